"""Reads a module that FSDP2 has sharded: its own groups, meshes, placements and element types.

One walk serves a plan that is compiled from a model and one that is attached to it, so that both have the same
units, slots and digest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.read.nesting import nest, takes_indices
from tide.compiler.read.policy import dtype_name, label, narrower
from tide.errors import InputError
from tide.topology import Topology

if TYPE_CHECKING:
    from tide.fsdp.introspect import Wrapped
    from tide.scope import Scope

_UNMANAGED = "in no FSDP2 group, so whole on every rank: it is in ignored_params or outside every fully_shard-ed module"


@dataclass(frozen=True, slots=True)
class Reading:
    """One parameter group as it was found.

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
    wrapped: Wrapped
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
    apart : set of (str, str)
        Units that were found to be whole at the same time though they share a slot.
    """

    trained: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    apart: set[tuple[str, str]] = field(default_factory=set)


def read_groups(
    model: Any, scope: Scope, sticky: Sticky | None = None, refuse: Callable[[Any], str | None] | None = None
) -> list[Reading]:
    """Every parameter group of the model, with its unit or the reason against one.

    One unit is one parameter group. A module whose parameters sit on several meshes has several
    units: the first bears the module's name, the others ``name#1`` and on, and all of them the same
    ``lives_with``, as they are whole at the same time.

    What is reduced is the gradient as autograd gives it, in the storage's type; gradients that FSDP2 accumulates
    over several backward passes arrive in ``reduce_dtype`` instead, which is for the attached path to see.

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed, it or modules inside of it; before or after the first forward.
    scope : Scope
        The ranks that hold it.
    sticky : Sticky, optional
        What was seen before; updated.
    refuse : callable, optional
        Further reasons against a group.
    """
    from tide.fsdp import introspect

    sticky = sticky if sticky is not None else Sticky()
    names_of = introspect.parameter_names(model)
    meshes: dict[tuple[Any, ...], Mesh] = {}
    readings: list[Reading] = []
    homes: dict[int, tuple[str, ...]] = {}
    indices: set[int] = set()
    for number, wrapped in enumerate(introspect.wrapped_modules(model)):
        if wrapped.groups:
            homes[number] = wrapped.names
        if takes_indices(wrapped.modules):
            indices.add(number)
        for index, group in enumerate(wrapped.groups):
            name = f"{wrapped.name}#{index}" if index else wrapped.name
            reason = introspect.why_stock(group) or (refuse(group) if refuse is not None else None)
            unit = None
            if reason is None:
                key = introspect.mesh_key(group)
                rows = None if key in meshes else scope.places(introspect.shard_groups(group), label(name))
                try:
                    if rows is not None:  # shared by all units on it: a mesh may have thousands of ranks
                        meshes[key] = Mesh(rows)
                    unit = Unit(
                        name=name,
                        parameters=tuple(_parameter(names_of[id(p)], p, sticky) for p in group.fsdp_params),
                        mesh=meshes[key],
                        stays_whole=_stays_whole(name, wrapped, group, sticky),
                        lives_with=number,
                    )
                except InputError as error:
                    if refuse is None:
                        raise
                    reason = str(error)
            parameters = tuple(names_of[id(param)][0] for param in group.fsdp_params)
            readings.append(Reading(name, wrapped, group, parameters, unit, reason))
    order = {name: index for index, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    nested = nest([r.unit for r in readings if r.unit is not None], homes, order, indices)
    units = {unit.name: unit for unit in nested}
    return [replace(reading, unit=units.get(reading.name)) for reading in readings]


def read_fsdp(model: Any, *, topology: Topology | None = None, scope: Scope | None = None) -> ModelSpec:
    """Model as FSDP2 shards it; see `read_groups`.

    Parameters
    ----------
    model : torch.nn.Module
        ``fully_shard`` was called on it or on modules inside of it; before or after the first forward.
    topology : Topology, optional
        Checked against the ranks that hold the model.
    scope : Scope, optional
        Those ranks; found by default, see `tide.fsdp.scope`.

    Raises
    ------
    InputError
        If a parameter is tied across groups, or topology and ranks disagree.
    """
    from tide.fsdp import introspect
    from tide.fsdp.scope import scope_of

    source = f"fully_shard-ed {introspect.class_name(model)}"
    _check_initialized(source)
    scope = scope or scope_of(model)
    scope.check(topology)
    readings = read_groups(model, scope)
    _check_ties(readings)
    seen = {name for names in introspect.parameter_names(model).values() for name in names}
    skipped = [(name, r.reason) for r in readings if r.reason is not None for name in r.parameters]
    skipped += [(name, _UNMANAGED) for name, _ in model.named_parameters() if name not in seen]
    units = tuple(reading.unit for reading in readings if reading.unit is not None)
    if skipped and not units:
        raise InputError(
            f"{source}: no parameters to plan; all are left to FSDP2, {skipped[0][0]} since: {skipped[0][1]}"
        )
    return ModelSpec(units, source=source, skipped=tuple(skipped))


def needs_padding(model: Any) -> bool:
    """Whether FSDP2 cuts whole parameters anew, padding and all: ``reshard_after_forward`` is a number of ranks."""
    from tide.fsdp import introspect

    return any(
        introspect.reshards_smaller(group)
        for wrapped in introspect.wrapped_modules(model)
        for group in wrapped.groups
        if introspect.why_stock(group) is None
    )


def _parameter(names: tuple[str, ...], param: Any, sticky: Sticky) -> Parameter:
    from tide.fsdp import introspect

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
        grad_dtype=narrower(storage, reduced) if names[0] in sticky.trained else None,
        out_dtype=reduced,
        aliases=names[1:],
    )


def _stays_whole(name: str, wrapped: Wrapped, group: Any, sticky: Sticky) -> bool:
    """Whether the unit needs storage of its own."""
    from tide.fsdp import introspect

    if not group.reshard_after_backward:
        sticky.kept.add(name)
    return name in sticky.kept or introspect.stays_whole(wrapped, group)


def _check_ties(readings: list[Reading]) -> None:
    from tide.fsdp import introspect

    ties: dict[int, tuple[str, str]] = {}
    for reading in readings:
        for name, param in zip(reading.parameters, reading.group.fsdp_params, strict=True):
            key = introspect.tie_key(param)
            if reading.reason is not None or key is None:
                continue
            if key in ties:
                first, first_unit = ties[key]
                raise InputError(
                    f"{name} in {label(reading.name)} is tied to {first} in {label(first_unit)}; FSDP2 refuses ties "
                    "across groups: put both modules into one group with fully_shard([a, b])"
                )
            ties[key] = name, reading.name


def _check_initialized(source: str) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InputError(f"{source}: its process group is gone; read the model before destroy_process_group()")
