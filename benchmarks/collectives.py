"""All-gather and reduce-scatter of real blocks and of a size sweep: stock, symmetric memory, TIDE.

usage: torchrun --nproc-per-node 2 benchmarks/collectives.py [--sweep]

algbw = bytes of the whole unit in bf16 ÷ time; busbw = algbw × (n − 1) ÷ n; ceiling = busbw ÷ the rate of
peer copies by copy engine measured in the same run. ``predicted`` is what TIDE's cost model makes of the plan with
the push rate of that run. ``SM ms`` = CTAs × duration of all kernels of one call, from a profile (CTAs are counted
up to the number of SMs). Host time in microseconds: ``host`` of the whole call right after an idle pause, FSDP2's
part included; ``in a row`` the same when calls follow each other; ``issue`` what of that is the collective itself
(c10d's call, NCCL's, or TIDE's transport); ``pace`` a fixed piece of work at the same time, which tells a slow host.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import PAUSE, Results, host_pace, median, parser, say, start, table, timed
from copy_rate import copy_engine_rate
from models import CASES
from records import SWEEP
from units import COLLECTIVES, VARIANTS, Unit
from variants import parse


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


def in_a_row(
    unit: Unit, collective: str, prepare: Callable[[], None], call: Callable[[], None]
) -> tuple[float, float, float]:
    """Host microseconds of a call, of the issue inside of it, when several follow each other, and the host's pace.

    The device waits behind a pause, so that the host never waits for it, and nothing is cold. Medians.
    """
    whole, inside, pace = [], [], []
    with unit.issue_times(collective) as issued:
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(PAUSE)
            for index in range(6):
                prepare()
                before, began = len(issued), time.perf_counter()
                call()
                if index:
                    whole.append((time.perf_counter() - began) * 1e6)
                    inside.append(sum(issued[before:]))
            pace.append(host_pace())
    torch.cuda.synchronize()
    return median(whole), median(inside), median(pace)


def measure(
    label: str, make: Callable[[], nn.Module], variant: str, repeats: int, rates: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """Rows of one unit under one variant."""
    unit = Unit(make, variant)
    world = dist.get_world_size()
    ceiling = max(rates.values())
    for collective in COLLECTIVES:
        gathers = collective == "all-gather"
        prepare, work = (unit.free, unit.gather) if gathers else (unit.prepare_reduce, unit.reduce)
        host: list[float] = []

        def call(work: Callable[[], None] = work, host: list[float] = host) -> None:
            began = time.perf_counter()
            work()
            host.append((time.perf_counter() - began) * 1e6)

        for _ in range(3):
            prepare()
            work()
        times = []
        for _ in range(repeats):
            prepare()
            times += timed(call, repeats=1, warmup=0)
        row_us, issue_us, pace_us = in_a_row(unit, collective, prepare, work)
        prepare()
        sm_ms, ctas, count = kernels(work)
        wrong = unit.wrong_gather() if gathers else unit.wrong_reduce()
        ms = median(times)
        algbw = unit.nbytes / ms / 1e6
        busbw = algbw * (world - 1) / world
        yield {
            "unit": label,
            "bytes": unit.nbytes,
            "mib": unit.nbytes / 2**20,
            "collective": collective,
            "variant": variant,
            "ms": ms,
            "min_ms": min(times),
            "max_ms": max(times),
            "predicted_ms": unit.predicted_ms(collective, max(rates["push"], rates.get("push to all", 0.0)) * 1e9),
            "algbw": algbw,
            "busbw": busbw,
            "share": busbw / ceiling,
            "wrong": wrong,
            "sm_ms": sm_ms,
            "ctas": ctas,
            "kernels": count,
            "host_us": median(host),
            "row_us": row_us,
            "issue_us": issue_us,
            "pace_us": pace_us,
        }
    unit.close()


COLUMNS = [
    ("unit", "unit", ""),
    ("mib", "MiB", ".1f"),
    ("collective", "collective", ""),
    ("variant", "variant", ""),
    ("ms", "ms", ".3f"),
    ("predicted_ms", "predicted", ".3f"),
    ("algbw", "algbw", ".1f"),
    ("busbw", "busbw", ".1f"),
    ("share", "of ceiling", ".1%"),
    ("wrong", "#wrong", "d"),
    ("sm_ms", "SM ms", ".2f"),
    ("ctas", "CTAs", "d"),
    ("kernels", "kernels", "d"),
    ("host_us", "host µs", ".0f"),
    ("row_us", "in a row", ".0f"),
    ("issue_us", "issue", ".0f"),
    ("pace_us", "pace", ".0f"),
]


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--sweep", action="store_true", help="also 64 KiB to 2 GiB")
    arguments.add_argument("--models", default="llama,qwen3,wan", help="none for the sweep alone")
    arguments.add_argument("--variants", default=",".join(VARIANTS), help="see variants.py")
    options = arguments.parse_args()
    variants = options.variants.split(",")
    for variant in variants:
        parse(variant)
    start()
    rates = copy_engine_rate()
    figures = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    say(f"peer copies by copy engine, 1 GiB, all ranks at once: {figures} GB/s; the largest is the ceiling\n")
    todo: list[tuple[str, Callable[[], nn.Module]]] = []
    if options.models != "none":
        todo = [(CASES[name].name + " block", CASES[name].make) for name in options.models.split(",")]
    if options.sweep:
        for size in [1 << k for k in range(16, 32, 2)] + [1 << 31]:
            label = f"{SWEEP} {size >> 20} MiB" if size >> 20 else f"{SWEEP} {size >> 10} KiB"
            todo.append((label, lambda size=size: Flat(size)))  # type: ignore[misc]
    results = Results("collectives", options.out, copy_engine_gb_s=rates)
    for label, make in todo:
        begin = len(results.rows)
        for variant in variants:
            for row in measure(label, make, variant, options.repeats, rates):
                results.add(row)
                say(f"  {label}, {row['collective']}, {variant}: {row['ms']:.3f} ms")
        say(table(sorted(results.rows[begin:], key=lambda row: row["collective"]), COLUMNS) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
