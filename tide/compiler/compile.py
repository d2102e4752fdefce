"""From a model's parameters to layouts and programs: the passes in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from tide.compiler.columns import ProgramRows
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import ArenaLayout, UnitLayout, lay_out_arena, lay_out_unit
from tide.compiler.schedule import (
    UnitContext,
    all_gather_program,
    arena_chunk,
    bundle_of,
    chunk_elements,
    reduce_scatter_program,
    reduce_scatter_rows,
    slot_areas,
)
from tide.compiler.schedule.routes import by_switch
from tide.compiler.schedule.switch import spread_places
from tide.compiler.steps import Program
from tide.errors import InputError
from tide.topology import Team, Topology, team_of

COLLECTIVES = ("all_gather", "reduce_scatter")

#: Subsets of units' gradients, or other types of them, whose programs are kept: those used last.
SUBSETS = 64

#: Parts of a parameter that decide its layout and programs; its name does not.
_Signature = tuple[tuple[object, ...], ...]


def _signature(unit: Unit, crosses: bool) -> _Signature:
    def key(p: Parameter) -> tuple[object, ...]:
        return (p.shape, p.dim, p.dtype, p.shard_dtype, p.grad_dtype, p.out_dtype)

    return (*(key(parameter) for parameter in unit.parameters), (unit.mesh.size, crosses))


@dataclass(frozen=True, eq=False, slots=True)
class Compiled:
    """Layouts and programs of all ranks; programs are made when first asked for, and kept.

    Programs of a subset of a unit's gradients are kept for the last `SUBSETS` subsets only, so that a model which
    trains another part of itself each step does not fill the memory.

    Attributes
    ----------
    spec : ModelSpec
        Units and parameters.
    topology : Topology
        Ranks and nodes.
    options : PlanOptions
        The choices made.
    layouts : dict of str to UnitLayout
        Storage of each unit within its slot.
    arena : ArenaLayout
        Slots, receive areas and signals.
    digest : str
        Hash of everything above: equal on two ranks if and only if they hold the same plan.
    beside : tuple of str
        Units that need the arena's areas although the plan reuses slots: their gradients do not fit.
    spread : frozenset of str
        Units whose partial sums are summed in the switch.
    """

    spec: ModelSpec
    topology: Topology
    options: PlanOptions
    layouts: dict[str, UnitLayout]
    arena: ArenaLayout
    digest: str
    beside: tuple[str, ...] = ()
    spread: frozenset[str] = frozenset()
    overrides: Mapping[tuple[str, str, int], Program] = field(default_factory=dict)
    _signatures: dict[str, int] = field(default_factory=dict)
    _teams: dict[tuple[Mesh, int], Team] = field(default_factory=dict)
    _programs: dict[tuple[object, ...], dict[int, Program]] = field(default_factory=dict)
    _partial: dict[tuple[object, ...], dict[int, Program]] = field(default_factory=dict)

    def group(self, unit: str, rank: int) -> tuple[tuple[int, ...], int]:
        """World ranks of the shard group of ``rank`` for ``unit``, and its position there."""
        found = self.spec.unit(unit).mesh.locate(rank)
        if found is None:
            raise InputError(f"rank {rank} holds no shard of unit {unit!r}")
        return found

    def context(self, unit: str, rank: int, in_slot: bool = True) -> UnitContext:
        """What the schedules need to know, for the shard group of ``rank``.

        ``in_slot`` says whether its slot has been vacated when gradients are reduced.
        """
        found = self.spec.unit(unit)
        group, _ = self.group(unit, rank)
        key = (found.mesh, group[0])
        if key not in self._teams:
            self._teams[key] = team_of(group, self.topology)
        layout, team = self.layouts[unit], self._teams[key]
        return UnitContext(
            found,
            layout,
            team,
            self.arena.receive,
            self.options,
            self.topology.links,
            fills_nodes=team.per_node == self.topology.gpus_per_node > 1,
            slot_bytes=layout.size if self.options.slot_reuse and in_slot else 0,
            by_switch=unit in self.spread,
        )

    def program(
        self,
        unit: str,
        collective: str,
        rank: int,
        subset: Sequence[int] | None = None,
        grad_dtypes: Mapping[int, str] | None = None,
        in_slot: bool = True,
    ) -> Program:
        """Program of world rank ``rank``.

        Parameters
        ----------
        unit : str
            Unit name.
        collective : str
            ``"all_gather"`` or ``"reduce_scatter"``.
        rank : int
            World rank.
        subset : sequence of int, optional
            Reduce-scatter only: indices of the parameters that have a gradient.
        grad_dtypes : mapping of int to str, optional
            Reduce-scatter only: element types of gradients that differ from the plan's this time, by parameter
            index (gradients accumulated in float32, say). The areas stay as they are; a piece of wider elements
            holds fewer of them.
        in_slot : bool
            Reduce-scatter only: whether the unit's slot has been vacated. The program then uses it if the plan
            reuses slots and the gradients fit, and says so (:attr:`Program.in_slot`).
        """
        _, position = self.group(unit, rank)
        return self.programs(unit, collective, rank, subset, grad_dtypes, in_slot)[position]

    def programs(
        self,
        unit: str,
        collective: str,
        rank: int,
        subset: Sequence[int] | None = None,
        grad_dtypes: Mapping[int, str] | None = None,
        in_slot: bool = True,
    ) -> Programs:
        """Programs of all positions of the shard group of ``rank``, each made when it is looked at.

        Parameters as for `program`. What several positions have in common is made once for all of them.
        """
        if collective not in COLLECTIVES:
            raise InputError(f"no collective {collective!r}; there are {' and '.join(COLLECTIVES)}")
        context = self.context(unit, rank, in_slot)
        ranks, _ = self.group(unit, rank)
        chosen = None if subset is None else tuple(subset)
        other = tuple(sorted(grad_dtypes.items())) if grad_dtypes else ()
        memory = context.slot_bytes, context.by_switch
        key = (self._signatures[unit], context.team, collective, chosen, other, memory)
        made = self._kept(key) if chosen is not None or other else self._programs.setdefault(key, {})
        damaged = {}
        if self.overrides and subset is None and (in_slot or not self.options.slot_reuse):
            found = ((position, (unit, collective, rank)) for position, rank in enumerate(ranks))
            damaged = {position: self.overrides[name] for position, name in found if name in self.overrides}
        return Programs(context, collective, chosen, other, made, damaged)

    def _kept(self, key: tuple[object, ...]) -> dict[int, Program]:
        """Programs of one subset, by position; it is now the one used last."""
        found = self._partial[key] = self._partial.pop(key, {})
        while len(self._partial) > SUBSETS:
            del self._partial[next(iter(self._partial))]
        return found

    def with_program(self, unit: str, rank: int, program: Program) -> Compiled:
        """A copy in which ``rank`` runs ``program`` for ``unit``; for experiments and tests."""
        overrides = {**self.overrides, (unit, program.collective, rank): program}
        return replace(self, overrides=overrides)


class Programs(Mapping[int, Program]):
    """Programs of one collective by position; made by :meth:`Compiled.programs`.

    Parameters
    ----------
    context : UnitContext
        Unit, team and memory.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    subset : tuple of int or None
        Parameters with a gradient.
    grad_dtypes : tuple of (int, str)
        Element types of gradients that differ from the plan's.
    made : dict of int to Program
        Where they are kept.
    damaged : dict of int to Program
        What takes the place of others.
    """

    def __init__(
        self,
        context: UnitContext,
        collective: str,
        subset: tuple[int, ...] | None,
        grad_dtypes: tuple[tuple[int, str], ...],
        made: dict[int, Program],
        damaged: dict[int, Program],
    ) -> None:
        self.context, self.collective, self.subset = context, collective, subset
        self._grad_dtypes, self._made, self._damaged = grad_dtypes, made, damaged

    @cached_property
    def _cast(self) -> UnitContext:
        """The context with the gradients' types; not needed where the program is kept."""
        return _with_grad_dtypes(self.context, dict(self._grad_dtypes)) if self._grad_dtypes else self.context

    def __getitem__(self, position: int) -> Program:
        if position in self._damaged:
            return self._damaged[position]
        if position not in self._made:
            if not 0 <= position < len(self):
                raise KeyError(position)
            if self.collective == "all_gather":
                self._made[position] = all_gather_program(self.context, position)
            else:
                self._made[position] = reduce_scatter_program(self._cast, position, self.subset)
        return self._made[position]

    def rows(self) -> Iterator[ProgramRows]:
        """All programs of a reduce-scatter as columns, one after the other; what they are made from."""
        assert self.collective == "reduce_scatter", "an all-gather is written as steps"
        return (reduce_scatter_rows(self._cast, position, self.subset) for position in self)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.context.team.size))

    def __len__(self) -> int:
        return self.context.team.size


