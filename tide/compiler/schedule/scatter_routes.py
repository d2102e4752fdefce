"""Reduce-scatter: which way partial sums go between nodes."""

from __future__ import annotations

from collections.abc import Sequence

from tide.compiler.columns import ProgramRows
from tide.compiler.schedule.areas import areas_of
from tide.compiler.schedule.reduce_scatter import Builder
from tide.compiler.schedule.switch import SwitchBuilder
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import Program


def reduce_scatter_program(context: UnitContext, position: int, subset: Sequence[int] | None = None) -> Program:
    """Program of one position.

    Parameters
    ----------
    context : UnitContext
        Unit, team, receive areas, and the slot if it may be used.
    position : int
        Whose program.
    subset : sequence of int, optional
        Parameters that have a gradient this time; all trainable ones by default. Every rank must
        name the same.
    """
    return reduce_scatter_rows(context, position, subset).program()


def reduce_scatter_rows(context: UnitContext, position: int, subset: Sequence[int] | None = None) -> ProgramRows:
    """The same as columns, from which the program is made."""
    chosen = tuple(i for i, p in enumerate(context.unit.parameters) if p.trainable) if subset is None else tuple(subset)
    builder = SwitchBuilder if context.by_switch and _fits(context, chosen) else Builder
    return builder(context, position, chosen).rows()


def _fits(context: UnitContext, subset: tuple[int, ...]) -> bool:
    """Whether partial sums fit the places of the spread area.

    Gradients of a narrower type than the plan's may come in chunks of more elements in a slot; they go to the wire
    area then, on every rank.
    """
    return areas_of(context, subset).capacity * 4 <= context.receive.spread_chunk
