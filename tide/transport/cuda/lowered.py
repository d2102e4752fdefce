"""A lowered program: everything that calls of one unit's collective need, and what changes between them.

Its operations are functions without arguments, in issue order. What changes from call to call (counter values,
addresses of gradients, factors) is written into their arguments first, or read from attributes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tide.compiler.steps import Buffer, Lane, Program
from tide.errors import InputError
from tide.transport.base import Binding
from tide.transport.cuda.bases import Bases, Int64s
from tide.transport.cuda.copies import CopyArrays
from tide.transport.cuda.operations import Device, Operation
from tide.transport.cuda.staging import Staging
from tide.transport.cuda.tables import LaunchSet


@dataclass(frozen=True, slots=True)
class Awaited:
    """A wait on a peer, for the watchdog: ``total`` signals of the program consumed once it has passed."""

    stream: str
    step: int
    lane: Lane
    rank: int
    index: int
    word: int
    total: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A wait on a rank of another node, for the watchdog: passed once event number ``mark`` of the call is done."""

    stream: str
    step: int
    lane: Lane
    rank: int
    count: int
    mark: int


@dataclass(eq=False, slots=True)
class Lowered:
    """A program, ready to be issued again and again for one unit.

    Attributes
    ----------
    program : Program
        Kept, so that its identity stays its own.
    operations : list of callable
        In issue order.
    name : str
        Of its range in a profile.
    streams : list of (str, int)
        CUDA stream of each program stream.
    awaited : list of Awaited
        Waits on peers, by flag word.
    crossings : list of Crossing
        Waits on peers, by NCCL.
    marks : list of int
        Events of the call under way, one after each wait by NCCL.
    indices : list of int
        Counters that the waits use.
    counters : list of int
        Words that launches count in.
    entry, vacated, unawaited : int, int, list of int
        Events that a call's streams begin after: what the caller did before, the slot's last readers (0 if there
        are none), ends of the slot's last collectives if nobody waited for them.
    record : callable
        Records an event on a stream.
    released : list of int
        Events of this call's last reads of gradients, of streams that go on afterwards.
    last : int
        Number of the last call.
    """

    program: Program
    device: Device
    bases: Bases
    copies: CopyArrays
    sets: dict[str, LaunchSet]
    operations: list[Operation] = field(default_factory=list)
    name: str = ""
    streams: list[tuple[str, int]] = field(default_factory=list)
    awaited: list[Awaited] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=list)
    entry: int = 0
    vacated: int = 0
    unawaited: list[int] = field(default_factory=list)
    record: Callable[[int], int] = lambda stream: 0
    released: list[int] = field(default_factory=list)
    last: int = 0
    _addresses: Int64s | None = None
    _keys: list[tuple[Buffer, int]] = field(default_factory=list)
    _pointers: list[int] = field(default_factory=list)
    _factors: tuple[float, float] | None = None
    _starts: dict[str, list[list[Callable[[int], None]]]] = field(default_factory=dict)
    _staging: dict[str, Staging] = field(default_factory=dict)
    _events: list[int] = field(default_factory=list)

    def prepare(self, binding: Binding) -> None:
        """All that may block the host: addresses, tables, compilation. Ends before the first step is issued."""
        tensors = binding.tensors
        try:
            pointers = [tensors[key].data_ptr() for key in self._keys]
        except KeyError as error:
            buffer, index = error.args[0]
            raise InputError(f"unit {binding.unit!r}: no tensor for {buffer.value}[{index}]") from None
        if pointers != self._pointers or self._addresses is None:
            self._rebase(binding, pointers)
        if self._factors != (binding.scale, binding.divisor):
            self._restart(binding.scale, binding.divisor)

    def _rebase(self, binding: Binding, pointers: list[int]) -> None:
        for key in self._keys:
            tensor = binding.tensors[key]
            if tensor.device != self.device.torch_device or not tensor.is_contiguous():
                raise InputError(
                    f"unit {binding.unit!r}: {key[0].value}[{key[1]}] must be contiguous on "
                    f"{self.device.torch_device}; it is on {tensor.device} with strides {tensor.stride()}"
                )
        if self._addresses is None:
            self._addresses = self.bases.addresses()
        for key, pointer in zip(self._keys, pointers, strict=True):
            self._addresses[self.bases.tensors[key]] = pointer
        self.copies.rebase(self._addresses)
        for name, launches in self.sets.items():
            if launches.rebase(self._addresses):
                self._factors = None  # bound to the old tables
            self._staging[name].fill(launches.words)
        self._pointers = pointers

    def _restart(self, scale: float, divisor: float) -> None:
        for name, launches in self.sets.items():
            self._starts[name][:] = [launches.starts(step, scale, divisor) for step in range(len(launches.launches))]
        self._factors = scale, divisor

    def keep_alive(self) -> list[torch.Tensor]:
        """Device memory that the issued launches read."""
        return [launches.memory for launches in self.sets.values()]

    def close(self) -> None:
        """Gives events, words and buffers back."""
        for event in self._events:
            self.device.driver.free_event(event)
        self._events.clear()
        if self.device.counters is not None:
            self.device.counters.give_back(self.counters)
            self.counters.clear()
        for staging in self._staging.values():
            staging.close()
