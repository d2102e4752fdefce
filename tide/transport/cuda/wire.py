"""Steps between nodes as NCCL's one-sided calls: which context and signal each lane has, and the operations.

A put moves one contiguous segment and then adds one to a counter that the receiver keeps for (sender, signal index,
context); a wait consumes as many as it says. NCCL stages a signal's value in memory of its context, so a context may be
used by one stream at a time: each lane has its own, as a lane is signalled from one stream of a program. That also
keeps the puts and signals of a lane in order, and lets lanes overtake each other.

Each unit has signal indices of its own, as it has words within a node (:mod:`tide.compiler.signals`): what is put for
one unit never answers a wait of another. NCCL keeps a counter for each index, context and rank.

NCCL runs the operations of one communicator in the order of their issue, also those of different streams: a wait then
holds back puts that were issued later. The order in which steps are issued (:mod:`tide.transport.cuda.order`) makes
that safe, as every wait comes after its signal, over all ranks; more than one communicator makes it cheaper.

Instead of NCCL's signals, flag words may be put (`Wire.words`): four bytes, as a put of their own after the data. The
stream has then seen the data out, and the waits are the same as within a node: no operation of NCCL's, so nothing is
held back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tide.compiler.place import ArenaLayout
from tide.compiler.schedule.chunks import CHUNK_ALIGNMENT
from tide.compiler.signals import GATHER_FAR, SCATTER_FAR
from tide.compiler.steps import ARENA, Buffer, Lane, Program, Put, Signal, Transfer
from tide.errors import InputError, TransportError
from tide.topology import Topology
from tide.transport.cuda.nccl import UINT8, SignalsAwaited
from tide.transport.cuda.window import WireNeeds
from tide.transport.cuda.words import VALUES, Words

#: Lanes that may cross nodes, and the context of each. Partial sums go to their owners or are spread over the owner's
#: node, by the same stream of a unit's program: the two kinds of lanes share a context. Their credits come from
#: different streams.
CONTEXTS = {
    Lane.FREE: 0,
    Lane.WIRE: 1,
    Lane.PARTIAL: 2,
    Lane.WIRE_CREDIT: 3,
    Lane.SPREAD: 2,
    Lane.SPREAD_CREDIT: 4,
}
LANES = tuple(CONTEXTS)
#: The communicator of each lane, by how many there are: one, one for each collective, one for each kind of signal.
PLACES = {
    1: dict.fromkeys(LANES, 0),
    2: {lane: int(lane not in (Lane.FREE, Lane.WIRE)) for lane in LANES},
    4: {**CONTEXTS, Lane.SPREAD_CREDIT: 3},
}
COMMUNICATORS = tuple(PLACES)
#: Signal indices at most: NCCL keeps a counter for each of them, rank and context.
MOST_SIGNALS = 1 << 14

#: Bytes between two segments of a partial sum that belong to nobody.
_PADDING = 4 * CHUNK_ALIGNMENT


class Channel(NamedTuple):
    """Where a lane's puts and signals go: number of the communicator, context, signal index."""

    communicator: int
    context: int
    signal: int


class Segment(NamedTuple):
    """A contiguous piece of a put; offsets are bytes from the beginning of the buffers."""

    src: Buffer
    src_offset: int
    dst: Buffer
    dst_offset: int
    length: int


def crossing_units(units: Sequence[tuple[tuple[int, ...], ...]], topology: Topology) -> bool:
    """Whether a shard group among ``units`` (each a unit's groups of world ranks) spans nodes."""
    return any(len({topology.node_of(rank) for rank in group}) > 1 for groups in units for group in groups)


def _per_unit(layout: ArenaLayout) -> int:
    """Signal indices of a unit: two for its all-gather, two for each form of its reduce-scatter."""
    return 2 + 2 * max((unit.forms for unit in layout.words.units.values()), default=0)


def needs_of(layout: ArenaLayout, communicators: int, words: bool = False) -> WireNeeds:
    """What the communicators have to offer for a plan.

    Raises
    ------
    InputError
        If the plan has more units than there can be signal indices.
    """
    signals = 1 if words else len(layout.words.units) * _per_unit(layout)
    if signals > MOST_SIGNALS:
        raise InputError(
            f"the plan has {len(layout.words.units)} units, and puts between nodes need {_per_unit(layout)} signal "
            f"indices for each: more than {MOST_SIGNALS}. Open it with Settings(wire_signals='word'), which needs none"
        )
    return WireNeeds(1 + max(CONTEXTS.values()), signals, communicators, strict=words)


