"""What of a sharded model decides its plan, read group by group, and watched for changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Mesh, Parameter, Unit
from tide.compiler.read.policy import dtype_name
from tide.errors import InputError
from tide.fsdp import introspect, versions

#: Slots at least: one unit is computed with while the next is gathered.
FEWEST_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """One parameter group as `attach` found it.

    Attributes
    ----------
    name : str
        Of the unit: the wrapped module's, with ``#1`` and on for its further groups.
    wrapped : Wrapped
        The ``fully_shard`` call that made it.
    group : FSDPParamGroup
        FSDP2's object.
    parameters : tuple of str
        Their names.
    unit : Unit or None
        What goes into the plan.
    reason : str or None
        Why it does not.
    """

    name: str
    wrapped: introspect.Wrapped
    group: Any
    parameters: tuple[str, ...]
    unit: Unit | None
    reason: str | None


@dataclass(slots=True)
class Sticky:
    """What stays as it once was, so that a model which goes to and fro is not planned anew each time.

    Attributes
    ----------
    trained : set of str
        Parameters that have been trainable: a plan with their gradients serves them frozen too.
    kept : set of str
        Units that have not been resharded after backward (accumulation turns that on and off), or were found
        to be whole until the end of it.
    more : int
        Slots that were found to be needed beside those for prefetching.
    """

    trained: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    more: int = 0


def read_groups(model: Any, sticky: Sticky) -> list[Reading]:
    """Every parameter group of the model, with its unit or the reason against one.

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed, it or modules inside of it.
    sticky : Sticky
        What was seen before; updated.
    """
    names_of = introspect.parameter_names(model)
    meshes: dict[tuple[Any, ...], Mesh] = {}
    readings = []
    every = introspect.wrapped_modules(model)
    depths = _depths(every)
    for number, wrapped in enumerate(every):
        for index, group in enumerate(wrapped.groups):
            name = f"{wrapped.name}#{index}" if index else wrapped.name
            reason = introspect.why_stock(group) or _why_not(group)
            unit = None
            if reason is None:
                try:
                    key = introspect.mesh_key(group)
                    if key not in meshes:
                        meshes[key] = Mesh(introspect.shard_groups(group))
                    unit = Unit(
                        name=name,
                        parameters=tuple(_parameter(names_of[id(p)], p, sticky) for p in group.fsdp_params),
                        mesh=meshes[key],
                        stays_whole=_stays_whole(name, wrapped, group, sticky),
                        lives_with=number,
                        depth=depths[number],
                    )
                except InputError as error:
                    reason = str(error)
            parameters = tuple(names_of[id(param)][0] for param in group.fsdp_params)
            readings.append(Reading(name, wrapped, group, parameters, unit, reason))
    return readings


def _parameter(names: tuple[str, ...], param: Any, sticky: Sticky) -> Parameter:
    dtypes = introspect.dtypes(param)
    storage, reduced = dtype_name(dtypes.storage, names[0]), dtype_name(dtypes.reduced, names[0])
    if dtypes.trainable:
        sticky.trained.add(names[0])
    return Parameter(
        name=names[0],
        shape=introspect.whole_shape(param),
        dim=introspect.shard_dim(param),
        dtype=storage,
        shard_dtype=dtype_name(dtypes.shard, names[0]),
        grad_dtype=_narrower(storage, reduced) if names[0] in sticky.trained else None,
        out_dtype=reduced,
        aliases=names[1:],
    )


def _narrower(storage: str, reduced: str) -> str:
    """What travels: the gradient as it is, or as it is reduced where that is smaller, as with stock FSDP2."""
    return reduced if itemsize(reduced) < itemsize(storage) else storage


def _stays_whole(name: str, wrapped: introspect.Wrapped, group: Any, sticky: Sticky) -> bool:
    """Whether the unit needs storage of its own; one that others run inside of shares it with its like."""
    if not group.reshard_after_backward:
        sticky.kept.add(name)
    return name in sticky.kept or introspect.stays_whole(replace(wrapped, nests=False), group)


def _depths(every: Sequence[introspect.Wrapped]) -> list[int]:
    """For each wrapped module, how many others with parameters it is inside of."""
    homes = {name: number for number, wrapped in enumerate(every) if wrapped.groups for name in wrapped.names}
    depths = []
    for number, wrapped in enumerate(every):
        parts = wrapped.names[0].split(".") if wrapped.names[0] else []
        prefixes = {homes.get(".".join(parts[:end])) for end in range(len(parts))}
        depths.append(len(prefixes - {None, number}))
    return depths


def _why_not(group: Any) -> str | None:
    """Reasons that concern attaching only, not planning."""
    if group.mesh_info.shard_mesh_size == 1:
        return "sharded over one rank only; nothing is sent"
    if not introspect.mesh_key(group)[2]:
        return "tensor parallelism cut a parameter unevenly, so that the ranks' plans would differ"
    if not versions.own_comm(group._all_gather_comm):
        return f"has an all-gather of its own ({type(group._all_gather_comm).__name__})"
    if introspect.reshards_smaller(group) and any(introspect.shard_dim(param) for param in group.fsdp_params):
        return "reshard_after_forward is a number of ranks and a parameter is not sharded on dim 0"
    return None


def slots_for(readings: Iterable[Reading]) -> int:
    """Slots that the model's prefetching fills: the unit in use and those gathered ahead."""
    depths = [introspect.prefetches(reading.wrapped.state) for reading in readings]
    return max(FEWEST_SLOTS, 1 + max(depths, default=0))


def fingerprint(readings: Sequence[Reading]) -> tuple[object, ...]:
    """Cheap to compare, and different whenever reading again may give another plan."""
    rows: list[object] = []
    for reading in readings:
        group, state = reading.group, reading.wrapped.state
        rows.append(
            (
                introspect.prefetches(state),
                state._is_root,
                state._auto_reshard_after_forward,
                group.post_forward_mesh_info is None,
                introspect.reshards_smaller(group),
                group.reshard_after_backward,
                type(group._all_gather_comm),
                [(p.sharded_param.requires_grad, p._sharded_param_data.dtype) for p in group.fsdp_params],
            )
        )
    return tuple(rows)
