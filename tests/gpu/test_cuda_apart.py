"""Ranks that issue different collectives, on a fake machine: nothing wrong is taken, and each is told in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_support import Cluster, Machine, cluster
from test_cuda_logic import TIGHT, bits, cut, routes, values

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.signals import SLOT_LANES
from tide.compiler.steps import Put, Signal, Wait
from tide.errors import PeerError
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.cuda import CudaTicket, CudaTransport, Settings
from tide.transport.cuda.words import Words

SLOTS = 3
NAMES = [f"block{number}" for number in range(5)]
#: What an output holds before anything is reduced into it.
UNTOUCHED = 12345.0


def compiled_for(topology: Topology, route: str = "push", **options: Any) -> Compiled:
    """Units of one shape, which share programs, in fewer slots."""
    mesh = Mesh((tuple(range(topology.world_size)),))
    units = [
        Unit(n, (Parameter(f"{n}.w", (50, 24)), Parameter(f"{n}.v", (24, 30)), Parameter(f"{n}.b", (7,))), mesh)
        for n in NAMES
    ]
    options |= {"multicast": "on"} if route == "multicast" else {"route": route}
    return compile_spec(ModelSpec(tuple(units), "apart"), topology, replace(TIGHT, slots=SLOTS, **options))


def cuda(session: Session) -> CudaTransport:
    assert isinstance(session.transport, CudaTransport)
    return session.transport


class Run:
    """Collectives of all ranks, each with what has to come of it."""

    def __init__(self, made: Cluster) -> None:
        self.made, self.machine, self.world = made, made.machine, len(made.sessions)
        self.stuck: dict[int, list[tuple[CudaTicket, str, dict[int, torch.Tensor]]]] = {}
        self.calls = 0

    def seed(self, unit: str) -> int:
        """Other values for each unit; its n-th collective is everybody's n-th, so they need not change with time."""
        return 100 * NAMES.index(unit)

    def parameters(self, unit: str) -> Sequence[Parameter]:
        return self.made.compiled.spec.unit(unit).parameters

    def gather(self, session: Session, unit: str) -> CudaTicket:
        seed, rank = self.seed(unit), session.rank
        wholes = [values(p.shape, p.shard_dtype, seed + i) for i, p in enumerate(self.parameters(unit))]
        shards = [cut(w, p.dim, self.world, rank) for w, p in zip(wholes, self.parameters(unit), strict=True)]
        self.made.kept.append(shards)
        ticket = session.all_gather(unit, shards)
        assert isinstance(ticket, CudaTicket)
        return ticket

    def gradient(self, unit: str, index: int, rank: int) -> torch.Tensor:
        p = self.parameters(unit)[index]
        return values(p.shape, p.grad_dtype or "", self.seed(unit) + 10 * rank + index)

    def reduce(self, session: Session, unit: str) -> tuple[CudaTicket, dict[int, torch.Tensor]]:
        indices = range(len(self.parameters(unit)))
        grads = {i: self.gradient(unit, i, session.rank) for i in indices}
        outs = session.new_outs(unit, indices, "cpu")
        for out in outs.values():
            out.fill_(UNTOUCHED)
        self.made.kept.append((grads, outs))
        ticket = session.reduce_scatter(unit, grads, outs)
        assert isinstance(ticket, CudaTicket)
        return ticket, outs

    def settle(self) -> None:
        """Runs all that can run."""
        while self.machine.go(10_000):
            pass

    def check(self, session: Session, ticket: CudaTicket, unit: str, outs: dict[int, torch.Tensor]) -> bool:
        """Whether a collective has ended; if so, with the right bytes, and no output is wrong in any case."""
        ended = cuda(session).books.is_finished(ticket)
        if ticket.collective == "all_gather":
            for i, p in enumerate(self.parameters(unit)) if ended else ():
                expected = values(p.shape, p.shard_dtype, self.seed(unit) + i).to(to_torch(p.dtype))
                assert torch.equal(bits(session.whole(unit)[p.name]), bits(expected)), f"rank {session.rank}, {p.name}"
            return ended
        one_node = self.made.compiled.topology.nodes == 1
        for i, out in outs.items():
            pieces = [self.gradient(unit, i, rank).float() for rank in range(self.world)]
            expected = cut(torch.stack(pieces).sum(0), self.parameters(unit)[i].dim, self.world, session.rank)
            right = torch.isclose(out, expected, rtol=1e-3, atol=1e-3)
            if not ended and one_node:  # across nodes, an output holds the sums of some of them for a while
                right |= out == UNTOUCHED
            if ended or one_node:
                assert bool(right.all()), f"rank {session.rank}, {unit}, {i}"
        return ended

    def issue(self, collective: str, units: Sequence[str | None], between: int = 5) -> list[bool]:
        """One collective of each rank, on its own unit; whose has ended once nothing moves any more."""
        issued: list[tuple[Session, CudaTicket | None, str, dict[int, torch.Tensor]]] = []
        for session, unit in zip(self.made.sessions, units, strict=True):
            if unit is None:
                continue
            outs: dict[int, torch.Tensor] = {}
            if collective == "all_gather":
                ticket = self.gather(session, unit)
            else:
                ticket, outs = self.reduce(session, unit)
            issued.append((session, ticket, unit, outs))
            self.machine.go(between)
        self.settle()
        found = []
        for session, ticket, unit, outs in issued:
            assert ticket is not None
            found.append(self.check(session, ticket, unit, outs))
            if not found[-1]:
                self.stuck.setdefault(session.rank, []).append((ticket, unit, outs))
            if collective == "all_gather":
                session.release(unit)
        self.settle()
        for rank, rows in self.stuck.items():  # what was stuck may have gone on
            for ticket, unit, outs in rows:
                if ticket.collective == "reduce_scatter":
                    self.check(self.made.sessions[rank], ticket, unit, outs)
        return found

    def end(self) -> dict[int, str]:
        """Lets the deadlines pass; what each rank is told."""
        for session in self.made.sessions:
            cuda(session).watchdog.timeout = 0.2
        limit = time.monotonic() + 20
        waiting = [session for session in self.made.sessions if session.rank in self.stuck]
        while any(cuda(session).broken is None for session in waiting) and time.monotonic() < limit:
            self.machine.go(100)
            time.sleep(0.01)
        for _ in range(200):  # the watchdogs set free what waits, also what a late peer has written over
            self.machine.go(10_000)
            if not any(self.machine.queues.values()):
                break
            time.sleep(0.05)
        told = {}
        for session in waiting:
            ticket = self.stuck[session.rank][0][0]
            with pytest.raises(PeerError) as caught:
                ticket.wait()
            told[session.rank] = str(caught.value)
        return told

    def abandon(self) -> None:
        """Ends a run whose streams wait in NCCL, where nothing sets them free."""
        for session in self.made.sessions:
            cuda(session).watchdog.stop()
            cuda(session).watchdog.timeout = -10.0
        for queue in self.machine.queues.values():
            queue.clear()


