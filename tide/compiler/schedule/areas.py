"""Where the pieces, partial sums and arrivals of a reduce-scatter lie: in the arena's areas, or in the unit's slot.

The arena's areas are rings, shared by all units. A vacated slot is the unit's own, and as large as all that comes
in: of ``N`` nodes × ``P`` ranks, a reducer gets ``N · (P - 1)`` of the ``N · P`` parts of the unit. So in a slot
every piece has a place of its own, and nobody waits for one::

    slot ├─ wire ring ─┤─ partial sums ──▶ (gap) ─┤─ pieces of turn 0 ─┤─ turn 1 ─┤ … ┤
         └ from other nodes                       └ one of each rank of the node

Partial sums, wider than the pieces of one rank, grow into the places of pieces that have been summed: the one of
turn ``t`` ends before the pieces of turn ``t`` begin. Gradients wider than the parameters do not fit: they go
through a ring within the slot. Where not even that fits, the arena's areas are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.options import MIB, PlanOptions
from tide.compiler.place import SEGMENT_ALIGNMENT, align
from tide.compiler.schedule.bundle import GradientBundle, bundle_of
from tide.compiler.schedule.chunks import (
    CHUNK_ALIGNMENT,
    Segment,
    aligned,
    chunk_elements,
    cut,
    extent,
    fall_of,
    owner_shape,
    shapes,
    widest,
)
from tide.compiler.schedule.unit import UnitContext
from tide.topology import Team

#: Bytes of a piece in the arena's areas, where these are needed only if a slot has not been vacated.
SPARE_PIECE = MIB
#: Positions of a ring in a slot, at most.
DEEPEST = 16


@dataclass(frozen=True, slots=True)
class Areas:
    """Places of one reduce-scatter; sizes and offsets in bytes.

    Attributes
    ----------
    in_slot : bool
        In the unit's vacated slot; offsets count from its start, otherwise from those of the arena's areas.
    ring : bool
        Pieces and partial sums go through positions that are used again; otherwise each has its own place.
    capacity : int
        Elements of a chunk at most.
    fall : int
        How many times larger each chunk is than the next, or 0: equal ones, then smaller ones.
    depth : int
        Positions: of the wire area, and of the others where they are rings.
    peers, piece : int
        Pieces of a ring position, and the size of one.
    width : int
        Bytes of the widest gradient's element, by which places of pieces are spaced.
    wire_width : int
        Bytes of an element of a partial sum.
    chunk : int
        Size of a partial sum.
    receive, partial, wire : int
        Where the pieces, the partial sums and those of other nodes begin.
    staged : int
        Where packed small gradients begin.
    staged_size : int
        Bytes of the slot for them; 0 in the arena, which has an area of its own.
    bundled : tuple of int
        Parameters whose gradients are packed; their segments come first.
    size : int
        Bytes of the slot that are used; 0 in the arena.
    """

    in_slot: bool
    ring: bool
    capacity: int
    fall: int
    depth: int
    peers: int
    piece: int
    width: int
    wire_width: int
    chunk: int
    receive: int = 0
    partial: int = 0
    wire: int = 0
    staged: int = 0
    staged_size: int = 0
    bundled: tuple[int, ...] = ()
    size: int = 0

    def chunks(self, unit: Unit, owner: int, subset: tuple[int, ...]) -> tuple[tuple[Segment, ...], ...]:
        """Chunks of the output of ``owner`` for the parameters in ``subset``."""
        order = in_order(subset, self.bundled)
        return cut(owner_shape(unit, owner, order), self.capacity, self.width, self.fall, self.bundled)


def areas_of(context: UnitContext, subset: tuple[int, ...]) -> Areas:
    """Areas of a reduce-scatter: the slot's if the context offers a slot and they fit, else the arena's.

    Parameters
    ----------
    context : UnitContext
        Unit, team, areas of the arena, bytes of the slot.
    subset : tuple of int
        Parameters that have a gradient.
    """
    key = ("areas", subset)
    if key not in context.memo:
        found = None
        if context.slot_bytes:
            found = slot_areas(context.unit, context.slot_bytes, context.team, context.options, subset)
        context.memo[key] = found or _arena_areas(context, subset)
    areas: Areas = context.memo[key]
    return areas


def in_order(subset: tuple[int, ...], bundled: tuple[int, ...]) -> tuple[int, ...]:
    """Parameters in the order of their segments: those that are packed stand together, at the start."""
    return (*bundled, *(index for index in subset if index not in bundled))


def arena_chunk(unit: Unit, options: PlanOptions, spare: bool) -> int:
    """Elements of the unit's chunks for which the arena's areas are laid out.

    ``spare`` areas serve a unit only when its slot has not been vacated.
    """
    elements = chunk_elements(unit, options)
    if not spare or not elements:
        return elements
    return min(elements, max(aligned(SPARE_PIECE // widest(unit.parameters)), CHUNK_ALIGNMENT))


def _arena_areas(context: UnitContext, subset: tuple[int, ...]) -> Areas:
    """The arena's areas; gradients of a wider type than those they were laid out for fill a piece sooner."""
    unit, receive, options = context.unit, context.receive, context.options
    width, wire_width = widest(unit.parameters), itemsize(options.wire_dtype)
    capacity = CHUNK_ALIGNMENT  # nothing to reduce: a program without steps
    if width:
        fits = receive.piece // width
        if receive.chunk:
            fits = min(fits, receive.chunk // wire_width)
        capacity = chunk_elements(unit, options)
        if capacity > fits:
            capacity = fits - fits % CHUNK_ALIGNMENT if fits > CHUNK_ALIGNMENT else max(fits, 1)
    bundle = bundle_of(unit, context.team, options, subset)
    return Areas(
        in_slot=False,
        ring=True,
        capacity=capacity,
        fall=0,
        depth=receive.depth,
        peers=receive.peers,
        piece=receive.piece,
        width=width,
        wire_width=wire_width,
        chunk=receive.chunk,
        bundled=bundle.members if bundle.nbytes <= receive.staged_size else (),
    )


def slot_areas(unit: Unit, slot_bytes: int, team: Team, options: PlanOptions, subset: tuple[int, ...]) -> Areas | None:
    """Areas within a slot of ``slot_bytes``, or None where not even one ring position fits."""
    if not widest(unit.parameters):
        return None
    wanted = chunk_elements(unit, options)
    fall = fall_of(team.per_node) if team.nodes == 1 and options.chunk_bytes is None else 0
    bundle = bundle_of(unit, team, options, subset)
    # Smaller chunks leave more room beside the pieces, but a ring is better than many steps.
    for smaller in range(1 if team.nodes == 1 else 4):
        placed = _placed(unit, team, options, subset, max(aligned(wanted >> smaller), CHUNK_ALIGNMENT), fall, bundle)
        if placed.size <= slot_bytes:
            return placed
    capacity = wanted
    while True:
        ring = _ring(unit, team, options, capacity, slot_bytes, bundle)
        if ring.depth >= options.receive_depth or (capacity == CHUNK_ALIGNMENT and ring.depth):
            return ring
        if capacity == CHUNK_ALIGNMENT:
            return None
        capacity = aligned(capacity // 2)


def _placed(
    unit: Unit,
    team: Team,
    options: PlanOptions,
    subset: tuple[int, ...],
    capacity: int,
    fall: int,
    bundle: GradientBundle,
) -> Areas:
    """A place for each piece and each partial sum, and a ring for what comes from other nodes."""
    peers, width, wire_width = team.per_node - 1, widest(unit.parameters), itemsize(options.wire_dtype)
    outputs = shapes(unit, in_order(subset, bundle.members))
    extents = [[extent(chunk) for chunk in cut(shape, capacity, width, fall, bundle.members)] for shape in outputs]
    output = max((sum(row) for row in extents), default=0)
    largest = max((size for row in extents for size in row), default=0)
    chunk = gap = 0
    if team.nodes > 1:
        chunk = align(largest * wire_width, SEGMENT_ALIGNMENT)
        # Elements of partial sums before turn t never exceed those of pieces, so their lead over the pieces' places
        # grows only where they are the larger ones.
        lead = wire_width - peers * width
        gap = largest * (wire_width if lead <= 0 else peers * width) + max(lead, 0) * (team.nodes - 1) * output
        gap = align(gap, SEGMENT_ALIGNMENT)
    staged = options.receive_depth * chunk
    partial = staged + align(bundle.nbytes, SEGMENT_ALIGNMENT)
    receive = partial + gap
    return Areas(
        in_slot=True,
        ring=False,
        capacity=capacity,
        fall=fall,
        depth=options.receive_depth,
        peers=peers,
        piece=0,
        width=width,
        wire_width=wire_width,
        chunk=chunk,
        receive=receive,
        partial=partial,
        wire=0,
        staged=staged,
        staged_size=bundle.nbytes,
        bundled=bundle.members,
        size=receive + peers * width * team.nodes * output,
    )


def _ring(
    unit: Unit, team: Team, options: PlanOptions, capacity: int, slot_bytes: int, bundle: GradientBundle
) -> Areas:
    """A ring with as many positions as a slot holds; none, if its depth is 0."""
    peers, width, wire_width = team.per_node - 1, widest(unit.parameters), itemsize(options.wire_dtype)
    piece = align(capacity * width, SEGMENT_ALIGNMENT)
    chunk = align(capacity * wire_width, SEGMENT_ALIGNMENT) if team.nodes > 1 else 0
    position = peers * piece + 2 * chunk
    room = max(slot_bytes - align(bundle.nbytes, SEGMENT_ALIGNMENT), 0)
    depth = min(room // position, DEEPEST) if position else DEEPEST
    return Areas(
        in_slot=True,
        ring=True,
        capacity=capacity,
        fall=0,
        depth=depth,
        peers=peers,
        piece=piece,
        width=width,
        wire_width=wire_width,
        chunk=chunk,
        partial=depth * peers * piece,
        wire=depth * (peers * piece + chunk),
        staged=depth * position,
        staged_size=bundle.nbytes,
        bundled=bundle.members,
        size=depth * position + bundle.nbytes,
    )
