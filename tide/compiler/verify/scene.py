"""One collective of one unit on one shard group: what is proved at a time, and how errors name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from tide.compiler.model import Parameter
from tide.compiler.schedule import UnitContext
from tide.compiler.shard import ShardTable
from tide.errors import PlanError

#: How the collectives are called in messages.
SPOKEN = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """Context of a proof.

    Attributes
    ----------
    context : UnitContext
        Unit, storage, team and receive areas.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    ranks : tuple of int
        World rank of each position, for messages.
    """

    context: UnitContext
    collective: str
    ranks: tuple[int, ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the unit."""
        return self.context.unit.parameters

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.context.team.size

    def table(self, index: int) -> ShardTable:
        """Shards of parameter ``index``."""
        return self.context.table(index)

    def name(self, position: int) -> str:
        """World rank of a position, as messages say it."""
        return f"rank {self.ranks[position]}" if 0 <= position < self.size else f"position {position}"

    def fail(
        self,
        problem: str,
        *,
        position: int | None = None,
        parameter: int | None = None,
        span: tuple[int, int] | None = None,
        step: str | None = None,
    ) -> NoReturn:
        """Raises a :class:`PlanError`.

        Parameters
        ----------
        problem : str
            What is wrong.
        position : int, optional
            Whose memory or program it concerns.
        parameter : int, optional
            Index of the parameter.
        span : tuple of int, optional
            First byte and end, within the parameter (or within the buffer that ``problem`` names).
        step : str, optional
            The step, as :meth:`Tables.describe` names it.
        """
        where = [f"{SPOKEN.get(self.collective, self.collective)} of unit {self.context.unit.name!r}"]
        if parameter is not None and 0 <= parameter < len(self.parameters):
            where.append(f"parameter {self.parameters[parameter].name}")
        if position is not None:
            where.append(self.name(position))
        if span is not None:
            where.append(f"bytes [{span[0]}, {span[1]})")
        if step is not None:
            where.append(step)
        raise PlanError(f"{', '.join(where)}: {problem}")
