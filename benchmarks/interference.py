"""How much slower compute gets while a collective of a Llama-3.1-70B block runs beside it.

usage: torchrun --nproc-per-node 2 benchmarks/interference.py

Alone = 1.00. The compute kernels are queued behind a pause on the same device, and so is the collective, so
that both start together whatever the host does; only as many kernels are timed as fit into the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import median, parser, say, start, table, timed, write
from models import CASES
from units import VARIANTS, Unit

#: Clock cycles of the pause: some milliseconds, longer than the host needs to queue everything.
PAUSE = 40_000_000


def compute_kernels() -> dict[str, Callable[[], Any]]:
    """GEMMs of one wave, of few and of many, and attention."""
    found: dict[str, Callable[[], Any]] = {}
    for label, (m, n, k) in {
        "GEMM 1536×1408×8192 (one wave)": (1536, 1408, 8192),
        "GEMM 2048×2048×8192 (few waves)": (2048, 2048, 8192),
        "GEMM 8192×8192×8192": (8192, 8192, 8192),
    }.items():
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        found[label] = lambda a=a, b=b: a @ b  # type: ignore[misc]
    q, k_, v = (torch.randn(1, 32, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found["attention 32 heads × 4096"] = lambda: F.scaled_dot_product_attention(q, k_, v, is_causal=True)
    return found


def together(
    prepare: Callable[[], None], collective: Callable[[], None] | None, kernel: Callable[[], Any], count: int
) -> float:
    """Milliseconds of ``count`` kernels that start together with the collective."""
    prepare()
    side, work = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    gate = torch.cuda.Stream()
    opened = torch.cuda.Event()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(PAUSE)
        opened.record()
    side.wait_event(opened)
    work.wait_event(opened)
    if collective is not None:
        with torch.cuda.stream(side):
            collective()
    with torch.cuda.stream(work):
        begin.record()
        for _ in range(count):
            kernel()
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--variants", default=",".join(VARIANTS))
    options = arguments.parse_args()
    start()
    work = compute_kernels()
    rows: list[dict[str, Any]] = []
    alone: dict[tuple[str, int], float] = {}
    for variant in options.variants.split(","):
        unit = Unit(CASES["llama"].make, variant)
        for collective in ("all-gather", "reduce-scatter"):
            gathers = collective == "all-gather"
            prepare = unit.free if gathers else unit.prepare_reduce
            call = unit.gather if gathers else unit.reduce
            lengths = []
            for _ in range(4):
                prepare()
                lengths += timed(call, repeats=1, warmup=0)
            duration = median(lengths[1:])
            for label, kernel in work.items():
                single = together(lambda: None, None, kernel, 20) / 20
                count = max(1, int(0.7 * duration / single))
                key = (label, count)
                if key not in alone:
                    alone[key] = median([together(lambda: None, None, kernel, count) for _ in range(7)])
                beside = median([together(prepare, call, kernel, count) for _ in range(7)])
                ratio = torch.tensor(beside / alone[key], device="cuda")
                dist.all_reduce(ratio, dist.ReduceOp.MAX)
                rows.append(
                    {
                        "kernel": label,
                        "collective": collective,
                        "variant": variant,
                        "count": count,
                        "collective_ms": duration,
                        "alone_ms": alone[key],
                        "slowdown": float(ratio),
                    }
                )
        unit.close()
    rows.sort(key=lambda row: (row["collective"], row["kernel"]))
    say(table(rows, COLUMNS))
    write("interference", rows, options.out)
    dist.destroy_process_group()


COLUMNS = [
    ("kernel", "kernel", ""),
    ("collective", "collective", ""),
    ("variant", "variant", ""),
    ("count", "kernels", "d"),
    ("collective_ms", "collective ms", ".2f"),
    ("alone_ms", "alone ms", ".3f"),
    ("slowdown", "slowdown", ".3f"),
]


if __name__ == "__main__":
    main()
