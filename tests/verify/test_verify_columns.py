"""Columns and steps are one schedule: they agree, and damage to any kind of step is found in either form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_strategies import TOPOLOGIES, plans

import tide.compiler.verify.proof as proof
from tide.compiler.columns import KIND_NAMES, ProgramRows, Rows, Steps, Sums
from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule import UnitContext, reduce_scatter_rows
from tide.compiler.verify import verify
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables
from tide.errors import PlanError
from tide.topology import Topology

LARGER = [*TOPOLOGIES, (5, 3), (8, 2), (2, 8)]


# Agreement --------------------------------------------------------------------------------------


def flat(value: Any) -> Iterator[np.ndarray]:
    """All arrays in columns of columns."""
    if isinstance(value, np.ndarray):
        yield value
        return
    for name in type(value).__slots__:
        yield from flat(getattr(value, name))


@given(plans(topologies=LARGER), st.booleans())
@settings(max_examples=25)
def test_columns_are_those_of_the_steps_made_of_them(compiled: Compiled, in_slot: bool) -> None:
    """What the proof reads of a schedule is what it reads of the programs that ranks run."""
    for unit in compiled.spec.units:
        if not any(p.trainable for p in unit.parameters):
            continue
        group = unit.mesh.groups[0]
        context = compiled.context(unit.name, group[0], in_slot)
        programs = [compiled.program(unit.name, "reduce_scatter", rank, in_slot=in_slot) for rank in group]
        rows = [reduce_scatter_rows(context, position) for position in range(len(group))]
        scene = Scene(context, "reduce_scatter", group)
        made, kept = Tables(scene, rows), Tables(scene, programs)
        for name in ("kind", "peer", "lane", "count", "queue", "queue_position", "queue_stream", "queue_released"):
            assert np.array_equal(getattr(made, name), getattr(kept, name)), name
        assert (made.streams, made.release, made.in_slot) == (kept.streams, kept.release, kept.in_slot)
        some = np.arange(len(group)) % 2 == 0
        for positions in (None, some):
            for kinds in ((0,), (1, 2), (2,)):
                pair = made.access(*kinds, positions=positions), kept.access(*kinds, positions=positions)
                assert all(np.array_equal(*both) for both in zip(*map(flat, pair), strict=True)), kinds
            (step, sums), (other, others) = made.summed(positions), kept.summed(positions)
            assert np.array_equal(step, other)
            assert all(np.array_equal(*both) for both in zip(flat(sums), flat(others), strict=True))
        for step in range(0, made.steps, 1 + made.steps // 12):
            assert made.describe(step) == kept.describe(step)
            assert made.gradient_of(step) == kept.gradient_of(step)


# Damage -----------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """Which step of a stream is dropped, or which column of the first of its rows is changed by how much."""

    stream: int
    step: int
    column: tuple[str, ...] = ()
    by: int = 0


def damaged(rows: ProgramRows, damage: Damage) -> ProgramRows:
    """The program with one step damaged."""
    stream = rows.streams[damage.stream]
    assert isinstance(stream, Rows)
    kind = int(stream.columns.kind[damage.step])
    columns, payloads = stream.columns, dict(stream.payloads)
    if kind in payloads and damage.column[:1] not in {(name,) for name in Steps._fields}:
        sizes, body = payloads[kind]()
        number = int(np.count_nonzero(columns.kind[: damage.step] == kind))
        first = int(sizes[:number].sum())
        if damage.column:
            body = changed(body, damage.column, first, damage.by)
        else:
            body = body[np.delete(np.arange(int(sizes.sum())), np.arange(first, first + sizes[number]))]
            sizes = np.delete(sizes, number)
        payloads[kind] = lambda: (sizes, body)  # type: ignore[assignment,return-value]
    if not damage.column:
        columns = Steps(*(np.delete(column, damage.step) for column in columns))
    elif damage.column[0] in Steps._fields:
        values = getattr(columns, damage.column[0]).copy()
        values[damage.step] += damage.by
        columns = columns._replace(**{damage.column[0]: values})
    streams = list(rows.streams)
    streams[damage.stream] = replace(stream, columns=columns, payloads=payloads)
    return replace(rows, streams=tuple(streams))


def changed(body: Any, column: tuple[str, ...], row: int, by: int) -> Any:
    """Columns with one figure changed."""
    if isinstance(body, Sums) and column[0] == "srcs":
        row = int(body.first[row])
    inner = getattr(body, column[0])
    if len(column) > 1:
        return replace(body, **{column[0]: changed(inner, column[1:], row, by)})
    values = inner.copy()
    values[row] = not values[row] if values.dtype == bool else values[row] + by
    return replace(body, **{column[0]: values})


#: What is changed of steps of each kind, and by how much.
CHANGES: dict[str, tuple[tuple[tuple[str, ...], int], ...]] = {
    "Place": ((("src", "offset"), 4), (("dst", "offset"), 4), (("runs",), 1)),
    "Copy": ((("src", "offset"), 4), (("dst", "offset"), 4), (("runs",), 1), (("number",), 1)),
    "Put": ((("src", "offset"), 4), (("dst", "offset"), 4), (("runs",), 1), (("lane",), 1)),
    "Signal": ((("number",), 1), (("lane",), 1)),
    "Wait": ((("number",), 1), (("lane",), 1)),
    "Accumulate": ((("srcs", "offset"), 4), (("dst", "offset"), 4), (("count",), 1), (("based",), 1)),
}


def spots(rows: ProgramRows) -> Iterator[tuple[str, Damage]]:
    """Kind and damages of a step of each kind, lane and side of each stream: the first one, or the last."""
    for number, stream in enumerate(rows.streams):
        assert isinstance(stream, Rows)
        columns = stream.columns
        form = np.stack((columns.kind, columns.lane, columns.peer == rows.position), axis=1)
        forms, of = np.unique(form, axis=0, return_inverse=True)
        for which in range(len(forms)):
            steps = np.flatnonzero(of.ravel() == which)
            step, kind = int(steps[-1 if (rows.position + which) % 2 else 0]), KIND_NAMES[forms[which, 0]]
            yield kind, Damage(number, step)
            for column, by in CHANGES[kind]:
                yield kind, Damage(number, step, column, by)
            if kind == "Accumulate":  # whether it is final
                yield kind, Damage(number, step, ("number",), -1 if columns.number[step] else 1)


def plan(nodes: int, local: int, reuse: bool, wide: str = "float32", **more: object) -> Compiled:
    """Shards that differ: whole, partial and empty ones, strided and packed gradients, rings that go round."""
    ranks = nodes * local
    rows = (
        Parameter("wide", (5 * ranks - 2, 24)),
        Parameter("strided", (3, 4 * ranks, 2), 1, out_dtype="bfloat16"),
        Parameter("few", (ranks - 1, 8)),
        *(Parameter(f"small{i}", (16 * ranks,), grad_dtype=wide) for i in range(5)),
    )
    unit = Unit("u", rows, Mesh((tuple(range(ranks)),)))
    options = PlanOptions(chunk_bytes=512, bundle_bytes=64, slot_reuse=reuse, **more)  # type: ignore[arg-type]
    return compile_spec(ModelSpec((unit,)), Topology(nodes, local), options)


PLANS = {
    "ring": plan(3, 2, False),
    "slot": plan(2, 2, True, "bfloat16", wire_dtype="bfloat16"),
    "node": plan(1, 3, False, "bfloat16"),
}


@pytest.mark.parametrize("compiled", PLANS.values(), ids=PLANS.keys())
def test_damage_to_any_kind_of_step_of_any_position_is_found(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the columns that the proof reads, and in a program of steps; what is said of a dropped step is the same."""
    seen: set[str] = set()
    for rank in range(compiled.topology.world_size):
        whole = reduce_scatter_rows(compiled.context("u", rank), rank)
        for kind, damage in spots(whole):
            seen.add(kind)
            wrong = damaged(whole, damage)
            slot = compiled.context("u", rank).slot_bytes

            def rows(context: UnitContext, position: int, wrong: ProgramRows = wrong, slot: int = slot) -> ProgramRows:
                hit = position == wrong.position and context.slot_bytes == slot
                return wrong if hit else reduce_scatter_rows(context, position)

            with monkeypatch.context() as patch:
                patch.setattr(proof, "reduce_scatter_rows", rows)
                with pytest.raises(PlanError) as of_columns:
                    verify(compiled, collectives=["reduce_scatter"])
            if damage.column:  # that both forms are read alike is shown by the others
                assert "of unit 'u'" in str(of_columns.value)
                continue
            stepped = compiled.with_program("u", rank, wrong.program())
            with pytest.raises(PlanError) as of_steps:
                verify(stepped, collectives=["reduce_scatter"])
            assert str(of_columns.value) == str(of_steps.value), (kind, damage)
    across = {"Put"} if compiled.topology.nodes > 1 else set()
    assert seen == {"Place", "Copy", "Signal", "Wait", "Accumulate"} | across
