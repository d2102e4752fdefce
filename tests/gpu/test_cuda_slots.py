"""The CUDA transport on a fake machine where reduce-scatters receive in vacated slots."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_support import Machine, cluster
from test_cuda_logic import (
    SHARING,
    TIGHT,
    TOPOLOGIES,
    UNITS,
    bits,
    check_gathered,
    check_reduced,
    compiled_for,
    delay,
    gather,
    gather_without_waiting,
    scatter,
)

from tide.compiler.compile import Compiled
from tide.compiler.model import Parameter
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Place
from tide.topology import Topology
from tide.transport.cuda import CudaTransport, Settings

REUSE = PlanOptions(**{**TIGHT.to_dict(), "slot_reuse": True})  # type: ignore[arg-type]


def plan(topology: Topology, names: list[str], slots: int = 2) -> Compiled:
    return compiled_for(topology, names, PlanOptions(**{**REUSE.to_dict(), "slots": slots}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topology", "shared", "signals"),
    # Signals and queues do not depend on the topology: each topology once, and both of them in turn.
    [
        (topology, bool(number % 2), ("write", "copy")[number // 2 % 2])
        for number, topology in enumerate([*TOPOLOGIES, Topology(2, 3, virtual=True)])
    ],
    ids=str,
)
def test_every_unit_through_its_slot(topology: Topology, shared: bool, signals: str) -> None:
    """Bytes of both collectives, in slots and beside them, with poison between."""
    compiled = plan(topology, list(UNITS))
    machine = Machine(1, shared)
    with cluster(compiled, machine, settings=Settings(4, 4, signals)) as made:
        for turn in range(2):
            for number, unit in enumerate(UNITS):
                seed = 1000 * turn + 10 * number
                gather(made, unit, seed, between=7)
                held = scatter(made, unit, seed + 1, 0.5, between=3)
                machine.finish()
                check_gathered(made, unit, seed)  # a reduction while the slot is held goes beside it
                check_reduced(made, unit, seed + 1, held, 0.5)
                for session in made.sessions:
                    session.release(unit)
                outs = scatter(made, unit, seed, 0.5, between=7)
                machine.finish()
                check_reduced(made, unit, seed, outs, 0.5)
    programs = [compiled.program(unit, "reduce_scatter", 0) for unit in UNITS]
    assert any(program.in_slot for program in programs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 3), Topology(2, 2, virtual=True)], ids=str)
def test_gathers_and_reductions_of_one_slot_overlap(seed: int, slots: int, topology: Topology) -> None:
    """The host far ahead: the next unit's gather is issued while the slot still receives gradients."""
    compiled = plan(topology, SHARING, slots)
    machine, chance = Machine(seed, shared_queues=seed % 2 == 1), random.Random(seed)
    with cluster(compiled, machine, poison=seed % 4 == 3, settings=Settings(2, 2, "write")) as made:
        reduced = []
        for turn in range(12):
            unit = SHARING[turn % len(SHARING)]
            gather(made, unit, turn, between=chance.choice([0, 0, 3, 50]))
            if chance.random() < 0.3:
                machine.finish()
                check_gathered(made, unit, turn)
            for session in made.sessions:
                session.release(unit)
            reduced.append((unit, turn, scatter(made, unit, turn, between=chance.choice([0, 0, 2, 40]))))
        machine.finish()
        for unit, turn, outs in reduced:
            check_reduced(made, unit, turn, outs)


@pytest.mark.parametrize("late", ["rs.push", "rs.sum", "rs.wire", "rs.fold", "ag.place", "ag.node"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_late_stream_changes_nothing(topology: Topology, late: str) -> None:
    """However late a stream is, the slot passes from compute to gradients to the next unit in order."""
    compiled = plan(topology, SHARING, 1)
    machine = Machine(5)
    seen: list[torch.Tensor] = []
    with cluster(compiled, machine, poison=False) as made:
        delay(made, late)
        gather(made, "block0", 5)
        for session in made.sessions:  # what the caller's stream still does with the slot
            flat = session.storage("block0")[0]
            machine.put(session.rank, machine.current, lambda flat=flat: seen.append(flat.clone()) or True)
            session.release("block0")
        first = scatter(made, "block0", 7)
        second = scatter(made, "block0", 8)  # the same slot, with no gather between
        gather(made, "block1", 50)
        machine.finish()
        check_gathered(made, "block1", 50)
        check_reduced(made, "block0", 7, first)
        check_reduced(made, "block0", 8, second)
    assert all(torch.equal(bits(flat), bits(seen[0])) for flat in seen)
    assert bool(seen[0].any())


def test_what_a_slot_held_is_gone_after_a_reduction() -> None:
    """A result of the forward pass is not taken up again once gradients have lain over it."""
    compiled = plan(Topology(1, 2), SHARING)
    machine = Machine(1)
    with cluster(compiled, machine, poison=False) as made:
        gather(made, "block0", 5)
        for session in made.sessions:
            session.release("block0")
            assert session.resume("block0")
            session.release("block0")
        outs = scatter(made, "block0", 7)
        machine.finish()
        check_reduced(made, "block0", 7, outs)
        assert not any(session.resume("block0") for session in made.sessions)


@pytest.mark.parametrize("reuse", [False, True], ids=["areas", "slots"])
@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(2, 2, virtual=True)], ids=str)
def test_small_gradients_travel_packed(topology: Topology, reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that packs is in the pushing stream, and the next call's does not overtake this one's copies."""
    ranks = topology.world_size
    rows = (Parameter("p.w", (48 * ranks, 12)), *(Parameter(f"p.{i}", (16 * ranks,)) for i in range(7)))
    monkeypatch.setitem(UNITS, "packed", rows)
    options = PlanOptions(**{**REUSE.to_dict(), "slot_reuse": reuse})  # type: ignore[arg-type]
    compiled = compiled_for(topology, ["packed"], options)
    assert isinstance(compiled.program("packed", "reduce_scatter", 0).streams[0].steps[0], Place)
    machine = Machine(9)
    with cluster(compiled, machine, poison=False, settings=Settings(2, 2, "write")) as made:
        reduced = [(turn, scatter(made, "packed", turn, between=5)) for turn in range(4)]
        machine.finish()
        for turn, outs in reduced:
            check_reduced(made, "packed", turn, outs)


def test_the_clock_waits_for_what_is_before_it_in_the_slot() -> None:
    """A gather behind a reduction whose caller has not come so far could not start: it is nobody's fault."""
    compiled = plan(Topology(1, 2), SHARING, 1)
    machine = Machine(3)
    reached: list[bool] = []
    with cluster(compiled, machine, poison=False) as made:
        gather(made, "block0", 5)
        for session in made.sessions:
            session.release("block0")
        machine.finish()
        for session in made.sessions:  # the backward pass is not there yet
            machine.put(session.rank, machine.current, lambda: bool(reached))
        outs = scatter(made, "block0", 7)
        machine.current = -1  # FSDP2 gathers on a stream of its own
        tickets = gather_without_waiting(made, "block1", 50)
        machine.go(5000)
        for session, ticket in zip(made.sessions, tickets, strict=True):
            transport = session.transport
            assert isinstance(transport, CudaTransport)
            assert transport.driver.done(ticket.entry)
            assert not transport.books.could_start(ticket)
        reached.append(True)
        machine.finish()
        machine.current = 0
        check_reduced(made, "block0", 7, outs)
        check_gathered(made, "block1", 50)
        for session, ticket in zip(made.sessions, tickets, strict=True):
            assert ticket.finished or session.transport.books.could_start(ticket)  # type: ignore[attr-defined]
