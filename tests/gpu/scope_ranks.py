"""Models on a part of the world, on GPUs: rank 0 has none and calls nothing, each of the others has one.

Three ranks on two GPUs, or on CPUs to try the script itself::

    torchrun --nproc-per-node 3 tests/gpu/scope_ranks.py
    torchrun --nproc-per-node 3 tests/gpu/scope_ranks.py cpu
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(folder) for folder in (TESTS.parent, TESTS, TESTS / "fsdp")]


def main(device: str) -> None:
    """Trains two models at the same time beside stock FSDP2, and runs a plan's own collectives."""
    os.environ.setdefault("TIDE_TIMEOUT", "20")
    import fsdp_models
    import torch
    import torch.distributed as dist

    fsdp_models.DEVICE = device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(max(rank - 1, 0) % torch.cuda.device_count())
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    import fsdp_scope as jobs

    import tide

    members = list(range(1, world))
    grid = jobs.on(members)
    told = []
    if rank in members:
        pairs = [[jobs.fresh_on(grid, seed, mp_policy=jobs.MIXED) for _ in range(2)] for seed in (1, 2)]
        attachments = [tide.attach(attached.model, debug=True) for _, attached in pairs]
        for step in range(3):
            for number, (stock, attached) in enumerate(pairs):
                jobs.same_training(stock, attached, rank, range(step, step + 1), f"model {number}")
        told = [attachment.report() for attachment in attachments]
        for _, attached in pairs:
            tide.detach(attached.model)
        for number, (stock, attached) in enumerate(pairs):
            jobs.same_training(stock, attached, rank, range(3, 4), f"model {number}, detached")
    told.append(jobs.plan_on_a_part(rank, world, *members))
    if rank == members[-1]:
        print("\n".join(told), "\nall equal", flush=True)
    dist.barrier(group=dist.new_group(backend="gloo"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cuda"]))
