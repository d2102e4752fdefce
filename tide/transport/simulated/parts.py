"""Parts of steps: what the machine executes in one go.

A data step is cut into parts, which take effect one by one, in any order, while other streams and ranks
go on: so a copy is seen half done, and nothing that relies on its being atomic goes unnoticed. A part
checks the marks of all that it reads and writes. Sums and casts are NumPy's and torch's own, on the CPU;
no code is shared with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from tide.compiler.steps import Buffer, Copy, Multicast, Put, Signal, Step, SwitchReduce, Wait
from tide.errors import PlanError
from tide.torch_types import to_torch
from tide.transport.simulated.memory import RINGS, UNWRITTEN, Access, Bytes, Call, Memory


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """Where in a program something happens; for messages and traces."""

    call: Call
    stream: str
    index: int
    step: Step | None

    @property
    def title(self) -> str:
        """The step in a few words, positions as world ranks."""
        step = self.step
        if step is None:
            return "use"
        name = type(step).__name__
        if isinstance(step, Copy):
            return f"{name} {'from' if step.pull else 'to'} {self._peer(step.peer)}"
        if isinstance(step, (Signal, Wait)):
            way = "to" if isinstance(step, Signal) else "from"
            return f"{name} {step.lane.name} ×{step.count} {way} {self._peer(step.peer)}"
        if isinstance(step, Put):
            return f"{name} to {self._peer(step.peer)}"
        if isinstance(step, (Multicast, SwitchReduce)):
            return f"{name} over {len(step.peers)} ranks"
        return name

    def _peer(self, position: int) -> str:
        group = self.call.group
        return f"rank {group[position]}" if 0 <= position < len(group) else f"position {position}"

    def __str__(self) -> str:
        call = self.call
        return (
            f"unit {call.unit.name!r}, {call.collective}, rank {call.rank}, stream {self.stream}, "
            f"step {self.index} ({self.title})"
        )


class Rule(IntEnum):
    """What a write may find."""

    ANY = 0  #: private memory: anything
    ONCE = 1  #: storage: anything but what this very collective has written
    CONSUMED = 2  #: rings: nothing, the previous content must have been read


@lru_cache(maxsize=4096)
def _filled(mark: int, length: int) -> bytes:
    return bytes((mark,)) * length


class Source:
    """Bytes to read, and the mark that they must bear."""

    __slots__ = ("access", "call", "consume", "data", "floats", "good", "marks", "memory", "padding", "tensor")

    def __init__(self, memory: Memory, call: Call, access: Access, dtype: str | None = None, count: int = 0) -> None:
        block, offset = memory.locate(call, access)
        region = access.region
        self.memory, self.call, self.access = memory, call, access
        self.data, self.marks = block.views(offset, region.pitch, access.runs, access.length)
        self.padding = memory.padding(call, access)
        self.good = _filled(call.mark, access.runs * access.length)
        self.consume = region.buffer in RINGS
        self.tensor, self.floats = None, None
        if dtype is not None:
            self.tensor = block.tensor(dtype, offset, region.pitch, access.runs, count)
            if dtype == "float32":  # the same memory: spares the sums a conversion
                self.floats = self.tensor.numpy()

    def check(self, site: Site) -> None:
        """Raises unless every byte was written by this collective and is still there."""
        if self.marks.tobytes() != self.good:
            self.fail(site)

    def used(self) -> None:
        """Bytes of a ring hold nothing once they have been read."""
        if self.consume:
            self.marks[...] = UNWRITTEN

    def fail(self, site: Site) -> None:
        """Names the first bytes with a wrong mark, unless they are pads."""
        wrong = self.marks != self.call.mark
        if self.padding is not None:
            wrong &= ~self.padding
            if not wrong.any():
                return
        wrong = wrong.reshape(self.access.runs, -1)
        run, first, last, found = _first_bytes(wrong, self.marks)
        name = self.memory.name(self.call, self.access, run, first, last)
        if found != UNWRITTEN:
            state = "which are of another collective: a stale read, or overwritten too early"
        elif self.access.region.buffer is Buffer.GRAD:
            state = "which were released: gradients may be freed by now"
        elif self.consume:
            state = "which are not written yet, or were read before"
        else:
            state = "which are not written yet"
        raise PlanError(f"{site}: reads {name} on rank {self.access.rank}, {state}")


class Zeros(Source):
    """A place that nobody has ever written, and that holds the zeros of the start."""

    __slots__ = ()

    def check(self, site: Site) -> None:
        """Raises unless every byte is as it was at the start."""
        if self.marks.any() or self.data.any():
            name = self.memory.name(self.call, self.access)
            raise PlanError(f"{site}: takes {name} on rank {self.access.rank} for zeros, but they were written")


class Target:
    """Bytes to write."""

    __slots__ = ("access", "call", "data", "empty", "floats", "mark", "marks", "memory", "rule", "tensor")

    def __init__(self, memory: Memory, call: Call, access: Access, dtype: str | None = None, count: int = 0) -> None:
        block, offset = memory.locate(call, access)
        region = access.region
        if access.runs > 1 and region.pitch < access.length:
            raise PlanError(f"{memory.name(call, access)}: its runs overlap (pitch {region.pitch})")
        self.memory, self.call, self.access = memory, call, access
        self.data, self.marks = block.views(offset, region.pitch, access.runs, access.length)
        self.mark, self.empty = call.mark, _filled(UNWRITTEN, access.runs * access.length)
        if region.buffer is Buffer.STORAGE:
            self.rule = Rule.ONCE
        else:
            self.rule = Rule.CONSUMED if region.buffer in RINGS else Rule.ANY
        self.tensor, self.floats = None, None
        if dtype is not None:
            self.tensor = block.tensor(dtype, offset, region.pitch, access.runs, count)
            if dtype == "float32":  # the same memory: spares the sums a conversion
                self.floats = self.tensor.numpy()

    def check(self, site: Site) -> None:
        """Raises if a byte may not be written now; marks all as written."""
        if self.rule == Rule.ONCE:
            if self.mark in self.marks.tobytes():
                self.fail(site, self.marks == self.mark, "which this collective has written before")
        elif self.rule == Rule.CONSUMED and self.marks.tobytes() != self.empty:
            self.fail(site, self.marks != UNWRITTEN, "which nobody has read yet")
        self.marks[...] = self.mark

    def fail(self, site: Site, wrong: npt.NDArray[np.bool_], state: str) -> NoReturn:
        """Names the first bytes that must not be written."""
        run, first, last, _ = _first_bytes(wrong.reshape(self.access.runs, -1), self.marks)
        name = self.memory.name(self.call, self.access, run, first, last)
        raise PlanError(f"{site}: writes {name} on rank {self.access.rank}, {state}")


def _first_bytes(wrong: npt.NDArray[np.bool_], marks: Bytes) -> tuple[int, int, int, int]:
    """First wrong extent: run, first and last byte within it, and the mark found there."""
    run = int(wrong.any(axis=1).argmax())
    first = int(wrong[run].argmax())
    good = np.flatnonzero(~wrong[run, first:])
    last = first + int(good[0]) - 1 if len(good) else wrong.shape[1] - 1
    return run, first, last, int(marks.reshape(wrong.shape)[run, first])


class Part:
    """One micro-operation."""

    __slots__ = ("site",)

    def __init__(self, site: Site) -> None:
        self.site = site

    def run(self) -> None:
        """Takes effect."""
        raise NotImplementedError


class Move(Part):
    """Bytes from one place to another, unchanged."""

    __slots__ = ("pairs",)

    def __init__(self, site: Site, pairs: tuple[tuple[Source, Target], ...]) -> None:
        super().__init__(site)
        self.pairs = pairs

    def run(self) -> None:
        site = self.site
        for source, target in self.pairs:
            source.check(site)
            target.check(site)
            target.data[...] = source.data
            source.used()


class Convert(Part):
    """Elements from one type to another, as torch converts them."""

    __slots__ = ("pairs",)

    def __init__(self, site: Site, pairs: tuple[tuple[Source, Target], ...]) -> None:
        super().__init__(site)
        self.pairs = pairs

    def run(self) -> None:
        site = self.site
        for source, target in self.pairs:
            source.check(site)
            target.check(site)
            assert source.tensor is not None
            assert target.tensor is not None
            target.tensor.copy_(source.tensor)
            source.used()


class Fan(Part):
    """Bytes from one place to the same place of several ranks."""

    __slots__ = ("fans",)

    def __init__(self, site: Site, fans: tuple[tuple[Source, tuple[Target, ...]], ...]) -> None:
        super().__init__(site)
        self.fans = fans

    def run(self) -> None:
        for source, targets in self.fans:
            source.check(self.site)
            for target in targets:
                target.check(self.site)
                target.data[...] = source.data
            source.used()


class Fetch(Part):
    """The near half of a put: takes the bytes from the source, which may be overwritten from then on."""

    __slots__ = ("sources", "staged")

    def __init__(self, site: Site, sources: tuple[Source, ...]) -> None:
        super().__init__(site)
        self.sources = sources
        self.staged: list[Bytes] = []

    def run(self) -> None:
        for source in self.sources:
            source.check(self.site)
        self.staged = [source.data.copy() for source in self.sources]
        for source in self.sources:
            source.used()


class Deliver(Part):
    """The far half of a put: writes what was fetched; it may come long after the put's local end."""

    __slots__ = ("fetch", "targets")

    def __init__(self, fetch: Fetch, targets: tuple[Target, ...]) -> None:
        super().__init__(fetch.site)
        self.fetch, self.targets = fetch, targets

    def run(self) -> None:
        for target, staged in zip(self.targets, self.fetch.staged, strict=True):
            target.check(self.site)
            target.data[...] = staged


