"""Options with which a plan fits into a given memory, at the least predicted cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.cost import predict
from tide.compiler.model import ModelSpec
from tide.compiler.options import MIB, PlanOptions
from tide.errors import InputError, MemoryLimitError
from tide.report.memory import can_reuse, planned_nbytes
from tide.report.units import kinds, show_bytes, show_time
from tide.topology import Topology

#: Pieces of gradients to fall back to; smaller ones cost more than they save.
CHUNKS = (4 * MIB, 1 * MIB, MIB // 4)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that fits.

    Attributes
    ----------
    compiled : Compiled
        The plan.
    remarks : tuple of str
        What was given up for it, with what that saves and costs.
    """

    compiled: Compiled
    remarks: tuple[str, ...]


@dataclass(eq=False)
class _Candidate:
    options: PlanOptions
    compiled: Compiled
    ranks: list[int]
    seconds: float = 0.0

    @cached_property
    def nbytes(self) -> int:
        """What the rank with most needs; takes the programs of all its units."""
        return max(planned_nbytes(self.compiled, rank) for rank in self.ranks)

    @cached_property
    def least(self) -> int:
        """No more than ``nbytes``, and quick."""
        return max(planned_nbytes(self.compiled, rank, scratch=False) for rank in self.ranks)


def fit(spec: ModelSpec, topology: Topology, options: PlanOptions, limit: int) -> Fitted:
    """Options that need at most ``limit`` bytes on every rank, of those the fastest.

    Candidates have fewer slots, Slot-Reuse, smaller chunks, or fewer positions of the receive area. Their cost is
    what the collectives of a step take by the cost model, gathers twice, where they cannot hide behind computation:
    with one slot none of them can, and a reduce-scatter that holds one of two slots holds up the gathers of
    backward. Time in which they can hide counts a hundredth, so that of two that fit the faster is taken.

    Parameters
    ----------
    spec, topology
        As for :func:`tide.compiler.compile.compile_spec`.
    options : PlanOptions
        What to start from; nothing of it is changed if it fits.
    limit : int
        Bytes that one rank has for what :func:`tide.report.memory` counts under TIDE: shards, reduced gradients,
        arena, gradients on their way.

    Raises
    ------
    InputError
        If the limit is no positive number of bytes.
    MemoryLimitError
        If nothing fits; it names the smallest limit that does.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"memory_limit must be a whole number of bytes of at least 1, got {limit!r}")
    ranks = _ranks(spec)
    start = _Candidate(options, compile_spec(spec, topology, options), ranks)
    if start.nbytes <= limit:
        return Fitted(start.compiled, ())
    found = [_Candidate(choice, compile_spec(spec, topology, choice), ranks) for choice in _choices(options, spec)]
    fitting = [candidate for candidate in found if candidate.least <= limit and candidate.nbytes <= limit]
    if not fitting:
        least = _smallest([start, *found])
        raise MemoryLimitError(
            f"{spec.source or 'model'}: needs {show_bytes(least.nbytes)} a rank at least (memory_limit="
            f"{least.nbytes}, with {_named(options, least.options)}), but memory_limit is {show_bytes(limit)}; shard "
            "over more ranks, wrap smaller units, or train fewer parameters"
        )
    known: dict[object, float] = {}
    for candidate in (start, *fitting):
        candidate.seconds = _cost(candidate, ranks[0], known)
    best = min(fitting, key=lambda candidate: (candidate.seconds, -candidate.nbytes))
    return Fitted(best.compiled, _remarks(start, best, limit))


def _ranks(spec: ModelSpec) -> list[int]:
    """One rank of every set of units that ranks hold shards of; the first of a group has the largest shards."""
    meshes = {id(unit.mesh): unit.mesh for unit in spec.units}.values()
    found: dict[tuple[bool, ...], int] = {}
    for mesh in meshes:
        for group in mesh.groups:
            found.setdefault(tuple(other.locate(group[0]) is not None for other in meshes), group[0])
    return sorted(found.values())


def _smallest(candidates: list[_Candidate]) -> _Candidate:
    """The one that needs least, the first of equals."""
    best: int | None = None
    tried = set[_Candidate]()
    for candidate in sorted(candidates, key=lambda candidate: candidate.least):
        if best is not None and candidate.least > best:
            break
        tried.add(candidate)
        best = candidate.nbytes if best is None else min(best, candidate.nbytes)
    return min((candidate for candidate in candidates if candidate in tried), key=lambda candidate: candidate.nbytes)


def _choices(options: PlanOptions, spec: ModelSpec) -> Iterator[PlanOptions]:
    """All that may need less, without those that are the same."""
    most = min(options.slots or 5, len(spec.units) + 1)
    slots: list[int | None] = [options.slots] if options.slots is None else []
    slots += range(most if options.slots else most - 1, 0, -1)
    now = options.chunk_bytes
    chunks: list[int | None] = [now, *(size for size in CHUNKS if now is None or size < now)]
    reuses: list[dict[str, bool]] = [{}]
    if can_reuse(options) and not options.slot_reuse:
        reuses.append({"slot_reuse": True})
    depths = range(options.receive_depth, 0, -1)
    for count, reuse, chunk, depth in itertools.product(slots, reuses, chunks, depths):
        choice = replace(options, slots=count, chunk_bytes=chunk, receive_depth=depth, **reuse)  # type: ignore[arg-type]
        if choice != options:
            yield choice


def _cost(candidate: _Candidate, rank: int, known: dict[object, float]) -> float:
    """Seconds of a step that computation does not hide, and a hundredth of those that it may."""
    options, compiled = candidate.options, candidate.compiled
    gathers = reduces = 0.0
    for alike in kinds(compiled, rank):
        gathers += len(alike) * _seconds(compiled, alike[0].name, "all_gather", rank, known)
        if any(p.trainable for p in alike[0].parameters):
            reduces += len(alike) * _seconds(compiled, alike[0].name, "reduce_scatter", rank, known)
    hidden = 0.01 * (2 * gathers + reduces)
    if options.slots == 1:
        return hidden + 2 * gathers
    held = options.slot_reuse and options.slots == 2
    return hidden + (gathers if held else 0.0)


def _seconds(compiled: Compiled, unit: str, collective: str, rank: int, known: dict[object, float]) -> float:
    """Predicted time, worked out once for what it depends on: a gather's programs know nothing of chunks."""
    options = replace(compiled.options, slots=None)
    if collective == "all_gather":
        options = replace(options, chunk_bytes=None, receive_depth=1)
    key = options, compiled._signatures[unit], collective
    if key not in known:
        known[key] = predict(compiled, unit, collective, rank).seconds
    return known[key]


