"""Where everything lies in the arena: parameters in a slot, slots, receive areas, signal words.

A slot holds one unit's storage at a time::

    slot ├─ p0 ─────────┤pad├─ p1 ───┤pad├─ p2 ┤ … ├─ bundle: owner 0 │ owner 1 │ … ┤
         └ whole parameter, row-major, aligned      └ shards of the small parameters, dense

and the arena is the same on every rank::

    arena ├─ slot 0 ─┤─ slot 1 ─┤ … ├─ receive ─┤─ partial ─┤─ wire ─┤─ staged ─┤─ spread ─┤─ signals ─┤
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tide.compiler.dtypes import itemsize
from tide.compiler.model import ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.shard import Int64, padded_numel, shard
from tide.compiler.signals import SIGNAL_BYTES, SignalLayout, lay_out_signals
from tide.compiler.slots import assign_slots
from tide.compiler.steps import Lane
from tide.topology import Team

#: Alignment of areas in the arena; NCCL windows ask for it too.
AREA_ALIGNMENT = 4096
#: Alignment of a parameter's segment in a bundle and of a piece in the receive area.
SEGMENT_ALIGNMENT = 16


def align(offset: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True, eq=False, slots=True)
class Bundle:
    """Small parameters' shards, dense, one segment per owner; all figures in bytes.

    Attributes
    ----------
    members : tuple of int
        Indices of the bundled parameters.
    offset : int
        Start of the bundle in the slot.
    base, length : ndarray of int64, shape (W,)
        Start of each owner's segment relative to ``offset``, and its bytes.
    at : ndarray of int64, shape (len(members), W)
        Start of each member within each owner's segment.
    """

    members: tuple[int, ...]
    offset: int
    base: Int64
    length: Int64
    at: Int64


@dataclass(frozen=True, eq=False, slots=True)
class UnitLayout:
    """Storage of one unit within its slot.

    Attributes
    ----------
    offsets : tuple of int
        Byte offset of each parameter.
    nbytes : tuple of int
        Bytes reserved for each parameter, without the pad to the next.
    bundle : Bundle or None
        Present when small parameters travel together.
    size : int
        Bytes of the whole.
    """

    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]
    bundle: Bundle | None
    size: int

    def bundled(self, index: int) -> bool:
        """Whether parameter ``index`` travels in the bundle."""
        return self.bundle is not None and index in self.bundle.members


def least_run(options: PlanOptions, crosses: bool) -> int:
    """Bytes that a run must have to travel as it is."""
    return max(options.min_run_bytes, options.min_put_run_bytes) if crosses else options.min_run_bytes


def _travels_in_bundle(parameter: Parameter, owners: int, options: PlanOptions, crosses: bool) -> bool:
    table = shard(parameter, owners)
    size = itemsize(parameter.dtype)
    largest = int(table.numel.max()) * size
    if not largest > 0:
        return False
    short_runs = table.outer > 1 and int(table.run.max()) * size < least_run(options, crosses)
    return largest <= options.bundle_bytes or short_runs


def lay_out_unit(unit: Unit, options: PlanOptions, crosses: bool = False) -> UnitLayout:
    """Storage offsets of a unit's parameters, and its bundle.

    Parameters
    ----------
    unit : Unit
        Parameters and mesh.
    options : PlanOptions
        Alignment and the bundle's thresholds.
    crosses : bool
        Whether a shard group of the unit spans nodes.
    """
    owners = unit.mesh.size
    offsets, sizes, cursor = [], [], 0
    for parameter in unit.parameters:
        numel = padded_numel(parameter, owners) if options.padded_storage else parameter.numel
        offsets.append(cursor)
        sizes.append(numel * itemsize(parameter.dtype))
        cursor = align(cursor + sizes[-1], options.alignment)
    members = tuple(
        index
        for index, parameter in enumerate(unit.parameters)
        if owners > 1 and _travels_in_bundle(parameter, owners, options, crosses)
    )
    # One small parameter alone gains nothing from the detour, unless its runs are too short for copies.
    if len(members) == 1 and shard(unit.parameters[members[0]], owners).outer == 1:
        members = ()
    bundle = None
    if members:
        at = np.zeros((len(members), owners), dtype=np.int64)
        length = np.zeros(owners, dtype=np.int64)
        for row, index in enumerate(members):
            parameter = unit.parameters[index]
            at[row] = length
            nbytes = shard(parameter, owners).numel * itemsize(parameter.dtype)
            length += -(-nbytes // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        bundle = Bundle(members, cursor, np.cumsum(length) - length, length, at)
        cursor = align(cursor + int(length.sum()), options.alignment)
    return UnitLayout(tuple(offsets), tuple(sizes), bundle, max(cursor, options.alignment))


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the arena that holds one unit's storage at a time."""

    offset: int
    size: int
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceiveLayout:
    """Areas of the reduce-scatter in the arena, shared by all units; sizes in bytes.

    With `PlanOptions.slot_reuse` they are small, and used only by calls that find a slot not vacated, or too small.

    Attributes
    ----------
    receive, partial, wire, staged : int
        Offsets in the arena.
    piece : int
        Bytes of one piece (one rank's gradients of one chunk); a position holds one piece per rank
        of the node other than the owner.
    peers : int
        Pieces per position.
    chunk : int
        Bytes of one partial sum.
    depth : int
        Positions of each area but the last.
    staged_size : int
        Bytes of small gradients that are packed at a time.
    spread : int
        Offset of the area that the switch sums, which transports fill with zeros when they open.
    spread_chunk : int
        Bytes of one of its places.
    spread_places : int
        Places of a rank there.
    """

    receive: int
    partial: int
    wire: int
    staged: int
    piece: int
    peers: int
    chunk: int
    depth: int
    staged_size: int
    spread: int = 0
    spread_chunk: int = 0
    spread_places: int = 0

    @property
    def spread_size(self) -> int:
        """Bytes of the area that the switch sums."""
        return self.spread_places * self.spread_chunk

    @property
    def receive_size(self) -> int:
        """Bytes of the receive area."""
        return self.depth * self.peers * self.piece

    @property
    def wire_size(self) -> int:
        """Bytes of the partial area, and of the wire area."""
        return self.depth * self.chunk