class Add(Part):
    """``target = base + (sources[0] + sources[1] + …)`` in float32, then scaled where final."""

    __slots__ = ("base", "factors", "sources", "target")

    def __init__(
        self,
        site: Site,
        sources: tuple[Source, ...],
        base: Source | None,
        target: Target,
        factors: tuple[float, float] | None,
    ) -> None:
        super().__init__(site)
        self.sources, self.base, self.target, self.factors = sources, base, target, factors

    def run(self) -> None:
        site, total = self.site, None
        for source in self.sources:
            source.check(site)
            assert source.tensor is not None
            if total is None:
                total = source.tensor.to(torch.float32, copy=True).numpy()
            elif source.floats is not None:
                total += source.floats
            else:
                total += source.tensor.to(torch.float32).numpy()
        assert total is not None
        if self.base is not None:
            self.base.check(site)
            assert self.base.floats is not None
            total = self.base.floats + total
        if self.factors is not None:
            scale_and_divide(total, *self.factors)
        self.target.check(site)
        assert self.target.tensor is not None
        if self.target.floats is not None:
            self.target.floats[...] = total
        else:
            self.target.tensor.copy_(torch.from_numpy(total))
        for source in self.sources:
            source.used()


def scale_and_divide(total: npt.NDArray[np.float32], scale: float, divisor: float) -> None:
    """Both factors, in this order, in place; a factor of one changes no bit and is left out."""
    if scale != 1.0:
        total *= np.float32(scale)
    if divisor != 1.0:
        total /= np.float32(divisor)


