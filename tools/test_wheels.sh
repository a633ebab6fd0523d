#!/usr/bin/env bash
# sdist -> wheel -> tests in fresh environments: tools/test_wheels.sh PYTHON... , e.g. ~/.pyenv/versions/3.1[0-4].*/bin/python
# For each interpreter with the oldest NumPy that is promised (where that is older than the Python: the first one for it) and
# with the newest. TESTS: paths of tests in the sdist; default "tests". Works in build/wheels; the wheels stay there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/wheels
rm -rf "$work" && mkdir -p "$work"
read -ra tests <<< "${TESTS:-tests}"

"$1" -m venv "$work/tools"
"$work/tools/bin/pip" install -q build auditwheel
"$work/tools/bin/python" -m build --sdist --outdir "$work" . &> "$work/sdist.log"
tar -xzf "$work"/kvquant_kernels-*.tar.gz -C "$work"
source=$(echo "$work"/kvquant_kernels-*/)

for python in "$@"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -m pip wheel -q --no-deps -w "$work/dist-$version" "$work"/kvquant_kernels-*.tar.gz
  wheel=$(echo "$work/dist-$version"/*.whl)
  case $version in
    3.10 | 3.11 | 3.12) oldest=1.26.0 ;;
    3.13) oldest=2.1.0 ;;
    *) oldest=2.3.2 ;;
  esac
  for numpy in "numpy==$oldest" numpy; do
    environment=$work/python-$version-$numpy
    "$python" -m venv "$environment"
    "$environment/bin/pip" install -q "$numpy" "$wheel[test]"
    echo "=== Python $version, NumPy $("$environment/bin/python" -c 'import numpy; print(numpy.__version__)') ==="
    # Not in the source folder, so that nothing is imported from it.
    (cd "$work" && "$environment/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]/#/$source}" > "$environment.log") ||
      { cat "$environment.log"; exit 1; }
    tail -n 1 "$environment.log"
  done
done
"$work/tools/bin/python" tools/check_wheel.py "$work"/dist-*/*.whl
