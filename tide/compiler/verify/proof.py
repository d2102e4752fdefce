"""Proves a plan: which collectives of which units on which ranks, and what the proof says."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from tide.compiler.columns import BUFFERS, KIND_NAMES, Bools, ProgramRows, Rows
from tide.compiler.compile import COLLECTIVES, Compiled
from tide.compiler.model import Unit
from tide.compiler.schedule import UnitContext, all_gather_program, reduce_scatter_rows
from tide.compiler.shard import Int64
from tide.compiler.steps import Copy, Multicast, Program, Put, Signal, Step, SwitchReduce, Wait
from tide.compiler.verify.arena import check_arena
from tide.compiler.verify.gather import GatherProof
from tide.compiler.verify.order import Order
from tide.compiler.verify.reduce import ReduceProof
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables
from tide.errors import InputError, PlanError
from tide.topology import Team

#: What the proof of a collective says, for reports.
CLAIMS = {
    "arena": (
        "shards tile every parameter; parameters, slots and areas are disjoint and in bounds; "
        "stated sizes are computed sizes"
    ),
    "all_gather": (
        "each byte of every parameter's storage is written once, with what its owner holds; reads follow the "
        "writes they need, and the next all-gather of the slot writes after the last read"
    ),
    "reduce_scatter": (
        "each gradient element reaches its owner once from every rank, summed in the fixed order, scaled once; "
        "places are overwritten after they were read, also by the next reduce-scatter; in a slot, written only once "
        "it has been vacated"
    ),
    "order": "signals and waits match one to one, and all programs end",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved.

    Attributes
    ----------
    full : bool
        False for the cheap form.
    collectives : tuple of str
        Collectives whose programs were proved.
    units : int
        Units of the plan; those of one signature and team share their programs and were proved once.
    programs, steps : int
        Distinct programs that were checked, and their steps.
    nbytes : int
        Bytes that these programs move.
    ranks : tuple of int
        World ranks whose own programs were proved, for all their units. Nothing is concluded by symmetry, but
        programs that are the same object (of equal units, of a mesh's groups) are looked at once.
    world_size : int
        Ranks of the plan.
    arena_bytes : int
        Bytes of one rank's arena: stated, and found when laid out anew.
    claims : tuple of str
        What was proved, in words.
    seconds : float
        Time the proof took.
    """

    full: bool
    collectives: tuple[str, ...]
    units: int
    programs: int
    steps: int
    nbytes: int
    ranks: tuple[int, ...]
    world_size: int
    arena_bytes: int
    claims: tuple[str, ...] = field(repr=False)
    seconds: float

    def __str__(self) -> str:
        if not self.full:
            looked = "one rank's all-gather" if self.programs else "no program"
            return f"layouts of {self.units} units proved in {self.seconds:.3f} s; {looked} was looked at"
        ranks = "all" if len(self.ranks) == self.world_size else f"{len(self.ranks)} of"
        names = " and ".join(name.replace("_", "-") for name in self.collectives)
        return (
            f"proved {names} of {self.units} units on {ranks} {self.world_size} ranks: {self.programs} distinct "
            f"programs, {self.steps} steps, {self.nbytes / 2**30:.2f} GiB moved, in {self.seconds:.2f} s"
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """One unit on one of its shard groups, for all units and groups that share the programs."""

    unit: Unit
    context: UnitContext
    ranks: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(slots=True)
class _Tally:
    """What the jobs of a proof have in common, and what they add up to."""

    programs: int = 0
    steps: int = 0
    nbytes: int = 0
    gathers: list[_Gather] = field(default_factory=list)
    #: By ring area, the streams that use it, and a unit where they do.
    streams: dict[int, tuple[set[str], str]] = field(default_factory=dict)
    #: Places of spread areas that are written, and that are taken for zeros, with a unit that does so.
    written: dict[tuple[int, int], str] = field(default_factory=dict)
    zeros: dict[tuple[int, int], str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class _Gather:
    """Who reads from whom in an all-gather, and for whom a rank waits: pairs as in :class:`GatherProof`."""

    signature: int
    team: Team
    readers: Int64
    awaited: Int64


def verify(
    compiled: Compiled,
    *,
    ranks: Iterable[int] | None = None,
    collectives: Sequence[str] = COLLECTIVES,
    full: bool = True,
) -> Proof:
    """Proves a plan.

    Parameters
    ----------
    compiled : Compiled
        The plan. Programs that were put in by :meth:`Compiled.with_program` are proved as they are.
    ranks : iterable of int, optional
        World ranks to prove, all by default. The programs of their neighbours are loaded too; that those
        are right is then taken for granted, and absence of deadlock is proved among the loaded ones only.
    collectives : sequence of str
        Which collectives to prove.
    full : bool
        False proves the layouts, and of the programs only one rank's all-gather of the largest unit, on small
        teams: milliseconds for any plan.

    Returns
    -------
    Proof
        What was proved.

    Raises
    ------
    PlanError
        Naming unit, parameter, rank, step and bytes of the first thing that does not hold.
    """
    began = time.perf_counter()
    for collective in collectives:
        if collective not in COLLECTIVES:
            raise InputError(f"no collective {collective!r}; there are {' and '.join(COLLECTIVES)}")
    chosen = None if ranks is None else sorted(set(ranks))
    if chosen is not None and not chosen:
        raise InputError("verify: no ranks to prove; leave ranks out to prove all of them")
    for rank in chosen or ():
        if not 0 <= rank < compiled.topology.world_size:
            raise InputError(f"rank {rank} is outside {compiled.topology}")
    check_arena(compiled)
    tally = _Tally()
    done: set[int] = set()
    if full or compiled.overrides:
        for job in _jobs(compiled, chosen):
            for collective in collectives:
                _prove(compiled, job, collective, tally)
            if "reduce_scatter" in collectives and job.context.slot_bytes:
                # The same without the slot, as it runs where the slot has not been vacated.
                aside = replace(job, context=replace(job.context, slot_bytes=0))
                _prove(compiled, aside, "reduce_scatter", tally)
        _check_slots(compiled, tally)
        done = _proved(compiled, chosen)
    elif (sample := _sample(compiled)) is not None and "all_gather" in collectives:
        collectives = ("all_gather",)
        _prove(compiled, sample, "all_gather", tally)
    programs = tuple(collectives) if tally.programs else ()
    claims = [CLAIMS["arena"], *(CLAIMS[c] for c in programs)] + ([CLAIMS["order"]] if programs else [])
    return Proof(
        full,
        programs,
        len(compiled.spec.units),
        tally.programs,
        tally.steps,
        tally.nbytes,
        tuple(sorted(done)),
        compiled.topology.world_size,
        compiled.arena.size,
        tuple(claims),
        time.perf_counter() - began,
    )


# Jobs --------------------------------------------------------------------------------------------

#: Programs that the cheap form may look at.
_CHEAP_PROGRAMS = 8


def _sample(compiled: Compiled) -> _Job | None:
    """One rank of the largest unit, if few programs prove its all-gather."""
    unit = max(compiled.spec.units, key=lambda unit: unit.nbytes)
    group = unit.mesh.groups[0]
    context = compiled.context(unit.name, group[0])
    if context.team.per_node * (1 + (context.team.nodes - 1).bit_length()) > _CHEAP_PROGRAMS:
        return None
    return _Job(unit, context, group, (len(group) - 1,))


def _jobs(compiled: Compiled, ranks: Sequence[int] | None) -> Iterator[_Job]:
    """One job for each unit signature and team; units with programs of their own come separately."""
    own = {unit for unit, _, _ in compiled.overrides}
    seen: set[tuple[object, ...]] = set()
    for unit in compiled.spec.units:
        for group in unit.mesh.groups:
            positions = tuple(range(len(group)))
            if ranks is not None:
                wanted = set(ranks)
                positions = tuple(p for p in positions if group[p] in wanted)
            if not positions:
                continue
            context = compiled.context(unit.name, group[0])
            key: tuple[object, ...] = (compiled._signatures[unit.name], id(context.layout), context.team, positions)
            if context.by_switch:  # whose places hold zeros is a matter of ranks, not of positions
                key += (group,)
            if unit.name in own:
                key += (unit.name, group)
            if key not in seen:
                seen.add(key)
                yield _Job(unit, context, group, positions)


def _proved(compiled: Compiled, ranks: Sequence[int] | None) -> set[int]:
    held = {rank for unit in compiled.spec.units for group in unit.mesh.groups for rank in group}
    return held if ranks is None else held & set(ranks)


def _program(compiled: Compiled, job: _Job, collective: str, position: int) -> Program | ProgramRows:
    """Program of a position, without filling the plan's cache with those of all ranks."""
    damaged = compiled.overrides.get((job.unit.name, collective, job.ranks[position]))
    if damaged is not None and (collective == "all_gather" or _is_default(compiled, job)):
        return damaged
    if collective == "all_gather":
        return all_gather_program(job.context, position)
    return reduce_scatter_rows(job.context, position)


def _is_default(compiled: Compiled, job: _Job) -> bool:
    """Whether a job's reduce-scatter is the one that runs where nothing is held."""
    return bool(job.context.slot_bytes) == compiled.options.slot_reuse


def _peers(program: Program | ProgramRows, *kinds: type[Step]) -> set[int]:
    """Positions that steps of the given kinds name."""
    found: set[int] = set()
    codes = [KIND_NAMES.index(kind.__name__) for kind in kinds]
    for stream in program.streams:
        if isinstance(stream, Rows):
            found.update(np.unique(stream.columns.peer[np.isin(stream.columns.kind, codes)]).tolist())
            continue
        for step in stream.steps:
            if not isinstance(step, kinds):
                continue
            if isinstance(step, Multicast | SwitchReduce):
                found |= set(step.peers)
            elif isinstance(step, Copy | Put | Signal | Wait):
                found.add(step.peer)
    return found


def _load(compiled: Compiled, job: _Job, collective: str) -> tuple[Iterable[Program | ProgramRows], Bools, Bools]:
    """Programs to look at, and the positions whose memory and whose outputs they prove."""
    size = len(job.ranks)
    near, far = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if len(job.positions) == size:
        return (_program(compiled, job, collective, p) for p in range(size)), ~near, ~far
    kept: dict[int, Program | ProgramRows] = {}

    def program(position: int) -> Program | ProgramRows:
        if position not in kept:
            kept[position] = _program(compiled, job, collective, position)
        return kept[position]

    own = {p for p in job.positions}
    around = own.union(*(_peers(program(p), Copy, Multicast, SwitchReduce) for p in own))
    # Where the switch sums, what an owner adds is put to other ranks of its node, too.
    switched = any(_peers(program(p), SwitchReduce) for p in own)
    asked = around if collective == "all_gather" or switched else own
    loaded = around.union(*(_peers(program(p), Copy, Put, Multicast, Signal, Wait) for p in asked))
    if collective == "reduce_scatter":
        loaded |= set().union(*(_peers(program(p), Copy) for p in around))
    near[sorted(around)], far[sorted(own)] = True, True
    return [program(p) for p in sorted(p for p in loaded if 0 <= p < size)], near, far


def _prove(compiled: Compiled, job: _Job, collective: str, tally: _Tally) -> None:
    if collective == "reduce_scatter" and not any(p.trainable for p in job.unit.parameters):
        return
    scene = Scene(job.context, collective, job.ranks)
    programs, near, far = _load(compiled, job, collective)
    with _no_collection():
        tables = Tables(scene, programs)
    order = Order(scene, tables)
    tally.programs += int(tables.loaded.sum())
    tally.steps += tables.steps
    if collective == "all_gather":
        gather = GatherProof(scene, tables, order, near)
        tally.nbytes += gather.run()
        signature = compiled._signatures[job.unit.name]
        tally.gathers.append(_Gather(signature, job.context.team, gather.readers, gather.awaited))
        return
    reduce = ReduceProof(scene, tables, order, near, far)
    tally.nbytes += reduce.run()
    for buffer, names in reduce.streams.items():
        _check_streams(tally, buffer, names, job.unit.name)
    if reduce.switch is not None:
        tally.written.update(dict.fromkeys(reduce.switch.written, job.unit.name))
        tally.zeros.update(dict.fromkeys(reduce.switch.zeros, job.unit.name))
        _check_zeros(tally)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collections: millions of steps come and go, none in a cycle, and each pass looks at all."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_streams(tally: _Tally, buffer: int, names: set[str], unit: str) -> None:
    """One stream uses an area in all collectives: only then do these follow each other in it."""
    if not names:
        return
    known, first = tally.streams.setdefault(buffer, (names, unit))
    if known != names:
        raise PlanError(
            f"{BUFFERS[buffer].value} area: used by {', '.join(sorted(known))} in unit {first!r} and by "
            f"{', '.join(sorted(names))} in unit {unit!r}, so nothing orders these reduce-scatters"
        )


def _check_zeros(tally: _Tally) -> None:
    """Nobody writes a place that a switch sum takes for zeros, in any reduce-scatter."""
    for rank, place in sorted(tally.written.keys() & tally.zeros.keys()):
        raise PlanError(
            f"spread area of rank {rank}, place {place}: unit {tally.written[rank, place]!r} puts partial sums there, "
            f"and unit {tally.zeros[rank, place]!r} takes it for zeros"
        )


def _check_slots(compiled: Compiled, tally: _Tally) -> None:
    """In a slot with several units, each unit waits for all ranks that read in any of them."""
    for number, slot in enumerate(compiled.arena.slots):
        names = {compiled._signatures[name]: name for name in slot.units}
        found = [gather for gather in tally.gathers if gather.signature in names]
        for first in found:
            for second in found:
                if first is second or first.team != second.team:
                    continue
                if len(np.setdiff1d(first.readers, second.awaited)):
                    raise PlanError(
                        f"slot {number}: the all-gather of unit {names[second.signature]!r} does not wait for a peer "
                        f"that reads unit {names[first.signature]!r} from the same slot"
                    )
