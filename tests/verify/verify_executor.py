"""Runs programs of all ranks on symbolic bytes in a random legal interleaving: what `verify` must agree with.

It shares no code with the proof and none with the transports. A byte is a pair (value, byte of the value);
the value of a shard's element is ``("p", parameter, element)``, that of a gradient's ``("g", rank,
parameter, element)``, and a sum is the tuple of what it adds, in order. Unwritten bytes are None.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.shard import shard
from tide.compiler.steps import (
    ARENA,
    INITIAL_CREDIT,
    Accumulate,
    Buffer,
    Copy,
    Multicast,
    Place,
    Program,
    Put,
    Region,
    Signal,
    SwitchReduce,
    Wait,
)

Byte = Any


class WrongError(AssertionError):
    """A run that did not do what the collective must do."""


@dataclass
class _Queue:
    """One persistent queue of a rank: (collective number, step) pairs still to run."""

    steps: list[tuple[int, Any]] = field(default_factory=list)
    at: int = 0


class Execution:
    """Some collectives of one unit, one after the other, on one shard group.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit, collective : str
        What to run.
    rank : int
        A rank of the group.
    repeats : int
        How many collectives follow each other.
    seed : int
        Chooses the interleaving.
    """

    def __init__(self, compiled: Compiled, unit: str, collective: str, rank: int, repeats: int, seed: int) -> None:
        self.compiled, self.unit, self.collective = compiled, compiled.spec.unit(unit), collective
        self.ranks, _ = compiled.group(unit, rank)
        self.size, self.repeats, self.rng = len(self.ranks), repeats, random.Random(seed)
        self.layout, self.parameters = compiled.layouts[unit], self.unit.parameters
        self.memory: dict[tuple[int, Buffer, int, int], dict[int, Byte]] = defaultdict(dict)
        self.counters: dict[tuple[int, int, int], int] = defaultdict(int)
        self.queues: dict[tuple[int, str], _Queue] = {}
        self.left: dict[tuple[int, int], int] = defaultdict(int)  # steps left of (position, collective)
        self.checked: set[tuple[int, int]] = set()
        programs: list[Program] = [compiled.program(unit, collective, r) for r in self.ranks]
        self.in_slot = programs[0].in_slot
        for position, program in enumerate(programs):
            for stream in program.streams:
                queue = self.queues.setdefault((position, stream.name), _Queue())
                for number in range(repeats):
                    queue.steps += [(number, step) for step in stream.steps]
                    self.left[position, number] += len(stream.steps)
        for position in range(self.size):
            for peer in range(self.size):
                for lane, credit in INITIAL_CREDIT.items():
                    self.counters[position, peer, lane] = credit
            for number in range(repeats):
                self._fill(position, number)

    # Memory --------------------------------------------------------------------------------------

    def _buffer(self, position: int, number: int, buffer: Buffer, index: int) -> dict[int, Byte]:
        """Bytes of a buffer; what the caller brings or takes away is of one collective, the arena is not."""
        own = buffer in ARENA
        if own and self.in_slot and buffer is not Buffer.SPREAD:
            buffer = Buffer.STORAGE
        return self.memory[position, buffer, index, -1 if own else number]

    def _fill(self, position: int, number: int) -> None:
        for index, p in enumerate(self.parameters):
            table = shard(p, self.size)
            if self.collective == "all_gather":
                size, run = itemsize(p.shard_dtype), int(table.run[position])
                memory = self._buffer(position, number, Buffer.SHARD, index)
                for row in range(table.outer):
                    for column in range(run):
                        element = row * table.pitch + int(table.offset[position]) + column
                        self._write(memory, (row * run + column) * size, size, ("p", number, index, element))
            elif p.grad_dtype is not None:
                size = itemsize(p.grad_dtype)
                memory = self._buffer(position, number, Buffer.GRAD, index)
                for element in range(p.numel):
                    self._write(memory, element * size, size, ("g", number, position, index, element))

    @staticmethod
    def _write(memory: dict[int, Byte], offset: int, size: int, value: Byte) -> None:
        for byte in range(size):
            memory[offset + byte] = (value, byte)

    @staticmethod
    def _read(memory: dict[int, Byte], offset: int, size: int) -> Byte:
        found = [memory.get(offset + byte) for byte in range(size)]
        if found[0] is None or any(f != (found[0][0], byte) for byte, f in enumerate(found)):
            return ("torn", tuple(map(repr, found)))
        return found[0][0]

    # Running -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs to the end and checks every rank's result as its collective ends.

        Raises
        ------
        WrongError
            On a deadlock, a wrong result or signals left over.
        """
        pace = {key: self.rng.choice((0.05, 0.3, 1.0)) for key in self.queues}  # some queues lag far behind
        while True:
            for position in range(self.size):
                self._finish(position)
            ready = [key for key in self.queues if self._ready(key)]
            if not ready:
                break
            key = self.rng.choices(ready, [pace[k] for k in ready])[0]
            queue = self.queues[key]
            number, step = queue.steps[queue.at]
            self._execute(key[0], number, step)
            queue.at += 1
            self.left[key[0], number] -= 1
        stuck = [key for key, queue in self.queues.items() if queue.at < len(queue.steps)]
        if stuck:
            raise WrongError(f"deadlock: {stuck}")
        for (receiver, sender, lane), count in self.counters.items():
            if count != INITIAL_CREDIT.get(lane, 0):  # type: ignore[call-overload]
                raise WrongError(f"{count} signals left over of {sender} to {receiver} on lane {lane}")

    def _ready(self, key: tuple[int, str]) -> bool:
        queue = self.queues[key]
        if queue.at == len(queue.steps):
            return False
        position, (number, step) = key[0], queue.steps[queue.at]
        # The next collective of a slot starts when the one before it has ended and the slot was vacated.
        if (self.collective == "all_gather" or self.in_slot) and number and self.left[position, number - 1]:
            return False
        return not isinstance(step, Wait) or self.counters[position, step.peer, step.lane] >= step.count

    def _execute(self, me: int, number: int, step: Any) -> None:
        if isinstance(step, Wait):
            self.counters[me, step.peer, step.lane] -= step.count
        elif isinstance(step, Signal):
            self.counters[step.peer, me, step.lane] += step.count
        elif isinstance(step, Place):
            for cast in step.casts:
                src, dst = itemsize(cast.src_dtype), itemsize(cast.dst_dtype)
                for run in range(cast.runs):
                    for i in range(cast.count):
                        value = self._load(me, number, cast.src, run, i * src, src)
                        self._store(me, number, cast.dst, run, i * dst, dst, value)
        elif isinstance(step, Copy | Put):
            pulls = isinstance(step, Copy) and step.pull
            source, target = (step.peer, me) if pulls else (me, step.peer)
            for t in step.transfers:
                from_, to = (self._buffer(r, number, s.buffer, s.index) for r, s in ((source, t.src), (target, t.dst)))
                for run in range(t.runs):
                    for i in range(t.length):
                        to[t.dst.offset + run * t.dst.pitch + i] = from_.get(t.src.offset + run * t.src.pitch + i)
            if isinstance(step, Put):
                self.counters[step.peer, me, step.lane] += 1
        elif isinstance(step, Multicast):
            for peer in (*step.peers, me):  # the switch writes to the sender too
                self._execute(me, number, Copy(peer, False, step.transfers))
        elif isinstance(step, Accumulate):
            for s in step.sums:
                src, dst = itemsize(s.src_dtype), itemsize(s.dst_dtype)
                for run in range(s.runs):
                    for i in range(s.count):
                        value = tuple(self._load(me, number, r, run, i * src, src) for r in s.srcs)
                        if s.base is not None:
                            value = (self._load(me, number, s.base, run, i * 4, 4), *value)
                        if step.final:
                            value = ("final", value)
                        self._store(me, number, s.dst, run, i * dst, dst, value)
        elif isinstance(step, SwitchReduce):
            for s in step.sums:
                dst = itemsize(s.dst_dtype)
                for run in range(s.runs):
                    for i in range(s.count):
                        value = frozenset(self._held(peer, s.srcs[0], run, i) for peer in step.peers) - {None}
                        if s.base is not None:
                            value = (self._load(me, number, s.base, run, i * 4, 4), value)
                        if step.final:
                            value = ("final", value)
                        self._store(me, number, s.dst, run, i * dst, dst, value)
        else:
            raise NotImplementedError(step)

    def _held(self, peer: int, region: Region, run: int, element: int) -> Byte:
        """What the switch reads of a rank; None for the zeros of a place that was never written."""
        memory = self._buffer(peer, 0, region.buffer, region.index)
        start = region.offset + run * region.pitch + element * 4
        if not any(start + byte in memory for byte in range(4)):
            return None
        return self._read(memory, start, 4)

    def _load(self, me: int, number: int, region: Region, run: int, offset: int, size: int) -> Byte:
        memory = self._buffer(me, number, region.buffer, region.index)
        return self._read(memory, region.offset + run * region.pitch + offset, size)

    def _store(self, me: int, number: int, region: Region, run: int, offset: int, size: int, value: Byte) -> None:
        memory = self._buffer(me, number, region.buffer, region.index)
        self._write(memory, region.offset + run * region.pitch + offset, size, value)

    # Results -------------------------------------------------------------------------------------

    def _finish(self, position: int) -> None:
        """Checks the result of a collective as soon as the rank has ended it."""
        for number in range(self.repeats):
            if (position, number) in self.checked or self.left[position, number]:
                continue
            self.checked.add((position, number))
            if self.collective == "all_gather":
                self._check_storage(position, number)
            else:
                self._check_outputs(position, number)

    def _check_storage(self, position: int, number: int) -> None:
        memory = self._buffer(position, number, Buffer.STORAGE, 0)
        for index, p in enumerate(self.parameters):
            size = itemsize(p.dtype)
            for element in range(p.numel):
                found = self._read(memory, self.layout.offsets[index] + element * size, size)
                if found != ("p", number, index, element):
                    raise WrongError(f"position {position}, {p.name}[{element}] holds {found}")

    def _check_outputs(self, position: int, number: int) -> None:
        team = self.compiled.context(self.unit.name, self.ranks[0]).team
        node, _ = team.seat(position)
        for index, p in enumerate(self.parameters):
            if p.grad_dtype is None:
                continue
            table, size = shard(p, self.size), itemsize(p.out_dtype)
            memory = self._buffer(position, number, Buffer.OUT, index)
            run = int(table.run[position])
            for row in range(table.outer):
                for column in range(run):
                    element = row * table.pitch + int(table.offset[position]) + column
                    sums = [
                        tuple(("g", number, rank, index, element) for rank in team.grid[(node - turn) % team.nodes])
                        for turn in range(team.nodes)
                    ]
                    want, others = sums[0], sums[1:]
                    if self.unit.name in self.compiled.spread:  # the switch's order is its own
                        many = team.per_node
                        others = [frozenset(others[at : at + many]) for at in range(0, len(others), many)]
                    for other in others:
                        want = (want, other)
                    want = ("final", want)
                    found = self._read(memory, (row * run + column) * size, size)
                    if found != want:
                        raise WrongError(f"position {position}, {p.name}[{element}] is {found}, not {want}")