def _with_grad_dtypes(context: UnitContext, grad_dtypes: Mapping[int, str]) -> UnitContext:
    """The unit as if its parameters had gradients of these types."""
    parameters = list(context.unit.parameters)
    for index, dtype in grad_dtypes.items():
        parameters[index] = replace(parameters[index], grad_dtype=dtype)
    return replace(context, unit=replace(context.unit, parameters=tuple(parameters)))


def compile_spec(spec: ModelSpec, topology: Topology, options: PlanOptions | None = None) -> Compiled:
    """Runs all passes that do not depend on a rank.

    Parameters
    ----------
    spec : ModelSpec
        As a reader gave it.
    topology : Topology
        Must hold every rank of every mesh.
    options : PlanOptions, optional
        Choices.

    Raises
    ------
    InputError
        If a mesh names a rank that the topology does not have.
    """
    options = options or PlanOptions()
    if spec.world_size > topology.world_size:
        raise InputError(
            f"{spec.source or 'model'}: its mesh names rank {spec.world_size - 1}, but {topology} has "
            f"only ranks 0..{topology.world_size - 1}; pass the topology of the job"
        )
    ids: dict[_Signature, int] = {}
    signatures: dict[str, int] = {}
    by_signature: dict[int, UnitLayout] = {}
    layouts: dict[str, UnitLayout] = {}
    chunks: dict[str, int] = {}
    fits: dict[tuple[int, Mesh], bool] = {}
    teams: dict[Mesh, set[Team]] = {}
    staged = 0

    def teams_of(unit: Unit) -> Sequence[Team]:
        if unit.mesh not in teams:
            teams[unit.mesh] = {team_of(group, topology) for group in unit.mesh.groups}
        return list(teams[unit.mesh])

    for unit in spec.units:
        crosses = any(team.nodes > 1 for team in teams_of(unit))
        number = signatures[unit.name] = ids.setdefault(_signature(unit, crosses), len(ids))
        if number not in by_signature:
            by_signature[number] = lay_out_unit(unit, options, crosses)
        layouts[unit.name] = by_signature[number]
        if (number, unit.mesh) not in fits:
            staged = max(staged, *(bundle_of(unit, team, options).nbytes for team in teams_of(unit)))
            fits[number, unit.mesh] = options.slot_reuse and _fits_slot(
                unit, layouts[unit.name].size, teams_of(unit), options
            )
        if elements := arena_chunk(unit, options, fits[number, unit.mesh]):
            chunks[unit.name] = elements
    spread = frozenset(unit.name for unit in spec.units if unit.name in chunks and by_switch(unit, topology, options))
    room = 0, 0
    if spread:
        largest = max(chunk_elements(spec.unit(name), options) for name in spread)
        room = spread_places(topology.nodes, topology.gpus_per_node, options.receive_depth), largest
    arena = lay_out_arena(spec, layouts, teams_of, chunks, staged, topology.world_size, options, room, spread)
    beside = tuple(name for name in chunks if options.slot_reuse and not fits[signatures[name], spec.unit(name).mesh])
    plan_digest = digest(spec, topology, options)
    return Compiled(spec, topology, options, layouts, arena, plan_digest, beside, spread, _signatures=signatures)


