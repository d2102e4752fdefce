"""What a reduce-scatter needs to receive in, as the number of nodes grows and each rank's output stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule import areas_of
from tide.topology import Topology


@dataclass(frozen=True, slots=True)
class ReceiveRow:
    """One line of the table; bytes per rank.

    Attributes
    ----------
    nodes : int
        Nodes over which the unit is sharded.
    areas : int
        Receive, partial and wire areas of a plan that does not reuse slots.
    spare : int
        The same areas where slots are reused: for calls that find a slot held.
    slot : int
        Bytes of the unit's own slot that its reduce-scatter uses then; they are there anyway.
    stock : int
        Stock FSDP2's flat input of the reduce-scatter, and its output.
    """

    nodes: int
    areas: int
    spare: int
    slot: int
    stock: int


def receive_table(
    output: int, per_node: int = 8, nodes: Sequence[int] = (2, 4, 8), options: PlanOptions | None = None
) -> tuple[ReceiveRow, ...]:
    """Receive memory by number of nodes, at a fixed output per rank.

    Parameters
    ----------
    output : int
        Elements of one rank's reduced gradients; bfloat16 gradients, float32 output.
    per_node : int
        Ranks of a node.
    nodes : sequence of int
        Numbers of nodes.
    options : PlanOptions, optional
        Other choices of the plan.
    """
    options = options or PlanOptions()
    rows = []
    for count in nodes:
        world = count * per_node
        unit = Unit("unit", (Parameter("unit.weight", (world, output)),), Mesh((tuple(range(world)),)))
        sizes = []
        for reuse in (False, True):
            chosen = replace(options, slot_reuse=reuse, route="push")
            plan = compile_spec(ModelSpec((unit,), "receive table"), Topology(count, per_node), chosen)
            sizes.append(plan.arena.signals - plan.arena.receive.receive)
        in_slot = areas_of(plan.context("unit", 0), (0,)).size
        rows.append(ReceiveRow(count, sizes[0], sizes[1], in_slot, 4 * output * (world + 1)))
    return tuple(rows)
