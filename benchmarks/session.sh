#!/usr/bin/env bash
# Runs a list of benchmarks with torchrun on one host, one after another, under one NCCL if NCCL_LIBRARY names one.
# usage: benchmarks/session.sh OUT 'collectives.py --sweep' 'step.py --models llama' …
#
#   GPUS=2                   GPUs to use; by default those of CUDA_VISIBLE_DEVICES, or all
#   CUDA_VISIBLE_DEVICES=2,3 two sessions may run side by side on one host, each on GPUs of its own
#   RANKS_PER_GPU=2          several ranks share a GPU (NCCL 2.30 or later; correctness, not speed)
#   LIMIT=300                seconds a benchmark may take; what it has measured by then is in its JSON and log
set -uo pipefail
out=$1; shift
mkdir -p "$out"
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/..:$here" PYTHONUNBUFFERED=1
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  found=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
  found=$(nvidia-smi -L | wc -l)
fi
ranks=$((${GPUS:-$found} * ${RANKS_PER_GPU:-1}))
if [ "${RANKS_PER_GPU:-1}" -gt 1 ]; then export NCCL_MULTI_RANK_GPU_ENABLE=1; fi
failed=0
for job in "$@"; do
  name=${job%%.py*}
  for ((number = 2; ; number++)); do # a second job of the same benchmark has files of its own
    [ -e "$out/$name.log" ] || break
    name=${job%%.py*}-$number
  done
  echo "== $job ($ranks ranks, $name)"
  began=$SECONDS
  # --standalone takes a free port, so that sessions do not meet. $job is split into words on purpose.
  # shellcheck disable=SC2086
  LD_PRELOAD=${NCCL_LIBRARY:-} timeout -k 15 "${LIMIT:-300}" torchrun --standalone --nproc-per-node "$ranks" \
    "$here"/$job --out "$out/$name.json" 2>"$out/$name.err" | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  echo "-- $job: $((SECONDS - began)) s, exit $code"
  if [ "$code" -ne 0 ]; then failed=1; tail -n 30 "$out/$name.err"; fi
done
exit $failed
