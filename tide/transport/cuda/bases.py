"""Symbolic buffers as numbers, and the addresses behind them.

All that a program's steps need to know of addresses is a list of *bases*: one for each buffer of each rank that
the program names. Offsets from them never change, so argument arrays of copies and records of kernels are made
once, as (base, offset) pairs, and completed by one vector addition when a base moves. Arena bases never do;
those of gradients and outputs may, from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tide.compiler.place import ArenaLayout
from tide.compiler.steps import ARENA, Buffer, Region
from tide.errors import TransportError

#: In place of a rank: the multicast address of all arenas of this rank's node.
EVERYWHERE = -1

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Located:
    """A region as the number of its base and bytes from there."""

    base: int
    offset: int
    pitch: int


class Bases:
    """Numbers for buffers, in order of first mention.

    Parameters
    ----------
    layout : ArenaLayout
        Where the arena's buffers lie.
    slot : int
        Slot of the unit.
    arenas : mapping of int to int
        Address of every reachable rank's arena.
    rank : int
        This rank.
    in_slot : bool
        Whether the areas of the reduce-scatter are the slot.
    """

    def __init__(
        self, layout: ArenaLayout, slot: int, arenas: Mapping[int, int], rank: int, in_slot: bool = False
    ) -> None:
        self.layout, self.slot, self.arenas, self.rank = layout, slot, arenas, rank
        self.in_slot = in_slot
        self._numbers: dict[tuple[Buffer, int], int] = {}
        #: Tensors that a call has to bring, with the number of their base.
        self.tensors: dict[tuple[Buffer, int], int] = {}
        self._addresses: list[int] = []

    def locate(self, region: Region, rank: int | None = None) -> Located:
        """A region of this rank, or of ``rank``, or of all ranks of the node at once (:data:`EVERYWHERE`).

        Raises
        ------
        TransportError
            If a peer's region is not in the arena, or the peer's arena is not mapped here.
        """
        rank = self.rank if rank is None else rank
        if region.buffer in ARENA:
            key = (region.buffer, rank)
            if key not in self._numbers:
                if rank not in self.arenas:
                    raise TransportError(f"rank {rank}'s arena is not mapped on rank {self.rank}")
                self._add(key, self.arenas[rank] + self.start(region.buffer))
            return Located(self._numbers[key], region.offset, region.pitch)
        if rank != self.rank:
            raise TransportError(f"{region.buffer.value}[{region.index}] of rank {rank} is not in its arena")
        key = (region.buffer, -1 - region.index)
        if key not in self._numbers:
            self.tensors[region.buffer, region.index] = self._add(key, 0)
        return Located(self._numbers[key], region.offset, region.pitch)

    def _add(self, key: tuple[Buffer, int], address: int) -> int:
        self._numbers[key] = len(self._addresses)
        self._addresses.append(address)
        return self._numbers[key]

    def start(self, buffer: Buffer) -> int:
        """Arena offset at which a buffer begins."""
        areas = self.layout.receive
        if buffer is Buffer.SPREAD:  # never in a slot
            return areas.spread
        if buffer is Buffer.STORAGE or self.in_slot:
            return self.layout.slots[self.slot].offset
        return {
            Buffer.RECEIVE: areas.receive,
            Buffer.PARTIAL: areas.partial,
            Buffer.WIRE: areas.wire,
            Buffer.STAGED: areas.staged,
        }[buffer]

    def addresses(self) -> Int64s:
        """Address of every base; 0 for tensors, which a call fills in."""
        return np.array(self._addresses, np.int64)
