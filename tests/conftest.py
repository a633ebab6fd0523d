"""Fixtures of the Python tests, and the record of what really ran: clause x ISA x (x type, output type)."""

from collections import Counter
from pathlib import Path

import kvquant
import pytest
from cases import PAIRS

CLAUSES = [f"C{n}" for n in range(1, 9)] + [f"I{n}" for n in range(1, 11)]
# The tests that may be skipped, one a line, each with its reason after a space.
MAY_SKIP = [line.split(maxsplit=1)[0] for line in Path(__file__).with_name("skips.txt").read_text().splitlines() if line]
CELLS = Counter()  # (clause, isa, pair) -> how many tests compared compiled calls


def pytest_generate_tests(metafunc):
    """A test that takes `isa` runs under every ISA of this machine; one that takes `pair`, for every type pair."""
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in str(mark.args[0]).split(", ")}
    wanted = set(metafunc.fixturenames) - own
    if "pair" in wanted:
        metafunc.parametrize("pair", PAIRS, ids="-".join)
    if "isa" in wanted:
        metafunc.parametrize("isa", kvquant.isa.available())


def pytest_collection_modifyitems(items):
    """The check for empty cells has to see all the others."""
    items.sort(key=lambda item: item.name.startswith("test_matrix"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A skip that is not on the list is a failure."""
    report = yield
    if report.skipped and item.nodeid.removeprefix("tests/") not in MAY_SKIP:
        report.outcome, report.longrepr = "failed", f"skipped, but not on the list tests/skips.txt: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a file that is skipped as a whole."""
    report = yield
    if report.skipped and collector.nodeid.removeprefix("tests/") not in MAY_SKIP:
        report.outcome, report.longrepr = "failed", f"skipped, but not on the list tests/skips.txt: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def executed():
    """executed("C1 I2", isa, pair): a compiled call under this ISA was compared with what these clauses demand."""

    def record(clauses, isa, pair):
        for clause in clauses.split():
            assert clause in CLAUSES
            CELLS[clause, isa, pair] += 1

    record.cells = CELLS
    return record


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"left out: {report.nodeid}: {report.longrepr[2]}")
    if not CELLS:
        return
    terminalreporter.section("tests that compared compiled calls, by clause")
    for isa in kvquant.isa.available():
        counts = {clause: sum(n for key, n in CELLS.items() if key[:2] == (clause, isa)) for clause in CLAUSES}
        terminalreporter.write_line(f"{isa:12}" + " ".join(f"{clause}:{n}" for clause, n in counts.items()))
    for isa, rows in kvquant._core.rows_written().items():
        terminalreporter.write_line(f"{isa:12}{rows} rows quantised and written")
