"""Slots from liveness: none is asked to hold two units at a time, and together they take little room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.liveness import Interval, live_intervals, moments
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import Slot
from tide.compiler.slots import least_bytes
from tide.compiler.verify import verify
from tide.errors import InputError, PlanError
from tide.topology import Topology

ALL = Mesh(((0, 1, 2, 3),))
MESHES = (ALL, Mesh(((0, 1), (2, 3))))


def unit(name: str, rows: int = 64, mesh: Mesh = ALL, **more: bool | int) -> Unit:
    return Unit(name, (Parameter(f"{name}.w", (rows, 256)),), mesh, **more)  # type: ignore[arg-type]


def compiled(*units: Unit, slots: int | None = 2, apart: tuple[tuple[str, str], ...] = ()) -> Compiled:
    return compile_spec(ModelSpec(units, apart=apart), Topology(1, 4), PlanOptions(slots=slots))


def shared(plan: Compiled) -> list[tuple[str, ...]]:
    return [slot.units for slot in plan.arena.slots]


@st.composite
def sequences(draw: st.DrawFn, meshes: tuple[Mesh, ...] = MESHES) -> ModelSpec:
    """Units in forward order: nested up to four deep, of few or many sizes, some whole, some of one module."""
    units: list[Unit] = []
    depth = module = 0
    sizes = draw(st.sampled_from((st.sampled_from((64, 128, 1024)), st.integers(1, 2048))))
    nested = draw(st.booleans())
    for number in range(draw(st.integers(1, 14))):
        with_last = number > 0 and draw(st.sampled_from((False, False, False, True)))
        if not with_last:
            module, depth = number, draw(st.integers(0, min(depth + 1, 3))) if nested and number else 0
        whole = draw(st.sampled_from((False, False, False, False, True)))
        mesh = draw(st.sampled_from(meshes))
        made = unit(f"u{number}", draw(sizes), mesh, stays_whole=whole, lives_with=module, depth=depth)
        units.append(made)
    return ModelSpec(tuple(units))


def live_bytes(spec: ModelSpec, mesh: Mesh, sizes: dict[str, int], prefetch: int) -> int:
    """Largest sum over the units of a mesh that are whole at once, by going through the step."""
    whole = {u.name for u in spec.units if u.stays_whole and u.mesh == mesh}
    return max(
        sum(sizes[name] for name in whole | {u.name for u in moment.live if u.mesh == mesh})
        for moment in moments(spec.units, prefetch)
    )


@settings(max_examples=150)
@given(sequences(), st.integers(0, 4))
def test_no_conflicts_and_within_one_slot_of_what_is_live(spec: ModelSpec, prefetch: int) -> None:
    plan = compile_spec(spec, Topology(1, 4), PlanOptions(slots=prefetch + 1))
    verify(plan, full=False)
    sizes = {slot_unit: plan.layouts[slot_unit].size for slot in plan.arena.slots for slot_unit in slot.units}
    for slot in plan.arena.slots:
        assert len({spec.unit(name).mesh for name in slot.units}) == 1
    for mesh in {u.mesh for u in spec.units}:
        slots = [slot for slot in plan.arena.slots if spec.unit(slot.units[0]).mesh == mesh]
        total = sum(max(sizes[name] for name in slot.units) for slot in slots)
        largest = max(sizes[u.name] for u in spec.units if u.mesh == mesh)
        # With more units at a time even the best assignment may take more.
        if prefetch <= 2:
            assert total <= live_bytes(spec, mesh, sizes, prefetch) + largest
    total = sum(max(sizes[name] for name in slot.units) for slot in plan.arena.slots)
    largest = sum(max(sizes[u.name] for u in spec.units if u.mesh == mesh) for mesh in {u.mesh for u in spec.units})
    assert least_bytes(spec, sizes, plan.options) <= total <= least_bytes(spec, sizes, plan.options) + largest
    again = compile_spec(spec, Topology(1, 4), PlanOptions(slots=prefetch + 1))
    assert again.digest == plan.digest
    assert again.arena.slots == plan.arena.slots


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(0, 4))
def test_units_of_one_size_take_as_few_slots_as_are_live(count: int, prefetch: int) -> None:
    plan = compiled(*(unit(f"u{number}") for number in range(count)), slots=prefetch + 1)
    assert len(plan.arena.slots) == min(count, prefetch + 1)


def test_intervals_of_nested_modules() -> None:
    units = [unit("o", depth=0), unit("i1", depth=1), unit("i2", depth=1), unit("a", depth=0)]
    assert live_intervals(units, moments(units, 0)) == {
        "o": (Interval(0, 2), Interval(5, 7)),
        "i1": (Interval(1, 1), Interval(7, 7)),
        "i2": (Interval(2, 2), Interval(6, 6)),
        "a": (Interval(3, 3), Interval(4, 4)),
    }
    # one ahead: the next that begins, in the order of either pass
    assert live_intervals(units, moments(units, 1)) == {
        "o": (Interval(0, 2), Interval(4, 7)),
        "i1": (Interval(0, 1), Interval(6, 7)),
        "i2": (Interval(1, 2), Interval(5, 6)),
        "a": (Interval(2, 3), Interval(4, 4)),
    }


def test_a_unit_that_stays_whole_is_live_throughout() -> None:
    units = [unit("a"), unit("b", stays_whole=True)]
    assert live_intervals(units, moments(units, 1))["b"] == (Interval(0, 1), Interval(2, 3))
    assert shared(compiled(*units, unit("c"), slots=1)) == [("a", "c"), ("b",)]


def test_embedding_and_head_take_turns_with_each_other_and_with_blocks() -> None:
    """Two slots serve all: the embedding's size, which the head fits too, and a block's."""
    blocks = [unit(f"layers.{number}", 512) for number in range(6)]
    plan = compiled(unit("embed", 1024), *blocks, unit("head", 1024))
    large, small = plan.arena.slots
    sizes = [plan.layouts["embed"].size, plan.layouts["layers.0"].size]
    assert large.size + small.size <= sizes[0] + max(sizes)
    seven = compiled(unit("embed", 1024), *blocks, unit("layers.6", 512), unit("head", 1024))
    assert sorted(slot.size for slot in seven.arena.slots) == sorted(sizes)


def test_dense_blocks_take_turns_in_the_slots_of_blocks_of_experts() -> None:
    dense = [unit(f"layers.{number}", 64) for number in range(3)]
    experts = [unit(f"layers.{number}", 1024) for number in range(3, 9)]
    plan = compiled(unit("root", 512, stays_whole=True), *dense, *experts)
    assert [len(slot.units) for slot in plan.arena.slots] == [1, 5, 4]


def test_units_of_two_slots_are_divided_anew() -> None:
    """No order of the units gives these slots: the best of them takes 1,408 rows."""
    plan = compiled(*(unit(f"u{k}", rows) for k, rows in enumerate((1024, 128, 128, 64, 64, 1024, 128))), slots=3)
    per_row = plan.layouts["u0"].size // 1024
    assert sum(slot.size for slot in plan.arena.slots) == 1344 * per_row


def test_a_slot_serves_one_mesh() -> None:
    plan = compiled(*(unit(f"u{k}", mesh=MESHES[k % 2]) for k in range(4)), slots=1)
    assert shared(plan) == [("u0", "u2"), ("u1", "u3")]


def test_units_seen_whole_together_are_kept_apart() -> None:
    units = [unit(f"u{number}") for number in range(5)]
    assert shared(compiled(*units)) == [("u0", "u2", "u4"), ("u1", "u3")]
    apart = compiled(*units, apart=(("u0", "u4"),))
    assert apart.arena.slot_of["u0"] != apart.arena.slot_of["u4"]
    assert apart.digest != compiled(*units).digest
    verify(apart, full=False)
    with pytest.raises(InputError, match="are not two of the units"):
        ModelSpec(tuple(units), apart=(("u0", "nobody"),))


# Planted faults ------------------------------------------------------------------------------------


def in_slots(plan: Compiled, *groups: tuple[str, ...]) -> Compiled:
    """The plan with its units in other slots, all as large as the largest."""
    size = max(slot.size for slot in plan.arena.slots)
    slots = tuple(Slot(number * size, size, names) for number, names in enumerate(groups))
    slot_of = {name: number for number, names in enumerate(groups) for name in names}
    return replace(plan, arena=replace(plan.arena, slots=slots, slot_of=slot_of))


NEST = (unit("a"), unit("o"), unit("b", depth=1), unit("c", depth=1), unit("d"))


@pytest.mark.parametrize(
    ("slots", "groups", "message"),
    [
        (2, (("b", "c"), ("a",), ("o",), ("d",)), r"slot 0: units 'b' and 'c' are .*, in the forward of 'b', yet"),
        (1, (("a", "c"), ("o", "b"), ("d",)), r"slot 1: units 'o' and 'b' are .*, in the forward of 'b', yet"),
        (2, (("c", "d"), ("a",), ("o",), ("b",)), r"slot 0: units 'c' and 'd' are .*, in the forward of 'c', yet"),
        # no two of these meet in forward: in backward, a is gathered when b runs, inside of o
        (2, (("a", "b"), ("o",), ("c",), ("d",)), r"slot 0: units 'b' and 'a' are .*, in the backward of 'b', yet"),
        (None, (("a", "c"), ("o",), ("b",), ("d",)), r"slot 0: units 'a' and 'c' share it, yet the option slots"),
    ],
)
def test_conflicts_are_found(slots: int | None, groups: tuple[tuple[str, ...], ...], message: str) -> None:
    plan = compiled(*NEST, slots=slots)
    verify(plan, full=False)
    with pytest.raises(PlanError, match=message):
        verify(in_slots(plan, *groups), full=False)


def test_units_seen_whole_together_must_not_share() -> None:
    plan = compiled(unit("a"), unit("b"), unit("c"), apart=(("a", "c"),))
    with pytest.raises(PlanError, match="'a' and 'c' were seen whole at the same time, yet share"):
        verify(in_slots(plan, ("a", "c"), ("b",)), full=False)
