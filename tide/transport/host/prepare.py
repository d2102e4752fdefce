"""Programs bound to addresses: done once for a program and a unit, reused by every later call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.steps import (
    ARENA,
    INITIAL_CREDIT,
    Accumulate,
    Buffer,
    Cast,
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Sum,
    SwitchReduce,
    Transfer,
    Wait,
)
from tide.errors import InputError, TransportError
from tide.torch_types import to_torch
from tide.transport.base import Binding
from tide.transport.host.memory import Bytes, Segment
from tide.transport.host.operations import (
    Add,
    AddPeers,
    Await,
    ByteView,
    Call,
    Convert,
    Move,
    Notify,
    Operation,
    TypedView,
)
from tide.transport.host.signals import Doorbells


@dataclass(slots=True)
class Operand:
    """A tensor that every call brings."""

    buffer: Buffer
    index: int
    dtype: str
    name: str
    nbytes: int = 0  #: at least so many are touched
    moved: bool = False  #: its bytes are moved, not only cast or summed


@dataclass(slots=True)
class Rank:
    """What this process has to run programs with.

    Attributes
    ----------
    compiled : Compiled
        The plan.
    rank : int
        This rank of the plan.
    segments : list of Segment
        Shared memory of every rank.
    words : list of memoryview
        Signal words of every rank.
    consumed : list of int
        For each own signal word, how much of it waits have used up.
    doorbells : Doorbells
        To wake peers.
    fence : callable
        Full fence.
    names : sequence of int
        World rank of each of the plan's, for messages.
    """

    compiled: Compiled
    rank: int
    segments: list[Segment]
    words: list[memoryview]
    consumed: list[int]
    doorbells: Doorbells
    fence: Callable[[], None]
    names: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program bound to addresses.

    Attributes
    ----------
    program : Program
        What was bound; kept, as programs are told apart by their identity.
    streams : tuple of (str, tuple of Operation, tuple of int)
        Name, operations, and for each the index of its step.
    operands : tuple of Operand
        Tensors that a call must bring.
    """

    program: Program
    streams: tuple[tuple[str, tuple[Operation, ...], tuple[int, ...]], ...]
    operands: tuple[Operand, ...] = field(default=())

    def bind(self, binding: Binding) -> Call:
        """Checks a call's tensors and makes them flat.

        Raises
        ------
        InputError
            If one is missing, on another device, of another type, too small or not contiguous.
        """
        call = Call([], [], binding.scale, binding.divisor)
        for operand in self.operands:
            tensor = binding.tensors.get((operand.buffer, operand.index))
            what = f"{operand.name}: its {operand.buffer.value} tensor"
            if tensor is None:
                raise InputError(f"{what} is missing from the call")
            if tensor.device.type != "cpu":
                raise InputError(f"{what} is on {tensor.device}; the host transport moves CPU tensors only")
            if operand.dtype and tensor.dtype != to_torch(operand.dtype):
                raise InputError(f"{what} must be {operand.dtype}, got {tensor.dtype}")
            if not tensor.is_contiguous():
                raise InputError(f"{what} is not contiguous; call .contiguous() on it")
            if tensor.numel() * tensor.itemsize < operand.nbytes:
                raise InputError(
                    f"{what} holds {tensor.numel() * tensor.itemsize} bytes, but {operand.nbytes} are needed"
                )
            flat = tensor.detach().view(-1)
            call.tensors.append(flat)
            call.bytes.append(flat.view(torch.uint8).numpy() if operand.moved else _NO_BYTES)
        return call


_NO_BYTES: Bytes = np.empty(0, np.uint8)


