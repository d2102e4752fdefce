"""Casts of a stream in one launch, told piece by piece: which steps share it, and that others wait for what it counts.

Every test of collectives on the fake machine runs them too, in which programs of a launch go on in random order.
"""

from __future__ import annotations

import ctypes

import pytest
from cuda_support import Cluster, Machine, cluster
from test_cuda_logic import SHARING, check_gathered, compiled_for, delay, gather

from tide.compiler.compile import Compiled
from tide.compiler.steps import Buffer, Cast, Lane, Place, Program, Region, Signal, Step, Stream, Wait
from tide.topology import Topology
from tide.transport.cuda import CudaTransport, Settings
from tide.transport.cuda.chains import cast_chains
from tide.transport.cuda.lower import _Lowering
from tide.transport.cuda.operations import MemoryOperation
from tide.transport.cuda.words import COUNTERS, MASK, Counters


def place(*pairs: tuple[str, str]) -> Place:
    src, dst = Region(Buffer.SHARD, 0, 0), Region(Buffer.STORAGE, 0, 0)
    return Place(tuple(Cast(src, dst, 1, 8, *pair) for pair in pairs))


USUAL, COPY = ("float32", "bfloat16"), ("bfloat16", "bfloat16")
A, B = place(USUAL, USUAL), place(COPY)
PLACED = Signal(0, Lane.PLACED)


@pytest.mark.parametrize(
    ("steps", "places", "signals"),
    [
        ([A, PLACED, A, PLACED, Signal(0, Lane.SHARDED), A, PLACED], [(0, 2, 5)], [((1,), (3, 4))]),
        ([A, A, PLACED, A], [(0, 1, 3)], [((), (2,))]),
        ([A, PLACED, B, PLACED, B, A, PLACED], [(2, 4)], [((3,),)]),
        ([A, PLACED, place(USUAL, COPY), A, PLACED, place(), A], [], []),
        ([A, Signal(1, Lane.PLACED), A, Wait(0, Lane.PLACED), A, Signal(0, Lane.DONE), A, A], [(6, 7)], [((),)]),
    ],
    ids=["with signals", "without", "two types", "mixed types", "what ends a chain"],
)
def test_chains(steps: list[Step], places: list[tuple[int, ...]], signals: list[tuple[tuple[int, ...], ...]]) -> None:
    stream = Stream("ag.place", tuple(steps))
    found = list(cast_chains(Program("all_gather", 0, (stream,)), stream))
    assert [chain.places for chain in found] == places
    assert [chain.signals for chain in found] == signals
    assert all(chain.steps == tuple(steps[index] for index in chain.places) for chain in found)


def counters_of(made: Cluster) -> list[Counters]:
    found = []
    for session in made.sessions:
        assert isinstance(session.transport, CudaTransport)
        assert session.transport._device.counters is not None
        found.append(session.transport._device.counters)
    return found


def planned() -> tuple[Compiled, int]:
    """A plan for two ranks, and the number of pieces of its first unit."""
    compiled = compiled_for(Topology(1, 2), SHARING)
    (stream,) = (s for s in compiled.program("block0", "all_gather", 0).streams if s.name == "ag.place")
    return compiled, sum(isinstance(step, Place) for step in stream.steps)


def test_calls_of_a_gather() -> None:
    """One launch, and an event for the last piece only; waits for the first one join those for the peers."""
    compiled, number = planned()
    assert number > 2
    calls: dict[bool, dict[str, int]] = {}
    for fused in (False, True):
        machine = Machine(0)
        with cluster(compiled, machine, settings=Settings(4, 4, "write", fused_casts=fused), poison=False) as made:
            for turn in range(2):
                for session in made.sessions:
                    session.transport.driver.calls.clear()  # type: ignore[attr-defined]
                gather(made, "block0", turn)
                driver = made.sessions[0].transport.driver  # type: ignore[attr-defined]
                calls[fused] = {kind: driver.calls.count(kind) for kind in driver.calls}
                machine.finish()
                check_gathered(made, "block0", turn)
                for session in made.sessions:
                    session.release("block0")
            (lowered,) = made.sessions[0].transport._lowered.values()  # type: ignore[attr-defined]
            launches = sum(len(step) for step in lowered.sets["ag.place"].launches)
            assert launches == (1 if fused else number)
    before, after = calls[False], calls[True]
    assert before["record"] - after["record"] == number - 1
    assert before["wait event"] - after["wait event"] == number - 1
    waits = [call.get("wait", 0) + call.get("batch of waits and writes", 0) for call in (before, after)]
    assert waits[1] - waits[0] == number - 2


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_a_missing_wait_is_noticed(missing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fake machine a piece can be pushed before it is cast; the waits for the counters keep it from that."""
    original, seen = _Lowering.memory_operation, []

    def leave_out(self: _Lowering, stream: int, operation: MemoryOperation) -> None:
        if operation.own:
            number = self.out.counters.index(operation.index)
            seen.append(number)
            if number == missing:
                return
        original(self, stream, operation)

    monkeypatch.setattr(_Lowering, "memory_operation", leave_out)
    compiled, number = planned()
    machine = Machine(4)
    with cluster(compiled, machine) as made:
        delay(made, "ag.place")
        gather(made, "block0", 5)
        machine.finish()
        assert sorted(seen) == sorted([*range(number - 1)] * 2)
        if missing is None:
            check_gathered(made, "block0", 5)
        else:
            with pytest.raises(AssertionError, match="rank"):
                check_gathered(made, "block0", 5)


def test_counters_wrap_around() -> None:
    """Several gathers of one unit under way, while its words pass 2**32."""
    compiled, _ = planned()
    machine = Machine(2)
    with cluster(compiled, machine, settings=Settings(3, 4), poison=False) as made:
        for counters in counters_of(made):
            counters.totals = [MASK - 4] * COUNTERS
            for number in range(COUNTERS):
                ctypes.c_uint32.from_address(counters.address(number)).value = MASK - 4
        for turn in range(8):
            gather(made, SHARING[turn // 2 % 2], turn, between=10 * turn)
            if turn % 4 == 3:
                machine.finish()
                check_gathered(made, SHARING[turn // 2 % 2], turn)
        assert all(max(counters.totals) > MASK for counters in counters_of(made))


def test_words_go_from_one_program_to_the_next() -> None:
    """Programs that are given up return their words once they have ended; without words left, pieces have events."""
    compiled, number = planned()
    room = 2 * (number - 1)
    machine = Machine(6)
    with cluster(compiled, machine, poison=False) as made:
        for session, counters in zip(made.sessions, counters_of(made), strict=True):
            counters._free = counters._free[: room + 1]
            session.transport.most_prepared = 1
        few = []
        for turn in range(12):
            unit = SHARING[turn % 3]
            gather(made, unit, turn, between=30 * (turn % 2))
            few.append(len(counters_of(made)[0]._free))
            if turn % 4 == 3:
                machine.finish()
                check_gathered(made, unit, turn)
            for session in made.sessions:
                session.release(unit)
        machine.finish()
        after = counters_of(made)
    assert min(few) == 1, "they were never used up"
    assert max(few[1:]) > 1, "none was ever given back"
    assert all(sorted(counters._free) == list(range(room + 1)) for counters in after)
