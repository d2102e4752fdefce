"""What every transport offers: an arena, and a way to run programs on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tide.compiler.compile import SUBSETS, Compiled
from tide.compiler.steps import Buffer, Program
from tide.torch_types import to_torch


@dataclass(frozen=True, slots=True)
class Binding:
    """What a program's symbolic names mean for one call.

    Attributes
    ----------
    unit : str
        Unit name, for messages and for the slot.
    slot : int
        Slot that holds the unit's storage.
    ranks : tuple of int
        World rank of each position.
    tensors : mapping of (Buffer, int) to Tensor
        Dense tensors behind ``SHARD``, ``GRAD``, ``OUT`` and ``RUNNING`` of each parameter index.
    scale, divisor : float
        Applied, in that order, to the float32 sums of steps marked final.
    """

    unit: str
    slot: int
    ranks: tuple[int, ...]
    tensors: Mapping[tuple[Buffer, int], torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    divisor: float = 1.0


class Ticket:
    """A collective under way. On transports that have finished when ``run`` returns, waits do nothing."""

    def wait(self) -> None:
        """Orders what the caller's current stream does next after the whole collective."""

    def wait_released(self) -> bool:
        """Orders what the caller's current stream does next after the last read of the gradients.

        Returns
        -------
        bool
            Whether the whole collective ends with it, so that this was a :meth:`wait`, too.
        """
        return True


class Transport(ABC):
    """Carries out the programs of one rank.

    Parameters
    ----------
    compiled : Compiled
        The plan; all ranks must hold the same one.
    rank : int
        This rank of the plan.
    names : sequence of int, optional
        World rank of each of the plan's ranks, for messages; the same numbers by default.
    """

    #: Short name for reports.
    name: str = "?"

    def __init__(self, compiled: Compiled, rank: int, names: Sequence[int] | None = None) -> None:
        self.compiled = compiled
        self.rank = rank
        self.names: Sequence[int] = range(compiled.topology.world_size) if names is None else names
        self._storages: dict[tuple[str, int], torch.Tensor] = {}
        #: Programs to keep prepared: some of each unit for all of its parameters, and those of subsets.
        self.most_prepared = 4 * len(compiled.spec.units) + SUBSETS

    @abstractmethod
    def arena_tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D tensor over this rank's arena, with a storage object of exactly its own size."""

    @abstractmethod
    def run(self, program: Program, binding: Binding) -> Ticket:
        """Carries out ``program``; collective over the unit's shard group.

        Raises
        ------
        PeerError
            If a peer does not answer within the deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives all shared resources back. Idempotent."""

    def storage(self, unit: str, index: int) -> torch.Tensor:
        """Flat storage of a parameter: always the same tensor object, valid while the unit is whole."""
        key = (unit, index)
        if key not in self._storages:
            self._storages[key] = self.alias(unit, index)
        return self._storages[key]

    def alias(self, unit: str, index: int) -> torch.Tensor:
        """A new tensor over the memory of :meth:`storage`, with a storage object and a version counter of its own.

        For an owner that re-points or takes apart what it is given, as FSDP2's parameters do.
        """
        layout, parameter = self.compiled.layouts[unit], self.compiled.spec.unit(unit).parameters[index]
        dtype = to_torch(parameter.dtype)
        offset = self.compiled.arena.slots[self.compiled.arena.slot_of[unit]].offset + layout.offsets[index]
        return self.arena_tensor(offset, layout.nbytes[index] // dtype.itemsize, dtype)

    def vacated(self, unit: str) -> None:  # noqa: B027 - most transports have nothing to note
        """Called when the unit's slot has been given up.

        What the caller's current stream was asked to do until now may still read the slot; whatever is asked for
        later may not. A transport that works on streams of its own must not write to the slot before that.
        """

    def poison(self, unit: str) -> None:
        """Fills a vacated unit's storage with NaN (bytes of ones for other types), once no peer reads it."""
        raise NotImplementedError(f"{self.name}: poisoning of vacated slots")

    def describe(self) -> Sequence[tuple[str, str]]:
        """What was probed and chosen, as ``(capability, answer with reason)``."""
        return ()

    @property
    def failure(self) -> str | None:
        """What has gone wrong for good: nothing can be run any more. None while all is well."""
        return None

    def fail(self, message: str) -> None:  # noqa: B027 - where it cannot be known, the next collective finds it out
        """Called when the ranks have parted: notes why, as :attr:`failure`, and tells the peers if it can.

        No collective can be run after that. The first reason stays.
        """

    def updating(self) -> None:  # noqa: B027 - where collectives are waited for on the host, none is under way
        """Called when the caller is about to issue what uses the results of all collectives so far for good.

        A transport whose collectives may fail after that says so in :attr:`failure`.
        """

    @property
    def opened(self) -> str:
        """The transport's name and what its arena is, for reports."""
        return f"transport {self.name}, arena: {dict(self.describe()).get('arena', 'of its own kind')}"
