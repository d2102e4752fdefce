"""All-gather and reduce-scatter of real blocks and of a size sweep: stock, symmetric memory, TIDE.

usage: torchrun --nproc-per-node 2 benchmarks/collectives.py [--sweep]

algbw = bytes of the whole unit in bf16 ÷ time; busbw = algbw × (n − 1) ÷ n; ceiling = busbw ÷ the rate of
peer copies by copy engine measured in the same run. ``SM ms`` = CTAs × duration of all kernels of one call,
from a profile, in SM-milliseconds ÷ 1 (CTAs are counted up to the number of SMs).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import Results, median, parser, say, start, table, timed
from models import CASES
from units import VARIANTS, Unit, copy_engine_rate


class Flat(nn.Module):
    """One unit of ``count`` equal matrices, for the size sweep."""

    def __init__(self, nbytes: int, count: int = 4) -> None:
        super().__init__()
        rows = max(nbytes // 2 // count // 1024, 1)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(rows, 1024)) for _ in range(count))


def kernels(call: Callable[[], Any]) -> tuple[float, int, int]:
    """SM-milliseconds, largest CTA count and number of kernels of one call, from a profile."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    total, most, count = 0.0, 0, 0
    for event in events:
        if event.get("cat") == "kernel":
            x, y, z = event["args"]["grid"]
            ctas = min(x * y * z, sms)
            total += ctas * event["dur"] / 1e3
            most, count = max(most, ctas), count + 1
    return total, most, count


def measure(label: str, make: Callable[[], nn.Module], variant: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one unit under one variant."""
    unit = Unit(make, variant)
    world = dist.get_world_size()
    rows = []
    for collective in ("all-gather", "reduce-scatter"):
        gathers = collective == "all-gather"
        host: list[float] = []

        def call(gathers: bool = gathers, host: list[float] = host) -> None:
            began = time.perf_counter()
            (unit.gather if gathers else unit.reduce)()
            host.append((time.perf_counter() - began) * 1e6)

        prepare = unit.free if gathers else unit.prepare_reduce
        times = []
        for turn in range(repeats + 3):
            prepare()
            times += timed(call, repeats=1, warmup=0) if turn >= 3 else (call(), [])[1]
        prepare()
        sm_ms, ctas, count = kernels(call)
        if gathers:
            wrong = unit.wrong_gather()
        else:
            wrong = unit.wrong_reduce()
        ms = median(times)
        algbw = unit.nbytes / ms / 1e6
        rows.append(
            {
                "unit": label,
                "bytes": unit.nbytes,
                "collective": collective,
                "variant": variant,
                "ms": ms,
                "min_ms": min(times),
                "max_ms": max(times),
                "algbw": algbw,
                "busbw": algbw * (world - 1) / world,
                "wrong": wrong,
                "sm_ms": sm_ms,
                "ctas": ctas,
                "kernels": count,
                "host_us": median(host[3:]),
            }
        )
    unit.close()
    return rows


COLUMNS = [
    ("unit", "unit", ""),
    ("mib", "MiB", ".1f"),
    ("collective", "collective", ""),
    ("variant", "variant", ""),
    ("ms", "ms", ".3f"),
    ("algbw", "algbw", ".1f"),
    ("busbw", "busbw", ".1f"),
    ("share", "of ceiling", ".1%"),
    ("wrong", "#wrong", "d"),
    ("sm_ms", "SM ms", ".2f"),
    ("ctas", "CTAs", "d"),
    ("kernels", "kernels", "d"),
    ("host_us", "host µs", ".0f"),
]


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--sweep", action="store_true", help="also 64 KiB to 2 GiB")
    arguments.add_argument("--models", default="llama,qwen3,wan")
    arguments.add_argument("--variants", default=",".join(VARIANTS))
    options = arguments.parse_args()
    start()
    rates = copy_engine_rate()
    ceiling = max(rates.values())
    say(
        f"peer copies by copy engine, 1 GiB, all ranks at once: pull {rates['pull']:.1f}, "
        f"push {rates['push']:.1f} GB/s; the larger is the ceiling\n"
    )
    todo: list[tuple[str, Callable[[], nn.Module]]] = []
    if options.models:
        todo = [(CASES[name].name + " block", CASES[name].make) for name in options.models.split(",")]
    if options.sweep:
        for size in [1 << k for k in range(16, 32, 2)] + [1 << 31]:
            label = f"sweep {size >> 20} MiB" if size >> 20 else f"sweep {size >> 10} KiB"
            todo.append((label, lambda size=size: Flat(size)))  # type: ignore[misc]
    results = Results("collectives", options.out, copy_engine_gb_s=rates)
    for label, make in todo:
        found: list[dict[str, Any]] = []
        for variant in options.variants.split(","):
            rows = measure(label, make, variant, options.repeats)
            for row in rows:
                row["mib"], row["share"] = row["bytes"] / 2**20, row["busbw"] / ceiling
            results.add(*rows)
            found += rows
        say(table(sorted(found, key=lambda row: row["collective"]), COLUMNS) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
