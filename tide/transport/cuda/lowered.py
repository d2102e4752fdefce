"""A lowered program: everything that calls of one unit's collective need, and what changes between them.

Its operations are functions without arguments, in issue order. What changes from call to call (counter values,
addresses of gradients, factors) is written into their arguments first, or read from attributes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tide.compiler.steps import Buffer, Lane, Program
from tide.errors import InputError
from tide.transport.base import Binding
from tide.transport.cuda.bases import Bases, Int64s
from tide.transport.cuda.copies import CopyArrays
from tide.transport.cuda.operations import Device, Operation
from tide.transport.cuda.staging import Staging
from tide.transport.cuda.tables import LaunchSet

if TYPE_CHECKING:
    from tide.transport.cuda.ticket import CudaTicket

# Called through map, for every tensor of a call.
_data_ptr, _get_device, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.get_device, torch.Tensor.is_contiguous


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
    streams : list of int
        CUDA stream of each program stream.
    ends : list of (int, bool)
        Those of them whose ends are the collective's, and whether they read gradients to the end. A stream whose end
        another one of this call waits for has none of its own.
    awaited : list of Awaited
        Waits on peers, by flag word.
    crossings : list of Crossing
        Waits on peers, by NCCL.
    indices : list of int
        Counters that the waits use.
    counters : list of int
        Words that launches count in.
    puts : bool
        Whether it puts to ranks of other nodes through NCCL.
    ticket : CudaTicket
        Of the call under way, or the last one: what its streams begin after, and the events that they record.
    unawaited : list of int
        Ends of the slot's last collectives that nobody waited for: its streams begin after them, too.
    last : int
        Number of the last call, 0 if there was none.
    """

    program: Program
    device: Device
    bases: Bases
    copies: CopyArrays
    sets: dict[str, LaunchSet]
    operations: list[Operation] = field(default_factory=list)
    name: str = ""
    streams: list[int] = field(default_factory=list)
    ends: list[tuple[int, bool]] = field(default_factory=list)
    awaited: list[Awaited] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=list)
    unawaited: list[int] = field(default_factory=list)
    puts: bool = False
    ticket: CudaTicket = field(init=False)
    last: int = 0
    _addresses: Int64s | None = None
    _keys: list[tuple[Buffer, int]] = field(default_factory=list)
    _numbers: Int64s | None = None
    _pointers: list[int] = field(default_factory=list)
    _factors: tuple[float, float] | None = None
    _kinds: dict[Buffer, slice] = field(default_factory=dict)
    _starts: dict[str, list[list[Callable[[int], None]]]] = field(default_factory=dict)
    _staging: dict[str, Staging] = field(default_factory=dict)
    _events: list[int] = field(default_factory=list)

    def prepare(self, binding: Binding) -> list[torch.Tensor]:
        """All that may block the host: addresses, tables, compilation. Ends before the first step is issued.

        Returns
        -------
        list of Tensor
            What the program reads and writes of the call's tensors; see `of`.
        """
        try:
            tensors = list(map(binding.tensors.__getitem__, self._keys))
        except KeyError as error:
            buffer, index = error.args[0]
            raise InputError(f"unit {binding.unit!r}: no tensor for {buffer.value}[{index}]") from None
        pointers = list(map(_data_ptr, tensors))
        if pointers != self._pointers or self._addresses is None:
            self._rebase(binding, tensors, pointers)
        if self._factors != (binding.scale, binding.divisor):
            self._restart(binding.scale, binding.divisor)
        return tensors

    def of(self, buffer: Buffer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors that `prepare` has given that are of one kind."""
        if (which := self._kinds.get(buffer)) is None:
            kinds = [kind for kind, _ in self._keys]  # those of a kind follow each other
            first = kinds.index(buffer) if buffer in kinds else 0
            which = self._kinds[buffer] = slice(first, first + kinds.count(buffer))
        return tensors[which]

    def _rebase(self, binding: Binding, tensors: list[torch.Tensor], pointers: list[int]) -> None:
        place = self.device.torch_device
        number = -1 if place.type == "cpu" else place.index
        if not {number}.issuperset(map(_get_device, tensors)) or not all(map(_is_contiguous, tensors)):
            for (buffer, index), tensor in zip(self._keys, tensors, strict=True):
                if tensor.get_device() != number or not tensor.is_contiguous():
                    raise InputError(
                        f"unit {binding.unit!r}: {buffer.value}[{index}] must be contiguous on {place}; it is on "
                        f"{tensor.device} with strides {tensor.stride()}"
                    )
        if self._addresses is None:
            self._addresses = self.bases.addresses()
            self._numbers = np.array([self.bases.tensors[key] for key in self._keys], np.int64)
        self._addresses[self._numbers] = pointers
        self.copies.rebase(self._addresses)
        for name, launches in self.sets.items():
            if launches.rebase(self._addresses):
                self._factors = None  # bound to the old tables
            self._staging[name].fill(launches.words)
        self._pointers = pointers

    def _restart(self, scale: float, divisor: float) -> None:
        self._factors = None  # should a kernel not load: some are bound to these factors, some to those before
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
