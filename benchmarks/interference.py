"""How much slower compute gets while a collective of a Llama-3.1-70B block runs beside it.

usage: torchrun --nproc-per-node 2 benchmarks/interference.py [--variants stock,tide] [--kernels one-wave]

Kernels and collective are queued behind a pause on the device, so that both start together whatever the host
does. Each row is measured in turn with kernels alone, beside the collective, and alone once more:

``slowdown``  time beside ÷ time alone of kernels that fit into the collective (``--share`` of its time);
``null``      the second alone ÷ the first: what a slowdown of nothing looks like here;
``lost ms``   compute lost to one collective: kernels that outlast it, beside minus alone.

All are the worst rank's; ``min`` and ``max`` are single repeats. ``late`` counts repeats, thrown away, whose pause
ended before the host had queued everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import Results, agreed, aligned_pause, median, parser, say, start, table, timed
from models import CASES
from tables import excesses
from units import COLLECTIVES, VARIANTS, Unit
from variants import parse

#: Clock cycles in a millisecond, about; and the pause that the first calls get.
MILLISECOND = 2_000_000
FIRST_PAUSE = 20 * MILLISECOND
GEMMS = {
    "one-wave": ("GEMM 1536×1408×8192 (one wave)", 1536, 1408, 8192),
    "few-waves": ("GEMM 2048×2048×8192 (few waves)", 2048, 2048, 8192),
    "many-waves": ("GEMM 8192×8192×8192", 8192, 8192, 8192),
}
KERNELS = (*GEMMS, "attention")


def compute_kernels(chosen: list[str]) -> dict[str, Callable[[], Any]]:
    """GEMMs of one wave, of few and of many, and attention, by label."""
    found: dict[str, Callable[[], Any]] = {}
    for name in chosen:
        if name == "attention":
            q, k, v = (torch.randn(1, 32, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            found["attention 32 heads × 4096"] = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
                q, k, v, is_causal=True
            )
            continue
        label, m, n, depth = GEMMS[name]
        a = torch.randn(m, depth, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(depth, n, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        found[label] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)  # type: ignore[misc]
    return found


@dataclass(frozen=True)
class Sample:
    """One run of kernels: their milliseconds, the collective's, the host's, and whether the host was in time."""

    kernels: float
    collective: float
    host: float
    in_time: bool


class Side:
    """Streams of one compute kernel and one collective, made once: each new stream costs a workspace of cuBLAS."""

    def __init__(self) -> None:
        self.gate, self.work = torch.cuda.Stream(), torch.cuda.Stream()
        self.comm = torch.cuda.Stream(priority=-1)  # as FSDP2's
        self.pause = FIRST_PAUSE

    def together(
        self,
        kernel: Callable[[], Any],
        count: int,
        prepare: Callable[[], None] | None = None,
        collective: Callable[[], None] | None = None,
    ) -> Sample:
        """``count`` kernels that start together with the collective, if there is one."""
        if prepare is not None:
            prepare()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end, opened, over = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        began = time.perf_counter()
        with torch.cuda.stream(self.gate):
            aligned_pause(self.pause)
            opened.record()
        self.comm.wait_event(opened)
        self.work.wait_event(opened)
        with torch.cuda.stream(self.comm):
            if collective is not None:
                collective()
            over.record()
        with torch.cuda.stream(self.work):
            begin.record()
            for _ in range(count):
                kernel()
            end.record()
        in_time = not opened.query()
        host = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        return Sample(begin.elapsed_time(end), opened.elapsed_time(over), host, in_time)


def ratios(found: list[Sample], alone: float) -> tuple[float, float, float]:
    """Median, least and largest of kernels' times over the time alone."""
    values = [sample.kernels / alone for sample in found]
    return median(values), min(values), max(values)


