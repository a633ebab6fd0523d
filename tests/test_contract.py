"""The record of the whole run: no empty cell in clause x ISA x type pair, no idle kernel.

Part of the whole suite only: on its own it reports every cell as empty, and it is right.
"""

import platform
import re
from pathlib import Path
from types import SimpleNamespace

import kvquant
from cases import PAIRS
from conftest import CLAUSES, too_few


def test_matrix_has_no_empty_cell(executed):
    empty = [
        f"{clause} {isa} {'-'.join(pair)}"
        for clause in CLAUSES
        for isa in kvquant.isa.available()
        for pair in PAIRS
        if not executed.cells[clause, isa, pair]
    ]
    assert not empty, f"{len(empty)} cells without a compared call: {empty[:10]}"


def test_matrix_every_kernel_wrote_rows():
    written = kvquant._core.rows_written()
    print("rows quantised and written:", written)
    idle = [isa for isa in kvquant.isa.available() if not written.get(isa)]
    assert not idle, f"kernels of this machine that never ran: {idle}"


def test_targets_are_those_that_the_operating_system_reports():
    """The kernel hides what it does not save (XCR0). A target that the dispatcher overlooked would never be tested."""
    needs = {"scalar": set()}
    if platform.machine() == "x86_64":
        needs["avx2"] = {"avx2", "f16c", "fma"}
        needs["avx512"] = needs["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
        needs["avx512_bf16"] = needs["avx512"] | {"avx512_bf16"}
    elif platform.machine() == "aarch64":
        needs["neon"] = {"asimd"}
    words = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M).group(1).split()
    assert set(kvquant.isa.available()) == {name for name, flags in needs.items() if flags <= set(words)}


def test_lost_tests_are_noticed():
    def config(*args, **chosen):
        options = {"keyword": "", "markexpr": "", "deselect": None} | chosen
        return SimpleNamespace(args=args, getoption=options.get)

    folder, expected = str(Path(__file__).parent), {"test_a.py": 3, "test_b.py": 2}
    ran = {"test_a.py": {"x", "y"}}
    assert len(too_few(config(folder), expected, ran)) == 2
    assert len(too_few(config("tests/test_a.py"), expected, ran)) == 1
    assert not too_few(config("tests/test_a.py::x"), expected, ran) and not too_few(config(folder, keyword="x"), expected, ran)
    assert not too_few(config(folder), expected, {"test_a.py": set("xyz"), "test_b.py": set("xyz")})
