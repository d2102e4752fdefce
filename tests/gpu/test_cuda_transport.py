"""The CUDA transport on devices: bytes of both collectives, overlap with poison between, and faults."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from test_cuda_logic import UNITS, bits, compiled_for, cut, routes, values

from ranks import run_ranks
from tide.compiler.options import MIB, PlanOptions
from tide.errors import InputError, PeerError
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.cuda import CudaTransport, Settings, nccl


def open_session(
    world: int,
    rank: int,
    names: list[str],
    timeout: float = 30.0,
    route: str = PlanOptions().route,
    nodes: int = 1,
    slots: int = 2,
    **settings: Any,
) -> Session:
    """A session with poison between the units; two ranks share a device where there is only one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    nodes = nodes if world < 4 else 2
    topology = Topology(nodes, world // nodes, virtual=nodes > 1)
    small = {"chunk_bytes": 4096, "bundle_bytes": 64, "min_run_bytes": 16, "min_put_run_bytes": 16}
    options = PlanOptions(slots=slots, piece_bytes=512, **small)
    compiled = compiled_for(topology, names, options, route)
    if route == "multicast":
        settings["multicast"] = "standin"  # no switch is asked for, wherever this runs
    return Session(compiled, CudaTransport.open(compiled, timeout=timeout, settings=Settings(**settings)), poison=True)


def gather(session: Session, world: int, unit: str, seed: int) -> None:
    parameters = session.compiled.spec.unit(unit).parameters
    wholes = [values(p.shape, p.shard_dtype, seed + i) for i, p in enumerate(parameters)]
    shards = [cut(w, p.dim, world, session.rank).cuda() for w, p in zip(wholes, parameters, strict=True)]
    session.all_gather(unit, shards).wait()
    for whole, p in zip(wholes, parameters, strict=True):
        found = bits(session.whole(unit)[p.name]).cpu()
        assert torch.equal(found, bits(whole.to(to_torch(p.dtype)))), f"rank {session.rank}, {p.name}"


def scatter(session: Session, world: int, unit: str, seed: int) -> None:
    parameters = session.compiled.spec.unit(unit).parameters
    chosen = [i for i, p in enumerate(parameters) if p.trainable]
    every = [
        {i: values(parameters[i].shape, parameters[i].grad_dtype or "", seed + 100 * r + i) for i in chosen}
        for r in range(world)
    ]
    outs = session.new_outs(unit, chosen, "cuda")
    grads = {i: grad.cuda() for i, grad in every[session.rank].items()}
    session.reduce_scatter(unit, grads, outs, divisor=float(world)).wait()
    for i in chosen:
        p = parameters[i]
        total = sum(cut(grads[i], p.dim, world, session.rank).float() for grads in every)
        assert isinstance(total, torch.Tensor)
        expected = (total / world).to(to_torch(p.out_dtype))
        assert torch.equal(bits(outs[i]).cpu(), bits(expected)), f"rank {session.rank}, {p.name}"


def exercise(rank: int, world: int, route: str, nodes: int = 1, settings: Any = None) -> list[tuple[str, str]]:
    session = open_session(world, rank, list(UNITS), route=route, nodes=nodes, **(settings or {}))
    for turn in range(3):
        for number, unit in enumerate(UNITS):
            gather(session, world, unit, 1000 * turn + 10 * number)
            scatter(session, world, unit, 1000 * turn + 10 * number)
            session.release(unit)
    rows = list(session.transport.describe())
    session.close()
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.transport.run(session.compiled.program("block0", "all_gather", rank), None)  # type: ignore[arg-type]
    return rows


@pytest.mark.multi_gpu
@pytest.mark.parametrize("signals", ["write", "copy"])
@routes
def test_every_unit(signals: str, route: str) -> None:
    rows = dict(run_ranks(exercise, 2, route, 1, {"signals": signals}, timeout=240)[0])
    assert rows["peer access 0 → 1"] == "mapped"
    assert ("stand-in" if route == "multicast" else "off") in rows["multicast"]
    assert "arena" in rows


needs_nccl = pytest.mark.skipif(
    nccl.unusable() is not None, reason=f"puts between nodes: {nccl.unusable()}; TIDE_NCCL_LIBRARY may name one"
)
wires = pytest.mark.parametrize(
    "wire", [{"communicators": 1}, {"communicators": 4}, {"wire_signals": "word"}], ids=["one", "four", "word"]
)


@needs_nccl
@pytest.mark.multi_gpu
@wires
@routes
def test_every_unit_between_virtual_nodes(wire: dict[str, Any], route: str) -> None:
    rows = dict(run_ranks(exercise, 2, route, 2, {"puts": "nccl", **wire}, timeout=240)[0])
    assert "between virtual nodes; no network is crossed" in rows["network"]


@needs_nccl
@pytest.mark.multi_gpu
@wires
def test_overlap_with_delays_between_virtual_nodes(wire: dict[str, Any]) -> None:
    assert run_ranks(overlap, 2, "push", 2, {"puts": "nccl", **wire}, timeout=240) == [0, 0]


def overlap(rank: int, world: int, route: str, nodes: int = 1, settings: Any = None) -> int:
    """Gathers ahead of their use, reductions behind, from streams of the caller's, with random delays."""
    names = ["block0", "block1", "block2", "uneven", "dims"]
    session = open_session(world, rank, names, route=route, nodes=nodes, **(settings or {}))
    chance = random.Random(rank)
    units = {name: session.compiled.spec.unit(name).parameters for name in names}
    wholes = {n: [values(p.shape, p.shard_dtype, i).cuda() for i, p in enumerate(rows)] for n, rows in units.items()}
    shards = {
        n: [cut(w, p.dim, world, rank) for w, p in zip(wholes[n], rows, strict=True)] for n, rows in units.items()
    }
    gathering, reducing = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    tickets = []
    for turn in range(400):
        unit = names[turn % len(names)]
        if chance.random() < 0.3:
            torch.cuda._sleep(int(chance.random() * 300_000))
        with torch.cuda.stream(gathering):
            if chance.random() < 0.2:
                torch.cuda._sleep(int(chance.random() * 300_000))
            ticket = session.all_gather(unit, shards[unit])
        ticket.wait()
        for p, whole in zip(units[unit], wholes[unit], strict=True):
            wrong += (session.whole(unit)[p.name] != whole.to(to_torch(p.dtype))).sum()
        grads = {
            i: whole.to(to_torch(p.grad_dtype or ""))
            for i, (p, whole) in enumerate(zip(units[unit], wholes[unit], strict=True))
        }
        session.release(unit)
        outs = session.new_outs(unit, list(grads), "cuda")
        reducing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reducing):
            tickets.append((unit, grads, outs, session.reduce_scatter(unit, grads, outs, divisor=float(world))))
        if len(tickets) > 2:
            unit, grads, outs, ticket = tickets.pop(0)
            ticket.wait()
            for i, p in enumerate(units[unit]):
                wrong += (outs[i] != cut(grads[i], p.dim, world, rank).float().to(outs[i].dtype)).sum()
    torch.cuda.synchronize()
    assert not session.transport.heads()  # type: ignore[attr-defined]
    session.close()
    return int(wrong)


