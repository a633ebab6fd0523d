"""What the tools share that make a file of this repository: write it, or compare it with what it should be."""

import argparse
import pathlib
import sys

kRoot = pathlib.Path(__file__).resolve().parents[1]


def main(doc, file, make):
    """doc: the tool's; file: its path; make: a function that returns the file's bytes."""
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    check = parser.parse_args().check
    made, name = make(), file.relative_to(kRoot)
    if not check:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(made)
    elif not file.exists() or made != file.read_bytes():
        sys.exit(f"{name} is not what tools/{pathlib.Path(sys.argv[0]).name} makes")
    print(f"{name}: {len(made)} bytes{', as expected' if check else ''}")
