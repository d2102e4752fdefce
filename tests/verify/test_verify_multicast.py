"""All-gathers by multicast, which no schedule makes yet: the proof is ready for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_executor import Execution

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Copy, Lane, Multicast, Signal, Step, Stream, Wait
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology


def by_multicast(compiled: Compiled, unit: str, rank: int, skip: int | None = None) -> Compiled:
    """Lets a rank write once where it pushed to each peer; ``skip`` is left out of the last write."""
    program = compiled.program(unit, "all_gather", rank)
    streams = []
    for stream in program.streams:
        steps: list[Step] = []
        waits = [step for step in stream.steps if isinstance(step, Wait) and step.lane == Lane.FREE]
        peers = tuple(dict.fromkeys(step.peer for step in stream.steps if isinstance(step, Copy)))
        pushed: set[object] = set()
        for step in stream.steps:
            if step in waits:
                continue
            if isinstance(step, Copy):
                if not pushed:
                    steps += waits
                if step.transfers not in pushed:
                    pushed.add(step.transfers)
                    steps.append(Multicast(peers, step.transfers))
            else:
                steps.append(step)
        if skip is not None and pushed:
            last = max(i for i, step in enumerate(steps) if isinstance(step, Multicast))
            steps[last] = replace(steps[last], peers=tuple(p for p in peers if p != skip))
        streams.append(Stream(stream.name, tuple(steps)))
    return compiled.with_program(unit, rank, replace(program, streams=tuple(streams)))


@pytest.fixture
def compiled() -> Compiled:
    rows = (Parameter("w", (37, 16)), Parameter("s", (4, 9, 3), 1), Parameter("b", (5,)), Parameter("c", (3,)))
    spec = ModelSpec((Unit("u", rows, Mesh(((0, 1, 2),))),))
    return compile_spec(spec, Topology(1, 3), PlanOptions(bundle_bytes=16, min_run_bytes=0, piece_bytes=512))


def test_multicast_proves_and_runs(compiled: Compiled) -> None:
    for rank in range(3):
        compiled = by_multicast(compiled, "u", rank)
    assert not any(isinstance(s, Copy) for _, _, s in compiled.program("u", "all_gather", 1).steps())
    verify(compiled)
    for seed in range(20):
        Execution(compiled, "u", "all_gather", 0, 2, seed).run()


def test_multicast_that_leaves_a_peer_out(compiled: Compiled) -> None:
    with pytest.raises(PlanError, match=r"parameter \w, rank 2, bytes \[\d+, \d+\): no step writes these bytes"):
        verify(by_multicast(compiled, "u", 1, skip=2))


def test_multicast_without_leave(compiled: Compiled) -> None:
    damaged = by_multicast(compiled, "u", 1)
    for rank, waits in ((1, True), (0, False)):
        program = damaged.program("u", "all_gather", rank)
        lost = Wait(0, Lane.FREE) if waits else Signal(1, Lane.FREE)
        streams = tuple(Stream(s.name, tuple(x for x in s.steps if x != lost)) for s in program.streams)
        damaged = damaged.with_program("u", rank, replace(program, streams=streams))
    with pytest.raises(PlanError, match=r"rank 0, bytes .* without its leave"):
        verify(damaged)
