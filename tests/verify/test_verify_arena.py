"""Damaged layouts: overlaps, wrong sizes, slots that units cannot share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import Slot
from tide.compiler.signals import UnitSignals
from tide.compiler.steps import Lane, Signal, Wait
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


# Signal words ------------------------------------------------------------------------------------


def with_words(compiled: Compiled, **units: UnitSignals) -> Compiled:
    words = replace(compiled.arena.words, units={**compiled.arena.words.units, **units})
    return replace(compiled, arena=replace(compiled.arena, words=words))


def test_units_that_share_signal_words(compiled: Compiled) -> None:
    """A signal for one unit would answer a wait of the other."""
    units = compiled.arena.words.units
    check(with_words(compiled, b=replace(units["a"], slot=units["b"].slot)), "unit 'a' and unit 'b' share signal word")
    last = replace(units["b"], first=units["b"].first - 1)
    check(with_words(compiled, b=last), f"unit 'a' and unit 'b' share signal word {last.first}")
    slots = compiled.arena.words.slots
    inside = replace(units["root"], first=slots[-1].first + slots[-1].count - 1)
    check(with_words(compiled, root=inside), f"slot 2 and unit 'root' share signal word {inside.first}")


def test_units_with_too_few_signal_words(compiled: Compiled) -> None:
    units = compiled.arena.words.units
    check(with_words(compiled, a=replace(units["a"], size=units["a"].size - 1)), "counted in a word that is not")
    check(with_words(compiled, a=replace(units["a"], forms=0)), "unit 'a': position 0 has no word for signals PUSHED")
    check(with_words(compiled, a=replace(units["a"], slot=0)), "unit 'a': its signals of the slot are counted from")
    words = replace(compiled.arena.words, count=compiled.arena.words.count - 1)
    check(replace(compiled, arena=replace(compiled.arena, words=words)), "signal words, but more are used")
    words = replace(compiled.arena.words, units={n: u for n, u in units.items() if n != "c"})
    check(replace(compiled, arena=replace(compiled.arena, words=words)), "unit 'c' has no signal words")


def test_a_signal_from_where_none_is_expected(compiled: Compiled) -> None:
    """Puts keep to their rails: a signal of another one would be counted as the rail's."""
    verify(compiled)
    programs = {rank: compiled.program("a", "all_gather", rank) for rank in range(4)}

    def edited(rank: int, step: Signal | Wait) -> Compiled:
        program = programs[rank]
        stream = program.streams[-1]
        streams = (*program.streams[:-1], replace(stream, steps=(*stream.steps, step)))
        return damaged.with_program("a", rank, replace(program, streams=streams))

    damaged = compiled
    damaged = edited(0, Signal(3, Lane.WIRE))
    damaged = edited(3, Wait(0, Lane.WIRE))
    with pytest.raises(PlanError, match="rank 3 has no word for signals WIRE of rank 0"):
        verify(damaged)


@pytest.mark.parametrize(
    ("units", "topology", "most"),
    [(80, Topology(1, 8), 100 << 10), (130, Topology(2048, 8), 10 << 20), (130, Topology(128, 8), 1 << 20)],
    ids=str,
)
@pytest.mark.parametrize("slot_reuse", [False, True])
def test_signal_words_stay_few(units: int, topology: Topology, most: int, slot_reuse: bool) -> None:
    """They grow with the ranks of a node and with nodes, not with the world."""
    mesh = Mesh((tuple(range(topology.world_size)),))
    size = topology.world_size, 64
    spec = ModelSpec(tuple(Unit(f"u{i}", (Parameter(f"u{i}.w", size),), mesh) for i in range(units)))
    compiled = compile_spec(spec, topology, PlanOptions(slot_reuse=slot_reuse))
    assert 0 < compiled.arena.words.nbytes < most
    assert compiled.arena.size - compiled.arena.signals < most + 4096


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 9])
def test_all_exchanges_between_nodes_have_words(nodes: int) -> None:
    """Of powers of two, and of other numbers, where FREE and WIRE come from other nodes."""
    mesh = Mesh((tuple(range(2 * nodes)),))
    spec = ModelSpec((unit("a", mesh), unit("b", mesh)))
    verify(compile_spec(spec, Topology(nodes, 2), PlanOptions(bundle_bytes=64, slot_reuse=bool(nodes % 2))))