@dataclass(frozen=True, eq=False, slots=True)
class ArenaLayout:
    """One rank's arena: the same offsets on every rank.

    Attributes
    ----------
    slots : tuple of Slot
        In order of offset.
    slot_of : dict of str to int
        Slot index of each unit.
    receive : ReceiveLayout
        Areas of the reduce-scatter.
    signals : int
        Offset of the signal words.
    words : SignalLayout
        Which word each signal is counted in.
    world_size : int
        Ranks of the topology.
    size : int
        Bytes of the arena.
    """

    slots: tuple[Slot, ...]
    slot_of: dict[str, int]
    receive: ReceiveLayout
    signals: int
    words: SignalLayout
    world_size: int
    size: int

    @property
    def zeroed(self) -> int:
        """Offset from which on a new arena holds zeros: the area that the switch sums, and the signals."""
        return self.receive.spread if self.receive.spread_size else self.signals

    def signal_word(self, unit: str, team: Team, lane: Lane, receiver: int, source: int, in_slot: bool = False) -> int:
        """Arena offset of the word in which ``receiver`` counts signals of ``source``, both positions of a team.

        ``in_slot`` is that of the program that signals and waits.
        """
        return self.signals + self.words.units[unit].word(team, lane, receiver, source, in_slot) * SIGNAL_BYTES


def lay_out_arena(
    spec: ModelSpec,
    layouts: dict[str, UnitLayout],
    teams: Callable[[Unit], Sequence[Team]],
    chunk_elements: dict[str, int],
    staged_bytes: int,
    world_size: int,
    options: PlanOptions,
    spread: tuple[int, int] = (0, 0),
    switched: frozenset[str] = frozenset(),
) -> ArenaLayout:
    """Offsets of slots, receive areas and signals.

    Parameters
    ----------
    spec : ModelSpec
        All units.
    layouts : dict of str to UnitLayout
        Storage of each unit.
    teams : callable
        The distinct teams of a unit's shard groups.
    chunk_elements : dict of str to int
        Elements of one chunk of each unit's reduce-scatter in the areas; absent for units without gradients.
    staged_bytes : int
        Bytes of small gradients that the unit with the most of them packs in the areas.
    world_size : int
        Ranks of the topology.
    options : PlanOptions
        Alignment, slots, depth.
    spread : tuple of int
        Places of the area that the switch sums, and elements of each.
    switched : frozenset of str
        Units whose partial sums are summed there.
    """
    cursor = 0
    slots: list[Slot] = []
    slot_of: dict[str, int] = {}
    for names in assign_slots(spec, {name: layout.size for name, layout in layouts.items()}, options):
        size = align(max(layouts[name].size for name in names), AREA_ALIGNMENT)
        for name in names:
            slot_of[name] = len(slots)
        slots.append(Slot(cursor, size, names))
        cursor += size
    piece = chunk = peers = 0
    crosses_nodes = False
    for unit in spec.units:
        if unit.name not in chunk_elements:
            continue
        width = max(itemsize(p.grad_dtype) for p in unit.parameters if p.grad_dtype is not None)
        piece = max(piece, chunk_elements[unit.name] * width)
        chunk = max(chunk, chunk_elements[unit.name] * itemsize(options.wire_dtype))
        for team in teams(unit):
            peers = max(peers, team.per_node - 1)
            crosses_nodes |= team.nodes > 1
    piece, chunk = align(piece, SEGMENT_ALIGNMENT), align(chunk, SEGMENT_ALIGNMENT)
    if not crosses_nodes:
        chunk = 0
    receive = cursor
    partial = align(receive + options.receive_depth * peers * piece, AREA_ALIGNMENT)
    wire = align(partial + options.receive_depth * chunk, AREA_ALIGNMENT)
    staged = align(wire + options.receive_depth * chunk, AREA_ALIGNMENT)
    spread_at = align(staged + staged_bytes, AREA_ALIGNMENT)
    spread_places, spread_chunk = spread[0], align(spread[1] * 4, SEGMENT_ALIGNMENT)
    signals = align(spread_at + spread_places * spread_chunk, AREA_ALIGNMENT)
    areas = ReceiveLayout(
        receive,
        partial,
        wire,
        staged,
        piece,
        peers,
        chunk,
        options.receive_depth,
        staged_bytes,
        spread_at,
        spread_chunk,
        spread_places,
    )
    held = [slot.units for slot in slots]
    words = lay_out_signals(spec.units, held, teams, chunk_elements, switched, options.slot_reuse)
    size = align(signals + words.nbytes, AREA_ALIGNMENT)
    return ArenaLayout(tuple(slots), slot_of, areas, signals, words, world_size, size)