class Inspect(Part):
    """Compute reads a piece of a whole parameter: its bytes must be the expected ones."""

    __slots__ = ("dtype", "expected", "source")

    def __init__(self, site: Site, source: Source, expected: Bytes, dtype: str) -> None:
        super().__init__(site)
        self.source, self.expected, self.dtype = source, expected, dtype

    def run(self) -> None:
        self.source.check(self.site)
        wrong = differing_bytes(self.source.data, self.expected, self.dtype)
        if wrong is not None:
            name = self.source.memory.name(self.source.call, self.source.access, 0, *wrong)
            raise PlanError(f"{self.site}: {name} on rank {self.source.access.rank} hold wrong values")


def differing_bytes(found: Bytes, expected: Bytes, dtype: str) -> tuple[int, int] | None:
    """First and last byte of the first wrong extent, or None; one NaN counts as good as another.

    Conversions of NaN differ in its payload between vector and scalar code, of torch as of anyone.
    """
    if found.tobytes() == expected.tobytes():
        return None
    kind = to_torch(dtype)
    wrong = (found != expected).reshape(-1, kind.itemsize).any(axis=1)
    if kind.is_floating_point:
        both = [torch.from_numpy(np.ascontiguousarray(x)).view(kind).isnan().numpy() for x in (found, expected)]
        wrong &= ~(both[0] & both[1])
    where = np.flatnonzero(wrong)
    if not len(where):
        return None
    first = int(where[0])
    good = np.flatnonzero(~wrong[first:])
    last = first + int(good[0]) if len(good) else len(wrong)
    return first * kind.itemsize, last * kind.itemsize - 1