@pytest.mark.multi_gpu
@routes
def test_overlap_with_delays(route: str) -> None:
    assert run_ranks(overlap, 2, route, timeout=240) == [0, 0]


def loses_its_peer(rank: int, world: int, how: str, route: str) -> str:
    session = open_session(world, rank, ["block0"], timeout=3.0, route=route)
    gather(session, world, "block0", 1)
    session.release("block0")
    torch.cuda.synchronize()
    if rank == 1:
        if how == "killed":
            os._exit(9)
        time.sleep(8)
        return ""
    begin, message = time.monotonic(), ""
    try:
        session.all_gather(
            "block0", [cut(values(p.shape, p.shard_dtype, 0), p.dim, 2, 0).cuda() for p in UNITS["block0"]]
        )
        torch.cuda.synchronize()  # hangs unless the watchdog sets the stream free
        gather(session, world, "block0", 1)
    except PeerError as error:
        message = str(error)
    assert time.monotonic() - begin < 8, "the deadline was not kept"
    session.close()
    return message


@pytest.mark.multi_gpu
@pytest.mark.parametrize("how", ["killed", "absent"])
@pytest.mark.parametrize(("route", "lane"), [("push", "FREE"), ("pull", "READY")])
def test_missing_peer(how: str, route: str, lane: str) -> None:
    message = run_ranks(loses_its_peer, 2, how, route, timeout=120, may_die=[1] if how == "killed" else [])[0]
    assert "all_gather of unit 'block0'" in message
    assert f"{lane} of rank 1" in message


