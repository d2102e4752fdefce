"""Many interleavings of one sequence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tide.compiler.compile import Compiled
from tide.transport.simulated.simulation import Operation, Simulation


@dataclass(frozen=True, slots=True)
class Exploration:
    """What :func:`explore` did.

    Attributes
    ----------
    family : str
        Seed family, or families with commas between.
    interleavings : int
        Interleavings executed, all without a difference.
    operations : int
        Micro-operations of all of them.
    seconds : float
        Time they took, without building.
    """

    family: str
    interleavings: int
    operations: int
    seconds: float

    @property
    def rate(self) -> float:
        """Interleavings per second."""
        return self.interleavings / max(self.seconds, 1e-9)


def explore(
    compiled: Compiled,
    sequence: Iterable[Operation],
    seeds: Iterable[int],
    family: str | Sequence[str] = "uniform",
    pieces: int = 3,
    payload: str = "normal",
) -> Exploration:
    """Executes one sequence under many interleavings; built once, so that each costs little.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    sequence : iterable of Operation
        As for :meth:`Simulation.run`.
    seeds : iterable of int
        One interleaving each.
    family : str or sequence of str
        Seed family; of several, each with all of the seeds.
    pieces, payload
        As for :class:`Simulation`.

    Raises
    ------
    PlanError
        At the first interleaving that goes wrong; the message ends with its family and seed.
    """
    families = (family,) if isinstance(family, str) else tuple(family)
    simulation = Simulation(compiled, pieces=pieces, payload=payload)
    simulation.build(sequence)
    machine, count, operations = simulation.machine, 0, 0
    began = time.perf_counter()
    for each, seed in itertools.product(families, seeds):
        simulation.replay(each, seed)
        count += 1
        operations += machine.clock
    return Exploration(", ".join(families), count, operations, time.perf_counter() - began)
