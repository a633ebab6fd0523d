"""Checks the object files of a release build: python tools/check_objects.py BUILD_DIR EXTENSION_MODULE

- A target's object defines one global symbol (its table), no weak symbol, no .init_array.
- Objects that any CPU must be able to load and run hold no VEX or EVEX instruction.
- Every target is compiled with exactly the ISA flags that dispatch.cpp asks the CPU for, and nothing with -march=native.
- The shared library exports the names of the public headers and nothing else, the extension module its entry point.

Needs compile_commands.json in BUILD_DIR and binutils. Exit 1 and one line per finding if something is wrong.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

FLAG_OF_FEATURE = {"avx512_bf16": "avx512bf16"}  # where -m spells a feature otherwise
NO_FLAG = {"os-ymm", "os-zmm"}                   # what only the operating system can grant


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(path: Path) -> list[tuple[str, str]]:
    """(kind, name) of every defined symbol; kinds as nm prints them."""
    lines = run("nm", "--defined-only", str(path)).splitlines()
    return [(line.split()[-2], line.split()[-1]) for line in lines if len(line.split()) >= 2]


def check_target(path: Path) -> list[str]:
    kinds = symbols(path)
    exported = [name for kind, name in kinds if kind.isupper() and kind not in "WVU"]
    weak = [name for kind, name in kinds if kind in "WVwvu"]
    found = []
    if len(exported) != 1:
        found.append(f"{path.name}: expected one global symbol, got {exported}")
    if weak:
        found.append(f"{path.name}: weak symbols {weak}")
    if re.search(r"\.(init_array|ctors)\b", run("readelf", "-SW", str(path))):
        found.append(f"{path.name}: has code that runs at load time")
    return found


def check_baseline(path: Path) -> list[str]:
    text = run("objdump", "-d", "--no-show-raw-insn", str(path))
    wide = [line.strip() for line in text.splitlines() if re.search(r":\s+v[a-z0-9]+\s|%[yz]mm", line)]
    return [f"{path.name}: {len(wide)} AVX instructions, first: {wide[0]}"] if wide else []


def needs_of_targets(dispatch: str) -> dict[str, set[str]]:
    return {name: set(needs.split()) for name, needs in re.findall(r'\{"(\w+)", &\w+, "([^"]*)"\}', dispatch)}


def check_flags(target: str, command: str, needs: set[str]) -> list[str]:
    flags = {flag for flag in re.findall(r"\s-m([a-z0-9_.]+)", command)}
    wanted = {FLAG_OF_FEATURE.get(feature, feature) for feature in needs - NO_FLAG}
    return [] if flags == wanted else [f"{target}: compiled with {sorted(flags)}, dispatched on {sorted(wanted)}"]


def declared_names(header: str) -> set[str]:
    return {name for name in re.findall(r"^KVQUANT_(?:C_)?API [^;(]*?(\w+)\(", header, re.M)}


def check_exports(path: Path, wanted: set[str]) -> list[str]:
    lines = run("nm", "-DC", "--defined-only", str(path)).splitlines()
    exported = {re.sub(r"\(.*", "", line.split(maxsplit=2)[2]).removeprefix("kvquant::") for line in lines}
    found = [f"{path.name}: exports {name}" for name in sorted(exported - wanted)]
    return found + [f"{path.name}: does not export {name}" for name in sorted(wanted - exported)]


def main(build: Path, extension: Path) -> int:
    source = Path(__file__).resolve().parent.parent
    needs = needs_of_targets((source / "cpp/src/dispatch.cpp").read_text())
    found, targets, baseline = [], 0, 0
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file, command = Path(entry["file"]), entry["command"]
        if source / "cpp/src" not in file.parents and file.name != "_core.cxx":
            continue
        path = Path(entry["directory"]) / re.search(r"-o (\S+)", command).group(1)
        if "-march=" in command:
            found.append(f"{file.name}: compiled with -march")
        if file.parent.name == "targets":
            targets += 1
            found += check_target(path) + check_flags(file.stem, command, needs[file.stem])
        if file.parent.name != "targets" or not needs[file.stem]:
            baseline += 1
            found += check_baseline(path)
    headers = source / "cpp/include/kvquant"
    public = declared_names((headers / "kvquant.h").read_text()) | declared_names((headers / "kvquant.hpp").read_text())
    found += check_exports(build / "libkvquant.so", public) + check_exports(extension, {"PyInit__core"})
    if targets < 2 or baseline < 5:
        found.append(f"too few objects seen: {targets} of targets, {baseline} of baseline code")
    print("\n".join(found) or f"{targets} targets, {baseline} baseline objects, {len(public)} exports: as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