def segments(transfers: Sequence[Transfer]) -> list[Segment]:
    """The contiguous pieces of a put, as few as can be.

    Both ends derive the number of signals from it, so it looks at nothing but the program. Between the segments of a
    partial sum lies padding that nobody else uses: it travels along, and the sum is one piece.
    """
    found: list[Segment] = []
    for src, dst, runs, length in transfers:
        if src.buffer not in ARENA or dst.buffer not in ARENA:
            raise TransportError(f"a put from {src.buffer.value} to {dst.buffer.value}: both have to be in the arena")
        if runs > 1 and src.pitch == dst.pitch == length:
            runs, length = 1, runs * length
        for run in range(runs):
            piece = Segment(src.buffer, src.offset + run * src.pitch, dst.buffer, dst.offset + run * dst.pitch, length)
            last = found[-1] if found else None
            if last is not None and (gap := _gap(last, piece)) is not None:
                found[-1] = last._replace(length=last.length + gap + length)
            else:
                found.append(piece)
    return found


def _gap(last: Segment, piece: Segment) -> int | None:
    """Bytes between two pieces that may travel as one; None if they may not."""
    if (last.src, last.dst) != (piece.src, piece.dst):
        return None
    gap = piece.src_offset - last.src_offset - last.length
    if gap != piece.dst_offset - last.dst_offset - last.length:
        return None
    allowed = _PADDING if (piece.src, piece.dst) == (Buffer.PARTIAL, Buffer.WIRE) else 1
    return gap if 0 <= gap < allowed else None


def signals_given(program: Program, to: int) -> dict[Lane, list[int]]:
    """For each lane, how many NCCL signals stand for each signal that ``program`` gives to position ``to``, in order.

    Raises
    ------
    TransportError
        If a lane is signalled from more than one stream: its signals then have no order.
    """
    given: dict[Lane, list[int]] = {}
    home: dict[Lane, str] = {}
    for stream, _, step in program.steps():
        if not isinstance(step, Put | Signal) or step.peer != to:
            continue
        if home.setdefault(step.lane, stream) != stream:
            raise TransportError(
                f"{program.collective} of position {program.position}: streams {home[step.lane]} and {stream} both "
                f"signal on {step.lane.name} to position {to}; between nodes a lane belongs to one stream"
            )
        if isinstance(step, Put):
            given.setdefault(step.lane, []).append(len(segments(step.transfers)))
        else:
            given.setdefault(step.lane, []).extend([1] * step.count)
    return given


class Tally:
    """How many NCCL signals each wait of one position consumes.

    Parameters
    ----------
    given : callable
        NCCL signals behind each signal that a peer gives to the position: `signals_given` of the peer's program.
    position : int
        Whose waits.
    """

    def __init__(self, given: Callable[[int], Mapping[Lane, list[int]]], position: int) -> None:
        self._find, self._position = given, position
        self._given: dict[int, Mapping[Lane, list[int]]] = {}
        self._taken: dict[tuple[int, Lane], int] = {}

    def take(self, peer: int, lane: Lane, count: int) -> int:
        """NCCL signals behind the next ``count`` signals of ``peer`` on ``lane``."""
        if peer not in self._given:
            self._given[peer] = self._find(peer)
        given, first = self._given[peer].get(lane, []), self._taken.get((peer, lane), 0)
        if first + count > len(given):
            raise TransportError(
                f"position {self._position} waits for {first + count} signals {lane.name} of position {peer}, whose "
                f"program gives {len(given)}"
            )
        self._taken[peer, lane] = first + count
        return sum(given[first : first + count])

    def finish(self) -> None:
        """Makes sure that nothing is left: the next program would take it for its own."""
        for peer, lanes in self._given.items():
            for lane, given in lanes.items():
                if left := len(given) - self._taken.get((peer, lane), 0):
                    raise TransportError(
                        f"position {self._position} leaves {left} signals {lane.name} of position {peer} unconsumed"
                    )


