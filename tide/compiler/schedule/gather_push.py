"""All-gather by pushes: every rank writes its shard to its peers, piece by piece as it is placed.

By copies, one to each peer, or by multicast, one write to the switch for all of them
(:func:`tide.compiler.schedule.routes.by_multicast`).

A rank's storage is written by others only after it has said that its slot is free, and read by its own
streams only; so nothing has to be told back, and poisoning or reusing a slot is a local matter. Across
nodes a put's arrivals are pushed on to the node's other ranks while the next one is on the wire::

    stream ag.place  FREE!  place piece 0 ─▶ PLACED!  place piece 1 ─▶ PLACED!  …  SHARDED!
    stream ag.node   PLACED? FREE? push to all peers …  ARRIVED? push …  READY!  READY?  scatter the bundle
    stream ag.wire   SHARDED? FREE? put ─▶ WIRE? ARRIVED! …
"""

from __future__ import annotations

from collections.abc import Sequence

from tide.compiler.schedule.pieces import own_pieces
from tide.compiler.schedule.rails import put_batches, seat_of
from tide.compiler.schedule.routes import by_multicast
from tide.compiler.schedule.unit import UnitContext, bundle_casts
from tide.compiler.steps import (
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Signal,
    Step,
    Stream,
    Transfer,
    Wait,
)


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
    push = multicast if by_multicast(context) else copies
    # All waits for the peers before the first push: they are one call of the driver then, and so are its copies. An
    # empty shard waits too: its peers' slots are written to nevertheless, where it passes puts on.
    free: list[Step] = [Wait(peer, Lane.FREE) for peer in peers]
    main: list[Step] = []
    for piece in own_pieces(context, position):
        place += [Place(piece.casts), Signal(position, Lane.PLACED)]
        main += [Wait(position, Lane.PLACED), *free, *push(peers, piece.transfers)]
        free = []
    main += free
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
            main += push(peers, batch)
    main += [Signal(peer, Lane.READY) for peer in peers]
    main += [Wait(peer, Lane.READY) for peer in peers]
    if casts := bundle_casts(context, position):
        main.append(Place(casts))
    streams = (Stream("ag.place", tuple(place)), Stream("ag.node", tuple(main)), Stream("ag.wire", tuple(wire)))
    return Program("all_gather", position, tuple(stream for stream in streams if stream.steps))


def copies(peers: Sequence[int], transfers: tuple[Transfer, ...]) -> list[Step]:
    """Pushes to one peer after the other."""
    return [Copy(peer, False, transfers) for peer in peers] if transfers else []


def multicast(peers: Sequence[int], transfers: tuple[Transfer, ...]) -> list[Step]:
    """One write for all peers."""
    return [Multicast(tuple(peers), transfers)] if transfers else []
