"""What the cost model expects of the benchmarks' blocks on 2, 4 and 8 GPUs of one host, without a GPU.

usage: python benchmarks/predict.py

Copies run at the push rate that was measured with as many GPUs, or with the most below. ``traffic`` is what one
collective reads from and writes to a rank's memory: by its casts, its sums, its own pushes and those of its peers.
The clock knows no compute, no two streams that share the memory, and no host; see tide/compiler/clock.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from models import CASES, Case, Stack
from records import RESULTS, newest
from tide import Topology, compile_plan
from tide.compiler.cost import Prediction, predict
from tide.compiler.read import Policy
from tide.plan import Plan
from tide.topology import Links

GPUS = (2, 4, 8)
MODELS = ("llama", "qwen3", "wan")
COLLECTIVES = ("all-gather", "reduce-scatter")


def push_rate(gpus: int, folder: Path = RESULTS) -> tuple[float, str]:
    """Bytes a second of pushes, and the results that say so."""
    for measured in (number for number in sorted(GPUS, reverse=True) if number <= gpus):
        record = newest("collectives", f"{measured}xh200", folder)
        if record is not None:
            rates = record.facts["copy_engine_gb_s"]
            return max(rates["push"], rates.get("push to all", 0.0)) * 1e9, record.files[0]
    raise SystemExit(f"no copy engine's rate was measured with {gpus} GPUs or fewer; run collectives.py first")


def plan_of(case: Case, gpus: int, rate: float) -> Plan:
    """The plan of two blocks of a model: one slot each, as in training."""
    with torch.device("meta"):
        stack = Stack([case.make() for _ in range(2)])
    topology = Topology(1, gpus, links=replace(Links(), copy_engine=rate))
    return compile_plan(stack, topology=topology, policy=Policy(), rank=0)


def traffic(found: Prediction) -> int:
    """Bytes that a collective reads from and writes to one rank's memory; peers push as much as this rank does."""
    kernels = sum(event.nbytes for event in found.events if event.kind in ("place", "accumulate"))
    return kernels + 2 * found.nvlink_bytes


@cache
def rows_of(case: Case, gpus: int, folder: Path = RESULTS) -> tuple[dict[str, Any], ...]:
    """One row a collective."""
    rate, source = push_rate(gpus, folder)
    plan = plan_of(case, gpus, rate)
    unit = plan.compiled.spec.units[0]
    nbytes = sum(2 * parameter.numel for parameter in unit.parameters)
    rows = []
    for collective in COLLECTIVES:
        found = predict(plan.compiled, unit.name, collective.replace("-", "_"), 0)
        busbw = nbytes / found.seconds * (gpus - 1) / gpus / 1e9
        rows.append(
            {
                "unit": f"{case.name} block",
                "collective": collective,
                "gpus": gpus,
                "ms": found.seconds * 1e3,
                "busbw": busbw,
                "share": busbw * 1e9 / rate,
                "kernels": found.kernels,
                "traffic": traffic(found),
                "push_gb_s": rate / 1e9,
                "push_from": source,
            }
        )
    return tuple(rows)


def main() -> None:
    """Prints them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row for name in MODELS for gpus in GPUS for row in rows_of(CASES[name], gpus)]
    for row in rows:
        rate = f"{row['busbw']:6.1f} GB/s {row['share']:6.1%} of the push rate"
        memory = f"{row['traffic'] / 1e9:6.2f} GB of memory traffic"
        print(f"{row['unit']:<22} {row['collective']:<15} {row['gpus']} GPUs {row['ms']:7.3f} ms {rate} {memory}")


if __name__ == "__main__":
    main()