def skipping(number: int, total: int = len(NAMES)) -> list[str | None]:
    """All units but some after the first, then nothing more."""
    names: list[str | None] = [name for i, name in enumerate(NAMES[:total]) if not 1 <= i <= number]
    return names + [None] * number


#: Also as many units as there are slots.
skips = pytest.mark.parametrize(
    ("topology", "skipped"), [(Topology(1, 2), 1), (Topology(1, 3), 2), (Topology(1, 2), SLOTS)], ids=["1", "2", "3"]
)


@skips
@routes
def test_a_rank_skips_units_in_forward(topology: Topology, route: str, skipped: int) -> None:
    """The units are of one shape. The very first that differs ends nowhere, and all say so."""
    with cluster(compiled_for(topology, route), Machine(skipped), poison=skipped == 1) as made:
        run, others = Run(made), topology.world_size - 1
        for unit, other in zip(NAMES, skipping(skipped), strict=True):
            ended = run.issue("all_gather", [other] + [unit] * others)
            assert all(ended) if unit == other else not any(ended), unit
        told = run.end()
        first = NAMES[1 + skipped]
        assert f"all_gather of unit {first!r}" in told[0]
        for rank in range(1, topology.world_size):
            assert "all_gather of unit 'block1'" in told[rank]
            assert " of rank 0" in told[rank]
            assert f"rank 0 waits in all_gather of unit {first!r}: it is alive" in told[rank]
        assert "waits in all_gather of unit 'block1': it is alive" in told[0]
        assert "most likely issued different collectives" in told[0]


