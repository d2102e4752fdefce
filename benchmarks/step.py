"""Training step of three models: stock FSDP2, symmetric memory and TIDE side by side, with the floor.

usage: torchrun --nproc-per-node 2 benchmarks/step.py [--models llama,qwen3,wan] [--variants stock,symm,tide]

``tide``  with ``reuse_forward=True``; ``tide-regather``  without.
``free``  FSDP2 whose collectives do nothing (its copies stay); ``solo``  the same model without FSDP.
The floor is the smaller of the two. ``gap closed`` is (stock − variant) ÷ (stock − floor).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide
from baselines import detach_baseline, use_free_collectives, use_symmetric_memory
from common import Results, median, parser, say, start, table
from models import CASES, Case
from tide.transport.cuda import CudaTransport
from tide.transport.cuda.ticket import ACCUMULATE_CTAS, PLACE_CTAS, Settings


def attach(model: nn.Module, ctas: str = "", reuse: bool = True) -> int:
    """TIDE, with CTAs of its kernels as ``place/accumulate`` if given; its arena is not in torch's allocator."""
    place, accumulate = map(int, ctas.split("/")) if ctas else (PLACE_CTAS, ACCUMULATE_CTAS)
    settings = Settings(place_ctas=place, accumulate_ctas=accumulate)
    transport = partial(CudaTransport.open, settings=settings)
    compiled = tide.attach(model, strict=True, reuse_forward=reuse, transport=transport).compiled
    assert compiled is not None
    return compiled.arena.size


#: Variants that need collectives of their own; each returns the bytes it holds outside torch's allocator.
SETUP: dict[str, Callable[[nn.Module], int]] = {
    "stock": lambda model: 0,
    "free": use_free_collectives,
    "symm": use_symmetric_memory,
}


def sharded(case: Case, world_size: int) -> nn.Module:
    """The model as FSDP2 users shard it: each block, then the root; bf16 parameters, fp32 reduction."""
    model = case.build("cuda")
    mesh = init_device_mesh("cuda", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def run(case: Case, variant: str, tokens: int, steps: int, trace: Path | None) -> dict[str, Any]:
    """Times training steps that follow each other without a pause, after some others; the slowest rank counts.

    The first timed step is left out: the host has no lead in it yet.
    """
    warmup = 3
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gc.collect()
    torch.cuda.empty_cache()
    outside = 0
    if variant == "solo":
        model: nn.Module = case.build("cuda").to(torch.bfloat16)
    else:
        model = sharded(case, world_size)
        name, _, ctas = variant.partition(":")
        outside = attach(model, ctas, name != "tide-regather") if name.startswith("tide") else SETUP[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(1, tokens, case.dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    marks, losses = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    profile = None
    for step in range(warmup + steps):
        if step == warmup:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            marks[0].record()
        if trace is not None and step == warmup + steps - 2:
            profile = torch.profiler.profile()
            profile.start()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warmup:
            marks[step - warmup + 1].record()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    if profile is not None:
        profile.stop()
        if rank == 0:
            profile.export_chrome_trace(str(trace / f"{case.name}-{tokens}-{variant}.json.gz"))
    times = torch.tensor([a.elapsed_time(b) for a, b in itertools.pairwise(marks)][1:], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    peak = torch.tensor([torch.cuda.max_memory_allocated() + outside], device="cuda", dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    result = {
        "times": times.tolist(),
        "peak_gib": float(peak) / 2**30,
        "losses": torch.stack(losses).double().tolist(),
    }
    if variant.startswith("tide"):
        tide.detach(model)
    elif variant in ("symm", "free"):
        detach_baseline(model)
    del model, optimizer, x, loss
    return result


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="llama,qwen3,wan")
    arguments.add_argument("--variants", default="solo,free,stock,symm,tide")
    arguments.add_argument("--tokens", default="", help="comma-separated; overrides each model's sizes")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=2, help="each variant runs this often, in turn")
    arguments.add_argument("--trace", type=Path, help="folder for a profile of each variant's last step")
    options = arguments.parse_args()
    start()
    results = Results("step", options.out)
    for name in options.models.split(","):
        case = CASES[name]
        sizes = [int(t) for t in options.tokens.split(",")] if options.tokens else case.tokens
        for tokens in sizes:
            runs: dict[str, list[dict[str, Any]]] = {}
            for _ in range(options.rounds):
                for variant in options.variants.split(","):
                    runs.setdefault(variant, []).append(run(case, variant, tokens, options.steps, options.trace))
            results.add(*summarise(case, tokens, runs))
            say(table(results.rows[-len(runs) :], COLUMNS) + "\n")
    say(table(results.rows, COLUMNS))
    dist.destroy_process_group()


COLUMNS = [
    ("model", "model", ""),
    ("tokens", "tokens/GPU", "d"),
    ("variant", "variant", ""),
    ("ms", "step ms", ".2f"),
    ("min_ms", "min", ".2f"),
    ("max_ms", "max", ".2f"),
    ("off_stock", "off stock %", ".1f"),
    ("gap_closed", "gap closed", ".2f"),
    ("peak_gib", "peak GiB", ".2f"),
    ("losses_equal", "losses = stock", ""),
]


def summarise(case: Case, tokens: int, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a variant."""
    ms = {variant: median([t for r in found for t in r["times"]]) for variant, found in runs.items()}
    floor = min((ms[v] for v in ("solo", "free") if v in ms), default=None)
    rows = []
    for variant, found in runs.items():
        times = [t for r in found for t in r["times"]]
        row: dict[str, Any] = {
            "model": f"{case.name} ×{case.count}",
            "tokens": tokens,
            "variant": variant,
            "ms": ms[variant],
            "min_ms": min(times),
            "max_ms": max(times),
            "peak_gib": max(r["peak_gib"] for r in found),
        }
        if "stock" in ms and variant not in ("stock", "solo", "free"):
            row["off_stock"] = 100 * (ms["stock"] - ms[variant]) / ms["stock"]
            if floor is not None and ms["stock"] > floor:
                row["gap_closed"] = (ms["stock"] - ms[variant]) / (ms["stock"] - floor)
            pairs = zip(runs["stock"][0]["losses"], found[0]["losses"], strict=True)
            row["losses_equal"] = str(all(a == b for a, b in pairs))
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