def _fits_slot(unit: Unit, slot_bytes: int, teams: Sequence[Team], options: PlanOptions) -> bool:
    """Whether the unit's gradients can be received in its own slot, on every team."""
    subset = tuple(i for i, p in enumerate(unit.parameters) if p.trainable)
    return all(slot_areas(unit, slot_bytes, team, options, subset) is not None for team in teams)


#: Raised whenever layouts or programs change for the same input, so that mixed versions do not run together.
FORMAT = 4


def spec_to_dict(spec: ModelSpec) -> dict[str, object]:
    """Plain values, for JSON and for the digest; meshes are stored once."""
    meshes: dict[Mesh, int] = {}
    units = []
    for unit in spec.units:
        mesh = meshes.setdefault(unit.mesh, len(meshes))
        parameters = [
            [p.name, list(p.shape), p.dim, p.dtype, p.shard_dtype, p.grad_dtype, p.out_dtype, list(p.aliases)]
            for p in unit.parameters
        ]
        units.append([unit.name, mesh, unit.stays_whole, unit.lives_with, unit.depth, list(unit.tail), parameters])
    return {
        "source": spec.source,
        "skipped": [list(row) for row in spec.skipped],
        "meshes": [[list(group) for group in mesh.groups] for mesh in meshes],
        "units": units,
        "apart": [list(pair) for pair in spec.apart],
    }


def spec_from_dict(data: Mapping[str, object]) -> ModelSpec:
    """Inverse of :func:`spec_to_dict`."""
    meshes = [Mesh(tuple(tuple(group) for group in groups)) for groups in data["meshes"]]  # type: ignore[attr-defined]
    units = []
    for name, mesh, stays_whole, lives_with, depth, tail, rows in data["units"]:  # type: ignore[attr-defined]
        parameters = tuple(
            Parameter(row[0], tuple(row[1]), row[2], row[3], row[4], row[5], row[6], tuple(row[7])) for row in rows
        )
        units.append(Unit(name, parameters, meshes[mesh], stays_whole, lives_with, depth, tuple(tail)))
    skipped = tuple((row[0], row[1]) for row in data["skipped"])  # type: ignore[attr-defined]
    apart = tuple((first, second) for first, second in data["apart"])  # type: ignore[attr-defined]
    return ModelSpec(tuple(units), str(data["source"]), skipped, apart)


def digest(spec: ModelSpec, topology: Topology, options: PlanOptions) -> str:
    """Hash of all that decides layouts and programs."""
    content = {
        "format": FORMAT,
        "spec": {key: value for key, value in spec_to_dict(spec).items() if key in ("meshes", "units", "apart")},
        "topology": [topology.nodes, topology.gpus_per_node],
        "options": options.to_dict(),
    }
    if "auto" in (options.multicast, options.switch_reduce):  # the cost model then decides on programs
        content["links"] = asdict(topology.links)
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
