"""Reduce-scatters in vacated slots, packed gradients and narrow partial sums, in random interleavings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated_models import REUSE, TINY, block, blocks, world

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.cost import predict
from tide.compiler.model import ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule import areas_of
from tide.compiler.steps import Accumulate, Buffer, Copy, Lane, Place, Wait
from tide.errors import InputError
from tide.topology import Team, Topology
from tide.transport.simulated import FAMILIES, Operation, Simulation, explore, training_sequence
from tide.transport.simulated.reference import error_bound, random_tensor, reference_reduce_scatter

WORLDS = [Topology(*pair) for pair in ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (2, 1))]


def _name(topology: Topology) -> str:
    return f"{topology.nodes}x{topology.gpus_per_node}"


@pytest.mark.parametrize(
    ("topology", "narrow", "slots"),
    # Every topology with a place for each piece; rings, and slots that take turns, on one and on several nodes.
    [(topology, True, 2) for topology in WORLDS]
    + [(topology, narrow, slots) for topology in (WORLDS[1], WORLDS[2]) for narrow, slots in ((False, 2), (True, 1))],
    ids=lambda value: _name(value) if isinstance(value, Topology) else str(value),
)
def test_training_through_slots(topology: Topology, narrow: bool, slots: int) -> None:
    """Gathers of the next units are issued while slots still receive; with one slot they take turns."""
    compiled = blocks(topology, 3, replace(REUSE, slots=slots), narrow=narrow)
    program = compiled.program("layers.0", "reduce_scatter", 0)
    ring = areas_of(compiled.context("layers.0", 0), (0, 1, 2, 3) + ((4,) if narrow else ())).ring
    assert program.in_slot == (not compiled.beside)
    if narrow and (topology.nodes == 1 or topology.gpus_per_node > 2):
        assert program.in_slot
        assert not ring
    sequence = training_sequence(compiled, 2)
    explore(compiled, sequence, [0], FAMILIES)


@pytest.mark.parametrize("topology", WORLDS[1:3], ids=_name)
def test_calls_that_find_the_slot_held(topology: Topology) -> None:
    """Beside the slot while the unit is whole, through it once it is vacated, again without a gather between."""
    compiled = blocks(topology, 2, replace(REUSE, slots=1), narrow=True)
    sequence: list[Operation] = [
        ("all_gather", "layers.0"),
        ("reduce_scatter", "layers.0"),
        ("use", "layers.0"),
        ("release", "layers.0"),
        ("reduce_scatter", "layers.0"),
        ("reduce_scatter", "layers.0", (0, 4)),
        ("reduce_scatter", "layers.1"),
        ("all_gather", "layers.1"),
        ("reduce_scatter", "layers.0"),
        ("use", "layers.1"),
        ("release", "layers.1"),
    ]
    explore(compiled, sequence, range(2), FAMILIES)


def _packing(topology: Topology, options: PlanOptions) -> Compiled:
    """Units of one large and many small parameters, some of them too odd to be packed."""
    ranks = topology.world_size

    def unit(name: str) -> Unit:
        small = [Parameter(f"{name}.bias{i}", (40 * ranks,)) for i in range(7)]
        odd = [Parameter(f"{name}.odd", (5,)), Parameter(f"{name}.uneven", (16 * ranks - 9,))]
        strided = [Parameter(f"{name}.strided", (4, 16 * ranks), 1)]
        return Unit(
            name, (small[0], Parameter(f"{name}.w", (100 * ranks, 12)), *small[1:], *odd, *strided), world(ranks)
        )

    return compile_spec(ModelSpec((unit("a"), unit("b")), "packing"), topology, options)


@pytest.mark.parametrize("reuse", [False, True], ids=["areas", "slots"])
@pytest.mark.parametrize(
    ("topology", "chunk"), [(WORLDS[0], None), (WORLDS[1], 512), (WORLDS[2], 512), (WORLDS[3], None)]
)
def test_small_gradients_travel_packed(topology: Topology, chunk: int | None, reuse: bool) -> None:
    options = PlanOptions(slots=1, bundle_bytes=256, chunk_bytes=chunk, slot_reuse=reuse)
    compiled = _packing(topology, options)
    push = compiled.program("a", "reduce_scatter", 0).streams[0]
    assert isinstance(push.steps[0], Place)
    packed = {cast.src.index for cast in push.steps[0].casts}
    assert packed == {0, 2, 3, 4, 5, 6, 7, 10} | packed & {9}
    first = next(step for step in push.steps if isinstance(step, Copy))
    staged = [t for t in first.transfers if t.src.buffer is Buffer.STAGED]
    if chunk is None:
        assert len(staged) < 4 <= len(packed)
    explore(compiled, training_sequence(compiled), [1], FAMILIES)


def test_packing_waits_for_enough_of_them() -> None:
    """Two norms between two ranks are not worth a kernel."""
    mesh = world(2)
    unit = Unit("u", (Parameter("w", (64, 64)), Parameter("n", (128,)), Parameter("m", (128,))), mesh)
    compiled = compile_spec(ModelSpec((unit,)), Topology(1, 2))
    assert not any(isinstance(step, Place) for _, _, step in compiled.program("u", "reduce_scatter", 0).steps())
    assert compiled.arena.receive.staged_size == 0


# Release ------------------------------------------------------------------------------------------


def _large(nodes: int, reuse: bool, output: int = 3 << 20, **options: object) -> Compiled:
    """One unit over nodes of eight H200s; every rank's output is the same for all numbers of nodes."""
    ranks = 8 * nodes
    unit = Unit("u", (Parameter("w", (ranks, output)), Parameter("v", (ranks, output // 2))), world(ranks))
    chosen = PlanOptions(slot_reuse=reuse, **options)  # type: ignore[arg-type]
    return compile_spec(ModelSpec((unit,), "large"), Topology(nodes, 8, "h200"), chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_gradients_are_released_when_the_pushes_end(nodes: int) -> None:
    """Phase 1 is as long as its pushes and sums, while the wire takes longer by far."""
    found = predict(_large(nodes, True), "u", "reduce_scatter", 0)
    pushes = found.copy_seconds
    assert found.released < 1.2 * pushes
    assert found.seconds > found.network_seconds > (1.0 if nodes == 2 else 1.2) * found.released
    through_rings = predict(_large(nodes, False), "u", "reduce_scatter", 0)
    assert found.released <= through_rings.released < through_rings.seconds
    if nodes > 2:  # more partial sums than a ring has positions
        assert found.released < 0.8 * through_rings.released
    assert found.seconds < 1.02 * through_rings.seconds


@pytest.mark.parametrize("nodes", [2, 4])
def test_narrow_sums_halve_the_wire(nodes: int) -> None:
    wide, narrow = (
        predict(_large(nodes, True, wire_dtype=dtype), "u", "reduce_scatter", 0) for dtype in ("float32", "bfloat16")
    )
    assert narrow.network_bytes * 2 == wide.network_bytes
    assert narrow.seconds < wide.seconds


def test_released_before_the_wire_has_carried_anything() -> None:
    """Streams that read gradients wait for pieces, and for nothing that comes from the wire."""
    compiled = blocks(Topology(3, 3), 1, replace(REUSE, slots=1), narrow=True)
    assert compiled.program("layers.0", "reduce_scatter", 0).in_slot
    for rank in range(9):
        program = compiled.program("layers.0", "reduce_scatter", rank)
        for stream in program.streams:
            if stream.name in program.release:
                lanes = {step.lane for step in stream.steps if isinstance(step, Wait)}
                assert lanes == {Lane.CREDIT if stream.name == "rs.push" else Lane.PUSHED}


# Narrow sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True], ids=["areas", "slots"])
@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 2), Topology(4, 1)], ids=_name)
def test_bfloat16_on_the_wire(topology: Topology, reuse: bool) -> None:
    """Delivered as the reference rounds them, whatever the interleaving, and within the stated bound."""
    options = replace(REUSE if reuse else TINY, wire_dtype="bfloat16")
    compiled = blocks(topology, 2, options, narrow=True)
    explore(compiled, training_sequence(compiled), range(2), FAMILIES)
    sums = [
        total
        for _, _, step in compiled.program("layers.0", "reduce_scatter", 0).steps()
        if isinstance(step, Accumulate)
        for total in step.sums
    ]
    assert {total.dst_dtype for total in sums if total.dst.buffer is Buffer.PARTIAL} == {"bfloat16"}
    assert {total.src_dtype for total in sums if total.srcs[0].buffer is Buffer.WIRE} == {"bfloat16"}


def test_the_bound_of_narrow_sums_holds_and_is_needed() -> None:
    parameter = Parameter("w", (64, 8))
    team = Team(((0, 1), (2, 3), (4, 5)))
    grads = [random_tensor((64, 8), "bfloat16", f"grad {rank}") for rank in range(6)]
    exact, bound = error_bound(grads, parameter, 1.0, 6.0, "bfloat16")
    _, tight = error_bound(grads, parameter, 1.0, 6.0)
    found = torch.cat(reference_reduce_scatter(grads, parameter, team, 1.0, 6.0, "bfloat16")).double().numpy()
    assert (abs(found - exact) <= bound).all()
    assert (abs(found - exact) > tight).any(), "a bound for float32 sums must not be enough"


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="wire_dtype must be one of float32, bfloat16, got 'float16'"):
        PlanOptions(wire_dtype="float16")
    with pytest.raises(InputError, match="slot_reuse needs route='push'"):
        PlanOptions(slot_reuse=True, route="pull")


def test_what_is_left_unread_in_a_slot_is_found() -> None:
    compiled = blocks(Topology(1, 3), 1, REUSE, narrow=True)
    program = compiled.program("layers.0", "reduce_scatter", 1)
    steps = list(program.streams[0].steps)
    at = next(index for index, step in enumerate(steps) if isinstance(step, Copy))
    first = steps[at]
    assert isinstance(first, Copy)
    far = first.transfers[-1]
    moved = far._replace(dst=far.dst._replace(offset=compiled.layouts["layers.0"].size - far.length), runs=1)
    steps[at] = replace(first, transfers=(*first.transfers, moved))
    damaged = compiled.with_program(
        "layers.0", 1, replace(program, streams=(replace(program.streams[0], steps=tuple(steps)), *program.streams[1:]))
    )
    with pytest.raises(Exception, match="of the slot was written, but never read"):
        Simulation(damaged).run([("reduce_scatter", "layers.0")])


def test_units_too_small_for_their_slots_go_beside_them() -> None:
    """A unit of tiny float32 gradients has no room for a ring in its slot; the plan says which."""
    mesh = world(8)
    units = (block("wide", mesh, 1), Unit("large", (Parameter("w", (64, 64)),), mesh))
    compiled = compile_spec(ModelSpec(units), Topology(1, 8), PlanOptions(slot_reuse=True, alignment=16))
    assert compiled.beside == ("wide",)
    assert not compiled.program("wide", "reduce_scatter", 0).in_slot
    assert compiled.program("large", "reduce_scatter", 0).in_slot
    explore(compiled, training_sequence(compiled), range(3), "burst")
