"""All-gathers by multicast: what the schedule makes is proved, and damage to it is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from verify_executor import Execution

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Copy, Lane, Multicast, Region, Signal, Step, Stream, Wait
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology

OPTIONS = PlanOptions(bundle_bytes=16, min_run_bytes=0, piece_bytes=512, put_bytes=4096, multicast="on")


def compiled_for(topology: Topology, options: PlanOptions = OPTIONS, mesh: Mesh | None = None) -> Compiled:
    rows = (Parameter("w", (37, 16)), Parameter("s", (4, 9, 3), 1), Parameter("b", (5,)), Parameter("c", (3,)))
    mesh = mesh or Mesh((tuple(range(topology.world_size)),))
    return compile_spec(ModelSpec((Unit("u", rows, mesh),)), topology, options)


@pytest.fixture
def compiled() -> Compiled:
    return compiled_for(Topology(1, 3))


def changed(compiled: Compiled, rank: int, change: Callable[[Step], Step | None]) -> Compiled:
    """The plan with every step of one rank's all-gather as ``change`` makes it; None drops the step."""
    program = compiled.program("u", "all_gather", rank)
    streams = tuple(
        Stream(s.name, tuple(new for step in s.steps if (new := change(step)) is not None)) for s in program.streams
    )
    return compiled.with_program("u", rank, replace(program, streams=streams))


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 3), Topology(2, 2), Topology(3, 2)], ids=str)
def test_multicast_proves_and_runs(topology: Topology) -> None:
    compiled = compiled_for(topology)
    steps = [step for _, _, step in compiled.program("u", "all_gather", 1).steps()]
    assert any(isinstance(step, Multicast) for step in steps)
    assert not any(isinstance(step, Copy) for step in steps)
    assert verify(compiled).collectives == ("all_gather", "reduce_scatter")
    for seed in range(12):
        Execution(compiled, "u", "all_gather", 0, 2, seed).run()


def test_each_piece_goes_once_and_after_all_have_given_leave(compiled: Compiled) -> None:
    push = compiled_for(Topology(1, 3), replace(OPTIONS, multicast="off"))
    for rank in range(3):
        by_copy = [s for _, _, s in push.program("u", "all_gather", rank).steps() if isinstance(s, Copy)]
        found = [s for _, _, s in compiled.program("u", "all_gather", rank).steps()]
        writes = [s for s in found if isinstance(s, Multicast)]
        assert [w.transfers for w in writes] == [c.transfers for c in by_copy[::2]]  # two peers, one write
        assert all(set(w.peers) == {0, 1, 2} - {rank} for w in writes)
        stream = next(s.steps for s in compiled.program("u", "all_gather", rank).streams if s.name == "ag.node")
        first = next(i for i, s in enumerate(stream) if isinstance(s, Multicast))
        assert {s.peer for s in stream[:first] if isinstance(s, Wait) and s.lane == Lane.FREE} == {0, 1, 2} - {rank}


def test_multicast_that_leaves_a_peer_out(compiled: Compiled) -> None:
    def change(step: Step) -> Step:
        return replace(step, peers=(0,)) if isinstance(step, Multicast) else step

    with pytest.raises(PlanError, match=r"rank 1 stream ag.node step \d+ \(Multicast\): leaves out rank 2"):
        verify(changed(compiled, 1, change))


def test_multicast_that_writes_twice(compiled: Compiled) -> None:
    program = compiled.program("u", "all_gather", 1)
    streams = []
    for stream in program.streams:
        steps = list(stream.steps)
        if found := [i for i, step in enumerate(steps) if isinstance(step, Multicast)]:
            steps.insert(found[-1], steps[found[-1]])
        streams.append(Stream(stream.name, tuple(steps)))
    with pytest.raises(PlanError, match=r"written more than once"):
        verify(compiled.with_program("u", 1, replace(program, streams=tuple(streams))))


def test_multicast_that_forgets_a_piece(compiled: Compiled) -> None:
    first = next(s for _, _, s in compiled.program("u", "all_gather", 1).steps() if isinstance(s, Multicast))
    with pytest.raises(PlanError, match=r"no step writes these bytes"):
        verify(changed(compiled, 1, lambda step: None if step is first else step))


def test_multicast_to_another_place(compiled: Compiled) -> None:
    """The switch writes into the sender's own storage too: only the very same bytes may go there."""

    def change(step: Step) -> Step:
        if not isinstance(step, Multicast):
            return step
        first = step.transfers[0]
        moved = first._replace(src=Region(first.src.buffer, 0, first.src.offset + 16))
        return replace(step, transfers=(moved, *step.transfers[1:]))

    with pytest.raises(PlanError, match=r"also writes them into the sender's own storage"):
        verify(changed(compiled, 1, change))


def test_multicast_in_a_part_of_a_node() -> None:
    """Two groups on one node: a multicast of one would write into the storage of the other."""
    mesh = Mesh(((0, 1), (2, 3)))
    compiled = compiled_for(Topology(1, 4), mesh=mesh)
    assert not any(isinstance(s, Multicast) for _, _, s in compiled.program("u", "all_gather", 0).steps())
    verify(compiled)

    def change(step: Step) -> Step:
        return Multicast((step.peer,), step.transfers) if isinstance(step, Copy) else step

    with pytest.raises(PlanError, match=r"ranks of the node that are not of the group"):
        verify(changed(compiled, 0, change))


def test_multicast_before_it_is_placed(compiled: Compiled) -> None:
    lost = {Wait(1, Lane.PLACED), Signal(1, Lane.PLACED)}
    with pytest.raises(PlanError, match=r"read before it is certain to be there"):
        verify(changed(compiled, 1, lambda step: None if step in lost else step))


def test_multicast_without_leave(compiled: Compiled) -> None:
    damaged = changed(compiled, 1, lambda step: None if step == Wait(0, Lane.FREE) else step)
    damaged = changed(damaged, 0, lambda step: None if step == Signal(1, Lane.FREE) else step)
    with pytest.raises(PlanError, match=r"rank 0, bytes .* without its leave"):
        verify(damaged)
