"""Peak memory of a training step, as the plan states it beforehand and as measured.

usage: torchrun --nproc-per-node 2 benchmarks/memory.py [--models llama,qwen3,wan,embedding]
           [--variants stock,symm,tide,tide-reuse] [--steps 1000]

A step of few tokens, so that activations are next to nothing, and SGD, which has no state. Measured is what torch's
allocator had at most (``max_memory_allocated``), less what it had before the model was made, plus what lies outside
of it: TIDE's arena, or the windows of symmetric memory that were handed out. Fails where that differs from what is
stated by more than ``--tolerance`` percent, or where memory is not the same after the last step as after the first.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tide
from baselines import windows_used
from common import Results, parser, say, start, table
from models import CASES, Case
from step import sharded
from tide.report import memory
from tide.report.memory import Memory, with_slot_reuse
from variants import parse, set_up, tear_down

GIB = 1 << 30
#: Columns of the statement, and what the variants are.
COLUMN = {"stock": "stock", "symm": "symmetric", "tide": "tide", "tide-reuse": "reuse"}
VARIANTS = {
    "stock": parse("stock"),
    "symm": parse("symm"),
    "tide": parse("tide+prefetch=1"),
    "tide-reuse": parse("tide+prefetch=1+slot_reuse"),
}
WARMUP = 3


def state(model: nn.Module) -> Memory:
    """What the plan of the model states for this rank."""
    compiled = tide.compile_plan(model, prefetch=1).compiled
    return memory(compiled, dist.get_rank(), with_slot_reuse(compiled))


def settle() -> None:
    """Makes what a first matrix product leaves behind, such as workspaces, in forward's thread and backward's."""
    layer = nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    layer(torch.ones(16, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
    torch.cuda.synchronize()
    del layer
    gc.collect()
    torch.cuda.empty_cache()


def run(case: Case, variant: str, tokens: int, steps: int) -> dict[str, Any]:
    """Steps of one variant: stated and measured peaks of this job's worst rank."""
    settle()
    before = torch.cuda.memory_allocated()
    model = sharded(case, dist.get_world_size())
    stated = state(model)
    nbytes, attachment = set_up(model, VARIANTS[variant], reuse_forward=False)
    arena = nbytes if attachment is not None else 0  # windows are counted as they are handed out
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, tokens, case.dim, device="cuda", dtype=torch.bfloat16)
    held: list[tuple[int, int]] = []
    gc.collect()
    torch.cuda.empty_cache()
    for step in range(WARMUP + steps):
        if step == WARMUP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARMUP - 1 and (step < WARMUP + 8 or step == WARMUP + steps - 1):
            torch.cuda.synchronize()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    outside = arena + windows_used()
    measured = torch.cuda.max_memory_allocated() - before + outside
    row = {
        "model": f"{case.name} ×{case.count}",
        "variant": variant,
        "tokens": tokens,
        "steps": steps,
        "stated": stated.total(COLUMN[variant]),
        "measured": measured,
        "reserved": torch.cuda.memory_reserved() + outside,
        "outside": outside,
        "constant": len({reserved for _, reserved in held[1:]}) == 1 and held[1][0] == held[-1][0],
        "peak": stated.peaks[COLUMN[variant]],
        "rows": {r.name: n for r in stated.rows if (n := getattr(r, COLUMN[variant]))},
    }
    tear_down(model, VARIANTS[variant])
    del model, optimizer, x
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, row)
    worst = max(gathered, key=lambda found: abs(found["measured"] / found["stated"] - 1))
    worst["constant"] = all(found["constant"] for found in gathered)
    return {**worst, "off": 100 * (worst["measured"] / worst["stated"] - 1)}


TABLE = [
    ("model", "model", ""),
    ("variant", "variant", ""),
    ("stated_gib", "stated GiB", ".3f"),
    ("measured_gib", "measured GiB", ".3f"),
    ("off", "off %", "+.2f"),
    ("reserved_gib", "reserved GiB", ".3f"),
    ("constant", "constant", ""),
    ("peak", "stated peak in", ""),
]


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="llama,qwen3,wan,embedding")
    arguments.add_argument("--variants", default="stock,symm,tide,tide-reuse")
    arguments.add_argument("--tokens", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--tolerance", type=float, default=2.0, help="percent (default 2)")
    options = arguments.parse_args()
    start()
    variants = options.variants.split(",")
    results = Results("memory", options.out, tokens=options.tokens, steps=options.steps)
    rows = results.rows
    for name in options.models.split(","):
        for variant in variants:
            row = run(CASES[name], variant, options.tokens, options.steps)
            row.update({f"{key}_gib": row[key] / GIB for key in ("stated", "measured", "reserved")})
            row["constant"] = str(row["constant"])
            results.add(row)
            say(table(rows[-1:], TABLE))
    say("\n" + table(rows, TABLE))
    wrong = [row for row in rows if abs(row["off"]) > options.tolerance or row["constant"] != "True"]
    dist.destroy_process_group()
    if wrong:
        names = ", ".join(f"{row['model']} {row['variant']}" for row in wrong)
        raise SystemExit(f"not as stated within {options.tolerance:g} %, or not constant: {names}")


if __name__ == "__main__":
    main()
