"""The descriptor graph: which bytes of whose shard lie where in whose storage.

A *descriptor* is one shard seen from one rank that needs it: `runs` pieces of the owner's shard, dense
there, at equal distances in the destination's storage::

    shard of rank 1      ▐▒▒▒▒▒▒▒▌▒▒▒▒▒▒▒▌▒▒▒▒▒▒▒▌            source pitch = one run
                             │       └───────┐
    storage of rank 0  ▐ … ▒▒▒▒▒▒▒ … … … ▒▒▒▒▒▒▒ … … … ▒▒▒▒▒▒▒ … ▌   destination pitch = one row of storage

Storage lies at the same offsets on every rank, so the descriptors of two destinations differ in nothing
but their rank: a parameter has as many as non-empty shards, times the ranks of the shard group. All
offsets, lengths and pitches are bytes; a cast from `shard_dtype` to `dtype` makes the two sides differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.model import Parameter, Unit
from tide.compiler.shard import shard
from tide.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

#: Edges above which a graph is refused; networkx takes about a kilobyte for each.
EDGE_LIMIT = 2_000_000

#: Columns of :func:`descriptor_table`; offsets, lengths and pitches in bytes.
COLUMNS = np.dtype(
    [
        ("parameter", np.int64),
        ("source_rank", np.int64),
        ("destination_rank", np.int64),
        ("shard_offset", np.int64),
        ("slot_offset", np.int64),
        ("arena_offset", np.int64),
        ("runs", np.int64),
        ("run_bytes", np.int64),
        ("source_run_bytes", np.int64),
        ("source_pitch", np.int64),
        ("destination_pitch", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One shard in one rank's storage.

    Attributes
    ----------
    unit, parameter : str
        What is described.
    source_rank, destination_rank : int
        World rank that owns the shard, and world rank in whose storage it is to lie (the same for a
        rank's own shard).
    shard_offset : int
        Bytes from the start of the shard to its first run.
    slot_offset, arena_offset : int
        Bytes from the start of the slot, and of the arena, to the first run in storage.
    runs : int
        Contiguous pieces.
    run_bytes : int
        Bytes of a run in storage.
    source_pitch, destination_pitch : int
        Bytes from one run to the next in the shard and in storage; 0 where there is one run.
    dtype, shard_dtype : str
        Element types in storage and in the shard.
    """

    unit: str
    parameter: str
    source_rank: int
    destination_rank: int
    shard_offset: int
    slot_offset: int
    arena_offset: int
    runs: int
    run_bytes: int
    source_pitch: int
    destination_pitch: int
    dtype: str
    shard_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in storage."""
        return self.runs * self.run_bytes


_FIELDS = tuple(field.name for field in fields(Descriptor))


def _chosen(unit: Unit, parameter: str | None) -> list[int]:
    if parameter is None:
        return list(range(len(unit.parameters)))
    for index, found in enumerate(unit.parameters):
        if parameter == found.name or parameter in found.aliases:
            return [index]
    known = ", ".join(repr(found.name) for found in unit.parameters[:8])
    more = ", …" if len(unit.parameters) > 8 else ""
    raise InputError(f"unit {unit.name!r} has no parameter {parameter!r}; it has {known}{more}")


def locate(compiled: Compiled, parameter: str) -> tuple[Unit, Parameter]:
    """Unit and parameter of that name, or of that alias."""
    for unit in compiled.spec.units:
        for found in unit.parameters:
            if parameter == found.name or parameter in found.aliases:
                return unit, found
    names = [found.name for unit in compiled.spec.units for found in unit.parameters]
    close = [name for name in names if name.endswith(f".{parameter}") or parameter in name][:4]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first is {names[0]!r}"
    raise InputError(f"no parameter {parameter!r} in the plan; {hint}")


def _groups(compiled: Compiled, unit: Unit, rank: int | None) -> tuple[tuple[int, ...], ...]:
    return unit.mesh.groups if rank is None else (compiled.group(unit.name, rank)[0],)


def descriptor_count(compiled: Compiled, unit: str, parameter: str | None = None, rank: int | None = None) -> int:
    """How many descriptors :func:`descriptors` yields, without making them."""
    found = compiled.spec.unit(unit)
    owners = found.mesh.size
    filled = sum(
        int(np.count_nonzero(shard(found.parameters[index], owners).numel)) for index in _chosen(found, parameter)
    )
    return filled * (1 if rank is not None else owners * len(found.mesh.groups))


def descriptor_table(
    compiled: Compiled, unit: str, parameter: str | None = None, rank: int | None = None
) -> npt.NDArray[np.void]:
    """Descriptors of a unit as a structured array with the columns of `COLUMNS`.

    Ordered by parameter, shard group, destination and source; time and memory are linear in the result.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        Unit name.
    parameter : str, optional
        Only this parameter; `parameter` in the table is its index in the unit.
    rank : int, optional
        Only descriptors into the storage of this world rank; all ranks by default.
    """
    found = compiled.spec.unit(unit)
    layout, owners = compiled.layouts[unit], found.mesh.size
    slot = compiled.arena.slots[compiled.arena.slot_of[unit]].offset
    groups = np.asarray(_groups(compiled, found, rank), dtype=np.int64)
    parts = []
    for index in _chosen(found, parameter):
        member, table = found.parameters[index], shard(found.parameters[index], owners)
        filled = np.flatnonzero(table.numel)
        width, wide = itemsize(member.dtype), itemsize(member.shard_dtype)
        one = np.zeros(len(filled), dtype=COLUMNS)
        one["parameter"] = index
        one["slot_offset"] = layout.offsets[index] + table.offset[filled] * width
        one["arena_offset"] = slot + one["slot_offset"]
        one["runs"] = table.outer
        one["run_bytes"] = table.run[filled] * width
        one["source_run_bytes"] = table.run[filled] * wide
        if table.outer > 1:
            one["source_pitch"] = one["source_run_bytes"]
            one["destination_pitch"] = table.pitch * width
        for group in groups:
            one["source_rank"] = group[filled]
            destinations = group if rank is None else np.asarray([rank])
            part = np.tile(one, len(destinations))
            part["destination_rank"] = np.repeat(destinations, len(filled))
            parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=COLUMNS)


def descriptors(
    compiled: Compiled, unit: str, parameter: str | None = None, rank: int | None = None
) -> Iterator[Descriptor]:
    """Descriptors of a unit one by one, in the order of :func:`descriptor_table`.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        Unit name.
    parameter : str, optional
        Only this parameter.
    rank : int, optional
        Only descriptors into the storage of this world rank; all ranks by default.
    """
    found = compiled.spec.unit(unit)
    for index in _chosen(found, parameter):  # a parameter at a time, to bound the memory
        member = found.parameters[index]
        for row in descriptor_table(compiled, unit, member.name, rank).tolist():
            _, source, destination, at, slot, arena, runs, length, _, here, there = row
            yield Descriptor(
                unit,
                member.name,
                source,
                destination,
                at,
                slot,
                arena,
                runs,
                length,
                here,
                there,
                member.dtype,
                member.shard_dtype,
            )


def descriptor_graph(
    compiled: Compiled,
    unit: str | None = None,
    parameter: str | None = None,
    rank: int | None = None,
) -> nx.MultiDiGraph:
    """Descriptor graph with plain attributes, ready for ``networkx.node_link_data``.

    Nodes are ``("shard", unit, parameter, rank)`` for the part that a rank holds (also for an empty one,
    which has no edges) and ``("storage", unit, parameter, rank)`` for the whole parameter there. An
    edge is a descriptor, with the fields of :class:`Descriptor` and ``nbytes`` for attributes.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str, optional
        Only this unit.
    parameter : str, optional
        Only this parameter; its unit need not be given.
    rank : int, optional
        Only edges into the storage of this world rank.

    Raises
    ------
    InputError
        If the graph would have more than `EDGE_LIMIT` edges.
    """
    import networkx as nx

    if parameter is not None and unit is None:
        unit = locate(compiled, parameter)[0].name
    units = compiled.spec.units if unit is None else (compiled.spec.unit(unit),)
    if rank is not None and unit is None:
        units = tuple(found for found in units if found.mesh.locate(rank) is not None)
    edges = sum(descriptor_count(compiled, found.name, parameter, rank) for found in units)
    if edges > EDGE_LIMIT:
        remedy = " or ".join(
            word
            for word, given in (
                ("a unit", unit),
                ("a parameter", parameter),
                ("a rank (descriptor_graph(…, rank=…))", rank),
            )
            if given is None
        )
        raise InputError(
            f"the descriptor graph would have {edges:,} edges, more than {EDGE_LIMIT:,}; name {remedy}, "
            "or read tide.compiler.scatter.descriptor_table instead"
        )
    graph = nx.MultiDiGraph(model=compiled.spec.source, topology=str(compiled.topology), digest=compiled.digest)
    for found in units:
        for index in _chosen(found, parameter):
            _add_nodes(graph, compiled, found, index, rank)
        for descriptor in descriptors(compiled, found.name, parameter, rank):
            ends = (("shard", descriptor.source_rank), ("storage", descriptor.destination_rank))
            source, destination = ((kind, found.name, descriptor.parameter, at) for kind, at in ends)
            values = {name: getattr(descriptor, name) for name in _FIELDS}
            graph.add_edge(source, destination, None, **values, nbytes=descriptor.nbytes)
    return graph


def _add_nodes(graph: nx.MultiDiGraph, compiled: Compiled, unit: Unit, index: int, rank: int | None) -> None:
    parameter, layout = unit.parameters[index], compiled.layouts[unit.name]
    slot = compiled.arena.slot_of[unit.name]
    common = {"unit": unit.name, "parameter": parameter.name}
    sizes = shard(parameter, unit.mesh.size).numel * itemsize(parameter.shard_dtype)
    for group in _groups(compiled, unit, rank):
        for position, owner in enumerate(group):
            graph.add_node(
                ("shard", unit.name, parameter.name, owner),
                kind="shard",
                **common,
                rank=owner,
                position=position,
                dtype=parameter.shard_dtype,
                nbytes=int(sizes[position]),
            )
        for reader in group if rank is None else (rank,):
            graph.add_node(
                ("storage", unit.name, parameter.name, reader),
                kind="storage",
                **common,
                rank=reader,
                slot=slot,
                slot_offset=layout.offsets[index],
                arena_offset=compiled.arena.slots[slot].offset + layout.offsets[index],
                dtype=parameter.dtype,
                shape=list(parameter.shape),
                dim=parameter.dim,
                nbytes=parameter.nbytes,
                bundled=layout.bundled(index),
            )
