"""Training step of three models: stock FSDP2, symmetric memory and TIDE side by side, with the floor.

usage: torchrun --nproc-per-node 2 benchmarks/step.py [--models llama,qwen3,wan] [--variants stock,symm,tide]

``solo`` is the same model without FSDP; the other variants are those of ``variants.py``, such as ``free``,
``tide:64/32`` or ``tide+slots=3``. The floor is the smaller of solo and free; ``gap closed`` is
(stock − variant) ÷ (stock − floor). Each variant runs ``--rounds`` times, in turn with the others; stock at least
twice, as its own losses say whether equal losses can be asked for. ``host ms`` is what the host takes to issue a
step while the device is behind. ``stated`` is what the plan says FSDP2's collectives need at their peak, to be seen
beside the measured peak, which holds shards of the optimizer and activations too.
"""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import Results, agreed, median, parser, say, start, table
from models import CASES, Case
from tide.report.memory import memory
from variants import parse, set_up, tear_down

SOLO = "solo"


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
    outside, attachment = 0, None
    if variant == SOLO:
        model: nn.Module = case.build("cuda").to(torch.bfloat16)
    else:
        model = sharded(case, world_size)
        outside, attachment = set_up(model, parse(variant))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(1, tokens, case.dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    marks, losses = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    host = []
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
        began = time.perf_counter()
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warmup:
            host.append((time.perf_counter() - began) * 1e3)
            marks[step - warmup + 1].record()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    if profile is not None:
        profile.stop()
        if rank == 0:
            label = variant.replace("/", "-")
            profile.export_chrome_trace(str(trace / f"{case.name}-{tokens}-{label}.json.gz"))
    times = torch.tensor([a.elapsed_time(b) for a, b in itertools.pairwise(marks)][1:], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    result = {
        "times": times.tolist(),
        "host_ms": agreed(median(host)),
        "peak_gib": agreed(torch.cuda.max_memory_allocated() + outside) / 2**30,
        "losses": torch.stack(losses).double().tolist(),
    }
    if attachment is not None:
        stated = memory(attachment.compiled, rank)
        result["stated"] = {"tide": agreed(stated.tide) / 2**30, "stock": agreed(stated.stock) / 2**30}
    if variant != SOLO:
        tear_down(model, parse(variant))
    del model, optimizer, x, loss, attachment
    return result


def same(one: list[float], other: list[float]) -> float:
    """Largest relative difference of two runs' losses; 0 only if all are equal."""
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(one, other, strict=True))


def summarise(case: Case, tokens: int, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a variant."""
    ms = {variant: median([t for r in found for t in r["times"]]) for variant, found in runs.items()}
    floor = min((ms[v] for v in (SOLO, "free") if v in ms), default=None)
    stock = runs.get("stock")
    stated = next((r["stated"] for found in runs.values() for r in found if "stated" in r), None)
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
            "rounds": [median(r["times"]) for r in found],
            "host_ms": median(r["host_ms"] for r in found),
            "peak_gib": max(r["peak_gib"] for r in found),
        }
        if "stated" in found[0]:
            row["stated_gib"] = found[0]["stated"]["tide"]
        elif variant == "stock" and stated is not None:
            row["stated_gib"] = stated["stock"]
        # Stock is compared with its own first run, all others with it: more than stock itself nobody can promise.
        others = found[1:] if variant == "stock" else found
        if stock is not None and variant not in (SOLO, "free") and others:
            difference = max(same(r["losses"], stock[0]["losses"]) for r in others)
            row["loss_difference"], row["losses_equal"] = difference, difference == 0
        if stock is not None and variant not in ("stock", SOLO, "free"):
            row["off_stock"] = 100 * (ms["stock"] - ms[variant]) / ms["stock"]
            if floor is not None and ms["stock"] > floor:
                row["gap_closed"] = (ms["stock"] - ms[variant]) / (ms["stock"] - floor)
        rows.append(row)
    return rows


COLUMNS = [
    ("model", "model", ""),
    ("tokens", "tokens/GPU", "d"),
    ("variant", "variant", ""),
    ("ms", "step ms", ".2f"),
    ("min_ms", "min", ".2f"),
    ("max_ms", "max", ".2f"),
    ("host_ms", "host ms", ".2f"),
    ("off_stock", "off stock %", ".1f"),
    ("gap_closed", "gap closed", ".2f"),
    ("peak_gib", "peak GiB", ".2f"),
    ("stated_gib", "stated GiB", ".2f"),
    ("losses_equal", "losses = stock", ""),
    ("loss_difference", "difference", ".1e"),
]


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="llama,qwen3,wan")
    arguments.add_argument("--variants", default="solo,free,stock,symm,tide", help="solo, and see variants.py")
    arguments.add_argument("--tokens", default="", help="comma-separated; overrides each model's sizes")
    arguments.add_argument("--blocks", type=int, help="blocks of each model, instead of its own number")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=2, help="each variant runs this often, in turn")
    arguments.add_argument("--trace", type=Path, help="folder for a profile of each variant's last step")
    options = arguments.parse_args()
    variants = options.variants.split(",")
    for variant in variants:
        if variant != SOLO:
            parse(variant)
    began = time.perf_counter()
    start()
    results = Results("step", options.out, losses={})
    for name in options.models.split(","):
        case = replace(CASES[name], count=options.blocks or CASES[name].count)
        for tokens in [int(t) for t in options.tokens.split(",")] if options.tokens else case.tokens:
            begin = len(results.rows)
            runs: dict[str, list[dict[str, Any]]] = {}
            rounds = [variant for _ in range(options.rounds) for variant in variants]
            if options.rounds == 1 and "stock" in variants:
                rounds.append("stock")
            for variant in rounds:
                found = run(case, variant, tokens, options.steps, options.trace)
                runs.setdefault(variant, []).append(found)
                say(
                    f"{time.perf_counter() - began:6.1f} s  {case.name} {tokens} {variant}: "
                    f"{median(found['times']):.2f} ms, host {found['host_ms']:.2f} ms, {found['peak_gib']:.2f} GiB"
                )
                results.rows[begin:] = summarise(case, tokens, runs)
                results.more["losses"][f"{case.name} {tokens}"] = {
                    key: [r["losses"] for r in value] for key, value in runs.items()
                }
                results.write()
            say(table(results.rows[begin:], COLUMNS) + "\n")
    say(table(results.rows, COLUMNS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
