"""Reads a module that FSDP2 has sharded: its own groups, meshes, placements and element types."""

from __future__ import annotations

from typing import Any

from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.read.policy import dtype_name, label
from tide.errors import InputError
from tide.topology import Topology

_UNMANAGED = "in no FSDP2 group, so whole on every rank: it is in ignored_params or outside every fully_shard-ed module"


def read_fsdp(model: Any, *, topology: Topology | None = None) -> ModelSpec:
    """Model as FSDP2 shards it.

    One unit is one parameter group. A module whose parameters sit on several meshes has several
    units: the first bears the module's name, the others ``name#1`` and on, and all of them the same
    ``lives_with``, as they are whole at the same time.

    The gradient's type is the storage's, as autograd gives it; gradients that FSDP2 accumulates over
    several backward passes arrive in ``reduce_dtype`` instead, which is for the attached path to see.

    Parameters
    ----------
    model : torch.nn.Module
        ``fully_shard`` was called on it or on modules inside of it; before or after the first forward.
    topology : Topology, optional
        Checked against the process group.

    Raises
    ------
    InputError
        If a parameter is tied across groups, or topology and process group disagree.
    """
    from tide.fsdp import introspect

    source = f"fully_shard-ed {introspect.class_name(model)}"
    _check_world(topology, source)
    names_of = introspect.parameter_names(model)
    meshes: dict[tuple[Any, ...], Mesh] = {}
    ties: dict[int, tuple[str, str]] = {}
    units: list[Unit] = []
    skipped: list[tuple[str, str]] = []
    seen: set[str] = set()
    for number, wrapped in enumerate(introspect.wrapped_modules(model)):
        for index, group in enumerate(wrapped.groups):
            unit_name = f"{wrapped.name}#{index}" if index else wrapped.name
            named = [(names_of[id(param)], param) for param in group.fsdp_params]
            seen.update(name for names, _ in named for name in names)
            reason = introspect.why_stock(group)
            if reason is not None:
                skipped += [(names[0], reason) for names, _ in named]
                continue
            _check_ties(named, unit_name, ties)
            key = introspect.mesh_key(group)
            if key not in meshes:  # shared by all units on it: a mesh may have thousands of ranks
                meshes[key] = Mesh(introspect.shard_groups(group))
            units.append(
                Unit(
                    name=unit_name,
                    parameters=tuple(_parameter(names, param) for names, param in named),
                    mesh=meshes[key],
                    stays_whole=introspect.stays_whole(wrapped, group),
                    lives_with=number,
                )
            )
    skipped += [(name, _UNMANAGED) for name, _ in model.named_parameters() if name not in seen]
    if skipped and not units:
        raise InputError(
            f"{source}: no parameters to plan; all are left to FSDP2, {skipped[0][0]} since: {skipped[0][1]}"
        )
    return ModelSpec(tuple(units), source=source, skipped=tuple(skipped))


def _parameter(names: tuple[str, ...], param: Any) -> Parameter:
    from tide.fsdp import introspect

    dtypes = introspect.dtypes(param)
    storage = dtype_name(dtypes.storage, names[0])
    return Parameter(
        name=names[0],
        shape=introspect.whole_shape(param),
        dim=introspect.shard_dim(param),
        dtype=storage,
        shard_dtype=dtype_name(dtypes.shard, names[0]),
        grad_dtype=storage if dtypes.trainable else None,
        out_dtype=dtype_name(dtypes.reduced, names[0]),
        aliases=names[1:],
    )


def _check_ties(named: list[tuple[tuple[str, ...], Any]], unit_name: str, ties: dict[int, tuple[str, str]]) -> None:
    from tide.fsdp import introspect

    for names, param in named:
        key = introspect.tie_key(param)
        if key is None:
            continue
        if key in ties:
            first, first_unit = ties[key]
            raise InputError(
                f"{names[0]} in {label(unit_name)} is tied to {first} in {label(first_unit)}; FSDP2 refuses ties "
                "across groups: put both modules into one group with fully_shard([a, b])"
            )
        ties[key] = names[0], unit_name


def _check_world(topology: Topology | None, source: str) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InputError(f"{source}: its process group is gone; read the model before destroy_process_group()")
    if topology is not None and topology.world_size != dist.get_world_size():
        raise InputError(
            f"topology of {topology} has {topology.world_size} ranks, but the process group has "
            f"{dist.get_world_size()}; leave topology out, or pass one of {dist.get_world_size()} ranks"
        )
