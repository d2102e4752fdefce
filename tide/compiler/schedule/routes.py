"""Which units go through the switch: what a user asked for, what can be, and what pays.

All positions of a team choose alike, by the shard of position 0, which is the largest.
"""

from __future__ import annotations

from tide.compiler.rates import copy_seconds, multicast_seconds
from tide.compiler.schedule.pieces import own_pieces
from tide.compiler.schedule.unit import UnitContext


def by_multicast(context: UnitContext) -> bool:
    """Whether an all-gather spreads shards within the node by multicast."""
    return why_no_multicast(context) is None


def why_no_multicast(context: UnitContext) -> str | None:
    """Why an all-gather pushes to one peer after the other; None if it writes to all at once."""
    if "multicast" not in context.memo:
        context.memo["multicast"] = _why_no_multicast(context)
    found: str | None = context.memo["multicast"]
    return found


def _why_no_multicast(context: UnitContext) -> str | None:
    wanted, ranks = context.options.multicast, context.team.per_node
    if wanted == "off":
        return "multicast is off"
    if context.options.route != "push":
        return "no multicast: shards are pulled"
    if ranks == 1:
        return "no multicast: one rank a node"
    if not context.fills_nodes:
        return "no multicast: it reaches whole nodes, and the group has a part of each"
    if wanted == "on":
        return None
    if not context.links.multicast:
        return "no multicast: the topology's switch has none"
    pieces = [
        (len(piece.transfers), sum(transfer.nbytes for transfer in piece.transfers)) for piece in own_pieces(context, 0)
    ]
    unicast = (ranks - 1) * sum(copy_seconds(context.links, *piece) for piece in pieces)
    at_once = sum(multicast_seconds(context.links, ranks, *piece) for piece in pieces)
    if at_once < unicast:
        return None
    return f"no multicast: predicted to take {at_once * 1e6:.1f} µs where {ranks - 1} pushes take {unicast * 1e6:.1f}"
