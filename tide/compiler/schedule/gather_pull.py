"""All-gather by pulls: every rank reads its peers' shards when they are in place.

On one node each rank places its shard, tells its peers, and pulls theirs in staggered order. Across nodes
each step's arrivals are pulled by the node's other ranks while the next step is on the wire::

    stream ag.node   DONE? FREE! place READY!  pull own node …  ARRIVED? pull step 0 …  ARRIVED? pull …  DONE!
    stream ag.wire         PLACED? FREE? put ─▶ WIRE? ARRIVED!  FREE? put ─▶ WIRE? ARRIVED!  …
"""

from __future__ import annotations

from tide.compiler.schedule.rails import blocks_on_rail, put_batches, seat_of
from tide.compiler.schedule.unit import UnitContext, bundle_casts, own_casts, storage_transfers
from tide.compiler.steps import Copy, Lane, Place, Program, Put, Signal, Step, Stream, Wait


def pull_program(context: UnitContext, position: int) -> Program:
    """Program of one position by the pull route.

    Parameters
    ----------
    context : UnitContext
        Unit, storage and team.
    position : int
        Whose program.
    """
    team = context.team
    _, local, peers, rail = seat_of(context, position)

    main: list[Step] = [Wait(peer, Lane.DONE) for peer in peers]
    main += [Signal(team.grid[step.source][local], Lane.FREE) for step in rail]
    if casts := own_casts(context, position):
        main.append(Place(casts))
    main += [Signal(position, Lane.PLACED)] if rail else []
    main += [Signal(peer, Lane.READY) for peer in peers]
    for peer in peers:
        main.append(Wait(peer, Lane.READY))
        if transfers := storage_transfers(context, [peer]):
            main.append(Copy(peer, True, transfers))
    wire: list[Step] = [Wait(position, Lane.PLACED)] if rail else []
    for step in rail:
        to, source = team.grid[step.to][local], team.grid[step.source][local]
        wire.append(Wait(to, Lane.FREE))
        puts = put_batches(context, step.sent, local)
        wire += [Put(to, batch, Lane.WIRE) for batch in puts]
        if not puts:
            wire.append(Signal(to, Lane.WIRE))
        wire.append(Wait(source, Lane.WIRE, max(len(put_batches(context, step.received, local)), 1)))
        wire += [Signal(peer, Lane.ARRIVED) for peer in peers]
        for peer in peers:
            main.append(Wait(peer, Lane.ARRIVED))
            lane = team.seat(peer)[1]
            if transfers := storage_transfers(context, blocks_on_rail(context, step.received, lane)):
                main.append(Copy(peer, True, transfers))
    main += [Signal(peer, Lane.DONE) for peer in peers]
    if rail and (context.layout.bundle is not None):
        wire.append(Signal(position, Lane.GATHERED))
        main.append(Wait(position, Lane.GATHERED))
    if casts := bundle_casts(context, position):
        main.append(Place(casts))
    streams = [Stream("ag.node", tuple(main))]
    if wire:
        streams.append(Stream("ag.wire", tuple(wire)))
    return Program("all_gather", position, tuple(streams))