def measure(
    side: Side, kernel: Callable[[], Any], unit: Unit, collective: str, duration: float, share: float, repeats: int
) -> dict[str, Any]:
    """Slowdown, null and lost milliseconds of one kernel beside one collective."""
    prepare, call = (unit.free, unit.gather) if collective == "all-gather" else (unit.prepare_reduce, unit.reduce)
    side.together(kernel, 20)
    # What each rank's clock says decides how often all of them meet, so they agree on it first.
    single = agreed(side.together(kernel, 20).kernels / 20)
    count, longer = max(1, int(share * duration / single)), max(2, int(2.5 * duration / single))
    side.pause = FIRST_PAUSE
    hosts = [side.together(kernel, longer, prepare, call).host for _ in range(2)]
    side.pause = int((agreed(hosts[-1]) * 1.5 + 2) * MILLISECOND)

    kinds: dict[str, list[Sample]] = {"alone": [], "beside": [], "again": [], "long alone": [], "long beside": []}
    late = 0
    for _ in range(repeats):
        turn = {
            "alone": side.together(kernel, count),
            "beside": side.together(kernel, count, prepare, call),
            "again": side.together(kernel, count),
            "long alone": side.together(kernel, longer),
            "long beside": side.together(kernel, longer, prepare, call),
        }
        if agreed(float(not all(sample.in_time for sample in turn.values()))):
            late += 1
            side.pause += side.pause // 2
            continue
        for kind, sample in turn.items():
            kinds[kind].append(sample)
    row: dict[str, Any] = {"collective_ms": duration, "count": count, "single_ms": single, "late": late}
    if late == repeats:
        return row
    alone = median(sample.kernels for sample in kinds["alone"])
    slowdown, least, most = ratios(kinds["beside"], alone)
    null, null_least, null_most = ratios(kinds["again"], alone)
    long_alone = median(sample.kernels for sample in kinds["long alone"])
    long_beside = median(sample.kernels for sample in kinds["long beside"])
    return row | {
        "alone_ms": agreed(alone),
        "slowdown": agreed(slowdown),
        "slowdown_min": -agreed(-least),
        "slowdown_max": agreed(most),
        "null": agreed(null),
        "null_min": -agreed(-null_least),
        "null_max": agreed(null_most),
        "lost_ms": agreed(long_beside - long_alone),
        "collective_beside_ms": agreed(median(sample.collective for sample in kinds["long beside"])),
    }


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__, repeats=7)
    arguments.add_argument("--variants", default=",".join(VARIANTS), help="see variants.py")
    arguments.add_argument("--kernels", default=",".join(KERNELS), help=f"of {', '.join(KERNELS)}")
    arguments.add_argument("--collectives", default=",".join(COLLECTIVES))
    arguments.add_argument("--model", default="llama", choices=list(CASES))
    arguments.add_argument("--share", type=float, default=0.7, help="of the collective's time that kernels fill")
    options = arguments.parse_args()
    for variant in options.variants.split(","):
        parse(variant)
    began = time.perf_counter()
    start()
    results = Results("interference", options.out, model=CASES[options.model].name, share=options.share)
    kernels = compute_kernels(options.kernels.split(","))
    side = Side()
    for variant in options.variants.split(","):
        unit = Unit(CASES[options.model].make, variant)
        for collective in options.collectives.split(","):
            gathers = collective == "all-gather"
            lengths = []
            for _ in range(5):
                (unit.free if gathers else unit.prepare_reduce)()
                lengths += timed(unit.gather if gathers else unit.reduce, repeats=1, warmup=0)
            duration = median(lengths[2:])
            for label, kernel in kernels.items():
                found = measure(side, kernel, unit, collective, duration, options.share, options.repeats)
                row = {"kernel": label, "collective": collective, "variant": variant, **found}
                say(f"{time.perf_counter() - began:5.1f} s\n" + table([row], COLUMNS))
                results.add(row)
        unit.close()
    results.rows.sort(key=lambda row: (row["collective"], row["kernel"]))
    results.write()
    say("\n" + table(results.rows, COLUMNS) + "\n\n" + table(excesses(results.rows), GOALS))
    dist.destroy_process_group()


COLUMNS = [
    ("kernel", "kernel", ""),
    ("collective", "collective", ""),
    ("variant", "variant", ""),
    ("count", "kernels", "d"),
    ("alone_ms", "alone ms", ".3f"),
    ("slowdown", "slowdown", ".3f"),
    ("slowdown_min", "min", ".3f"),
    ("slowdown_max", "max", ".3f"),
    ("null", "null", ".3f"),
    ("null_min", "min", ".3f"),
    ("null_max", "max", ".3f"),
    ("lost_ms", "lost ms", ".3f"),
    ("collective_ms", "collective ms", ".2f"),
    ("collective_beside_ms", "beside", ".2f"),
    ("late", "late", "d"),
]
GOALS = [
    ("kernel", "kernel", ""),
    ("collective", "collective", ""),
    ("variant", "variant", ""),
    ("stock", "stock", ".3f"),
    ("slowdown", "slowdown", ".3f"),
    ("noise", "noise", ".4f"),
    ("bound", "", ""),
    ("figure", "(stock − 1) ÷ (this − 1)", ".1f"),
    ("lost_ratio", "lost ms, stock ÷ this", ".1f"),
]


if __name__ == "__main__":
    main()
