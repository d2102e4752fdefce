"""Operations: functions without arguments that make one driver call each, with arguments laid down beforehand.

A signal adds to a host counter and brings the new value to the peer's flag word; a wait adds to another one and
holds the stream back until its own word has reached that. Neighbouring ones share a call, which costs no more
than one of them alone (``benchmarks/cuda_check.py --only ceiling,issue``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from tide.compiler.steps import Lane
from tide.kernels.launch import Tuning
from tide.transport.cuda.copies import CopyArrays, CopyStep
from tide.transport.cuda.driver import (
    COPY_2D_WORDS,
    MEM_OP_WAIT_32,
    MEM_OP_WORDS,
    MEM_OP_WRITE_32,
    WAIT_GEQ,
    laid_down,
)
from tide.transport.cuda.wire import Wire
from tide.transport.cuda.words import MASK, STRIDE, VALUES, Counters, Words

Operation = Callable[[], None]


@dataclass(slots=True)
class Device:
    """What lowering needs to know of the device and the transport.

    Attributes
    ----------
    driver : Driver
        Driver calls.
    torch_device : torch.device
        Where tensors and kernels are.
    rank : int
        This rank.
    arenas : mapping of int to int
        Address of every mapped arena, by world rank.
    values : int
        Address of the table of counter values.
    words : Words
        Counters.
    stream : callable
        CUDA stream of a program stream's name.
    last : callable
        Event of the last signal to oneself on a lane of a slot, in whatever program.
    write_to_peers : bool
        Signal by writing the peer's word from the stream, instead of copying a value to it.
    wait_flags : int
        Flags of waits on words.
    place : Tuning
        How casts are cut.
    accumulate_ctas : int
        CTAs of a sum at most.
    counters : Counters or None
        Words in which programs of a launch count; None for a launch, and events, for each Place step.
    wire : Wire or None
        Puts and signals to other nodes; None where copies reach them.
    record : callable
        A new event on a stream, for the watchdog.
    multicast : int or None
        Multicast address of the arenas of this rank's node.
    stand_in : bool
        Carry out what needs the switch without it.
    """

    driver: Any
    torch_device: torch.device
    rank: int
    arenas: Mapping[int, int]
    values: int
    words: Words
    stream: Callable[[str], int]
    last: Callable[[int, Lane], int]
    write_to_peers: bool
    wait_flags: int
    place: Tuning
    accumulate_ctas: int
    multicast: int | None = None
    stand_in: bool = False
    counters: Counters | None = None
    wire: Wire | None = None
    record: Callable[[int], int] = lambda stream: 0


@dataclass(frozen=True, slots=True)
class MemoryOperation:
    """A wait or a signal, before it becomes a call of its own or part of one.

    Parameters
    ----------
    wait : bool
        Whether it waits.
    index : int
        Place of its counter.
    count : int
        Signals to take or to give.
    credit : int
        Signals that count as given before the first.
    address : int
        Of the flag word.
    own : bool
        Whether it is one of this rank's own :class:`~tide.transport.cuda.words.Counters`: a wait for all that was
        issued so far.
    """

    wait: bool
    index: int
    count: int
    credit: int
    address: int
    own: bool = False

    def counting(self, device: Device) -> tuple[list[int], int]:
        """Host counters, and the driver's flags."""
        if self.own:  # nothing comes from a peer with it that would have to be flushed
            assert device.counters is not None
            return device.counters.totals, WAIT_GEQ
        return (device.words.consumed, device.wait_flags) if self.wait else (device.words.sent, 0)


def fixed_call(device: Device, function: Callable[..., int], what: str, *arguments: int) -> Operation:
    """A driver call with fixed arguments."""
    check, fixed = device.driver.check, laid_down(function, *arguments)

    def issue() -> None:
        if result := function(*fixed):
            check(result, what)

    return issue


def copy_step(device: Device, copies: CopyArrays, which: CopyStep, stream: int) -> Operation:
    """The copies of a step: one batch, then the 2-D ones."""
    driver = device.driver
    count, check = which.last - which.first, driver.check
    dst, src, sizes = (
        array.ctypes.data + 8 * which.first for array in (copies.destinations, copies.sources, copies.sizes)
    )
    first = copies.pitched.ctypes.data
    pitched = [first + 8 * COPY_2D_WORDS * row for row in range(which.first_2d, which.last_2d)]
    batch, copy_2d, copy = driver.copy_batch, driver.copy_2d, driver.copy

    def issue() -> None:
        if count and batch is not None:
            if result := batch(dst, src, sizes, count, stream):
                check(result, "batch of copies")
        else:
            for row in range(which.first, which.last):
                arguments = copies.destinations[row], copies.sources[row], copies.sizes[row]
                if result := copy(*map(int, arguments), stream):
                    check(result, "copy")
        for descriptor in pitched:
            if result := copy_2d(descriptor, stream):
                check(result, "2-D copy")

    return issue


