"""Makes tests/grid.txt: the calls on which every target is compared, by the Python tests and by the C++ tests alike.

Decides which shapes and options a call has, and nothing about values, which both sides draw from the row's number.

    python tools/make_grid.py            write the file
    python tools/make_grid.py --check    make it in memory, exit 1 if it differs from the file

Every row is a call for each of the six type pairs. Rows hold every D with every T, most of them with every cache layout for some
D, and any two values of any two columns together; tests/test_operator.py proves it from the file.
"""

import sys

import made_file
import numpy as np

sys.path.insert(0, str(made_file.kRoot / "tests"))
from cases import DIMS, GRID, GRID_COLUMNS, OPTIONS, TOKENS, all_pairs, word  # noqa: E402

# These D and T meet every cache layout: D below, on and above whole and half blocks of 16 columns.
kCrossedDims = (2, 4, 6, 10, 14, 16, 18, 30, 32, 34, 48, 64, 66, 80, 96, 128, 130, 160, 192, 256, 512)
kCrossedTokens = TOKENS[:-1]
kFewHeads = 64 * 130  # D*T beyond which a call has one head each, as it would take most of the time


def steps_of(row, rng):
    """S: 1 for x of two dimensions, else a divisor of T; without tokens B or S is 0."""
    if row["rank"] == 2:
        return 1
    if row["tokens"] == 0:
        return int(rng.choice([0, 3]))
    return int(rng.choice([n for n in range(1, row["tokens"] + 1) if row["tokens"] % n == 0]))


def make():
    rng = np.random.default_rng(1)
    shapes = []
    for dim in DIMS:
        for tokens in TOKENS:
            crossed = dim in kCrossedDims and tokens in kCrossedTokens
            more = [{"layout": layout} for layout in OPTIONS["layout"]] if crossed else [{}]
            few_heads = {"heads": (1, 1)} if dim * tokens > kFewHeads else {}
            shapes += [{"dim": dim, "tokens": tokens, **few_heads, **one} for one in more]
    rng.shuffle(shapes)
    rows = all_pairs({"dim": DIMS, "tokens": TOKENS, **GRID_COLUMNS}, shapes, rng)
    lines = ["# Made by tools/make_grid.py. The columns and their values; then D, T, S and, in the columns' order, which value."]
    lines += [" ".join([name, *map(word, values)]) for name, values in GRID_COLUMNS.items()]
    lines.append(f"rows {len(rows)}")
    for row in sorted(rows, key=lambda row: (row["dim"], row["tokens"])):
        digits = "".join(str(values.index(row[name])) for name, values in GRID_COLUMNS.items())
        lines.append(f"{row['dim']} {row['tokens']} {steps_of(row, rng)} {digits}")
    return ("\n".join(lines) + "\n").encode()


if __name__ == "__main__":
    made_file.main(__doc__, GRID, make)
