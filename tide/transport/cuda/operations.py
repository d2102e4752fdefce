"""Operations: functions without arguments that make one driver call each, with arguments laid down beforehand.

A signal adds to a host counter and brings the new value to the peer's flag word; a wait adds to another one and
holds the stream back until its own word has reached that. Neighbouring ones share a call, which costs no more
than one of them alone (``benchmarks/cuda_check.py --only ceiling,issue``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide.compiler.steps import Lane
from tide.kernels.launch import Tuning
from tide.transport.cuda.copies import CopyArrays, CopyStep
from tide.transport.cuda.driver import COPY_2D_WORDS, MEM_OP_WAIT_32, MEM_OP_WORDS, MEM_OP_WRITE_32, WAIT_GEQ
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

    def counting(self, device: Device) -> tuple[list[int], int, int]:
        """Host counters, distance of two values in the word, and the driver's flags."""
        if self.own:  # nothing comes from a peer with it that would have to be flushed
            assert device.counters is not None
            return device.counters.totals, 1, WAIT_GEQ
        if self.wait:
            return device.words.consumed, STRIDE, device.wait_flags
        return device.words.sent, STRIDE, 0


def fixed_call(device: Device, function: Callable[..., int], what: str, *arguments: int) -> Operation:
    """A driver call with fixed arguments."""
    check = device.driver.check

    def issue() -> None:
        if result := function(*arguments):
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


def memory_operations(device: Device, stream: int, operations: Sequence[MemoryOperation]) -> list[Operation]:
    """Waits and signals of one stream, in as few calls as can be."""
    if len(operations) == 1:
        return [_single(device, stream, operations[0])]
    if device.write_to_peers:
        return [_batched(device, stream, operations)]
    # Signals are copies: only waits between them share a call.
    out: list[Operation] = []
    at = 0
    while at < len(operations):
        end = at
        while end < len(operations) and operations[end].wait:
            end += 1
        if end - at > 1:
            out.append(_batched(device, stream, operations[at:end]))
            at = end
        else:
            out.append(_single(device, stream, operations[at]))
            at += 1
    return out


def _single(device: Device, stream: int, operation: MemoryOperation) -> Operation:
    driver, check = device.driver, device.driver.check
    index, count, credit, address = operation.index, operation.count, operation.credit, operation.address
    counters, stride, flags = operation.counting(device)
    if operation.wait:
        wait = driver.wait_value

        def issue_wait() -> None:
            value = counters[index] = counters[index] + count
            if result := wait(stream, address, ((value - credit) * stride) & MASK, flags):
                check(result, "wait")

        return issue_wait
    values = device.values
    if device.write_to_peers:
        write = driver.write_value

        def issue_write() -> None:
            value = counters[index] = counters[index] + count
            if result := write(stream, address, (value * stride) & MASK, flags):
                check(result, "signal")

        return issue_write
    copy = driver.copy

    def issue_copy() -> None:
        value = counters[index] = counters[index] + count
        if result := copy(address, values + 4 * (value % VALUES), 4, stream):
            check(result, "signal")

    return issue_copy


def _batched(device: Device, stream: int, operations: Sequence[MemoryOperation]) -> Operation:
    """Several waits and signals in one call, in order."""
    check, run = device.driver.check, device.driver.memory_operations
    number = len(operations)
    array = (ctypes.c_uint64 * (MEM_OP_WORDS * number))()
    updates: list[tuple[int, list[int], int, int, int, int]] = []
    for row, operation in enumerate(operations):
        at = row * MEM_OP_WORDS
        array[at] = MEM_OP_WAIT_32 if operation.wait else MEM_OP_WRITE_32
        array[at + 1] = operation.address
        counters, stride, array[at + 3] = operation.counting(device)
        updates.append((at + 2, counters, operation.index, operation.count, operation.credit, stride))
    address = ctypes.addressof(array)

    def issue() -> None:
        for place, counters, index, count, credit, stride in updates:
            value = counters[index] = counters[index] + count
            array[place] = ((value - credit) * stride) & MASK
        if result := run(stream, number, address, 0):
            check(result, "waits and signals")

    return issue
