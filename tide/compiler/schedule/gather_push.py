"""All-gather by pushes: every rank writes its shard to its peers, piece by piece as it is placed.

A rank's storage is written by others only after it has said that its slot is free, and read by its own
streams only; so nothing has to be told back, and poisoning or reusing a slot is a local matter. Across
nodes a put's arrivals are pushed on to the node's other ranks while the next one is on the wire::

    stream ag.place  FREE!  place piece 0 ─▶ PLACED!  place piece 1 ─▶ PLACED!  …  SHARDED!
    stream ag.node   PLACED? FREE? push to all peers …  ARRIVED? push …  READY!  READY?  scatter the bundle
    stream ag.wire   SHARDED? FREE? put ─▶ WIRE? ARRIVED! …
"""

from __future__ import annotations

from typing import NamedTuple

from tide.compiler.dtypes import itemsize
from tide.compiler.schedule.rails import put_batches, seat_of
from tide.compiler.schedule.unit import SPLIT_ALIGNMENT, UnitContext, bundle_casts, own_casts
from tide.compiler.steps import (
    Buffer,
    Cast,
    Copy,
    Lane,
    Place,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Stream,
    Transfer,
    Wait,
)

#: Each piece is this many times the one before, times the number of peers: few pieces, and little to place before
#: the first push. A cast runs about three times as fast as one push of what it has placed.
GROWTH = 3


class Piece(NamedTuple):
    """A part of a rank's shard: how it is placed, and what of storage is then pushed."""

    casts: tuple[Cast, ...]
    transfers: tuple[Transfer, ...]


def push_program(context: UnitContext, position: int) -> Program:
    """Program of one position by the push route.

    Parameters
    ----------
    context : UnitContext
        Unit, storage and team.
    position : int
        Whose program.
    """
    team = context.team
    _, local, peers, rail = seat_of(context, position)
    place: list[Step] = [Signal(peer, Lane.FREE) for peer in peers]
    place += [Signal(team.grid[step.source][local], Lane.FREE) for step in rail]
    main: list[Step] = []
    for number, piece in enumerate(own_pieces(context, position)):
        place += [Place(piece.casts), Signal(position, Lane.PLACED)]
        main.append(Wait(position, Lane.PLACED))
        # All waits before all copies: the waits are one call of the driver, and so are the copies.
        main += [Wait(peer, Lane.FREE) for peer in peers] if number == 0 else []
        main += [Copy(peer, False, piece.transfers) for peer in peers if piece.transfers]
    if not main:  # an empty shard; its peers' slots are written to nevertheless, where it passes puts on
        main += [Wait(peer, Lane.FREE) for peer in peers]
    wire: list[Step] = []
    if rail:
        place.append(Signal(position, Lane.SHARDED))
        wire.append(Wait(position, Lane.SHARDED))
    for step in rail:
        to, source = team.grid[step.to][local], team.grid[step.source][local]
        wire.append(Wait(to, Lane.FREE))
        puts = put_batches(context, step.sent, local)
        wire += [Put(to, batch, Lane.WIRE) for batch in puts] or [Signal(to, Lane.WIRE)]
        for batch in put_batches(context, step.received, local) or [()]:
            wire += [Wait(source, Lane.WIRE), Signal(position, Lane.ARRIVED)]
            main.append(Wait(position, Lane.ARRIVED))
            main += [Copy(peer, False, batch) for peer in peers if batch]
    main += [Signal(peer, Lane.READY) for peer in peers]
    main += [Wait(peer, Lane.READY) for peer in peers]
    if casts := bundle_casts(context, position):
        main.append(Place(casts))
    streams = (Stream("ag.place", tuple(place)), Stream("ag.node", tuple(main)), Stream("ag.wire", tuple(wire)))
    return Program("all_gather", position, tuple(stream for stream in streams if stream.steps))


def own_pieces(context: UnitContext, position: int) -> list[Piece]:
    """Cuts a rank's shard into pieces of growing size; the bundled parameters go with the first."""
    bundle = context.layout.bundle
    pieces: list[Piece] = []
    casts: list[Cast] = []
    transfers: list[Transfer] = []
    limit = context.options.piece_bytes
    growth = GROWTH * max(context.team.per_node - 1, 1)
    room = limit
    queue = []
    for cast in own_casts(context, position):
        if context.layout.bundled(cast.src.index):
            casts.append(cast)
        else:
            queue.append(cast)
    if bundle is not None and (length := int(bundle.length[position])):
        region = Region(Buffer.STORAGE, 0, bundle.offset + int(bundle.base[position]))
        transfers.append(Transfer(region, region, 1, length))
    queue.reverse()
    while queue:
        cast = queue.pop()
        size = itemsize(cast.dst_dtype)
        head, rest = _cut(cast, room // size)
        if head is not None:
            casts.append(head)
            transfers.append(Transfer(head.dst, head.dst, head.runs, head.count * size))
            room -= head.runs * head.count * size
        if rest is not None:
            queue.append(rest)
            if casts:
                pieces.append(Piece(tuple(casts), tuple(transfers)))
            casts, transfers, limit = [], [], limit * growth
            room = limit
    if casts:
        pieces.append(Piece(tuple(casts), tuple(transfers)))
    return pieces


def _cut(cast: Cast, room: int) -> tuple[Cast | None, Cast | None]:
    """A head of at most ``room`` elements, and the rest; cut inside a run only if there is only one."""
    if cast.runs * cast.count <= room:
        return cast, None
    take = room // cast.count if cast.runs > 1 else room - room % SPLIT_ALIGNMENT
    if take == 0:
        return None, cast

    def moved(region: Region, dtype: str) -> Region:
        step = region.pitch if cast.runs > 1 else itemsize(dtype)
        return region._replace(offset=region.offset + take * step)

    src, dst = moved(cast.src, cast.src_dtype), moved(cast.dst, cast.dst_dtype)
    if cast.runs > 1:
        return cast._replace(runs=take), cast._replace(src=src, dst=dst, runs=cast.runs - take)
    return cast._replace(count=take), cast._replace(src=src, dst=dst, count=cast.count - take)