class Preparer:
    """Binds programs of one rank.

    Parameters
    ----------
    rank : Rank
        Memory, words and bells.
    program : Program
        To bind.
    binding : Binding
        Unit, slot and ranks; its tensors are not looked at.
    """

    def __init__(self, rank: Rank, program: Program, binding: Binding) -> None:
        self.rank, self.program, self.binding = rank, program, binding
        self.operands: dict[tuple[Buffer, int], int] = {}
        self.listed: list[Operand] = []
        self.parameters = rank.compiled.spec.unit(binding.unit).parameters
        self.signals = rank.compiled.arena.words.units[binding.unit]
        self.team = rank.compiled.context(binding.unit, rank.rank).team
        # A program may have been made for gradients of another type than the plan's; its sums know.
        self.grad_dtypes = {
            src.index: row.src_dtype
            for _, _, step in program.steps()
            if isinstance(step, Accumulate)
            for row in step.sums
            for src in row.srcs
            if src.buffer is Buffer.GRAD
        }
        arena = rank.compiled.arena
        slot, areas = arena.slots[binding.slot], arena.receive
        in_slot = (slot.offset, slot.size)
        self.areas = {
            Buffer.STORAGE: in_slot,
            Buffer.RECEIVE: in_slot if program.in_slot else (areas.receive, areas.receive_size),
            Buffer.PARTIAL: in_slot if program.in_slot else (areas.partial, areas.wire_size),
            Buffer.WIRE: in_slot if program.in_slot else (areas.wire, areas.wire_size),
            Buffer.STAGED: in_slot if program.in_slot else (areas.staged, areas.staged_size),
            Buffer.SPREAD: (areas.spread, areas.spread_size),
        }

    def prepare(self) -> Prepared:
        """Binds all streams."""
        streams = []
        for stream in self.program.streams:
            operations: list[Operation] = []
            steps: list[int] = []
            for index, step in enumerate(stream.steps):
                made = self.operations(step)
                operations += made
                steps += [index] * len(made)
            streams.append((stream.name, tuple(operations), tuple(steps)))
        return Prepared(self.program, tuple(streams), tuple(self.listed))

    def operations(self, step: Step) -> list[Operation]:
        """Operations that carry out one step."""
        me, ranks = self.rank.rank, self.binding.ranks
        if isinstance(step, Wait):
            return [self.wait(step)]
        if isinstance(step, Signal):
            return [self.signal(step.peer, step.lane, step.count)]
        if isinstance(step, Copy):
            peer = ranks[step.peer]
            return self.move(step.transfers, *((peer, me) if step.pull else (me, peer)))
        if isinstance(step, Put):
            return [*self.move(step.transfers, me, ranks[step.peer]), self.signal(step.peer, step.lane, 1)]
        if isinstance(step, Multicast):
            return [op for peer in step.peers for op in self.move(step.transfers, me, ranks[peer])]
        if isinstance(step, Place):
            return self.place(step.casts)
        if isinstance(step, Accumulate):
            return [Add([self.sum(row) for row in step.sums if row.runs * row.count], step.final)]
        if isinstance(step, SwitchReduce):
            return [AddPeers([self.sum_of_peers(row, step.peers) for row in step.sums], step.final)]
        raise TransportError(f"the host transport has no step {type(step).__name__}")

    def wait(self, step: Wait) -> Await:
        """The wait's own word, which only its source writes."""
        rank, source = self.rank, self.binding.ranks[step.peer]
        word = self.word(step.lane, self.program.position, step.peer)
        credit = INITIAL_CREDIT.get(step.lane, 0)
        own, name = rank.words[rank.rank], rank.names[source]
        return Await(own, rank.consumed, word, step.count, credit, source, step.lane, rank.fence, name)

    def signal(self, position: int, lane: Lane, count: int) -> Notify:
        """The word that ``position`` keeps for this rank."""
        rank, peer = self.rank, self.binding.ranks[position]
        word = self.word(lane, position, self.program.position)
        return Notify(rank.words[peer], word, count, peer, rank.doorbells, rank.fence)

    def word(self, lane: Lane, receiver: int, source: int) -> int:
        """Index of the word in which a position counts signals of another."""
        return self.signals.word(self.team, lane, receiver, source, self.program.in_slot)

    def move(self, transfers: Sequence[Transfer], src_rank: int, dst_rank: int) -> list[Operation]:
        """Copies between two ranks, or within one."""
        pairs = []
        for src, dst, runs, length in transfers:
            if runs * length:
                flat = runs == 1 or src.pitch == dst.pitch == length
                pairs.append((self.raw(dst, runs, length, flat, dst_rank), self.raw(src, runs, length, flat, src_rank)))
        return self.moves(pairs)

    @staticmethod
    def moves(pairs: Sequence[tuple[ByteView, ByteView]]) -> list[Operation]:
        """One operation for all pairs, if there are any."""
        ready = [(d.fixed, s.fixed) for d, s in pairs if d.fixed is not None and s.fixed is not None]
        bound = [(d, s) for d, s in pairs if d.fixed is None or s.fixed is None]
        return [Move(ready, bound)] if pairs else []

    def place(self, casts: Sequence[Cast]) -> list[Operation]:
        """Casts; those that change no type are copies of bytes, which keep every bit of a NaN."""
        me = self.rank.rank
        moved: list[tuple[ByteView, ByteView]] = []
        converted: list[tuple[TypedView, TypedView]] = []
        for src, dst, runs, count, src_dtype, dst_dtype in casts:
            if runs * count == 0:
                continue
            if src_dtype == dst_dtype:
                length = count * itemsize(src_dtype)
                flat = runs == 1 or src.pitch == dst.pitch == length
                moved.append((self.raw(dst, runs, length, flat, me), self.raw(src, runs, length, flat, me)))
            else:
                converted.append(
                    (self.elements(dst, dst_dtype, runs, count, me), self.elements(src, src_dtype, runs, count, me))
                )
        return self.moves(moved) + ([Convert(converted)] if converted else [])

    def sum(self, row: Sum) -> tuple[list[TypedView], TypedView, TypedView | None]:
        """Views of one sum."""
        me, runs, count = self.rank.rank, row.runs, row.count
        srcs = [self.elements(src, row.src_dtype, runs, count, me) for src in row.srcs]
        base = None if row.base is None else self.elements(row.base, "float32", runs, count, me)
        return srcs, self.elements(row.dst, row.dst_dtype, runs, count, me), base

    def sum_of_peers(self, row: Sum, peers: Sequence[int]) -> tuple[list[torch.Tensor], TypedView, TypedView | None]:
        """The source of a sum in the arena of every peer, and the views of its result and base."""
        (src,) = row.srcs
        found = [self.elements(src, row.src_dtype, row.runs, row.count, self.binding.ranks[peer]) for peer in peers]
        srcs = [view.fixed for view in found if view.fixed is not None]
        if len(srcs) < len(found):
            raise TransportError(f"the switch sums arenas only, not {src.buffer.value}")
        _, dst, base = self.sum(row)
        return srcs, dst, base

    def raw(self, region: Region, runs: int, length: int, flat: bool, rank: int) -> ByteView:
        """Bytes of a region."""
        nbytes = (runs - 1) * region.pitch + length
        start, operand = self.locate(region, nbytes, moved=True)
        view = ByteView(None, operand, start, region.pitch, runs, length, flat)
        if region.buffer in ARENA:
            view.fixed = view.of(self.rank.segments[rank].array)
        return view

    def elements(self, region: Region, dtype: str, runs: int, count: int, rank: int) -> TypedView:
        """Elements of a region; ``(runs, count)``."""
        size = itemsize(dtype)
        nbytes = (runs - 1) * region.pitch + count * size
        start, operand = self.locate(region, nbytes, moved=False)
        if start % size or region.pitch % size:
            raise TransportError(f"{region}: not on a multiple of {size} bytes")
        pitch = region.pitch // size if runs > 1 else count
        if region.buffer not in ARENA:
            return TypedView(None, operand, start // size, pitch, runs, count)
        flat = self.rank.segments[rank].tensor(start, nbytes // size, to_torch(dtype))
        view = TypedView(None, -1, 0, pitch, runs, count)
        view.fixed = view.of(flat)
        return view

    def locate(self, region: Region, nbytes: int, moved: bool) -> tuple[int, int]:
        """Byte offset of a region in its arena, or in an operand, and that operand's number.

        Raises
        ------
        TransportError
            If the region leaves its area: the plan is damaged.
        """
        if region.buffer in ARENA:
            start, size = self.areas[region.buffer]
            if region.offset < 0 or region.pitch < 0 or region.offset + nbytes > size:
                raise TransportError(
                    f"unit {self.binding.unit!r}, {self.program.collective}: bytes {region.offset}.."
                    f"{region.offset + nbytes} are outside the {region.buffer.value} area of {size} bytes"
                )
            return start + region.offset, -1
        key = (region.buffer, region.index)
        if key not in self.operands:
            parameter = self.parameters[region.index]
            dtypes = {
                Buffer.SHARD: parameter.shard_dtype,
                Buffer.GRAD: self.grad_dtypes.get(region.index, ""),  # not summed here: only its bytes are moved
                Buffer.OUT: parameter.out_dtype,
                Buffer.RUNNING: "float32",
            }
            self.operands[key] = len(self.listed)
            self.listed.append(Operand(*key, dtypes[region.buffer], parameter.name))
        number = self.operands[key]
        operand = self.listed[number]
        operand.nbytes = max(operand.nbytes, region.offset + nbytes)
        operand.moved |= moved
        return region.offset, number
