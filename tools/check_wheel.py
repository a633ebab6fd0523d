"""Checks wheels: python tools/check_wheel.py WHEEL...

- A wheel holds the files of the source folder kvquant/ and what the build adds (listed here), nothing else.
- It is smaller than 3 MB, and the kernels stand in it twice: in the extension module and in the static library.
- `auditwheel show` finds no library but those of the C and C++ runtime.

Needs git and the Python package auditwheel. Exit 1 and one line per finding if something is wrong.
"""
import re
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
LARGEST = 3_000_000
BUILT = {
    "kvquant/_core.SUFFIX.so",
    "kvquant/lib/libkvquant.a",
    "kvquant/lib/pkgconfig/kvquant.pc",
    *(f"kvquant/lib/cmake/kvquant/kvquant{name}.cmake" for name in ("Config", "ConfigVersion", "Targets", "Targets-release")),
    *(f"kvquant_kernels.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")),
}
RUNTIME = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2",
           "ld-linux-aarch64.so.1"}  # fmt: skip


def expected_files() -> set[str]:
    tracked = subprocess.run(["git", "ls-files", "kvquant", "cpp/include"], cwd=SOURCE, check=True, capture_output=True, text=True)
    names = [name for name in tracked.stdout.splitlines() if not name.endswith((".pyx", ".pxi"))]
    return BUILT | {name.replace("cpp/include/", "kvquant/include/") for name in names}


def check_content(path: Path) -> list[str]:
    names = {re.sub(r"_core\.[\w-]+\.so$", "_core.SUFFIX.so", re.sub(r"-[\d.]+\.dist-info/", ".dist-info/", name))
             for name in zipfile.ZipFile(path).namelist()}  # fmt: skip
    wanted = expected_files()
    found = [f"{path.name}: unexpected {name}" for name in sorted(names - wanted)]
    found += [f"{path.name}: lacks {name}" for name in sorted(wanted - names)]
    size = path.stat().st_size
    return found + ([f"{path.name}: {size} bytes, expected fewer than {LARGEST}"] if size >= LARGEST else [])


def check_libraries(path: Path) -> list[str]:
    command = [sys.executable, "-m", "auditwheel", "show", str(path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(" ".join(shown.split()))
    libraries = set(re.findall(r"\S+\.so[.\d]*", shown)) - {path.name}
    return [f"{path.name}: needs {name}" for name in sorted(libraries - RUNTIME)]


def main(wheels: list[str]) -> int:
    found = [] if wheels else ["no wheel given"]
    for path in map(Path, wheels):
        print(f"{path.name}: {path.stat().st_size} bytes")
        found += check_content(path) or check_libraries(path)
    print("\n".join(found) or "wheels: as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