@skips
@pytest.mark.parametrize("slot_reuse", [False, True], ids=["areas", "slots"])
def test_a_rank_skips_units_in_backward(topology: Topology, slot_reuse: bool, skipped: int) -> None:
    """Gathers are the same, reductions are not: no sum is of gradients of different units."""
    with cluster(compiled_for(topology, slot_reuse=slot_reuse), Machine(skipped)) as made:
        run, others = Run(made), topology.world_size - 1
        for unit in NAMES:
            assert all(run.issue("all_gather", [unit] * (others + 1)))
        for unit, other in zip(NAMES, skipping(skipped), strict=True):
            ended = run.issue("reduce_scatter", [other] + [unit] * others)
            assert all(ended) if unit == other else not any(ended), unit
        told = run.end()
        for rank in range(1, topology.world_size):
            assert "reduce_scatter of unit 'block1'" in told[rank]
            assert " of rank 0" in told[rank]
            assert f"rank 0 waits in reduce_scatter of unit {NAMES[1 + skipped]!r}" in told[rank]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_in_other_orders(collective: str, seed: int) -> None:
    """All issue the same, each in an order of its own: what ends is right, and nothing ends in the wrong place."""
    topology = Topology(1, 3)
    with cluster(compiled_for(topology, slot_reuse=bool(seed % 2)), machine := Machine(seed)) as made:
        run = Run(made)
        orders = [machine.random.sample(NAMES, len(NAMES)) for _ in made.sessions]
        apart = next(i for i, units in enumerate(zip(*orders, strict=True)) if len(set(units)) > 1)
        for number, units in enumerate(zip(*orders, strict=True)):
            ended = run.issue(collective, units, machine.random.choice([0, 3, 30]))
            assert all(ended) if number < apart else not all(ended)
        assert run.end().keys() == {0, 1, 2}


@routes
def test_a_rank_gathers_a_unit_once_more(route: str) -> None:
    """As one that alone does not reuse what it has: its peers' next gather of the unit is no answer."""
    with cluster(compiled_for(Topology(1, 2), route), Machine(3), poison=False) as made:
        run = Run(made)
        assert all(run.issue("all_gather", ["block0", "block0"]))
        for unit, other in zip(["block0", "block1", "block2"], ["block1", "block2", "block0"], strict=True):
            assert not any(run.issue("all_gather", [unit, other]))
        told = run.end()
        assert "all_gather of unit 'block0'" in told[0]
        assert "rank 1 waits in all_gather of unit 'block1'" in told[0]


def test_a_slot_that_only_one_rank_has_vacated() -> None:
    """One reduces in the slot, the other beside it, of the same unit: they take nothing of each other."""
    with cluster(compiled_for(Topology(1, 2), slot_reuse=True), Machine(1), poison=False) as made:
        run = Run(made)
        assert all(run.issue("all_gather", ["block0", "block0"]))
        made.sessions[1]._occupant[made.compiled.arena.slot_of["block0"]] = "block0"
        assert not any(run.issue("reduce_scatter", ["block0", "block0"]))
        for p in run.parameters("block0"):  # rank 1 may still compute with it
            i = run.parameters("block0").index(p)
            expected = values(p.shape, p.shard_dtype, run.seed("block0") + i).to(to_torch(p.dtype))
            assert torch.equal(bits(made.sessions[1].whole("block0")[p.name]), bits(expected))
        assert len(run.end()) == 2


