"""`python -m kvquant`: what is installed and what it can use here. `python -m kvquant demo`: the operator on real data."""
import platform
import sys

import numpy as np

import kvquant
from kvquant import _core


def report() -> str:
    try:
        active = kvquant.isa.active()
    except (RuntimeError, ValueError) as error:  # KVQUANT_ISA names none, or one that can't run here
        active = f"none ({error})"
    lines = [f"kvquant {kvquant.__version__} (compiled by {_core.compiler})",
             f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}",
             f"ISA in use: {active}"]
    lines += [f"  available: {name}" for name in kvquant.isa.available() if name != active]
    lines += [f"  not here: {name} (this machine lacks {reason})" for name, reason in kvquant.isa.missing().items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if not argv:
        print(report())
        return 0
    if argv[0] == "demo":
        from kvquant import demo
        return demo.main(argv[1:])
    print(f"usage: python -m kvquant [demo], got {argv[0]!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