class Calls(Protocol):
    """What the wire needs of :class:`~tide.transport.cuda.nccl.Library`."""

    def function(self, name: str) -> Callable[..., int]: ...

    def check(self, result: int, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Wire:
    """Puts, signals and waits of one rank.

    Attributes
    ----------
    library : Calls
        NCCL.
    communicators, windows : sequence of int
        Handles, one each.
    layout : ArenaLayout
        Of the plan.
    topology : Topology
        Which ranks are on other nodes.
    rank : int
        This rank.
    abort : callable
        Breaks the communicators off.
    words : Words or None
        Counters, where flag words are put instead of NCCL's signals.
    values : int
        Address of the table of counter values, in the window.
    """

    library: Calls
    communicators: Sequence[int]
    windows: Sequence[int]
    layout: ArenaLayout
    topology: Topology
    rank: int
    abort: Callable[[], None]
    words: Words | None = None
    values: int = 0
    _numbers: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {unit: number for number, unit in enumerate(self.layout.words.units)})

    def crosses(self, rank: int) -> bool:
        """Whether ``rank`` is on another node."""
        return self.topology.node_of(rank) != self.topology.node_of(self.rank)

    def channel(self, unit: str, lane: Lane, in_slot: bool = False) -> Channel:
        """Communicator, context and signal index of a unit's lane; where flag words are put, nobody looks at those."""
        if lane not in LANES:
            raise TransportError(f"signals {lane.name} do not cross nodes")
        signal = 0
        if self.words is None:
            kind = GATHER_FAR.index(lane) if lane in GATHER_FAR else 2 + SCATTER_FAR.index(lane) % 2
            if lane in SCATTER_FAR and self.layout.words.units[unit].forms > 1 and not in_slot:
                kind += 2
            signal = self._numbers[unit] * _per_unit(self.layout) + kind
        return Channel(PLACES[len(self.communicators)][lane], CONTEXTS[lane], signal)

    def put(
        self, stream: int, peer: int, pieces: Sequence[tuple[int, int, int]], channel: Channel
    ) -> Callable[[], None]:
        """Puts ``(address, offset in the window, bytes)`` to a peer, each with a signal, in one launch."""
        library, put = self.library, self.library.function("ncclPutSignal")
        start, end = (library.function(name) for name in ("ncclGroupStart", "ncclGroupEnd"))
        communicator, window = self.communicators[channel.communicator], self.windows[channel.communicator]
        where = channel.signal, channel.context, 0, communicator, stream
        calls = [(address, length, UINT8, peer, window, offset, *where) for address, offset, length in pieces]

        def issue_one() -> None:
            if result := put(*calls[0]):
                library.check(result, "ncclPutSignal")

        def issue() -> None:
            result = start()
            for call in calls:
                result = result or put(*call)
            ended = end()
            if result or ended:
                library.check(result or ended, "ncclPutSignal")

        return issue if len(calls) > 1 else issue_one

    def word(self, stream: int, peer: int, count: int, index: int, offset: int, channel: Channel) -> Callable[[], None]:
        """Puts the flag word at an offset of the peer's arena, ``count`` further than before."""
        assert self.words is not None
        library, put, values = self.library, self.library.function("ncclPutSignal"), self.values
        sent = self.words.sent
        communicator, window = self.communicators[channel.communicator], self.windows[channel.communicator]
        where = peer, window, offset, channel.signal, channel.context, 0, communicator, stream

        def issue() -> None:
            value = sent[index] = sent[index] + count
            if result := put(values + 4 * (value % VALUES), 4, UINT8, *where):
                library.check(result, "ncclPutSignal of a flag word")

        return issue

    def signal(self, stream: int, peer: int, count: int, channel: Channel) -> Callable[[], None]:
        """Signals ``count`` times."""
        library, signal = self.library, self.library.function("ncclSignal")
        call = peer, channel.signal, channel.context, 0, self.communicators[channel.communicator], stream

        def issue() -> None:
            for _ in range(count):
                if result := signal(*call):
                    library.check(result, "ncclSignal")

        return issue

    def wait(self, stream: int, awaited: Sequence[tuple[int, int, Channel]]) -> Callable[[], None]:
        """Waits for ``(signals, peer, channel)``, all of one communicator, in one call."""
        library, wait = self.library, self.library.function("ncclWaitSignal")
        merged: dict[tuple[int, Channel], int] = {}
        for count, peer, channel in awaited:
            merged[peer, channel] = merged.get((peer, channel), 0) + count
        rows = [SignalsAwaited(n, peer, c.signal, c.context) for (peer, c), n in merged.items()]
        descriptors = (SignalsAwaited * len(rows))(*rows)
        communicator = self.communicators[awaited[0][2].communicator]
        number, address = len(rows), ctypes.addressof(descriptors)

        def issue(keep: object = descriptors) -> None:
            if result := wait(number, address, communicator, stream):
                library.check(result, "ncclWaitSignal")

        return issue