def test_a_slot_in_use_is_not_written_for_another_unit() -> None:
    """Room that a rank gives in one slot is none in another, whose unit it still computes with."""
    with cluster(compiled_for(Topology(1, 2), slot_reuse=True), Machine(1), poison=False) as made:
        run = Run(made)
        for session in made.sessions:
            run.gather(session, "block0")
        run.settle()
        made.sessions[0].release("block0")
        assert not any(run.issue("reduce_scatter", ["block0", "block1"]))
        for i, p in enumerate(run.parameters("block0")):
            expected = values(p.shape, p.shard_dtype, run.seed("block0") + i).to(to_torch(p.dtype))
            assert torch.equal(bits(made.sessions[1].whole("block0")[p.name]), bits(expected))
        assert len(run.end()) == 2


WIRES = [
    (Topology(2, 2, virtual=True), Settings(4, 4, puts="copy")),
    (Topology(2, 2), Settings(4, 4, puts="nccl")),
    (Topology(3, 1), Settings(4, 4, puts="nccl", communicators=4)),
    (Topology(3, 1), Settings(4, 4, puts="nccl", wire_signals="word")),
]


@pytest.mark.parametrize(("topology", "settings"), WIRES, ids=["copies", "nccl", "four", "word"])
@pytest.mark.parametrize(
    ("collective", "slot_reuse"), [("all_gather", False), ("reduce_scatter", False), ("reduce_scatter", True)]
)
def test_a_rank_skips_a_unit_across_nodes(
    topology: Topology, settings: Settings, collective: str, slot_reuse: bool
) -> None:
    compiled = compiled_for(topology, slot_reuse=slot_reuse)
    with cluster(compiled, Machine(2), settings=settings, poison=False) as made:
        run, others = Run(made), topology.world_size - 1
        for unit, other in zip(NAMES, skipping(1), strict=True):
            ended = run.issue(collective, [other] + [unit] * others)
            assert all(ended) if unit == other else not any(ended), unit
        if settings.puts == "copy":
            told = run.end()
            assert all(f"{collective} of unit 'block1'" in told[rank] for rank in range(1, topology.world_size))
        else:
            run.abandon()


@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(2, 2), Topology(5, 1)], ids=str)
@pytest.mark.parametrize(
    ("route", "slot_reuse"), [("pull", False), ("push", False), ("push", True), ("multicast", True)]
)
def test_signals_of_a_unit_answer_its_own_waits_only(topology: Topology, route: str, slot_reuse: bool) -> None:
    """Each is written to the word that its peer waits for, and no two units, collectives or forms share one."""
    compiled = compiled_for(topology, route, slot_reuse=slot_reuse)
    words = [Words(compiled, rank) for rank in range(topology.world_size)]
    waited: dict[tuple[int, int], set[object]] = {}
    given: dict[tuple[int, int], set[object]] = {}
    for unit in NAMES:
        for collective, in_slot in (("all_gather", True), ("reduce_scatter", True), ("reduce_scatter", False)):
            for rank in range(topology.world_size):
                program = compiled.program(unit, collective, rank, in_slot=in_slot)
                if program.in_slot != (in_slot and slot_reuse and collective == "reduce_scatter"):
                    continue
                group, _ = compiled.group(unit, rank)
                for _, _, step in program.steps():
                    if not isinstance(step, Signal | Wait | Put) or step.peer == program.position:
                        continue
                    peer, kept = group[step.peer], compiled.arena.slot_of[unit] if step.lane in SLOT_LANES else unit
                    if isinstance(step, Wait):
                        word = words[rank].incoming(unit, step.lane, peer, program.in_slot)
                        row, key = waited, (rank, word.offset)
                        what = kept, collective, program.in_slot, step.lane, peer
                    else:
                        word = words[rank].outgoing(unit, step.lane, peer, program.in_slot)
                        row, key = given, (peer, word.offset)
                        what = kept, collective, program.in_slot, step.lane, rank
                    row.setdefault(key, set()).add(what)
    assert given == waited
    assert all(len(found) == 1 for found in waited.values())
