#!/usr/bin/env bash
# Python tests on an extension with address and undefined-behaviour sanitizers; the first finding ends the run.
#   tools/test_sanitized.sh [PYTHON [PYTEST ARGUMENT...]]
# PYTHON has kvquant[test] installed (default .venv/bin/python). Needs the preset asan, built. Works in build/sanitized.
# Not for tests that preload an allocator of their own (test_allocation.py), count bytes of the process (test_leaks.py) or fork
# while threads run (test_threads.py): the sanitizers do these things in other ways.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD work=$PWD/build/sanitized
python=${1:-.venv/bin/python}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
shift $(($# > 0))
flags=$("$python" -c 'import json
presets = json.load(open("CMakePresets.json"))["configurePresets"]
print(next(p["cacheVariables"]["CMAKE_CXX_FLAGS"] for p in presets if p["name"] == "asan"))')

rm -rf "$work" && mkdir -p "$work"
cp -r kvquant "$work/kvquant"
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q "cython>=3.1" "numpy>=2.0"
"$work/tools/bin/cython" --cplus -3 "$work/kvquant/_core.pyx" -o "$work/_core.cpp"
includes=$("$python" -c 'import numpy, sysconfig
print("-I" + numpy.get_include(), "-I" + sysconfig.get_path("include"))')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
# shellcheck disable=SC2086
g++ -std=c++17 -g -O1 -shared -fPIC -fvisibility=hidden $flags -DNPY_NO_DEPRECATED_API=NPY_1_7_API_VERSION \
  -Icpp/include -Icpp/src $includes "$work/_core.cpp" cpp/src/pool.cpp build/asan/libkvquant.a \
  -Wl,--exclude-libs,ALL -pthread -o "$work/kvquant/_core$suffix"

# The interpreter is not ours, so that the runtimes come first by LD_PRELOAD and leaks (Python keeps much) are not looked for.
# libstdc++ too: the sanitizer wants to find its exceptions.
preload=$(for name in libasan.so libubsan.so libstdc++.so; do printf '%s ' "$(gcc -print-file-name=$name)"; done)
sanitized=(env LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$work" "$python" -B)
cd "$work"  # in the source folder, kvquant would find the installed extension

# The extension must be the one that was just built, and a row too many must be found.
control='
import sys, numpy as np, kvquant
assert kvquant._core.__file__.startswith(sys.argv[1]), kvquant._core.__file__
print("loaded", flush=True)
room, one = np.zeros((8, 192), np.float32), np.ones((9, 64), np.float32)
x = np.lib.stride_tricks.as_strided(room, (9, 192), room.strides)
caches = [np.zeros((9, 1, 1, 64), np.int8) for _ in range(2)]
scale = np.ones(1, np.float32)
kvquant.dequant_rope_quant_kvcache(x, one, one, *caches, np.arange(9), scale, scale, [64] * 3, cache_mode="page")'
if "${sanitized[@]}" -c "$control" "$work/" > control.log 2>&1; then
  echo "the sanitizer did not notice that memory beyond an array was read"
  exit 1
fi
if ! grep -q '^loaded' control.log || ! grep -q 'heap-buffer-overflow' control.log; then
  cat control.log
  exit 1
fi

if [ $# = 0 ]; then  # all but what has its own word on crashes, needs gigabytes of shadow memory or runs Python only
  set -- "$root"/tests/test_{numbers,safety,positions,errors,plan,repeated,faults}.py \
    -k "not guarded_memory and not F01 and not reference"
fi
if ! "${sanitized[@]}" -m pytest -q -s -p no:cacheprovider "$@" > pytest.log 2>&1; then
  grep -v '^\.*\( \[.*\]\)\?$' pytest.log | head -n 200
  exit 1
fi
tail -n 1 pytest.log
