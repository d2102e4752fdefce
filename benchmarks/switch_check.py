"""The switch routes on GPUs without the switch: the stand-in's bytes, and that the real path refuses.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONPATH=. \\
        torchrun --nproc-per-node 4 benchmarks/switch_check.py --nodes 2 --out switch_check.json

Programs with ``Multicast`` and ``SwitchReduce`` steps are carried out by copies to each peer and by sums over the
peers' memory in rank order (``Settings(multicast="standin")``), and every byte is compared. ``--nodes`` groups the
ranks into virtual nodes; sums in the switch need two or more, of two ranks or more. Nothing is run unless a variable
forbids multicast: on a shared machine it must never be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cuda_check import SMALL
from cuda_check_support import Bench, bf16_equal, whole_of
from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Multicast, SwitchReduce
from tide.compiler.verify import verify
from tide.errors import CapabilityError
from tide.multicast import refusal
from tide.session import Session
from tide.transport.cuda import CudaTransport, Settings
from tide.transport.simulated import reference_reduce_scatter
from tide.transport.switch import settled

OPTIONS = PlanOptions(slots=1, chunk_bytes=64 << 10, piece_bytes=64 << 10, multicast="on", switch_reduce="on")
STAND_IN = Settings(multicast="standin")


def compiled_for(bench: Bench, options: PlanOptions) -> Compiled:
    """The small units on all ranks, proved."""
    mesh = Mesh((tuple(range(bench.world)),))
    units = tuple(Unit(name, parameters, mesh) for name, parameters in SMALL.items())
    compiled = compile_spec(ModelSpec(units, "check"), bench.topology, options)
    verify(compiled)
    return compiled


def refuses(bench: Bench) -> dict[str, Any]:
    """The real path raises on every rank before anything runs, and names the variable; "auto" turns off."""
    wanted, said = refusal(), ""
    assert wanted is not None
    try:
        CudaTransport.open(compiled_for(bench, OPTIONS), timeout=20.0, provider=bench.provider).close()
    except CapabilityError as error:
        said = str(error)
    right = wanted in said
    auto = settled(replace(OPTIONS, multicast="auto", switch_reduce="auto"), bench.topology)
    right &= (auto.multicast, auto.switch_reduce) == ("off", "off")
    bench.say(f"   refusal: {said}")
    return {"wrong": bench.total(not right), "message": said}


def gathers(bench: Bench, session: Session, turns: int) -> dict[str, Any]:
    """All-gathers of every unit, each with new values, over slots in use again."""
    wrong = elements = 0
    for turn in range(turns):
        for name, parameters in SMALL.items():
            session.all_gather(name, bench.shards(parameters, turn)).wait()
            found = session.whole(name)
            for i, p in enumerate(parameters):
                if p.numel:
                    wrong += int(bf16_equal(found[p.name], whole_of(p, i, turn)))
                    elements += p.numel
            session.release(name)
    torch.cuda.synchronize()
    return {"wrong": bench.total(wrong), "elements": bench.total(elements)}


def sums(bench: Bench, session: Session, turns: int) -> dict[str, Any]:
    """Reduce-scatters of every unit, compared with the simulator's reference on the CPU."""
    compiled, wrong, elements = session.compiled, 0, 0
    for turn in range(turns):
        for name, parameters in SMALL.items():
            chosen = [i for i, p in enumerate(parameters) if p.trainable]
            grads = [[_gradient(parameters[i], i, turn, rank) for i in chosen] for rank in range(bench.world)]
            mine = {i: grads[bench.rank][at].to(bench.device) for at, i in enumerate(chosen)}
            outs = session.new_outs(name, chosen, bench.device)
            session.reduce_scatter(name, mine, outs, 1.0, float(bench.world)).wait()
            torch.cuda.synchronize()
            team = compiled.context(name, bench.rank).team
            for at, i in enumerate(chosen):
                column = [row[at] for row in grads]
                expected = reference_reduce_scatter(
                    column, parameters[i], team, 1.0, float(bench.world), "float32", name in compiled.spread
                )[bench.rank]
                wrong += int((outs[i].cpu().flatten() != expected.flatten()).sum())
                elements += expected.numel()
    return {"wrong": bench.total(wrong), "elements": bench.total(elements)}


def _gradient(p: Any, index: int, turn: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 + 1000 * turn + 31 * rank + index)
    return torch.randn(p.shape, generator=generator).to(getattr(torch, p.grad_dtype))


def times(bench: Bench, session: Session) -> dict[str, float]:
    """Microseconds of one all-gather of each unit, median; the stand-in's, which says nothing of a switch."""
    out = {}
    for name, parameters in SMALL.items():
        shards, found = bench.shards(parameters, 0), []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            begin.record()
            session.all_gather(name, shards).wait()
            end.record()
            session.release(name)
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
        out[name] = round(statistics.median(found[2:]), 1)
    return out


def main() -> None:
    """Runs the checks; exits with 1 if a byte is wrong."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", default="")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--provider", default=None)
    arguments.add_argument("--nodes", type=int, default=1, help="virtual nodes")
    given = arguments.parse_args()
    if refusal() is None:
        sys.exit("switch_check: set NCCL_NVLS_ENABLE=0; this check is for machines on which multicast stays off")
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    bench = Bench(given.provider, given.nodes)
    results: dict[str, Any] = {"environment": bench.environment(), "nodes": given.nodes}
    try:
        results["refusal"] = refuses(bench)
        compiled = compiled_for(bench, OPTIONS)
        kinds = {type(s) for u in SMALL for c in ("all_gather", "reduce_scatter") for s in _steps(compiled, u, c)}
        assert Multicast in kinds or bench.topology.gpus_per_node == 1
        assert SwitchReduce in kinds or bench.topology.nodes == 1
        transport = CudaTransport.open(compiled, timeout=20.0, provider=bench.provider, settings=STAND_IN)
        with transport:
            session = Session(compiled, transport, poison=True)
            bench.say("   " + dict(transport.describe())["multicast"])
            results["gathers"] = gathers(bench, session, given.turns)
            results["sums"] = sums(bench, session, given.turns)
            results["microseconds"] = times(bench, session)
            torch.cuda.synchronize()
            dist.barrier()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the other ranks may wait for this one: the launcher ends them
    bench.say(json.dumps(results, indent=1))
    if given.out and bench.rank == 0:
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(any(results[name]["wrong"] for name in ("refusal", "gathers", "sums")))


def _steps(compiled: Compiled, unit: str, collective: str) -> list[Any]:
    return [step for _, _, step in compiled.program(unit, collective, dist.get_rank()).steps()]


if __name__ == "__main__":
    main()
