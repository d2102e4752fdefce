"""Damaged layouts: overlaps, wrong sizes, slots that units cannot share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import Slot
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology

MESH = Mesh(((0, 1, 2, 3),))


def unit(name: str, mesh: Mesh = MESH, **more: bool | int) -> Unit:
    rows = (Parameter(f"{name}.w", (33, 16)), Parameter(f"{name}.b", (9,)), Parameter(f"{name}.g", (6,)))
    return Unit(name, rows, mesh, **more)  # type: ignore[arg-type]


@pytest.fixture
def compiled() -> Compiled:
    spec = ModelSpec((unit("root", stays_whole=True), unit("a"), unit("b"), unit("c")))
    return compile_spec(spec, Topology(2, 2), PlanOptions(slots=2, bundle_bytes=64))


def check(compiled: Compiled, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(compiled, full=False)


def with_slots(compiled: Compiled, *slots: Slot) -> Compiled:
    slot_of = {name: number for number, slot in enumerate(slots) for name in slot.units}
    return replace(compiled, arena=replace(compiled.arena, slots=slots, slot_of=slot_of))


def test_sound_layout_proves(compiled: Compiled) -> None:
    verify(compiled, full=False)


def test_stated_size(compiled: Compiled) -> None:
    check(replace(compiled, arena=replace(compiled.arena, size=compiled.arena.size + 4096)), "states .* its areas need")
    check(
        replace(compiled, arena=replace(compiled.arena, size=compiled.arena.size - 4096)), "signal words.*out of bounds"
    )


def test_overlapping_slots(compiled: Compiled) -> None:
    slots = compiled.arena.slots
    moved = replace(slots[1], offset=slots[1].offset - 4096)
    check(with_slots(compiled, slots[0], moved, *slots[2:]), r"overlap in bytes \[0, 4096\)")


def test_slot_too_small(compiled: Compiled) -> None:
    slots = compiled.arena.slots
    check(
        with_slots(compiled, replace(slots[0], size=512), *slots[1:]), "slot 0: holds 512 bytes, but unit 'root' needs"
    )


def test_overlapping_areas(compiled: Compiled) -> None:
    areas = compiled.arena.receive
    moved = replace(areas, partial=areas.receive)
    check(replace(compiled, arena=replace(compiled.arena, receive=moved)), "receive area and partial area overlap")


def test_swapped_slots(compiled: Compiled) -> None:
    slot_of = {**compiled.arena.slot_of, "a": compiled.arena.slot_of["b"], "b": compiled.arena.slot_of["a"]}
    check(replace(compiled, arena=replace(compiled.arena, slot_of=slot_of)), "unit 'a' uses slot 2, but slot 1")


def test_unit_without_a_slot_of_its_own(compiled: Compiled) -> None:
    slots = compiled.arena.slots
    twice = replace(slots[2], units=(*slots[2].units, "a"))
    check(with_slots(compiled, *slots[:2], twice), r"unit 'a' is in slots \[1, 2\]")


def test_whole_unit_does_not_share(compiled: Compiled) -> None:
    first, second, third = compiled.arena.slots
    shared = with_slots(compiled, replace(first, units=("root", "a", "c")), replace(second, units=()), third)
    check(shared, "unit 'root' stays whole, yet shares")


def test_meshes_do_not_share() -> None:
    other = Mesh(((0, 2), (1, 3)))
    spec = ModelSpec((unit("a"), unit("b", other)))
    compiled = compile_spec(spec, Topology(2, 2), PlanOptions(slots=1))
    first, second = compiled.arena.slots
    size = max(first.size, second.size)
    shared = with_slots(compiled, Slot(0, size, ("a", "b")), Slot(first.size, second.size, ()))
    check(shared, "different meshes")


def test_units_of_one_module_do_not_share() -> None:
    spec = ModelSpec((unit("a", lives_with=1), unit("b", lives_with=1)))
    compiled = compile_spec(spec, Topology(2, 2), PlanOptions(slots=1))
    first, second = compiled.arena.slots
    shared = with_slots(compiled, Slot(0, first.size, ("a", "b")), replace(second, units=()))
    check(shared, "whole at the same time")


def test_overlapping_parameters(compiled: Compiled) -> None:
    layout = compiled.layouts["a"]
    moved = replace(layout, offsets=(layout.offsets[0], layout.offsets[0] + 512, *layout.offsets[2:]))
    check(
        replace(compiled, layouts={**compiled.layouts, "a": moved}),
        r"unit 'a', parameter a.w, bytes \[512, .*overlaps a.b in the slot",
    )


def test_parameter_beyond_its_storage(compiled: Compiled) -> None:
    layout = compiled.layouts["a"]
    moved = replace(layout, size=layout.size - 512)
    check(replace(compiled, layouts={**compiled.layouts, "a": moved}), "out of bounds: the unit's storage has")


def test_unaligned_parameter(compiled: Compiled) -> None:
    layout = compiled.layouts["a"]
    moved = replace(layout, offsets=(*layout.offsets[:2], layout.offsets[2] + 8))
    check(replace(compiled, layouts={**compiled.layouts, "a": moved}), "parameter a.g, .* not aligned to 512")


def test_overlapping_bundle_members(compiled: Compiled) -> None:
    layout = compiled.layouts["a"]
    assert layout.bundle is not None
    bundle = replace(layout.bundle, at=np.zeros_like(layout.bundle.at))
    check(
        replace(compiled, layouts={**compiled.layouts, "a": replace(layout, bundle=bundle)}),
        "parameter a.g, bytes .* overlaps another, is not aligned or ends beyond the bundle segment of shard 0",
    )


def test_receive_area_too_small(compiled: Compiled) -> None:
    areas = replace(compiled.arena.receive, piece=16)
    check(
        replace(compiled, arena=replace(compiled.arena, receive=areas)),
        "a piece of the receive area: holds 16 bytes|belong to nothing",
    )
