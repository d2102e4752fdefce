"""What a prepared program is made of: views of memory, and the operations on them.

What lies in an arena has its views ready; tensors that differ from call to call (shards, gradients, outputs)
are numbered *operands*, and their views are made in the call. NumPy moves bytes (its views are cheap and
checked against the memory's bounds), torch casts and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tide.compiler.steps import Lane
from tide.kernels.reference import accumulate_reference, switch_reduce_reference
from tide.transport.host.memory import Bytes
from tide.transport.host.signals import Doorbells


@dataclass(slots=True)
class Call:
    """Tensors of one call, by operand number: flat, and as bytes where bytes are moved."""

    tensors: list[torch.Tensor]
    bytes: list[Bytes]
    scale: float
    divisor: float


class Operation:
    """One step; ``run`` carries it out and says whether it could, which only waits ever deny."""

    __slots__ = ()

    def run(self, call: Call) -> bool:
        """Carries the step out."""
        raise NotImplementedError


# Memory ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ByteView:
    """Bytes of an arena (``fixed``) or of an operand."""

    fixed: Bytes | None
    operand: int
    offset: int
    pitch: int
    runs: int
    length: int
    flat: bool

    def get(self, call: Call) -> Bytes:
        """The bytes, 1-D if both sides of the transfer are contiguous, otherwise one row a run."""
        return self.fixed if self.fixed is not None else self.of(call.bytes[self.operand])

    def of(self, memory: Bytes) -> Bytes:
        """The same bytes of ``memory``."""
        if self.flat:
            return memory[self.offset : self.offset + self.runs * self.length]
        return np.ndarray((self.runs, self.length), np.uint8, memory, self.offset, (self.pitch, 1))


@dataclass(slots=True)
class TypedView:
    """Elements of an arena (``fixed``) or of an operand, one row a run; offset and pitch in elements."""

    fixed: torch.Tensor | None
    operand: int
    offset: int
    pitch: int
    runs: int
    count: int

    def get(self, call: Call) -> torch.Tensor:
        """The elements, ``(runs, count)``."""
        return self.fixed if self.fixed is not None else self.of(call.tensors[self.operand])

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The same elements of ``flat``."""
        return flat.as_strided((self.runs, self.count), (self.pitch, 1), flat.storage_offset() + self.offset)


# Operations ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Move(Operation):
    """Copies of bytes; pairs in arenas are ready, the others are made in the call."""

    ready: list[tuple[Bytes, Bytes]]
    pairs: list[tuple[ByteView, ByteView]]

    def run(self, call: Call) -> bool:
        """Copies all."""
        for dst, src in self.ready:
            np.copyto(dst, src)
        for to, source in self.pairs:
            np.copyto(to.get(call), source.get(call))
        return True


@dataclass(slots=True)
class Convert(Operation):
    """Casts."""

    pairs: list[tuple[TypedView, TypedView]]

    def run(self, call: Call) -> bool:
        """Casts all, as ``Tensor.to`` does."""
        for dst, src in self.pairs:
            dst.get(call).copy_(src.get(call))
        return True


@dataclass(slots=True)
class Add(Operation):
    """Sums in float32, of pieces in this rank's memory."""

    sums: list[tuple[list[TypedView], TypedView, TypedView | None]]
    final: bool

    def run(self, call: Call) -> bool:
        """Sums all."""
        scale, divisor = (call.scale, call.divisor) if self.final else (1.0, 1.0)
        for srcs, dst, base in self.sums:
            accumulate_reference(
                [src.get(call) for src in srcs],
                dst.get(call),
                None if base is None else base.get(call),
                scale,
                divisor,
            )
        return True


@dataclass(slots=True)
class AddPeers(Operation):
    """What the switch does elsewhere: sums of the same memory of several ranks, read in place."""

    sums: list[tuple[list[torch.Tensor], TypedView, TypedView | None]]
    final: bool

    def run(self, call: Call) -> bool:
        """Sums in the order of the peers."""
        scale, divisor = (call.scale, call.divisor) if self.final else (1.0, 1.0)
        for srcs, dst, base in self.sums:
            switch_reduce_reference(srcs, dst.get(call), None if base is None else base.get(call), scale, divisor)
        return True


@dataclass(slots=True)
class Notify(Operation):
    """A signal: everything before it, then the counter, then the bell."""

    words: memoryview
    word: int
    count: int
    peer: int
    doorbells: Doorbells
    fence: Callable[[], None]

    def run(self, call: Call) -> bool:
        """Adds to the counter. Nobody else writes this word, so it needs no atomic addition."""
        self.fence()
        self.words[self.word] += self.count
        self.doorbells.ring(self.peer)
        return True


@dataclass(slots=True)
class Await(Operation):
    """A wait: consumes signals, or says that they have not come yet."""

    words: memoryview
    consumed: list[int]
    word: int
    count: int
    credit: int
    peer: int
    lane: Lane
    fence: Callable[[], None]
    name: int  # the peer's world rank, for messages

    def here(self) -> bool:
        """Whether enough signals are there."""
        return bool(self.words[self.word] + self.credit - self.consumed[self.word] >= self.count)

    def run(self, call: Call) -> bool:
        """Consumes the signals if they are there."""
        if not self.here():
            return False
        self.fence()
        self.consumed[self.word] += self.count
        return True

    def __str__(self) -> str:
        here = self.words[self.word] + self.credit - self.consumed[self.word]
        return f"wait for {self.lane.name} from rank {self.name} ({here} of {self.count} signals here)"
