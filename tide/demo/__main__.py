"""The demonstration: what TIDE does, on any machine, without a GPU."""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.multiprocessing as mp

import tide
from tide.demo.llama import Llama, LlamaConfig
from tide.demo.progress import progress
from tide.demo.ranks import free_port, gather_and_reduce, train


def main(argv: list[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tide.demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="CPU ranks that gather and reduce (default 4)")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run (default 6)")
    arguments = parser.parse_args(argv)
    show_plan()
    ok = True
    for ranks, title, task, settings in (
        (arguments.ranks, "gathers and reduces: TIDE beside FSDP2's own calls", gather_and_reduce, ()),
        # A sum of two has only one order, so between two ranks every bit of the training must agree.
        (2, "trains the same model twice: stock FSDP2, then with tide.attach", train, (arguments.steps,)),
    ):
        print(f"\n── {ranks} CPU ranks, a small Llama: {title} ──", flush=True)
        queue = mp.get_context("spawn").SimpleQueue()
        with progress("ranks at work"):
            mp.spawn(task, args=(ranks, free_port(), queue, *settings), nprocs=ranks, join=True)
        lines, good = queue.get()
        print("\n".join(lines), flush=True)
        ok &= good
    print("\nAll bytes are equal." if ok else "\nBYTES DIFFER: see above.")
    return 0 if ok else 1


def show_plan() -> None:
    """Prints the plan of Llama-3.1-70B for 8 nodes × 8 GPUs, built on the meta device."""
    topology = tide.Topology(nodes=8, gpus_per_node=8)
    print(f"── the plan of Llama-3.1-70B for {topology}, built on the meta device ──", flush=True)
    began = time.perf_counter()
    with progress("building Llama-3.1-70B on the meta device"), torch.device("meta"):
        model = Llama(LlamaConfig())
    built = time.perf_counter()
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plan = tide.compile_plan(
        model,
        topology=topology,
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        options=tide.PlanOptions(slots=2),
        rank=0,
    )
    compiled = time.perf_counter()
    print(plan)
    print(plan.report())
    with progress("proving the plan for all ranks"):
        proof = plan.verify()
    proved = time.perf_counter()
    print(proof)
    print(
        f"model on meta device {built - began:.2f} s, plan {compiled - built:.2f} s, "
        f"full proof {proved - compiled:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
