#!/usr/bin/env bash
# The kernels' small tests under compute-sanitizer, on one GPU: memcheck for all, racecheck for accumulate.
# usage: benchmarks/sanitize.sh [memcheck|racecheck|plain|all]    (LIMIT: seconds for each part, 90 by default)
#
# The sanitizer makes everything slow that starts the process or compiles, so a plain run fills Triton's cache first
# (kept in TRITON_CACHE_DIR) and the tests are few and small.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here" || exit 1
export PYTHONPATH="$here" PYTORCH_NO_CUDA_MEMORY_CACHING=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/tide-sanitize-cache}
limit=${LIMIT:-90} part=${1:-all}
python=${PYTHON:-python}
tests=tests/kernels/test_kernels_sanitize.py
pytest=("$python" -m pytest -q -x -p no:cacheprovider -p no:xdist -m gpu "$tests")
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)

plain() { timeout -k 10 "$limit" "${pytest[@]}"; }
sanitized() { # tool, selection
  [ -n "$sanitizer" ] || { echo "compute-sanitizer is not installed" >&2; return 1; }
  timeout -k 10 "$limit" "$sanitizer" --tool "$1" --error-exitcode 9 --target-processes application-only \
    --kernel-regex 'kns=(place|accumulate)_kernel' "${pytest[@]}" -k "$2"
}

code=0
run() {
  local began=$SECONDS
  "$@" || code=1
  echo "-- $*: $((SECONDS - began)) s"
}
run plain
case $part in
  plain) ;;
  memcheck) run sanitized memcheck "" ;;
  racecheck) run sanitized racecheck accumulate ;;
  all) run sanitized memcheck ""; run sanitized racecheck accumulate ;;
  *) echo "no part $part" >&2; exit 2 ;;
esac
exit $code
