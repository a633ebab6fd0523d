"""The record of the whole run: no empty cell in clause x ISA x type pair, no idle kernel.

Part of the whole suite only: on its own it reports every cell as empty, and it is right.
"""

import kvquant
from cases import PAIRS
from conftest import CLAUSES


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
