"""The bytes of every rank, each with a mark that tells which collective wrote it.

A mark is one byte beside each byte of memory: 0 for "nobody has written this, or it was consumed",
anything else for the collective that wrote it. Every read names the mark that it expects, so that a
read that comes too early (poison), too late (overwritten) or from the wrong place is found where it
happens, not only by the wrong sum that it leads to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.place import Bundle
from tide.compiler.shard import shard_shape
from tide.compiler.steps import ARENA, Buffer, Region
from tide.errors import PlanError
from tide.torch_types import to_torch

Bytes = npt.NDArray[np.uint8]

#: What memory holds before it is written: NaN in every floating-point type.
POISON = 0xFF
#: Mark of bytes that hold nothing to read.
UNWRITTEN = 0
#: Marks in use; they repeat after so many collectives on one slot.
MARKS = 255

#: Areas whose bytes are written once and read once, again and again.
RINGS = frozenset({Buffer.RECEIVE, Buffer.PARTIAL, Buffer.WIRE, Buffer.SPREAD, Buffer.STAGED})


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor on the CPU, shared with it."""
    # Strides of axes with one element or none are arbitrary, and view() insists on them.
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


class Block:
    """A piece of one rank's memory with its marks.

    Parameters
    ----------
    data : ndarray of uint8, shape (n,)
        The bytes; shared with whoever made them.
    mark : int
        Mark of all of them at the start.
    """

    __slots__ = ("_typed", "data", "mark", "marks")

    def __init__(self, data: Bytes, mark: int = UNWRITTEN) -> None:
        self.data, self.mark = data, mark
        self.marks: Bytes = np.full(data.size, mark, dtype=np.uint8)
        self._typed: dict[str, torch.Tensor] = {}

    @classmethod
    def poisoned(cls, size: int) -> Block:
        """``size`` bytes that nobody has written."""
        return cls(np.full(size, POISON, dtype=np.uint8))

    @classmethod
    def of(cls, tensor: torch.Tensor, mark: int = UNWRITTEN) -> Block:
        """The bytes of a contiguous tensor on the CPU, shared with it."""
        return cls(bytes_of(tensor), mark)

    def reset(self) -> None:
        """Back to the marks of the start; what was unwritten is poisoned."""
        self.marks.fill(self.mark)
        if self.mark == UNWRITTEN:
            self.data.fill(POISON)

    def views(self, offset: int, pitch: int, runs: int, length: int) -> tuple[Bytes, Bytes]:
        """Bytes and marks of ``runs`` runs: one axis for a single run, two for several."""
        if runs == 1:
            stop = offset + length
            return self.data[offset:stop], self.marks[offset:stop]
        shape, strides = (runs, length), (pitch, 1)
        return (
            np.ndarray(shape, np.uint8, self.data, offset, strides),
            np.ndarray(shape, np.uint8, self.marks, offset, strides),
        )

    def tensor(self, dtype: str, offset: int, pitch: int, runs: int, count: int) -> torch.Tensor:
        """The same runs as elements; offset and pitch are bytes, and multiples of the element's."""
        size = itemsize(dtype)
        flat = self._typed.get(dtype)
        if flat is None:
            flat = torch.from_numpy(self.data[: self.data.size // size * size]).view(to_torch(dtype))
            self._typed[dtype] = flat
        if runs == 1:
            return flat[offset // size : offset // size + count]
        return torch.as_strided(flat, (runs, count), (pitch // size, 1), offset // size)


class Access(NamedTuple):
    """Runs that a step reads or writes in one buffer of one rank."""

    rank: int
    region: Region
    runs: int
    length: int


@dataclass(eq=False, slots=True)
class Call:
    """One collective of one unit on one rank: what the symbolic names of its program mean.

    Attributes
    ----------
    unit : Unit
        Its parameters.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    rank : int
        World rank that runs it.
    group : tuple of int
        World rank of each position.
    slot : int
        Slot of the unit.
    mark : int
        What it leaves on the bytes that it writes; the same on every rank of the group.
    in_slot : bool
        Whether the areas of a reduce-scatter are the unit's slot.
    blocks : dict of (Buffer, int) to Block
        Memory of this rank outside of the arena, by parameter.
    scale, divisor : float
        Applied, in that order, to the float32 sums of steps marked final.
    """

    unit: Unit
    collective: str
    rank: int
    group: tuple[int, ...]
    slot: int
    mark: int
    blocks: dict[tuple[Buffer, int], Block] = field(default_factory=dict)
    scale: float = 1.0
    divisor: float = 1.0
    in_slot: bool = False


class Memory:
    """Arenas of all ranks.

    Parameters
    ----------
    compiled : Compiled
        Tells where slots and areas lie.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        # Signals are counters of the machine here, so their words need no memory.
        self.arenas = [Block.poisoned(compiled.arena.signals) for _ in range(compiled.topology.world_size)]
        self._pads: dict[str, npt.NDArray[np.bool_]] = {}
        self.reset()

    def reset(self) -> None:
        """Poisons every arena, but for the area that holds zeros until something is put there."""
        areas = self.compiled.arena.receive
        for arena in self.arenas:
            arena.reset()
            arena.data[areas.spread : areas.spread + areas.spread_size] = 0

    def _area(self, call: Call, buffer: Buffer) -> tuple[int, int]:
        """Start in the arena and size of an area, as the program of ``call`` sees it."""
        areas = self.compiled.arena.receive
        if buffer is Buffer.SPREAD:  # never in a slot: what nobody writes there has to stay zero
            return areas.spread, areas.spread_size
        if buffer is Buffer.STORAGE or call.in_slot:
            return self.compiled.arena.slots[call.slot].offset, self.compiled.layouts[call.unit.name].size
        if buffer is Buffer.STAGED:
            return areas.staged, areas.staged_size
        if buffer is Buffer.RECEIVE:
            return areas.receive, areas.receive_size
        return (areas.partial if buffer is Buffer.PARTIAL else areas.wire), areas.wire_size

    def locate(self, call: Call, access: Access) -> tuple[Block, int]:
        """Block that holds an access, and where it starts there.

        Raises
        ------
        PlanError
            If it leaves the buffer, or the buffer is not of this rank and not in the arena.
        """
        rank, region, runs, length = access
        if region.buffer in ARENA:
            base, size = self._area(call, region.buffer)
            block = self.arenas[rank]
        else:
            if rank != call.rank:
                raise PlanError(f"{self.name(call, access)} is not in the arena, so no peer can reach it")
            found = call.blocks.get((region.buffer, region.index))
            if found is None:
                raise PlanError(f"there is no buffer {region.buffer.value}[{region.index}] on rank {rank}")
            block, base, size = found, 0, found.data.size
        last = region.offset + (runs - 1) * region.pitch + length
        if runs < 1 or length < 1 or region.offset < 0 or region.pitch < 0 or last > size:
            raise PlanError(f"{self.name(call, access)} on rank {rank}: out of bounds, the buffer has {size} bytes")
        return block, base + region.offset

    def vacate(self, call: Call) -> None:
        """Forgets what the slot of a call held on its rank: nobody reads it any more."""
        start, size = self._area(call, Buffer.STORAGE)
        arena = self.arenas[call.rank]
        arena.marks[start : start + size] = UNWRITTEN
        arena.data[start : start + size] = POISON

    def check_read(self, call: Call) -> None:
        """Raises if a reduce-scatter that has ended left something unread in the slot of its rank.

        In a ring, the next write there would tell.
        """
        if not call.in_slot:
            return
        start, size = self._area(call, Buffer.STORAGE)
        unread = np.flatnonzero(self.arenas[call.rank].marks[start : start + size] != UNWRITTEN)
        if len(unread):
            raise PlanError(
                f"unit {call.unit.name!r}, {call.collective}, rank {call.rank}: byte {unread[0]} of the slot was "
                "written, but never read"
            )

    def padding(self, call: Call, access: Access) -> npt.NDArray[np.bool_] | None:
        """Which bytes of an access to storage are pads within the bundle, whose content is of no matter."""
        bundle = self.compiled.layouts[call.unit.name].bundle
        region = access.region
        if bundle is None or region.buffer is not Buffer.STORAGE:
            return None
        if region.offset + (access.runs - 1) * region.pitch + access.length <= bundle.offset:
            return None
        pads = self._pads.get(call.unit.name)
        if pads is None:
            pads = self._pads[call.unit.name] = self._find_pads(call.unit, bundle)
        starts = region.offset + np.arange(access.runs) * region.pitch
        found = pads[starts[:, None] + np.arange(access.length)]
        return (found[0] if access.runs == 1 else found) if found.any() else None

    def _find_pads(self, unit: Unit, bundle: Bundle) -> npt.NDArray[np.bool_]:
        """Bytes of the unit's storage that lie in the bundle, in no member's shard."""
        pads = np.ones(self.compiled.layouts[unit.name].size, dtype=np.bool_)
        pads[: bundle.offset] = False
        owners = unit.mesh.size
        for row, index in enumerate(bundle.members):
            parameter = unit.parameters[index]
            for owner in range(owners):
                start = bundle.offset + int(bundle.base[owner] + bundle.at[row, owner])
                nbytes = math.prod(shard_shape(parameter, owners, owner)) * itemsize(parameter.dtype)
                pads[start : start + nbytes] = False
        return pads

    def name(self, call: Call, access: Access, run: int = 0, first: int = 0, last: int | None = None) -> str:
        """Words for bytes ``first`` to ``last`` of a run: ``bytes 0..63 of 'w' in storage``."""
        region = access.region
        start = region.offset + run * region.pitch + first
        stop = region.offset + run * region.pitch + (access.length - 1 if last is None else last)
        what = region.buffer.value
        if region.buffer not in ARENA:
            if 0 <= region.index < len(call.unit.parameters):
                what = f"{call.unit.parameters[region.index].name!r} ({what})"
        elif region.buffer is Buffer.STORAGE:
            layout = self.compiled.layouts[call.unit.name]
            for index, offset in enumerate(layout.offsets):
                if offset <= start < offset + layout.nbytes[index]:
                    what = f"{call.unit.parameters[index].name!r} (storage)"
                    start, stop = start - offset, stop - offset
                    break
            else:
                bundle = layout.bundle
                in_bundle = bundle is not None and bundle.offset <= start
                what = "the bundle (storage)" if in_bundle else "storage between two parameters"
        else:
            what = f"the {what} area"
        return f"bytes {start}..{stop} of {what}"
