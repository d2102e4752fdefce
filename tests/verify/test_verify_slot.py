"""Reduce-scatters in vacated slots: what the proof says of layouts in which places get in each other's way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule import areas
from tide.compiler.steps import Program
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology


def plan(nodes: int, local: int, **options: Any) -> Compiled:
    """A unit of one large parameter, and some of small ones that travel packed."""
    ranks = nodes * local
    rows = [Parameter(f"small{i}", (16 * ranks,)) for i in range(7)]
    unit = Unit("u", (Parameter("w", (96 * ranks, 24)), *rows), Mesh((tuple(range(ranks)),)))
    chosen = PlanOptions(slot_reuse=True, bundle_bytes=64, chunk_bytes=1024, **options)
    return compile_spec(ModelSpec((unit,)), Topology(nodes, local), chosen)


@pytest.mark.parametrize(("nodes", "local"), [(1, 2), (1, 4), (2, 3), (3, 4)])
def test_slots_are_proved_in_both_forms(nodes: int, local: int) -> None:
    """In the slot, and beside it, as where a call finds the slot held."""
    compiled = plan(nodes, local)
    assert compiled.program("u", "reduce_scatter", 0).in_slot
    assert not compiled.program("u", "reduce_scatter", 0, in_slot=False).in_slot
    assert verify(compiled, collectives=("reduce_scatter",)).programs == 2 * nodes * local


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a: {"receive": a.receive - (a.receive - a.partial) // 32 * 16}, "overwrites pieces that are still"),
        (lambda a: {"partial": a.partial + 1 << 12}, "overwrites pieces|written before|overlaps|out of bounds"),
        (lambda a: {"wire": a.receive}, "overlap in the slot|the wire area"),
        (lambda a: {"staged": a.receive + 64}, "lies where the slot has packed gradients"),
        (lambda a: {"size": 1 << 30}, "needs 1073741824 bytes, but the unit's slot has"),
    ],
)
def test_places_in_each_others_way_are_found(monkeypatch: Any, change: Any, problem: str) -> None:
    compiled = plan(2, 3)
    placed = areas._placed

    def damaged(*arguments: Any) -> areas.Areas:
        found = placed(*arguments)
        return replace(found, **change(found))

    with monkeypatch.context() as patch:
        patch.setattr(areas, "_placed", damaged)
        if problem.startswith("needs"):  # would not be chosen at all
            patch.setattr(
                areas,
                "slot_areas",
                lambda unit, size, *rest: damaged(unit, *rest, 512, 0, areas.bundle_of(unit, *rest)),
            )
        with pytest.raises(PlanError, match=problem):
            verify(compiled, collectives=("reduce_scatter",))


def test_ranks_that_receive_elsewhere_are_found() -> None:
    compiled = plan(1, 3)
    beside = compiled.program("u", "reduce_scatter", 1, in_slot=False)
    assert isinstance(beside, Program)
    with pytest.raises(PlanError, match="does not receive where the others do"):
        verify(compiled.with_program("u", 1, beside), collectives=("reduce_scatter",))
