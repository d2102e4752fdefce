"""The primitive operations of a plan, and the programs made of them.

Steps name *symbolic buffers* and *positions* (a rank's index in its shard group), never addresses or
world ranks, so all units of one shape and all replicas of a mesh share their programs; a transport
binds them once. Offsets, lengths and pitches are bytes; counts in casts and sums are elements.

Signals are counters: ``Signal(peer, lane)`` adds to the counter that the peer keeps for (this
position, lane), ``Wait(peer, lane)`` consumes what the peer has signalled. A signal becomes visible
only after every earlier step of its stream has finished; a wait holds back all later steps of its
stream. A rank may signal itself: that is how its own streams are ordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias


class Buffer(Enum):
    """Symbolic memory; the arena's are addressable by peers."""

    SHARD = "shard"  #: resident shard of parameter [index], dense
    STORAGE = "storage"  #: arena: the unit's slot, parameters and bundle
    GRAD = "grad"  #: whole gradient of parameter [index], dense
    RECEIVE = "receive"  #: arena: pieces of gradients pushed by ranks of the node
    PARTIAL = "partial"  #: arena: node-local float32 sums on their way to another node
    WIRE = "wire"  #: arena: partial sums that came from other nodes
    SPREAD = "spread"  #: arena: partial sums that came for ranks of the node, one place a rank, or zeros in it
    RUNNING = "running"  #: float32 running sum of the output where the output is not float32 itself
    OUT = "out"  #: reduced shard of the gradient of parameter [index], dense
    STAGED = "staged"  #: arena: small gradients, packed for the ranks that sum them

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names, in Python, at each look-up


#: Buffers that live in the arena, at the same offsets on every rank.
ARENA = frozenset({Buffer.STORAGE, Buffer.RECEIVE, Buffer.PARTIAL, Buffer.WIRE, Buffer.SPREAD, Buffer.STAGED})


class Lane(IntEnum):
    """What a signal says. DONE is counted once a slot, the others once a unit: :mod:`tide.compiler.signals`."""

    READY = 0  #: pull route: my shard is in my storage; push route: so is all that I push to you
    DONE = 1  #: I have pulled all I need from your storage: you may overwrite it
    FREE = 2  #: my storage may be written: put into it
    WIRE = 3  #: (carried by a put) data has arrived in your storage
    ARRIVED = 4  #: a put has arrived in my storage: pull it; (to myself) push it
    PLACED = 5  #: (to myself) my shard, or the next piece of it, is in my storage
    GATHERED = 6  #: (to myself) all that comes by put has arrived in my storage
    SHARDED = 7  #: (to myself) all of my shard is in my storage: put it
    PUSHED = 8  #: a piece is in your receive area
    CREDIT = 9  #: a position of my receive area is free for your next piece; in a slot: all places are
    SUMMED = 10  #: (to myself) a partial sum is ready to go out
    SENT = 11  #: (to myself) a partial sum has gone out, its place is free
    PARTIAL = 12  #: (carried by a put) a partial sum is in your wire area
    WIRE_CREDIT = 13  #: a position of my wire area is free for your next partial sum
    BEGUN = 14  #: (to myself) my node's sum of a chunk is in the running sum: add the other nodes'
    SPREAD = 15  #: (carried by a put) a partial sum for a rank of your node is in your spread area
    SPREAD_CREDIT = 16  #: a place of my spread area is free for your next partial sum
    HELD = 17  #: a partial sum for you is in my spread area
    TAKEN = 18  #: I have summed what you held for me


#: Credits that exist before the first signal: nobody reads a slot that was never gathered.
INITIAL_CREDIT = {Lane.DONE: 1}


class Region(NamedTuple):
    """Equal runs in one buffer: run ``i`` starts at ``offset + i · pitch``."""

    buffer: Buffer
    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    offset: int
    pitch: int = 0


