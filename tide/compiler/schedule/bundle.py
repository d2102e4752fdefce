"""Small gradients, packed by one kernel so that one copy a rank carries them.

A copy costs more than a microsecond whatever its size, and a block of a diffusion transformer has many biases
and norms. So a ``Place`` at the start packs them, one reducer after the other, as they are to lie in its piece. Only
those are packed whose shards leave no gap between them, as copies carry no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule.chunks import PACKED_ALIGNMENT, widest
from tide.compiler.shard import shard
from tide.topology import Team

#: Copies that a bundle has to save before a rank packs: the kernel costs as much as four of them.
WORTH = 6


@dataclass(frozen=True, slots=True)
class GradientBundle:
    """Parameters whose gradients are packed, and the bytes that this takes on a rank at most."""

    members: tuple[int, ...] = ()
    nbytes: int = 0


def bundle_of(unit: Unit, team: Team, options: PlanOptions, subset: tuple[int, ...] | None = None) -> GradientBundle:
    """The unit's bundle of gradients.

    Parameters
    ----------
    unit : Unit
        Parameters, with the types of their gradients.
    team : Team
        Positions that shard them.
    options : PlanOptions
        What is small.
    subset : tuple of int, optional
        Parameters that have a gradient; all trainable ones by default.
    """
    if subset is None:
        subset = tuple(i for i, p in enumerate(unit.parameters) if p.trainable)
    width, members, elements = widest(unit.parameters), [], 0
    for index in subset:
        parameter = unit.parameters[index]
        assert parameter.grad_dtype is not None, "a frozen parameter has no gradient to reduce"
        table, size = shard(parameter, team.size), itemsize(parameter.grad_dtype)
        largest = int(table.numel.max())
        even = int(table.run.max()) % PACKED_ALIGNMENT == 0
        if 0 < largest * size <= options.bundle_bytes and size == width and even:
            members.append(index)
            elements += largest
    if (len(members) - 1) * (team.per_node - 1) * team.nodes < WORTH:
        return GradientBundle()
    return GradientBundle(tuple(members), elements * team.size * width)
