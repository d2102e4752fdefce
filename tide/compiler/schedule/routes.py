"""Which units go through the switch: what a user asked for, what can be, and what pays.

All positions of a team choose alike, by the shard of position 0, which is the largest.
"""

from __future__ import annotations

from tide.compiler.model import Unit
from tide.compiler.options import PlanOptions
from tide.compiler.rates import copy_seconds, multicast_seconds, switch_seconds
from tide.compiler.schedule.chunks import chunk_elements
from tide.compiler.schedule.pieces import own_pieces
from tide.compiler.schedule.switch import group_sizes
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.shard import shard
from tide.topology import Topology


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


def by_switch(unit: Unit, topology: Topology, options: PlanOptions) -> bool:
    """Whether a unit's partial sums are spread over the ranks of the owner's node and summed in the switch."""
    return why_no_switch(unit, topology, options) is None


def why_no_switch(unit: Unit, topology: Topology, options: PlanOptions) -> str | None:
    """Why an owner adds the other nodes' partial sums one by one; None if the switch sums them.

    Ranks that hold no partial sum rely on zeros that nobody writes, so all units that go this way have to agree on
    who they are: these are the units that are sharded over all ranks, in order.
    """
    if options.switch_reduce == "off":
        return "sums in the switch are off"
    if topology.nodes == 1 or topology.gpus_per_node == 1:
        return "no sums in the switch: there is one node, or one rank a node"
    if unit.mesh.groups != (tuple(range(topology.world_size)),):
        return "no sums in the switch: they need units that are sharded over all ranks, in order"
    if options.wire_dtype != "float32":
        return f"no sums in the switch: it would round them to {options.wire_dtype}"
    if options.switch_reduce == "on":
        return None
    links, ranks = topology.links, topology.gpus_per_node
    if not links.multicast:
        return "no sums in the switch: the topology's switch makes none"
    chunk = chunk_elements(unit, options)
    if not chunk:
        return "no sums in the switch: there are no gradients"
    output = sum(int(shard(p, unit.mesh.size).numel.max()) for p in unit.parameters if p.trainable)
    chunks, groups = -(-output // chunk), group_sizes(topology.nodes, ranks)
    # A partial sum and the running sum are read, the running sum is written.
    one_by_one = (topology.nodes - 1) * (chunks * links.kernel_latency + 12 * output / links.memory)
    at_once = len(groups) * (
        chunks * (switch_seconds(links, ranks, 0) + links.signal_latency)
        + switch_seconds(links, ranks, 4 * output)
        - switch_seconds(links, ranks, 0)
        + 8 * output / links.memory
    )
    if at_once < one_by_one:
        return None
    return (
        f"no sums in the switch: predicted to take {at_once * 1e6:.1f} µs where sums one by one take "
        f"{one_by_one * 1e6:.1f}"
    )
