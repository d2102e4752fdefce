"""Faults that only a run can show, beyond those that the proof is tested with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tide.compiler.compile import COLLECTIVES, Compiled
from tide.compiler.steps import Lane, Program, Signal, Step, Wait

#: What a planter returns: the damaged plan, and words for the damage.
Planted = tuple[Compiled, str]
Planter = Callable[[Compiled, int], Planted]


class Spot(NamedTuple):
    """A step of a plan."""

    unit: str
    collective: str
    rank: int
    stream: int
    index: int

    def program(self, compiled: Compiled) -> Program:
        return compiled.program(self.unit, self.collective, self.rank)

    def steps(self, compiled: Compiled) -> list[Step]:
        """All steps of its stream."""
        return list(self.program(compiled).streams[self.stream].steps)

    def edited(self, compiled: Compiled, steps: list[Step]) -> Compiled:
        """The plan with other steps in its stream."""
        program = self.program(compiled)
        streams = list(program.streams)
        streams[self.stream] = replace(streams[self.stream], steps=tuple(steps))
        return compiled.with_program(self.unit, self.rank, replace(program, streams=tuple(streams)))

    def __str__(self) -> str:
        return f"{self.collective} of {self.unit}, rank {self.rank}, stream {self.stream}, step {self.index}"


def spots(compiled: Compiled, wanted: Callable[[list[Step], int], bool]) -> list[Spot]:
    """Steps that a planter can work on, of all units, collectives and ranks."""
    return [
        Spot(unit.name, collective, rank, number, index)
        for unit in compiled.spec.units
        for collective in COLLECTIVES
        for group in unit.mesh.groups
        for rank in group
        for number, stream in enumerate(compiled.program(unit.name, collective, rank).streams)
        for index in range(len(stream.steps))
        if wanted(list(stream.steps), index)
    ]


def _choose(compiled: Compiled, seed: int, wanted: Callable[[list[Step], int], bool]) -> Spot:
    return random.Random(seed).choice(spots(compiled, wanted))


def moves_data(step: Step) -> bool:
    """Whether it is neither a signal nor a wait."""
    return not isinstance(step, (Signal, Wait))


def guards_data(steps: list[Step], index: int) -> bool:
    """Whether the step is a wait with a data step somewhere behind it."""
    return isinstance(steps[index], Wait) and any(moves_data(step) for step in steps[index:])


def delayed(compiled: Compiled, spot: Spot) -> Compiled:
    """The plan with a wait moved behind the next data step: counts match, the order does not."""
    steps = spot.steps(compiled)
    wait = steps.pop(spot.index)
    behind = next(index for index in range(spot.index, len(steps)) if moves_data(steps[index])) + 1
    steps.insert(behind, wait)
    return spot.edited(compiled, steps)


def late_wait(compiled: Compiled, seed: int) -> Planted:
    # A credit may be implied by an earlier one that was sent at the same time; others never are.
    credits = (Lane.CREDIT, Lane.WIRE_CREDIT, Lane.FREE, Lane.WIRE)

    def wanted(steps: list[Step], index: int) -> bool:
        step = steps[index]
        return guards_data(steps, index) and isinstance(step, Wait) and step.lane not in credits

    spot = _choose(compiled, seed, wanted)
    return delayed(compiled, spot), f"{spot}: moved {spot.steps(compiled)[spot.index]} behind the next data step"


def early_signal(compiled: Compiled, seed: int) -> Planted:
    """A signal goes out before the data step that it tells of."""

    def wanted(steps: list[Step], index: int) -> bool:
        step = steps[index]
        # A ring position that nobody fills again needs no word of its being free.
        told = isinstance(step, Signal) and step.lane != Lane.SENT
        return told and index > 0 and moves_data(steps[index - 1])

    spot = _choose(compiled, seed, wanted)
    steps = spot.steps(compiled)
    steps[spot.index - 1 : spot.index + 1] = steps[spot.index], steps[spot.index - 1]
    return spot.edited(compiled, steps), f"{spot}: {steps[spot.index - 1]} goes out too early"


def missing_credit(compiled: Compiled, seed: int) -> Planted:
    credits = (Lane.CREDIT, Lane.WIRE_CREDIT, Lane.DONE, Lane.FREE)

    def wanted(steps: list[Step], index: int) -> bool:
        step = steps[index]
        return isinstance(step, Signal) and step.lane in credits

    spot = _choose(compiled, seed, wanted)
    steps = spot.steps(compiled)
    step = steps[spot.index]
    assert isinstance(step, Signal)
    steps[spot.index : spot.index + 1] = [replace(step, count=step.count - 1)] if step.count > 1 else []
    return spot.edited(compiled, steps), f"{spot}: one credit less in {step}"


def swapped_slot(compiled: Compiled, seed: int) -> Planted:
    """Two slots that overlap: one begins inside the other."""
    first, second = random.Random(seed).sample(range(len(compiled.arena.slots)), 2)
    slots = list(compiled.arena.slots)
    slots[first] = replace(slots[first], offset=slots[second].offset)
    arena = replace(compiled.arena, slots=tuple(slots))
    return replace(compiled, arena=arena), f"slot {first} lies where slot {second} does"


PLANTERS: tuple[Planter, ...] = (
    late_wait,
    early_signal,
    missing_credit,
    swapped_slot,
)
