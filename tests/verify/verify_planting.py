"""What faults are made of: the registry, and ways to find and change steps of a plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tide.compiler.compile import Compiled
from tide.compiler.steps import (
    Copy,
    Put,
    Step,
    Stream,
    Transfer,
)


class NoPlaceError(Exception):
    """The plan has no step that this fault could damage."""


class Spot(NamedTuple):
    """A step in a plan."""

    unit: str
    rank: int
    stream: int
    index: int
    step: Step


@dataclass(frozen=True)
class Fault:
    """A way to damage a plan.

    Attributes
    ----------
    name : str
        Short name.
    collective : str
        Collective whose program it damages.
    shows : str
        Where a run shows it: ``"always"`` in wrong bytes, a deadlock or a leftover signal; ``"race"`` only in
        some interleavings; ``"reuse"`` only in some interleavings of two collectives one after the other;
        ``"never"`` in what the programs compute.
    plant : callable
        ``(compiled, rng) -> (damaged, description)``.
    """

    name: str
    collective: str
    shows: str
    plant: Callable[[Compiled, random.Random], tuple[Compiled, str]]

    def __call__(self, compiled: Compiled, seed: int) -> tuple[Compiled, str]:
        """The damaged plan, and what was done to it.

        Raises
        ------
        NoPlaceError
            If the plan has nothing to damage in this way.
        """
        damaged, what = self.plant(compiled, random.Random(f"{self.name}/{seed}"))
        return damaged, f"{self.name}: {what}"


FAULTS: list[Fault] = []

Plant = Callable[[Compiled, random.Random, str], tuple[Compiled, str]]


def fault(name: str, *collectives: str, shows: str = "always") -> Callable[[Plant], Plant]:
    """Registers a planter for each of the collectives."""

    def register(plant: Plant) -> Plant:
        for collective in collectives:
            short = {"all_gather": "ag", "reduce_scatter": "rs"}[collective]
            FAULTS.append(Fault(f"{short}-{name}", collective, shows, lambda c, rng, of=collective: plant(c, rng, of)))
        return plant

    return register


AG, RS = "all_gather", "reduce_scatter"


# Finding and changing steps ----------------------------------------------------------------------


def spots(compiled: Compiled, collective: str) -> Iterator[Spot]:
    """All steps of all ranks' programs."""
    for unit in compiled.spec.units:
        if collective == RS and not any(p.trainable for p in unit.parameters):
            continue
        for group in unit.mesh.groups:
            for rank in group:
                program = compiled.program(unit.name, collective, rank)
                for number, stream in enumerate(program.streams):
                    for index, step in enumerate(stream.steps):
                        yield Spot(unit.name, rank, number, index, step)


def pick(compiled: Compiled, rng: random.Random, collective: str, fits: Callable[[Spot], bool]) -> Spot:
    """A random step that fits."""
    found = [spot for spot in spots(compiled, collective) if fits(spot)]
    if not found:
        raise NoPlaceError
    return rng.choice(found)


def edit(compiled: Compiled, spot: Spot, collective: str, change: Callable[[list[Step]], Sequence[Step]]) -> Compiled:
    """The plan with the stream of ``spot`` changed."""
    program = compiled.program(spot.unit, collective, spot.rank)
    streams = list(program.streams)
    stream = streams[spot.stream]
    streams[spot.stream] = Stream(stream.name, tuple(change(list(stream.steps))))
    changed = replace(program, streams=tuple(streams))
    return compiled.with_program(spot.unit, spot.rank, changed)


def substitute(compiled: Compiled, spot: Spot, collective: str, *steps: Step) -> Compiled:
    """The plan with the step of ``spot`` replaced by ``steps``."""
    return edit(compiled, spot, collective, lambda old: [*old[: spot.index], *steps, *old[spot.index + 1 :]])


def where(compiled: Compiled, spot: Spot, collective: str) -> str:
    """Names a step."""
    stream = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].name
    return f"unit {spot.unit!r} rank {spot.rank} {stream}[{spot.index}] {type(spot.step).__name__}"


def world_rank(compiled: Compiled, spot: Spot, position: int) -> int:
    """World rank of a position of the spot's shard group."""
    return compiled.group(spot.unit, spot.rank)[0][position]


def copies_before(compiled: Compiled, spot: Spot, collective: str, peer: int) -> list[int]:
    """Places of the copies from or to ``peer`` in the spot's stream, before the spot."""
    steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
    return [i for i, step in enumerate(steps[: spot.index]) if isinstance(step, Copy) and step.peer == peer]


def moves(step: Step) -> tuple[Transfer, ...]:
    return step.transfers if isinstance(step, Copy | Put) else ()
