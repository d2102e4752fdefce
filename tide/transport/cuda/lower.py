"""From a program to driver calls: the passes that prepare a :class:`~tide.transport.cuda.lowered.Lowered`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from tide.transport.cuda.chains import Chain, cast_chains
from tide.transport.cuda.copies import CopyArrays, CopyStep
from tide.transport.cuda.lowered import Awaited, Crossing, Lowered
from tide.transport.cuda.operations import (
    Device,
    MemoryOperation,
    MemoryOperations,
    Operation,
    copy_step,
    fixed_call,
)
from tide.transport.cuda.peers import Peers
from tide.transport.cuda.staging import Staging
from tide.transport.cuda.tables import LaunchSet, accumulate_jobs, chain_job, place_jobs, switch_jobs
from tide.transport.cuda.wire import Channel, Tally, Wire, segments
from tide.transport.cuda.words import Counters, check_distance


def lower(program: Program, binding: Binding, peers: Peers, device: Device) -> Lowered:
    """Prepares a program of one unit.

    Parameters
    ----------
    program : Program
        This rank's.
    binding : Binding
        Unit, slot and ranks; its tensors are not looked at.
    peers : Peers
        The order of issue, and the number of signals that a put of theirs carries.
    device : Device
        Driver, streams, arenas, counters.
    """
    return _Lowering(program, binding, device, peers).run()


class _Given(NamedTuple):
    """A signal to oneself: its stream, and its event, or the counter that reaches its total then."""

    stream: int
    event: int
    counter: int | None = None


#: Memory that belongs to the caller; steps that touch it wait for what the caller did before.
_CALLERS = frozenset(Buffer) - ARENA


class _Lowering:
    def __init__(self, program: Program, binding: Binding, device: Device, peers: Peers) -> None:
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
        self.memory = MemoryOperations(device, sum(isinstance(s, Signal | Wait | Put) for _, _, s in program.steps()))
        self.tally, self.order = Tally(peers.given, program.position), peers.order
        self.waiting: tuple[int, Channel, list[tuple[int, int, Channel]]] | None = None  # stream, first one, all
        self.waits = 0  # calls of NCCL's wait
        self.totals: dict[int, int] = {}
        self.given: dict[Lane, list[_Given]] = {}
        self.chains: dict[tuple[str, int], Chain] = {}  # by stream and index of the first step
        self.chained: dict[tuple[str, int], int | None] = {}  # the other steps; counter that tells of a signal
        self.taken: dict[Lane, int] = {}
        self.lasts: dict[str, int] = {}  # by stream: event of its last step, where that is a signal to oneself
        self.awaited: set[int] = set()  # events that another stream of this call waits for
        self.batches: list[tuple[int, int, CopyStep]] = []  # place among the operations, stream, copies

    def run(self) -> Lowered:
        out, program = self.out, self.program
        out.name = f"tide::{program.collective}/{self.binding.unit}"
        out.streams = [self.device.stream(stream.name) for stream in program.streams]
        for stream, handle in zip(program.streams, out.streams, strict=True):
            if not stream.steps:  # a claim that waits for no peer: it ends when the slot has been vacated
                self.append(self.gate(handle))
        if self.device.counters is not None:
            self.chain(self.device.counters)
        for number, index in self.order:
            stream, handle = program.streams[number], out.streams[number]
            if index == stream.released and stream.name in program.release:
                self.append(self.released(handle))
            self.step(stream.name, handle, index, stream.steps[index])
        self.flush()
        self.tally.finish()
        self.copies.finish()
        for place, handle, which in self.batches:
            out.operations[place] = copy_step(self.device, self.copies, which, handle)
        for stream, handle in zip(program.streams, out.streams, strict=True):
            reads = stream.name in program.release and stream.released is None
            if reads or not self.followed(stream.name):
                out.ends.append((handle, reads))
        out.operations.insert(0, self.memory.advance())
        out._keys = sorted(self.bases.tensors, key=lambda key: key[0].value)
        out.indices = sorted({awaited.index for awaited in out.awaited})
        return out

    # Steps -------------------------------------------------------------------------------------

    def step(self, name: str, stream: int, index: int, step: Step) -> None:
        self.lasts.pop(name, None)
        if name not in self.gated and (self.program.uses_slot or self.touches(step)):
            self.gated.add(name)
            if not self.follows(step):
                self.append(self.gate(stream))
        if (name, index) in self.chained:
            if isinstance(step, Signal):
                self.given.setdefault(step.lane, []).extend([_Given(stream, 0, self.chained[name, index])] * step.count)
        elif isinstance(step, Signal):
            self.signal(stream, step)
            if step.peer == self.program.position and not self.words.credit(step.lane):
                self.lasts[name] = self.given[step.lane][-1].event
        elif isinstance(step, Wait):
            self.wait(name, stream, index, step)
        elif isinstance(step, Copy):
            self.copy(stream, step.transfers, self.rank_of(step.peer), step.pull)
        elif isinstance(step, Multicast):
            for rank in self.reached(step):
                self.copy(stream, step.transfers, rank, False)
        elif isinstance(step, Put):
            if (wire := self.wire_to(step.peer)) is not None:
                self.put(wire, stream, step)
            else:
                self.copy(stream, step.transfers, self.rank_of(step.peer), False)
                self.signal(stream, Signal(step.peer, step.lane))
        elif isinstance(step, Place | Accumulate | SwitchReduce):
            self.launch(name, index, stream, step)
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

    def follows(self, step: Step) -> bool:
        """Whether a step waits for another stream of this call, which has passed the gate already."""
        if not isinstance(step, Wait) or step.peer != self.program.position:
            return False
        return not self.words.credit(step.lane) and bool(self.given.get(step.lane))

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

    def followed(self, name: str) -> bool:
        """Whether the end of another stream implies the end of this one.

        It does if this one ends with a signal to oneself, by an event, that another one waits for: all that was
        issued here comes before the event. The last of a row of streams that follow each other is followed by none.
        """
        return self.lasts.get(name) in self.awaited

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
            self.given.setdefault(step.lane, []).extend([_Given(stream, event)] * step.count)
            self.append(fixed_call(self.device, self.driver.event_record, "event record", event, stream))
            if self.words.credit(step.lane):
                last = self.device.last(self.binding.slot, step.lane)
                self.append(fixed_call(self.device, self.driver.event_record, "event record", last, stream))
            return
        rank = self.rank_of(step.peer)
        wire = self.wire_to(step.peer)
        if wire is not None and wire.words is None:
            self.append(wire.signal(stream, rank, step.count, self.channel(wire, step.lane)))
            return
        index, offset = self.words.outgoing(self.binding.unit, step.lane, rank, self.program.in_slot)
        if wire is not None:
            self.append(wire.word(stream, rank, step.count, index, offset, self.channel(wire, step.lane)))
            return
        self.memory_operation(stream, MemoryOperation(False, index, step.count, 0, self.device.arenas[rank] + offset))

    def wait(self, name: str, stream: int, number: int, step: Wait) -> None:
        check_distance(step.count, f"{self.program.collective}: wait on {step.lane.name}")
        if step.peer == self.program.position:
            self.wait_for_oneself(name, stream, step)
            return
        wire = self.wire_to(step.peer)
        if wire is not None and wire.words is None:
            self.wait_for_wire(wire, name, stream, number, step)
            return
        rank = self.rank_of(step.peer)
        index, word = self.words.incoming(self.binding.unit, step.lane, rank, self.program.in_slot)
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
            source, event, counter = given[taken - 1]
            if source == stream:
                return
            if counter is not None:
                assert self.device.counters is not None
                address = self.device.counters.address(counter)
                self.memory_operation(stream, MemoryOperation(True, counter, 0, 0, address, own=True))
                return
            self.awaited.add(event)
        self.append(fixed_call(self.device, self.driver.stream_wait_event, "event wait", stream, event, 0))

    # Steps between nodes ---------------------------------------------------------------------------

    def wire_to(self, position: int) -> Wire | None:
        """The wire, if the position is on another node and copies do not reach it."""
        wire = self.device.wire
        return wire if wire is not None and wire.crosses(self.rank_of(position)) else None

    def channel(self, wire: Wire, lane: Lane) -> Channel:
        """Where the unit's signals of a lane go."""
        return wire.channel(self.binding.unit, lane, self.program.in_slot)

    def put(self, wire: Wire, stream: int, step: Put) -> None:
        """Each contiguous segment as a put with a signal of its own; then the flag word, where that is the signal."""
        start = self.bases.start
        own = self.device.arenas[self.device.rank]
        pieces = [
            (own + start(piece.src) + piece.src_offset, start(piece.dst) + piece.dst_offset, piece.length)
            for piece in segments(step.transfers)
        ]
        channel, self.out.puts = self.channel(wire, step.lane), True
        self.append(wire.put(stream, self.rank_of(step.peer), pieces, channel))
        if wire.words is not None:
            self.signal(stream, Signal(step.peer, step.lane))

    def wait_for_wire(self, wire: Wire, name: str, stream: int, number: int, step: Wait) -> None:
        """Neighbouring waits of a stream on one communicator and context share a call."""
        channel = self.channel(wire, step.lane)
        rank, count = self.rank_of(step.peer), self.tally.take(step.peer, step.lane, step.count)
        if self.waiting is None or self.waiting[0] != stream or self.waiting[1][:2] != channel[:2]:
            self.flush()
            self.waiting = stream, channel, []
            self.waits += 1
        self.waiting[2].append((count, rank, channel))
        self.out.crossings.append(Crossing(name, number, step.lane, rank, count, self.waits - 1))

    def copy(self, stream: int, transfers: Sequence[Any], rank: int, pull: bool) -> None:
        which = self.copies.add(self.bases, transfers, rank, pull)
        self.flush()
        if self.batches:
            place, last_stream, last = self.batches[-1]
            # Nothing was issued since the copies before these, on the same stream: one call carries both.
            if place == len(self.out.operations) - 1 and last_stream == stream:
                joined = replace(last, last=which.last, last_2d=which.last_2d)
                self.batches[-1] = place, stream, joined
                return
        self.batches.append((len(self.out.operations), stream, which))
        self.append(_nothing)  # its arguments are arrays that do not exist yet

    def chain(self, counters: Counters) -> None:
        """Chooses Place steps that share a launch, as far as there are words to count in."""
        for stream in self.program.streams:
            for chain in cast_chains(self.program, stream):
                told = [signals for signals in chain.signals if signals]
                if (taken := counters.take(len(told))) is None:
                    return
                self.out.counters += taken
                self.chains[stream.name, chain.places[0]] = chain
                self.chained.update({(stream.name, index): None for index in chain.places[1:]})
                for signals, counter in zip(told, taken, strict=True):
                    self.chained.update({(stream.name, index): counter for index in signals})

    def launch(self, name: str, index: int, stream: int, step: Place | Accumulate | SwitchReduce) -> None:
        if name not in self.sets:
            self.sets[name] = LaunchSet(self.driver, self.device.torch_device)
            self.out._starts[name] = []
            self.out._staging[name] = Staging(self.driver, self.device.torch_device)
            self.append(self.upload(name, stream))
        if (chain := self.chains.get((name, index))) is not None:
            self.launch_chain(name, stream, chain)
            return
        if isinstance(step, Place):
            jobs = place_jobs(step, self.bases, self.device.place)
        elif isinstance(step, SwitchReduce):
            jobs = switch_jobs(step, self.bases, self.reached(step), self.device.accumulate_ctas)
        else:
            jobs = accumulate_jobs(step, self.bases, self.device.accumulate_ctas)
        number, starts = self.sets[name].add(jobs), self.out._starts[name]

        def issue() -> None:
            for start in starts[number]:
                start(stream)

        self.append(issue)

    def launch_chain(self, name: str, stream: int, chain: Chain) -> None:
        """Several steps in one launch, which adds one for each program to the counter of every step."""
        counters, launches, starts = self.device.counters, self.sets[name], self.out._starts[name]
        assert counters is not None
        told = [self.chained[name, signals[0]] if signals else None for signals in chain.signals]
        addresses = [0 if counter is None else counters.address(counter) for counter in told]
        number = launches.add([chain_job(chain.steps, [*addresses, 0], self.bases, self.device.place)])
        totals, used = counters.totals, [counter for counter in told if counter is not None]

        def issue() -> None:
            for start in starts[number]:
                start(stream)
            programs = launches.programs(number)
            for counter in used:
                totals[counter] += programs

        self.append(issue)

    # Operations --------------------------------------------------------------------------------

    def gate(self, stream: int) -> Operation:
        """Waits for what the caller did before, and for the slot's last users on this rank."""
        out, wait, check = self.out, self.driver.stream_wait_event, self.driver.check

        def issue() -> None:
            ticket = out.ticket
            if ticket.gate and (result := wait(stream, ticket.gate, 0)):
                check(result, "wait for the slot's last readers")
            for event in out.unawaited:
                if result := wait(stream, event, 0):
                    check(result, "wait for the slot's last collective")
            if result := wait(stream, ticket.entry, 0):
                check(result, "wait for the caller's stream")

        return issue

    def released(self, stream: int) -> Operation:
        """Notes that the stream reads no gradient from here on."""
        out, record = self.out, self.device.record

        def issue() -> None:
            out.ticket.midway.append(record(stream))

        return issue

    def upload(self, name: str, stream: int) -> Operation:
        """Brings the tables of a stream to the device, if they changed."""
        out = self.out

        def issue() -> None:
            staging = out._staging[name]
            if staging.dirty:
                staging.send(out.sets[name].memory.data_ptr(), stream, out.ticket)

        return issue

    def memory_operation(self, stream: int, operation: MemoryOperation) -> None:
        """Collects neighbouring waits and signals of a stream."""
        if self.pending is not None and self.pending[0] == stream and self.waiting is None:
            self.pending[1].append(operation)
            return
        self.flush()
        self.pending = stream, [operation]

    def flush(self) -> None:
        if self.pending is not None:
            (stream, operations), self.pending = self.pending, None
            self.out.operations += self.memory.calls(stream, operations)
        if self.waiting is not None:
            (stream, _, awaited), self.waiting = self.waiting, None
            assert self.device.wire is not None
            wait, out, record = self.device.wire.wait(stream, awaited), self.out, self.device.record

            def issue() -> None:
                wait()
                out.ticket.marks.append(record(stream))

            self.out.operations.append(issue)


def _nothing() -> None:
    """Holds the place of an operation that is built last."""
