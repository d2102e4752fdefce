#!/usr/bin/env bash
# Runs a list of benchmarks with torchrun on all GPUs, under one NCCL if NCCL_LIBRARY names one.
# usage: benchmarks/session.sh OUT 'collectives.py --sweep' 'step.py --models llama' …
set -uo pipefail
out=$1; shift
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/..:$here" PYTHONUNBUFFERED=1
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
for job in "$@"; do
  name=${job%%.py*}
  echo "== $job"
  LD_PRELOAD=${NCCL_LIBRARY:-} timeout "${LIMIT:-300}" torchrun --nproc-per-node "$gpus" "$here"/$job \
    --out "$out/$name.json" 2>"$out/$name.err" || { echo "failed: $job"; tail -n 30 "$out/$name.err"; }
done
