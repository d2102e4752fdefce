"""From a program to driver calls: the passes that prepare a :class:`~tide.transport.cuda.lowered.Lowered`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tide.compiler.steps import (
    ARENA,
    Accumulate,
    Buffer,
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Signal,
    Step,
    SwitchReduce,
    Wait,
)
from tide.errors import CapabilityError, TransportError
from tide.transport.base import Binding
from tide.transport.cuda.bases import EVERYWHERE, Bases
from tide.transport.cuda.copies import CopyArrays
from tide.transport.cuda.lowered import Awaited, Lowered
from tide.transport.cuda.operations import (
    Device,
    MemoryOperation,
    Operation,
    copy_step,
    fixed_call,
    memory_operations,
)
from tide.transport.cuda.order import issue_order
from tide.transport.cuda.staging import Staging
from tide.transport.cuda.tables import LaunchSet, accumulate_jobs, place_jobs, switch_jobs
from tide.transport.cuda.words import check_distance


def lower(program: Program, binding: Binding, programs: Mapping[int, Program], device: Device) -> Lowered:
    """Prepares a program of one unit.

    Parameters
    ----------
    program : Program
        This rank's.
    binding : Binding
        Unit, slot and ranks; its tensors are not looked at.
    programs : mapping of int to Program
        Those of all positions, for the order of issue.
    device : Device
        Driver, streams, arenas, counters.
    """
    return _Lowering(program, binding, device).run(issue_order(programs, program.position))


#: Memory that belongs to the caller; steps that touch it wait for what the caller did before.
_CALLERS = frozenset(Buffer) - ARENA


class _Lowering:
    def __init__(self, program: Program, binding: Binding, device: Device) -> None:
        # Operations keep this object; the call's tensors must not live as long.
        self.program, self.binding, self.device = program, replace(binding, tensors={}), device
        self.driver, self.words = device.driver, device.words
        layout = device.words.arena
        arenas = dict(device.arenas)
        if device.multicast is not None:
            arenas[EVERYWHERE] = device.multicast
        self.bases = Bases(layout, binding.slot, arenas, device.rank, program.in_slot)
        self.copies = CopyArrays()
        self.sets: dict[str, LaunchSet] = {}
        self.out = Lowered(program, device, self.bases, self.copies, self.sets)
        self.gated: set[str] = set()
        self.pending: tuple[int, list[MemoryOperation]] | None = None
        self.totals: dict[int, int] = {}
        self.given: dict[Lane, list[tuple[int, int]]] = {}  # self-signals: (stream, event) of each
        self.taken: dict[Lane, int] = {}
        self.late: list[Operation] = []  # once the arrays exist

    def run(self, order: Sequence[tuple[int, int]]) -> Lowered:
        out, program = self.out, self.program
        out.name = f"tide::{program.collective}/{self.binding.unit}"
        out.streams = [(stream.name, self.device.stream(stream.name)) for stream in program.streams]
        for stream, (_, handle) in zip(program.streams, out.streams, strict=True):
            if not stream.steps:  # a claim that waits for no peer: it ends when the slot has been vacated
                self.append(self.gate(handle))
        for number, index in order:
            stream, handle = program.streams[number], out.streams[number][1]
            if index == stream.released and stream.name in program.release:
                self.append(self.released(handle))
            self.step(stream.name, handle, index, stream.steps[index])
        self.flush()
        self.copies.finish()
        for build in self.late:
            build()
        out._keys = list(self.bases.tensors)
        out.indices = sorted({awaited.index for awaited in out.awaited})
        return out

    # Steps -------------------------------------------------------------------------------------

    def step(self, name: str, stream: int, index: int, step: Step) -> None:
        if name not in self.gated and (self.program.uses_slot or self.touches(step)):
            self.gated.add(name)
            self.append(self.gate(stream))
        if isinstance(step, Signal):
            self.signal(stream, step)
        elif isinstance(step, Wait):
            self.wait(name, stream, index, step)
        elif isinstance(step, Copy):
            self.copy(stream, step.transfers, self.rank_of(step.peer), step.pull)
        elif isinstance(step, Multicast):
            for rank in self.reached(step):
                self.copy(stream, step.transfers, rank, False)
        elif isinstance(step, Put):
            self.copy(stream, step.transfers, self.rank_of(step.peer), False)
            self.signal(stream, Signal(step.peer, step.lane))
        elif isinstance(step, Place | Accumulate | SwitchReduce):
            self.launch(name, stream, step)
        else:
            raise TransportError(f"the CUDA transport has no step {type(step).__name__}")

    def reached(self, step: Multicast | SwitchReduce) -> list[int]:
        """Whose arenas to reach: all at once by the multicast address, or one by one in its stead."""
        if self.device.stand_in:
            return [self.rank_of(peer) for peer in step.peers]
        if self.device.multicast is None:
            raise CapabilityError(
                f"{self.program.collective} of unit {self.binding.unit!r}: the program uses {type(step).__name__}, "
                "but the transport was opened without a multicast address; compile the plan without multicast, or "
                "open it with Settings(multicast='standin')"
            )
        return [EVERYWHERE]

    def touches(self, step: Step) -> bool:
        """Whether a step reads or writes memory of the caller."""
        if isinstance(step, Place):
            return True
        if isinstance(step, Accumulate | SwitchReduce):
            regions = [region for item in step.sums for region in (item.dst, *item.srcs)]
        elif isinstance(step, Copy | Put):
            regions = [region for transfer in step.transfers for region in (transfer.src, transfer.dst)]
        else:
            return False
        return any(region.buffer in _CALLERS for region in regions)

    def append(self, operation: Operation) -> None:
        self.flush()
        self.out.operations.append(operation)

    def rank_of(self, position: int) -> int:
        return self.binding.ranks[position]

    def signal(self, stream: int, step: Signal) -> None:
        check_distance(step.count, f"{self.program.collective}: signal on {step.lane.name}")
        if step.peer == self.program.position:
            event = self.driver.new_event()
            self.out._events.append(event)
            self.given.setdefault(step.lane, []).extend([(stream, event)] * step.count)
            self.append(fixed_call(self.device, self.driver.event_record, "event record", event, stream))
            if self.words.credit(step.lane):
                last = self.device.last(self.binding.slot, step.lane)
                self.append(fixed_call(self.device, self.driver.event_record, "event record", last, stream))
            return
        rank = self.rank_of(step.peer)
        address = self.device.arenas[rank] + self.words.outgoing(self.binding.slot, step.lane)
        index = self.words.index(self.binding.slot, step.lane, rank)
        self.memory_operation(stream, MemoryOperation(False, index, step.count, 0, address))

    def wait(self, name: str, stream: int, number: int, step: Wait) -> None:
        check_distance(step.count, f"{self.program.collective}: wait on {step.lane.name}")
        if step.peer == self.program.position:
            self.wait_for_oneself(name, stream, step)
            return
        rank, slot = self.rank_of(step.peer), self.binding.slot
        index, word = self.words.index(slot, step.lane, rank), self.words.incoming(slot, step.lane, rank)
        total = self.totals[index] = self.totals.get(index, 0) + step.count
        self.out.awaited.append(Awaited(name, number, step.lane, rank, index, word, total))
        address = self.device.arenas[self.device.rank] + word
        credit = self.words.credit(step.lane)
        self.memory_operation(stream, MemoryOperation(True, index, step.count, credit, address))

    def wait_for_oneself(self, name: str, stream: int, step: Wait) -> None:
        taken = self.taken[step.lane] = self.taken.get(step.lane, 0) + step.count
        taken -= self.words.credit(step.lane)
        given = self.given.get(step.lane, [])
        if taken > len(given):
            raise TransportError(f"{name}: waits for {step.lane.name} of itself before it is signalled")
        if taken <= 0:  # the credit is what an earlier program signalled last, or nothing
            event = self.device.last(self.binding.slot, step.lane)
        else:
            source, event = given[taken - 1]
            if source == stream:
                return
        self.append(fixed_call(self.device, self.driver.stream_wait_event, "event wait", stream, event, 0))

    def copy(self, stream: int, transfers: Sequence[Any], rank: int, pull: bool) -> None:
        which = self.copies.add(self.bases, transfers, rank, pull)
        self.flush()
        place = len(self.out.operations)

        def build() -> None:
            self.out.operations[place] = copy_step(self.device, self.copies, which, stream)

        self.append(_nothing)  # its arguments are arrays that do not exist yet
        self.late.append(build)

    def launch(self, name: str, stream: int, step: Place | Accumulate | SwitchReduce) -> None:
        if name not in self.sets:
            self.sets[name] = LaunchSet(self.driver, self.device.torch_device)
            self.out._starts[name] = []
            self.out._staging[name] = Staging(self.driver, self.device.torch_device)
            self.append(self.upload(name, stream))
        if isinstance(step, Place):
            jobs = place_jobs(step, self.bases, self.device.place)
        elif isinstance(step, SwitchReduce):
            jobs = switch_jobs(step, self.bases, self.reached(step), self.device.accumulate)
        else:
            jobs = accumulate_jobs(step, self.bases, self.device.accumulate)
        number, starts = self.sets[name].add(jobs), self.out._starts[name]

        def issue() -> None:
            for start in starts[number]:
                start(stream)

        self.append(issue)

    # Operations --------------------------------------------------------------------------------

    def gate(self, stream: int) -> Operation:
        """Waits for what the caller did before, and for the slot's last users on this rank."""
        out, wait, check = self.out, self.driver.stream_wait_event, self.driver.check

        def issue() -> None:
            if out.vacated and (result := wait(stream, out.vacated, 0)):
                check(result, "wait for the slot's last readers")
            for event in out.unawaited:
                if result := wait(stream, event, 0):
                    check(result, "wait for the slot's last collective")
            if result := wait(stream, out.entry, 0):
                check(result, "wait for the caller's stream")

        return issue

    def released(self, stream: int) -> Operation:
        """Notes that the stream reads no gradient from here on."""
        out = self.out

        def issue() -> None:
            out.released.append(out.record(stream))

        return issue

    def upload(self, name: str, stream: int) -> Operation:
        """Brings the tables of a stream to the device, if they changed."""
        out = self.out

        def issue() -> None:
            staging = out._staging[name]
            if staging.dirty:
                staging.send(out.sets[name].memory.data_ptr(), stream)

        return issue

    def memory_operation(self, stream: int, operation: MemoryOperation) -> None:
        """Collects neighbouring waits and signals of a stream."""
        if self.pending is not None and self.pending[0] == stream:
            self.pending[1].append(operation)
            return
        self.flush()
        self.pending = stream, [operation]

    def flush(self) -> None:
        if self.pending is None:
            return
        (stream, operations), self.pending = self.pending, None
        self.out.operations += memory_operations(self.device, stream, operations)


def _nothing() -> None:
    """Holds the place of an operation that is built last."""
