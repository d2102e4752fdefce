"""Exchanges between nodes: who sends whose blocks to whom, step by step."""

from __future__ import annotations

from typing import NamedTuple

from tide.compiler.schedule.unit import UnitContext, batches, storage_transfers
from tide.compiler.steps import Transfer


class RailStep(NamedTuple):
    """One exchange on a rail: nodes to send to and receive from, and whose blocks go and come."""

    to: int
    source: int
    sent: tuple[int, ...]
    received: tuple[int, ...]


def rail_steps(nodes: int, node: int) -> list[RailStep]:
    """Exchanges of ``node`` in an all-gather over ``nodes`` nodes, ``ceil(log2(nodes))`` of them.

    Recursive doubling for powers of two: in step ``k`` the partner is ``node ^ 2**k`` and both hold
    an aligned group of ``2**k`` blocks. Otherwise dissemination (Bruck et al., 1997): in step ``k`` a
    node sends to ``node + 2**k`` what it holds, and no more than the receiver still lacks.
    """
    steps = []
    distance = 1
    while distance < nodes:
        if nodes & (nodes - 1) == 0:
            partner = node ^ distance
            mine, theirs = node & -distance, partner & -distance
            sent = tuple(range(mine, mine + distance))
            received = tuple(range(theirs, theirs + distance))
            steps.append(RailStep(partner, partner, sent, received))
        else:
            count = min(distance, nodes - distance)
            source = (node - distance) % nodes
            sent = tuple((node - i) % nodes for i in range(count))
            received = tuple((source - i) % nodes for i in range(count))
            steps.append(RailStep((node + distance) % nodes, source, sent, received))
        distance *= 2
    return steps


def blocks_on_rail(context: UnitContext, blocks: tuple[int, ...], local: int) -> list[int]:
    """Positions of one rail on the given nodes."""
    return [context.team.grid[block][local] for block in blocks]


def put_batches(context: UnitContext, blocks: tuple[int, ...], local: int) -> list[tuple[Transfer, ...]]:
    """Transfers of the blocks of one rail, cut into puts."""
    key = ("batches", blocks, local)
    if key not in context.memo:
        transfers = storage_transfers(context, blocks_on_rail(context, blocks, local))
        context.memo[key] = batches(transfers, context.options.put_bytes)
    found: list[tuple[Transfer, ...]] = context.memo[key]
    return found


class Seat(NamedTuple):
    """Where a position sits, and whom it deals with.

    ``peers`` are the others of its node, staggered: at any time each of them is dealt with by one rank only.
    """

    node: int
    local: int
    peers: list[int]
    rail: list[RailStep]


def seat_of(context: UnitContext, position: int) -> Seat:
    """Seat of a position in its unit's team."""
    team = context.team
    node, local = team.seat(position)
    row = team.grid[node]
    peers = [row[(local + j) % team.per_node] for j in range(1, team.per_node)]
    return Seat(node, local, peers, rail_steps(team.nodes, node))
