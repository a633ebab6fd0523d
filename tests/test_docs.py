"""docs/testing.md and docs/contract.md speak of tests that exist, and no fault is without a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTING = (ROOT / "docs" / "testing.md").read_text()
FAULTS = ("F01 F03 F06 F07 F09 F11 F13 F15 F17 F19 F21 F24 F25 F27 F29 F30 F32 F34 F37 F39 F41 F43 F46 F48 F49 F52 F53 F55 F57 F59 "
          "F60 F62 F65 F67 F69 F71 F73 F75 F77").split()  # fmt: skip
ROWS = {row[0]: row[3] for row in re.findall(r"^\| (F\d\d) \| (.+?) \| (.+?) \| (.+) \|$", TESTING, re.M)}


def exists(test):
    """Whether `file.py::name`, `file.cpp: name of a test case` or `file` stands for something."""
    python, cpp = re.match(r"(\w+\.py)::(\w+)$", test), re.match(r"(\w+\.cpp): (.*)$", test)
    if python:
        return re.search(rf"^def {python[2]}\(", (ROOT / "tests" / python[1]).read_text(), re.M)
    if cpp:
        return f'TEST_CASE("{cpp[2]}"' in (ROOT / "cpp" / "tests" / cpp[1]).read_text()
    return any((ROOT / folder / test).exists() for folder in ("", "tests", "cpp/tests"))


def defined(pattern):
    files = (ROOT / "tests").glob("test_*.py")
    return {(file.name, name) for file in files for name in re.findall(rf"^def ({pattern}\w*)\(", file.read_text(), re.M)}


def test_every_fault_has_a_row_and_every_row_a_test():
    assert sorted(ROWS) == FAULTS
    for fault, cell in ROWS.items():
        tests = re.findall("`(.+?)`", cell)
        assert tests and all(map(exists, tests)), (fault, tests)
        # F62 is older than the names.
        assert fault == "F62" or any(f"::test_fault_{fault}_" in test for test in tests), fault


def test_every_test_of_a_fault_is_in_its_row():
    for file, name in defined("test_fault_F"):
        assert f"`{file}::{name}`" in ROWS[name.split("_")[2]], name


def test_everything_named_exists():
    named = re.findall(r"`(\w+\.(?:py|cpp)(?:::\w+|: [^`]+)?|(?:cpp|tests|tools|docs)/[\w/.]+)`", TESTING)
    assert len(named) > 60
    assert not [test for test in named if not exists(test)]


@pytest.mark.parametrize("clause", [f"C{n}" for n in range(1, 9)] + [f"I{n}" for n in range(1, 11)])
def test_every_clause_has_a_test_of_its_name(clause):
    text = (ROOT / "docs" / "contract.md").read_text()
    section = re.search(rf"^### {clause} .*?(?=^##)", text, re.M | re.S)
    names = {name for _, name in defined(f"test_{clause}_")}
    assert names and section and any(name in section[0] for name in names)