class Transfer(NamedTuple):
    """``runs`` runs of ``length`` bytes from ``src`` to ``dst``, bytes unchanged."""

    src: Region
    dst: Region
    runs: int
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.runs * self.length


class Cast(NamedTuple):
    """``runs`` runs of ``count`` elements, converted from ``src_dtype`` to ``dst_dtype``."""

    src: Region
    dst: Region
    runs: int
    count: int  # type: ignore[assignment]
    src_dtype: str
    dst_dtype: str


class Sum(NamedTuple):
    """``dst = base + (srcs[0] + srcs[1] + …)`` in float32, in that order; ``base`` may be absent."""

    srcs: tuple[Region, ...]
    src_dtype: str
    base: Region | None
    dst: Region
    dst_dtype: str
    runs: int
    count: int  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Place:
    """Cast and scatter local data; one kernel. The only kernel of an all-gather; packs small gradients, too."""

    casts: tuple[Cast, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies between this rank and ``peer`` on the same node, by copy engine.

    ``pull`` says which side is the peer's: the source of a pull, the destination of a push.
    """

    peer: int
    pull: bool
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Writes into the arena of ``peer`` on another node, then a signal on ``lane`` there."""

    peer: int
    transfers: tuple[Transfer, ...]
    lane: Lane


@dataclass(frozen=True, slots=True)
class Multicast:
    """One write that every position of ``peers`` receives at the same offsets."""

    peers: tuple[int, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """Adds ``count`` to the counter that ``peer`` keeps for (me, lane)."""

    peer: int
    lane: Lane
    count: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Consumes ``count`` signals of ``peer`` on ``lane``; later steps of the stream run only then."""

    peer: int
    lane: Lane
    count: int = 1


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Sums gradient pieces; ``final`` sums also take the scale and the divisor of the call."""

    sums: tuple[Sum, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class SwitchReduce:
    """Sums over the same region of all ``peers``, formed inside the switch, in an order of its own.

    The one source of each of ``sums`` stands for that region in the arena of every peer, the own one included. It is
    float32: of narrower operands the switch returns a sum of their type. Peers that are no ``holders`` have zeros
    there. ``final`` sums also take the scale and the divisor of the call.
    """

    peers: tuple[int, ...]
    holders: tuple[int, ...]
    sums: tuple[Sum, ...]
    final: bool


Step: TypeAlias = Place | Copy | Put | Multicast | Signal | Wait | Accumulate | SwitchReduce


@dataclass(frozen=True, slots=True)
class Stream:
    """An ordered queue of steps.

    Parameters
    ----------
    name : str
        Equal names follow each other from collective to collective.
    steps : tuple of Step
        In order.
    released : int or None
        Step before which the last one that reads gradients has ended; None: known only at the stream's end.
    """

    name: str
    steps: tuple[Step, ...]
    released: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """All streams of one position for one collective of one unit.

    Parameters
    ----------
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    position : int
        Whose program this is.
    streams : tuple of Stream
        They run side by side; the collective has ended when all have.
    release : tuple of str
        Streams that read gradients: at their `released` steps, or their ends, no gradient is read any more.
    in_slot : bool
        ``RECEIVE``, ``PARTIAL``, ``WIRE`` and ``STAGED`` are the unit's own slot, which has been vacated: a
        reduce-scatter that needs no memory of its own. All of them then begin where the slot begins.
    """

    collective: str
    position: int
    streams: tuple[Stream, ...]
    release: tuple[str, ...] = field(default=())
    in_slot: bool = False

    @property
    def uses_slot(self) -> bool:
        """Whether it writes the unit's slot, so that it has to follow whatever used the slot before."""
        return self.in_slot or self.collective != "reduce_scatter"

    def steps(self) -> Iterator[tuple[str, int, Step]]:
        """All steps as ``(stream name, index, step)``."""
        for stream in self.streams:
            for index, step in enumerate(stream.steps):
                yield stream.name, index, step

    def __len__(self) -> int:
        return sum(len(stream.steps) for stream in self.streams)