def skips_a_unit(rank: int, world: int, collective: str, route: str) -> tuple[str, float, bool]:
    """Rank 0 leaves out a unit; what a rank is told, after how long, and whether nothing had been taken until then."""
    session = open_session(world, rank, ["block0", "block1"], timeout=1.5, route=route, slots=1)
    for unit in ("block0", "block1"):
        gather(session, world, unit, 1)
        scatter(session, world, unit, 1)
        session.release(unit)
    unit = "block1" if rank else "block0"
    parameters = UNITS[unit]
    shards = [cut(values(p.shape, p.shard_dtype, 7), p.dim, world, rank).cuda() for p in parameters]
    grads = {i: values(p.shape, p.grad_dtype or "", 7).cuda() for i, p in enumerate(parameters)}
    outs = session.new_outs(unit, list(grads), "cuda")
    for out in outs.values():
        out.fill_(12345.0)
    wholes = [session.whole(unit)[p.name] for p in parameters]  # poisoned
    side, device, seen = torch.cuda.Stream(), torch.cuda.current_device(), []
    watchdog = session.transport.watchdog  # type: ignore[attr-defined]
    tell = watchdog.tell_peers

    def look_first() -> None:
        """This rank gives up; no peer's streams are set free before it has said so. What have they done so far?"""
        if not seen:
            with torch.cuda.device(device), torch.cuda.stream(side):
                sums = [bool((out.cpu() == 12345.0).all()) for out in outs.values()]
                pieces = [cut(whole.cpu(), p.dim, world, 1 - rank) for whole, p in zip(wholes, parameters, strict=True)]
                seen.extend(sums if collective == "reduce_scatter" else [bool(x.isnan().all()) for x in pieces])
        tell()

    watchdog.tell_peers = look_first
    torch.cuda.synchronize()
    begin, message = time.monotonic(), ""
    if collective == "all_gather":
        ticket = session.all_gather(unit, shards)
    else:
        ticket = session.reduce_scatter(unit, grads, outs)
    try:
        ticket.synchronize()  # type: ignore[attr-defined]
    except PeerError as error:
        message = str(error)
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    session.close()
    return message, seconds, bool(seen) and all(seen)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("collective", "route"), [("all_gather", "push"), ("all_gather", "pull"), ("reduce_scatter", "push")]
)
def test_a_rank_skips_a_unit_of_equal_shape(collective: str, route: str) -> None:
    """Programs, slot and counts are the same, and yet nothing is taken for the other unit; both say so in time."""
    results = run_ranks(skips_a_unit, 2, collective, route, timeout=120)
    for rank, (message, seconds, untouched) in enumerate(results):
        mine, theirs = ("block1", "block0") if rank else ("block0", "block1")
        assert f"rank {rank}: {collective} of unit {mine!r}" in message
        assert f" of rank {1 - rank}" in message
        assert f"in {collective} of unit {theirs!r}" in message
        assert seconds < 6
        assert untouched, f"rank {rank}"


def holds_another_plan(rank: int, world: int) -> None:
    with pytest.raises(PeerError, match="different plans"):
        open_session(world, rank, ["block0", "block1"] if rank else ["block0"])


@pytest.mark.multi_gpu
def test_different_plans_are_refused() -> None:
    run_ranks(holds_another_plan, 2, timeout=120)


def captures_a_graph(rank: int, world: int) -> None:
    """The watchdog's queries do not spoil a capture in the caller's thread."""
    session = open_session(world, rank, ["block0"])
    with pytest.raises(InputError):
        session.transport.arena_tensor(0, 1 << 60, torch.uint8)
    gather(session, world, "block0", 1)
    x, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    session.release("block0")
    session.all_gather(
        "block0", [cut(values(p.shape, p.shard_dtype, 0), p.dim, 2, rank).cuda() for p in UNITS["block0"]]
    )
    with torch.cuda.graph(graph):
        y = x * 2
        time.sleep(1)
    graph.replay()
    torch.cuda.synchronize()
    assert float(y.sum()) == 2 * x.numel()
    session.close()


@pytest.mark.multi_gpu
def test_watchdog_allows_captures() -> None:
    run_ranks(captures_a_graph, 2, timeout=120)


@pytest.mark.gpu
def test_one_rank() -> None:
    compiled = compiled_for(Topology(1, 1), ["block0", "mixed"], PlanOptions(slots=2, chunk_bytes=1 * MIB))
    session = Session(compiled, CudaTransport.open(compiled), poison=True)
    for unit in ("block0", "mixed"):
        gather(session, 1, unit, 3)
        scatter(session, 1, unit, 3)
        session.release(unit)
    session.close()