#: From so many waits and signals on, their values are worked out by NumPy.
MANY = 32


class MemoryOperations:
    """All waits and signals of a program, as the driver reads them.

    Their values are worked out before the first step of a call is issued: with eight ranks there are a hundred, which
    takes a while one by one.

    Parameters
    ----------
    device : Device
        Driver calls and counters.
    most : int
        Waits and signals at most.
    """

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._words = np.zeros((most, MEM_OP_WORDS), np.int64)
        self._used = 0
        self._rows: list[tuple[int, list[int], int, int, int]] = []  # place, counters, counter, signals, credit
        self._totals: dict[tuple[bool, int], int] = {}  # signals of a call, by kind and counter
        self._ahead: list[int] = []  # signals of a call up to a row

    def calls(self, stream: int, operations: Sequence[MemoryOperation]) -> list[Operation]:
        """Waits and signals of one stream, in as few calls as can be; they come in order of issue."""
        if self._device.write_to_peers:
            return [self._batch(stream, operations)]
        # Signals are copies: only waits between them share a call.
        out: list[Operation] = []
        for waits, group in groupby(operations, lambda operation: operation.wait):
            neighbours = list(group)
            if waits:
                out.append(self._batch(stream, neighbours))
            else:
                out += [_copied_signal(self._device, stream, operation) for operation in neighbours]
        return out

    def _batch(self, stream: int, operations: Sequence[MemoryOperation]) -> Operation:
        """Several waits and signals in one call, in order."""
        driver, words, first, number = self._device.driver, self._words, self._used, len(operations)
        self._used += number
        own: list[tuple[int, list[int], int]] = []
        for row, operation in enumerate(operations, first):
            counters, flags = operation.counting(self._device)
            kind = MEM_OP_WAIT_32 if operation.wait else MEM_OP_WRITE_32
            words[row, :4] = kind, operation.address, 0, flags
            if operation.own:
                own.append((row, counters, operation.index))
                continue
            key = operation.wait, operation.index
            self._totals[key] = self._totals.get(key, 0) + operation.count
            self._ahead.append(self._totals[key] - operation.credit)
            self._rows.append((row, counters, operation.index, operation.count, operation.credit))
        check, run = driver.check, driver.memory_operations
        fixed = laid_down(run, stream, number, words[first:].ctypes.data, 0)

        def issue() -> None:
            for row, counters, index in own:  # what launches of this call have added by now
                words[row, 2] = counters[index] & MASK
            if result := run(*fixed):
                check(result, "waits and signals")

        return issue

    def advance(self) -> Operation:
        """Brings the counters forward by a call, and sets all values; once all waits and signals are in."""
        words, rows = self._words, self._rows
        if len(rows) < MANY:

            def one_by_one() -> None:
                for row, counters, index, count, credit in rows:
                    value = counters[index] = counters[index] + count
                    words[row, 2] = ((value - credit) * STRIDE) & MASK

            return one_by_one
        keys = list(self._totals)
        lists = [self._device.words.consumed if wait else self._device.words.sent for wait, _ in keys]
        totals = [
            (counters, index, self._totals[wait, index]) for counters, (wait, index) in zip(lists, keys, strict=True)
        ]
        sent = self._device.words.sent
        which = np.array([keys.index((counters is not sent, index)) for _, counters, index, *_ in rows])
        places, ahead = np.array([row for row, *_ in rows]), np.array(self._ahead, np.int64)

        def at_once() -> None:
            before = np.array([counters[index] for counters, index, _ in totals], np.int64)
            words[places, 2] = ((before[which] + ahead) * STRIDE) & MASK
            for counters, index, total in totals:
                counters[index] += total

        return at_once


def _copied_signal(device: Device, stream: int, operation: MemoryOperation) -> Operation:
    """A signal as a copy of four bytes from the table of values."""
    check, copy, values = device.driver.check, device.driver.copy, device.values
    index, count, address, sent = operation.index, operation.count, operation.address, device.words.sent

    def issue() -> None:
        value = sent[index] = sent[index] + count
        if result := copy(address, values + 4 * (value % VALUES), 4, stream):
            check(result, "signal")

    return issue