def _named(before: PlanOptions, after: PlanOptions) -> str:
    """Options that differ."""
    then, now = before.to_dict(), after.to_dict()
    return ", ".join(f"{name}={now[name]}" for name in now if now[name] != then[name]) or "its options as they are"


def _ahead(options: PlanOptions) -> str:
    count = options.prefetch or 0
    return "nothing is" if count == 0 else "1 module is" if count == 1 else f"{count} modules are"


def _pieces(depth: int) -> str:
    return "one piece" if depth == 1 else f"{depth} pieces"


def _remarks(start: _Candidate, best: _Candidate, limit: int) -> tuple[str, ...]:
    before, after = start.options, best.options
    why = {
        "slots": f"{_ahead(after)} gathered ahead, not {before.prefetch}",
        "slot_reuse": "the reduce-scatter receives into the unit's own slot",
        "chunk_bytes": "gradients travel in smaller pieces",
        "receive_depth": f"there is room for {_pieces(after.receive_depth)} of each peer",
    }
    if before.slots is None and after.slots is not None:
        why["slots"] = f"units share slots, and {_ahead(after)} gathered ahead"
    then, now = before.to_dict(), after.to_dict()
    remarks = [f"{name}: {then[name]} → {now[name]}, {why[name]}" for name in why if now.get(name) != then.get(name)]
    slower = best.seconds - start.seconds
    total = f"{show_bytes(start.nbytes)} → {show_bytes(best.nbytes)} a rank, for a limit of {show_bytes(limit)}"
    if slower > 0:
        total += f"; predicted to hide {show_time(slower)} of collectives less in a step"
    return (*remarks, total)
