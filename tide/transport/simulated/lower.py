"""From the steps of a program to what the machine executes: addresses bound, data steps cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from tide.compiler.dtypes import itemsize
from tide.compiler.signals import SLOT_LANES
from tide.compiler.steps import (
    Accumulate,
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
from tide.errors import PlanError
from tide.transport.simulated.machine import (
    EndItem,
    Event,
    HoldItem,
    Item,
    Machine,
    SignalItem,
    WaitItem,
    Work,
)
from tide.transport.simulated.memory import Access, Call
from tide.transport.simulated.parts import Add, Convert, Deliver, Fan, Fetch, Move, Part, Site, Source, Target, Zeros

T = TypeVar("T")


def cuts(runs: int, count: int, pieces: int, random: Random) -> list[tuple[int, int, int, int]]:
    """Cuts ``runs`` × ``count`` into up to ``pieces``: (first run, runs, first element, elements) each.

    Several runs are cut between runs, a single one within.
    """
    length = runs if runs > 1 else count
    points = sorted(random.sample(range(1, length), min(pieces, length) - 1)) if length > 1 else []
    ends = zip([0, *points], [*points, length], strict=True)
    if runs > 1:
        return [(first, last - first, 0, count) for first, last in ends]
    return [(0, 1, first, last - first) for first, last in ends]


def moved(region: Region, run: int, element: int, size: int) -> Region:
    """The region from a run and an element of ``size`` bytes on."""
    return Region(region.buffer, region.index, region.offset + run * region.pitch + element * size, region.pitch)


def enqueue(
    machine: Machine,
    call: Call,
    program: Program,
    after: Sequence[Event] = (),
    pieces: int = 3,
    random: Random | None = None,
) -> tuple[Event, Event]:
    """Appends a program to the streams of its rank.

    Parameters
    ----------
    machine : Machine
        Where it will run.
    call : Call
        What its symbolic names mean.
    program : Program
        The steps.
    after : sequence of Event
        Events that each of its streams waits for first. A reduce-scatter that uses the slot then finds it empty.
    pieces : int
        Parts into which a data step is cut, about.
    random : Random, optional
        Decides where.

    Returns
    -------
    tuple of Event
        The end of all streams, and the end of those that read gradients.

    Raises
    ------
    PlanError
        If a step leaves its buffer or names a rank that it cannot reach.
    """
    call.in_slot = program.in_slot
    lowering = _Lowering(machine, call, pieces, random or Random(0))
    what = f"{program.collective} of {call.unit.name!r} on rank {call.rank}"
    end = machine.event(f"end of {what}", len(program.streams))
    released = machine.event(
        f"last read of gradients of {what}", sum(stream.name in program.release for stream in program.streams)
    )
    if program.in_slot:
        begun = machine.event(f"begin of {what}", 1)
        begun.action = partial(machine.memory.vacate, call)
        items = machine.actor(call.rank, f"slot {call.slot}").items
        items += [HoldItem(Site(call, "slot", 0, None), event) for event in after]
        items.append(EndItem(begun))
        after = [begun]
    for stream in program.streams:
        items = machine.actor(call.rank, stream.name).items
        items += [HoldItem(Site(call, stream.name, 0, None), event) for event in after]
        reads = stream.name in program.release
        for index, step in enumerate(stream.steps):
            if reads and index == stream.released:
                items.append(EndItem(released))
            items += lowering.lower(Site(call, stream.name, index, step), step)
        if reads and (stream.released is None or stream.released == len(stream.steps)):
            items.append(EndItem(released))
        items.append(EndItem(end))
    return end, released


class _Lowering:
    """Lowers the steps of one call."""

    def __init__(self, machine: Machine, call: Call, pieces: int, random: Random) -> None:
        self.machine, self.call, self.pieces, self.random = machine, call, pieces, random
        self.memory = machine.memory
        self.position = call.group.index(call.rank)
        self.team = machine.compiled.context(call.unit.name, call.rank).team

    def lower(self, site: Site, step: Step) -> list[Item]:
        """Items of one step."""
        try:
            return self._lower(site, step)
        except PlanError as error:
            raise PlanError(f"{site}: {error}") from None

    def _lower(self, site: Site, step: Step) -> list[Item]:
        if isinstance(step, Signal):
            counter = self.counter(step.lane, step.peer, self.position)
            return [SignalItem(site, counter, step.count)]
        if isinstance(step, Wait):
            counter = self.counter(step.lane, self.position, step.peer)
            return [WaitItem(site, counter, step.count)]
        if isinstance(step, Put):
            return self.put(site, step)
        if isinstance(step, Place):
            parts = self.place(site, step)
        elif isinstance(step, Copy):
            parts = self.copy(site, step)
        elif isinstance(step, Multicast):
            parts = self.multicast(site, step)
        elif isinstance(step, Accumulate):
            parts = self.accumulate(site, step)
        else:
            parts = self.switch_reduce(site, step)
        return [Work(site, parts)] if parts else []

    # Positions and regions ---------------------------------------------------------------------

    def rank(self, position: int) -> int:
        """World rank of a position."""
        if not 0 <= position < len(self.call.group):
            raise PlanError(f"there is no position {position} in a group of {len(self.call.group)}")
        return self.call.group[position]

    def counter(self, lane: Lane, receiver: int, source: int) -> int:
        """Counter of a position's signals at another; both may be this rank's."""
        rank, giver, unit = self.rank(receiver), self.rank(source), self.call.unit.name
        words = self.machine.compiled.arena.words.units[unit]
        word = words.word(self.team, lane, receiver, source, self.call.in_slot)
        kept = f"slot {self.call.slot}" if lane in SLOT_LANES else f"unit {unit!r}"
        return self.machine.counter(rank, word, lane, f"rank {giver} on lane {lane.name} of {kept}")

    def near(self, position: int) -> int:
        """World rank of a position that must be on this node."""
        rank, node_of = self.rank(position), self.machine.compiled.topology.node_of
        if node_of(rank) != node_of(self.call.rank):
            raise PlanError(f"rank {rank} is on another node, which only a put can reach")
        return rank

    def source(self, rank: int, region: Region, runs: int, length: int) -> Source:
        return Source(self.memory, self.call, Access(rank, region, runs, length))

    def target(self, rank: int, region: Region, runs: int, length: int) -> Target:
        return Target(self.memory, self.call, Access(rank, region, runs, length))

    def elements(self, kind: Callable[..., T], rank: int, region: Region, dtype: str, runs: int, count: int) -> T:
        """A typed source or target."""
        size = itemsize(dtype)
        if region.offset % size or (runs > 1 and region.pitch % size):
            raise PlanError(f"{region} is not aligned to elements of {dtype}")
        return kind(self.memory, self.call, Access(rank, region, runs, count * size), dtype, count)

    def transfers(self, transfers: Sequence[Transfer]) -> list[list[Transfer]]:
        """The same transfers, as the parts of one step."""
        each = -(-self.pieces // max(len(transfers), 1))
        small: list[Transfer] = []
        for transfer in transfers:
            for run, runs, first, length in cuts(transfer.runs, transfer.length, each, self.random):
                src, dst = moved(transfer.src, run, first, 1), moved(transfer.dst, run, first, 1)
                small.append(Transfer(src, dst, runs, length))
        return self.grouped(small)

    def grouped(self, small: list[T]) -> list[list[T]]:
        """Deals many small operations out to a few parts, at random."""
        if len(small) > self.pieces:
            self.random.shuffle(small)
        return [small[first :: self.pieces] for first in range(min(self.pieces, len(small)))]

    # Steps -------------------------------------------------------------------------------------

    def copy(self, site: Site, step: Copy) -> list[Part]:
        peer, me = self.near(step.peer), self.call.rank
        reader, writer = (peer, me) if step.pull else (me, peer)
        return [
            Move(
                site,
                tuple(
                    (self.source(reader, t.src, t.runs, t.length), self.target(writer, t.dst, t.runs, t.length))
                    for t in group
                ),
            )
            for group in self.transfers(step.transfers)
        ]

    def put(self, site: Site, step: Put) -> list[Item]:
        me, peer = self.call.rank, self.rank(step.peer)
        near: list[Part] = []
        far: list[Part] = []
        for group in self.transfers(step.transfers) or [[]]:
            fetch = Fetch(site, tuple(self.source(me, t.src, t.runs, t.length) for t in group))
            near.append(fetch)
            far.append(Deliver(fetch, tuple(self.target(peer, t.dst, t.runs, t.length) for t in group)))
        arrival = SignalItem(site, self.counter(step.lane, step.peer, self.position), 1)
        return [Work(site, near, self.machine.channel(me, peer), far, arrival)]

    def multicast(self, site: Site, step: Multicast) -> list[Part]:
        peers = [self.near(peer) for peer in step.peers]
        return [
            Fan(
                site,
                tuple(
                    (
                        self.source(self.call.rank, t.src, t.runs, t.length),
                        tuple(self.target(peer, t.dst, t.runs, t.length) for peer in peers),
                    )
                    for t in group
                ),
            )
            for group in self.transfers(step.transfers)
        ]

    def place(self, site: Site, step: Place) -> list[Part]:
        each = -(-self.pieces // max(len(step.casts), 1))
        small: list[Cast] = []
        for cast in step.casts:
            for run, runs, first, count in cuts(cast.runs, cast.count, each, self.random):
                src = moved(cast.src, run, first, itemsize(cast.src_dtype))
                dst = moved(cast.dst, run, first, itemsize(cast.dst_dtype))
                small.append(cast._replace(src=src, dst=dst, runs=runs, count=count))
        parts: list[Part] = []
        for group in self.grouped(small):
            pairs = tuple(
                (
                    self.elements(Source, self.call.rank, cast.src, cast.src_dtype, cast.runs, cast.count),
                    self.elements(Target, self.call.rank, cast.dst, cast.dst_dtype, cast.runs, cast.count),
                )
                for cast in group
            )
            same = all(cast.src_dtype == cast.dst_dtype for cast in group)
            parts.append(Move(site, pairs) if same else Convert(site, pairs))
        return parts

    def accumulate(self, site: Site, step: Accumulate) -> list[Part]:
        return self.sums(site, step.sums, step.final, [(self.call.rank, Source)])

    def sums(
        self, site: Site, sums: Sequence[Sum], final: bool, memories: Sequence[tuple[int, type[Source]]]
    ) -> list[Part]:
        """Parts of sums, whose sources lie in each of the given memories."""
        me = self.call.rank
        each = -(-self.pieces // max(len(sums), 1))
        parts: list[Part] = []
        for total in sums:
            for run, runs, first, count in cuts(total.runs, total.count, each, self.random):

                def part_of(
                    kind: Callable[..., T],
                    region: Region,
                    dtype: str,
                    rank: int = me,
                    run: int = run,
                    runs: int = runs,
                    first: int = first,
                    count: int = count,
                ) -> T:
                    region = moved(region, run, first, itemsize(dtype))
                    return self.elements(kind, rank, region, dtype, runs, count)

                sources = tuple(
                    part_of(kind, region, total.src_dtype, rank) for region in total.srcs for rank, kind in memories
                )
                base = None if total.base is None else part_of(Source, total.base, "float32")
                target = part_of(Target, total.dst, total.dst_dtype)
                parts.append(Add(site, sources, base, target, self.factors(final)))
        return parts

    def switch_reduce(self, site: Site, step: SwitchReduce) -> list[Part]:
        kinds = [(self.near(peer), Source if peer in step.holders else Zeros) for peer in step.peers]
        for total in step.sums:
            if len(total.srcs) != 1 or total.src_dtype != "float32":
                raise PlanError(f"the switch sums one float32 region of all ranks, not {total.src_dtype}")
        return self.sums(site, step.sums, step.final, kinds)

    def factors(self, final: bool) -> tuple[float, float] | None:
        """Scale and divisor of a final sum."""
        return (self.call.scale, self.call.divisor) if final else None
