"""The simulated ranks behind the interface of every transport, so that sessions run on them too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import torch

from tide.compiler.compile import Compiled
from tide.compiler.steps import Buffer, Program
from tide.errors import PlanError
from tide.transport.base import Binding, Ticket, Transport
from tide.transport.simulated.checks import free_gradients
from tide.transport.simulated.lower import enqueue
from tide.transport.simulated.machine import Event, Machine
from tide.transport.simulated.memory import MARKS, Block, Call


class SimulatedWorld:
    """All ranks of a plan, each with a transport of its own; nothing moves before somebody waits.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    seed : int
        Decides the interleaving.
    family : str
        Seed family.
    pieces : int
        Parts into which a data step is cut, about.

    Examples
    --------
    >>> world = SimulatedWorld(compiled)                                         # doctest: +SKIP
    >>> sessions = [Session(compiled, world.transport(rank)) for rank in range(4)]  # doctest: +SKIP
    >>> tickets = [session.all_gather("layers.0", shards) for session in sessions]  # doctest: +SKIP
    >>> tickets[0].wait()                                                        # doctest: +SKIP
    """

    def __init__(self, compiled: Compiled, seed: int = 0, family: str = "uniform", pieces: int = 3) -> None:
        self.compiled, self.seed, self.family, self.pieces = compiled, seed, family, pieces
        self.machine = Machine(compiled)
        self.random = Random(f"cuts {seed}")
        self._waits = 0
        self._transports: dict[int, SimulatedTransport] = {}

    def transport(self, rank: int) -> SimulatedTransport:
        """The transport of a rank, always the same object."""
        if rank not in self._transports:
            self._transports[rank] = SimulatedTransport(self.compiled, rank, self)
        return self._transports[rank]

    def wait(self, event: Event) -> None:
        """Lets all ranks run until an event has happened.

        Raises
        ------
        PlanError
            If it cannot happen, or any rank's step does what it must not.
        """
        if not event.remaining:
            return
        self._waits += 1
        self.machine.start(self.family, self.seed * 1_000_003 + self._waits)
        try:
            self.machine.drive(event)
        except PlanError as error:
            raise PlanError(f"waiting for the {event.what} (have all ranks of its group begun it?): {error}") from None


class SimulatedTicket(Ticket):
    """A collective of one rank; waiting lets all ranks run."""

    def __init__(self, world: SimulatedWorld, end: Event, released: Event) -> None:
        self.world, self.end, self.released = world, end, released

    def wait(self) -> None:
        self.world.wait(self.end)

    def wait_released(self) -> bool:
        self.world.wait(self.released)
        return False


class SimulatedTransport(Transport):
    """One rank of a :class:`SimulatedWorld`.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    rank : int
        This rank.
    world : SimulatedWorld, optional
        Shared with the other ranks; one of its own by default, which serves groups of one rank only.
    """

    name = "simulated"

    def __init__(self, compiled: Compiled, rank: int, world: SimulatedWorld | None = None) -> None:
        super().__init__(compiled, rank)
        self.world = world or SimulatedWorld(compiled)
        self._turns: dict[tuple[str, int | str], int] = {}
        self._index = {unit.name: number for number, unit in enumerate(compiled.spec.units)}

    def arena_tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        arena = self.world.machine.memory.arenas[self.rank].data
        return torch.from_numpy(arena[offset : offset + numel * dtype.itemsize]).view(dtype)

    def run(self, program: Program, binding: Binding) -> Ticket:
        machine = self.world.machine
        # The same number on every rank of the group, as all issue the unit's collectives in one order.
        key: tuple[str, int | str]
        if program.collective == "all_gather":
            key, first = (program.collective, binding.slot), binding.slot
        else:
            key, first = (program.collective, binding.unit), self._index[binding.unit]
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        call = Call(
            self.compiled.spec.unit(binding.unit),
            program.collective,
            self.rank,
            binding.ranks,
            binding.slot,
            1 + (first * 37 + turn) % MARKS,
            scale=binding.scale,
            divisor=binding.divisor,
        )
        for (buffer, index), tensor in binding.tensors.items():
            given = buffer in (Buffer.SHARD, Buffer.GRAD)
            call.blocks[buffer, index] = Block.of(tensor, call.mark) if given else Block.of(tensor)
        end, released = enqueue(machine, call, program, (), self.world.pieces, self.world.random)
        released.action = partial(free_gradients, call)
        return SimulatedTicket(self.world, end, released)

    def poison(self, unit: str) -> None:
        """Nothing to fill: marks already tell bytes of another collective from the expected ones."""

    def close(self) -> None:
        """Holds nothing that needs to be given back."""

    def describe(self) -> Sequence[tuple[str, str]]:
        return [("simulated", f"all {self.compiled.topology} in one process, no clock")]
