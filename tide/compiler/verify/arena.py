"""Proof of the layouts: shards tile parameters, parameters do not overlap, areas fit, stated sizes hold.

No two units share a signal word either, nor two lanes, forms or sources of one; that whoever signals is one of those
sources is proved with the order of the steps (:mod:`tide.compiler.verify.words`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NoReturn

import numpy as np

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.model import Mesh, Unit
from tide.compiler.place import AREA_ALIGNMENT, SEGMENT_ALIGNMENT, UnitLayout, align
from tide.compiler.schedule import arena_chunk, chunk_elements
from tide.compiler.schedule.switch import spread_places
from tide.compiler.shard import ShardTable, padded_numel, shard
from tide.compiler.verify.liveness import check_liveness
from tide.compiler.verify.words import check_words
from tide.errors import PlanError


def check_arena(compiled: Compiled) -> None:
    """Raises :class:`PlanError` unless all layouts of the plan are sound.

    Parameters
    ----------
    compiled : Compiled
        The plan; its programs are not looked at.
    """
    _check_slots(compiled)
    check_liveness(compiled)
    _check_areas(compiled)
    check_words(compiled)
    done: set[tuple[int, int]] = set()
    for unit in compiled.spec.units:
        layout = compiled.layouts.get(unit.name)
        if layout is None:
            raise PlanError(f"unit {unit.name!r} has no storage layout")
        key = (id(layout), compiled._signatures[unit.name])
        if key not in done:
            done.add(key)
            _check_unit(compiled, unit, layout)


# Arena -------------------------------------------------------------------------------------------


def _check_slots(compiled: Compiled) -> None:
    arena = compiled.arena
    units = {unit.name: unit for unit in compiled.spec.units}
    held = [name for slot in arena.slots for name in slot.units]
    for name in held:
        if name not in units:
            raise PlanError(f"arena: a slot is assigned to unit {name!r}, which the plan does not have")
    for unit in compiled.spec.units:
        where = [number for number, slot in enumerate(arena.slots) if unit.name in slot.units]
        if len(where) != 1 or held.count(unit.name) != 1:
            raise PlanError(f"unit {unit.name!r} is in slots {where}; a unit has exactly one")
        if arena.slot_of.get(unit.name) != where[0]:
            raise PlanError(
                f"unit {unit.name!r} uses slot {arena.slot_of.get(unit.name)}, but slot {where[0]} is assigned to it"
            )
    for number, slot in enumerate(arena.slots):
        for name in slot.units:
            _check_fit(f"arena, slot {number}", slot.size, f"unit {name!r}", compiled.layouts[name].size)
        if slot.offset % compiled.options.alignment:
            raise PlanError(
                f"arena, slot {number}: offset {slot.offset} is not aligned to {compiled.options.alignment}"
            )
        first = units[slot.units[0]] if slot.units else None
        for name in slot.units[1:] if first is not None else ():
            assert first is not None
            for whole in (first, units[name]):
                if whole.stays_whole:
                    other = name if whole is first else first.name
                    raise PlanError(f"slot {number}: unit {whole.name!r} stays whole, yet shares it with {other!r}")
            if not _same(first.mesh, units[name].mesh):
                raise PlanError(
                    f"slot {number}: units {first.name!r} and {name!r} are sharded over different meshes, so their "
                    "signals of the slot would mix"
                )


def _same(first: Mesh, second: Mesh) -> bool:
    return first is second or first == second


def _areas(compiled: Compiled) -> Iterator[tuple[str, int, int]]:
    arena, receive = compiled.arena, compiled.arena.receive
    for number, slot in enumerate(arena.slots):
        units = ", ".join(repr(name) for name in slot.units[:2]) + (", …" if len(slot.units) > 2 else "")
        yield f"slot {number} ({units})", slot.offset, slot.size
    yield "receive area", receive.receive, receive.receive_size
    yield "partial area", receive.partial, receive.wire_size
    yield "wire area", receive.wire, receive.wire_size
    yield "area of packed gradients", receive.staged, receive.staged_size
    yield "spread area", receive.spread, receive.spread_size
    yield "signal words", arena.signals, arena.words.nbytes


def _check_areas(compiled: Compiled) -> None:
    """Areas are disjoint, inside the arena, and the arena is no larger than they need."""
    arena = compiled.arena
    areas = [area for area in _areas(compiled) if area[2]]
    for name, start, size in areas:
        if start < 0 or start + size > arena.size:
            raise PlanError(
                f"arena: {name}, bytes [{start}, {start + size}), is out of bounds: the stated size is {arena.size}"
            )
    by_start = sorted(areas, key=lambda area: area[1])
    for (name, start, size), (other, next_start, _) in pairwise(by_start):
        if start + size > next_start:
            raise PlanError(f"arena: {name} and {other} overlap in bytes [{next_start}, {start + size})")
    needed = 0
    for name, start, size in by_start:
        needed = align(needed, AREA_ALIGNMENT)
        if start > needed:
            raise PlanError(
                f"arena: bytes [{needed}, {start}) before {name} belong to nothing; the stated size is wrong"
            )
        needed = start + size
    needed = align(needed, AREA_ALIGNMENT)
    if needed != arena.size:
        raise PlanError(f"arena: states {arena.size} bytes, but its areas need {needed}")
    meshes = {id(unit.mesh): unit.mesh for unit in compiled.spec.units}
    last = max(max(group) for mesh in meshes.values() for group in mesh.groups)
    if arena.world_size <= last:
        raise PlanError(f"arena: laid out for {arena.world_size} ranks, but a mesh names rank {last}")


def _check_fit(where: str, room: int, what: str, need: int) -> None:
    if need > room:
        raise PlanError(f"{where}: holds {room} bytes, but {what} needs {need}")


# Units -------------------------------------------------------------------------------------------


def _check_unit(compiled: Compiled, unit: Unit, layout: UnitLayout) -> None:
    owners, options = unit.mesh.size, compiled.options
    if len(layout.offsets) != len(unit.parameters) or len(layout.nbytes) != len(unit.parameters):
        raise PlanError(f"unit {unit.name!r}: its layout is for {len(layout.offsets)} parameters")
    spans: list[tuple[int, int, int]] = []
    for index, parameter in enumerate(unit.parameters):
        _check_shards(unit, index, shard(parameter, owners))
        numel = padded_numel(parameter, owners) if options.padded_storage else parameter.numel
        need, offset = numel * itemsize(parameter.dtype), layout.offsets[index]
        if layout.nbytes[index] != need:
            _fail(unit, index, (offset, offset + layout.nbytes[index]), f"reserves other than the {need} bytes it has")
        if offset % options.alignment:
            _fail(unit, index, (offset, offset + need), f"is not aligned to {options.alignment}")
        if need:
            spans.append((offset, offset + need, index))
    if layout.bundle is not None:
        _check_bundle(unit, layout)
        spans.append((layout.bundle.offset, layout.bundle.offset + int(layout.bundle.length.sum()), -1))
    spans.sort()
    for (_, stop, index), (other_start, other_stop, other) in pairwise(spans):
        if stop > other_start:
            name = unit.parameters[other].name if other >= 0 else "the bundle"
            shown = index if index >= 0 else other
            _fail(unit, shown, (other_start, min(stop, other_stop)), f"overlaps {name} in the slot")
    if spans and (spans[0][0] < 0 or max(stop for _, stop, _ in spans) > layout.size):
        start, stop, index = max(spans, key=lambda span: span[1])
        _fail(unit, max(index, 0), (start, stop), f"is out of bounds: the unit's storage has {layout.size} bytes")
    _check_chunk(compiled, unit)


def _check_shards(unit: Unit, index: int, table: ShardTable) -> None:
    """Shards follow each other and end with the parameter."""
    parameter = unit.parameters[index]
    extent = parameter.shape[parameter.dim]
    ends = table.start + table.rows
    follows = np.array_equal(ends[:-1], table.start[1:]) and int(table.start[0]) == 0 and int(ends[-1]) == extent
    if not follows or (table.rows < 0).any() or table.outer * table.pitch != parameter.numel:
        raise PlanError(f"unit {unit.name!r}, parameter {parameter.name}: its shards do not tile dim {parameter.dim}")


def _check_bundle(unit: Unit, layout: UnitLayout) -> None:
    bundle, owners = layout.bundle, unit.mesh.size
    assert bundle is not None
    if len(set(bundle.members)) != len(bundle.members) or not set(bundle.members) <= set(range(len(unit.parameters))):
        raise PlanError(f"unit {unit.name!r}: the bundle's members {bundle.members} are not distinct parameters")
    if not np.array_equal(bundle.base, np.cumsum(bundle.length) - bundle.length) or bundle.offset % SEGMENT_ALIGNMENT:
        raise PlanError(f"unit {unit.name!r}: the bundle's segments do not follow each other")
    before = np.zeros(owners, dtype=np.int64)
    for row, index in enumerate(bundle.members):
        parameter = unit.parameters[index]
        nbytes = shard(parameter, owners).numel * itemsize(parameter.dtype)
        wrong = np.flatnonzero((bundle.at[row] < before) | (bundle.at[row] + nbytes > bundle.length))
        wrong = np.union1d(wrong, np.flatnonzero(bundle.at[row] % SEGMENT_ALIGNMENT))
        if len(wrong):
            owner = int(wrong[0])
            start = int(bundle.at[row, owner])
            _fail(
                unit,
                index,
                (start, start + int(nbytes[owner])),
                f"overlaps another, is not aligned or ends beyond the bundle segment of shard {owner}",
            )
        before = bundle.at[row] + nbytes


def _check_chunk(compiled: Compiled, unit: Unit) -> None:
    spare = compiled.options.slot_reuse and unit.name not in compiled.beside
    elements, receive = arena_chunk(unit, compiled.options, spare), compiled.arena.receive
    if not elements:
        return
    width = max(itemsize(p.grad_dtype) for p in unit.parameters if p.grad_dtype is not None)
    where = f"unit {unit.name!r}, reduce-scatter"
    group = unit.mesh.groups[0]
    team = compiled.context(unit.name, group[0]).team
    if team.per_node > 1:
        _check_fit(f"{where}: a piece of the receive area", receive.piece, "a chunk", elements * width)
        _check_fit(f"{where}: a position of the receive area", receive.peers, "the node (pieces)", team.per_node - 1)
    if team.nodes > 1:
        if unit.name in compiled.spread:
            places = spread_places(team.nodes, team.per_node, receive.depth)
            needed = chunk_elements(unit, compiled.options) * 4
            _check_fit(f"{where}: a place of the spread area", receive.spread_chunk, "a partial sum", needed)
            _check_fit(f"{where}: the spread area", receive.spread_places, "the node's owners (places)", places)
        _check_fit(
            f"{where}: a position of the wire area",
            receive.chunk,
            "a partial sum",
            elements * itemsize(compiled.options.wire_dtype),
        )


def _fail(unit: Unit, index: int, span: tuple[int, int], problem: str) -> NoReturn:
    name = unit.parameters[index].name
    raise PlanError(
        f"storage of unit {unit.name!r}, parameter {name}, bytes [{span[0]}, {span[1]}) of the slot: {problem}"
    )
