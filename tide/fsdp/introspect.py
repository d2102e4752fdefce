"""FSDP2's private attributes, read in one place, with what differs between torch 2.11 and 2.15.

Reading only: nothing here changes a module. Objects of FSDP2 are passed through as they are, so that
whoever attaches to them can: a *group* is an ``FSDPParamGroup`` and a *param* an ``FSDPParam``.

======================  ==================================  ========================================
what                    torch 2.11                          from
======================  ==================================  ========================================
groups of a state       one, ``_fsdp_param_group``          2.12: a list, ``_fsdp_param_groups``
TP layout of a param    ``_tp_spec``                        2.12: ``_unsharded_dtensor_spec``
identity of a tie       not kept                            2.12: ``_orig_param_uid``
``reduce_dtype=None``   the gradient's own type             2.15: the parameter's original type
======================  ==================================  ========================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tide.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What one ``fully_shard`` call made: the modules it took, its state and its groups.

    Parameters
    ----------
    names : tuple of str
        Names of the modules within the model; ``fully_shard([a, b])`` takes several.
    modules : tuple
        The modules themselves.
    state : FSDPState
        FSDP2's state of them.
    groups : tuple of FSDPParamGroup
        None for a module whose parameters are all ignored or in nested modules, one as a rule,
        several when parameters of one module sit on different meshes.
    is_root : bool
        Whether FSDP2 treats (or will treat, at the first forward) this as the root.
    """

    names: tuple[str, ...]
    modules: tuple[Any, ...]
    state: Any
    groups: tuple[Any, ...]
    is_root: bool

    @property
    def name(self) -> str:
        """Name as FSDP2 writes it: the modules' names, joined; ``""`` for the root."""
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Element types of one parameter along its way, as torch dtypes.

    Parameters
    ----------
    shard : torch.dtype
        The resident shard.
    storage : torch.dtype
        What the all-gather delivers and compute reads.
    reduced : torch.dtype
        What the gradient is reduced in.
    trainable : bool
        Whether a gradient is reduced at all.
    """

    shard: Any
    storage: Any
    reduced: Any
    trainable: bool


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch in use."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_fsdp(module: Any) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    return isinstance(module, FSDPModule)


def has_fsdp(module: Any) -> bool:
    """Whether ``fully_shard`` was called on this module or one inside of it."""
    return any(is_fsdp(child) for child in module.modules())


def class_name(module: Any) -> str:
    """Name of the user's class, which ``fully_shard`` puts two of its own in front of."""
    cls = type(module)
    return str(cls.__mro__[2].__name__ if is_fsdp(module) else cls.__name__)


def state_of(module: Any) -> Any:
    """FSDP2's state of a module that `is_fsdp`."""
    return module._get_fsdp_state()


def groups_of(module: Any) -> tuple[Any, ...]:
    """Parameter groups of a module that `is_fsdp`, in the order in which FSDP2 unshards them."""
    return state_groups(state_of(module))


def state_groups(state: Any) -> tuple[Any, ...]:
    """Parameter groups of a state, in the order in which FSDP2 unshards them."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return tuple(groups)
    try:
        group = state._fsdp_param_group  # torch 2.11
    except AttributeError:
        raise CapabilityError(
            f"FSDP2 of torch {torch.__version__} keeps its parameter groups where TIDE does not know them; "
            "TIDE knows torch 2.11 to 2.15"
        ) from None
    return () if group is None else (group,)


def wrapped_modules(root: Any) -> tuple[Wrapped, ...]:
    """Every ``fully_shard`` call within ``root``, outer ones first, in the order of ``named_modules``."""
    members: dict[int, list[tuple[str, Any]]] = {}
    for name, module in root.named_modules():
        if is_fsdp(module):
            members.setdefault(id(state_of(module)), []).append((name, module))
    enclosed: set[int] = set()
    for key, named in members.items():
        for _, module in named:
            inside = (id(state_of(inner)) for inner in module.modules() if is_fsdp(inner))
            enclosed.update(state for state in inside if state != key)
    found = []
    for key, named in members.items():
        module = named[0][1]
        state = state_of(module)
        # None until the first forward; the outermost state becomes the root then
        is_root = key not in enclosed if state._is_root is None else bool(state._is_root)
        names, modules = zip(*named, strict=True)
        found.append(Wrapped(names, modules, state, groups_of(module), is_root))
    return tuple(found)


def states_of_step(wrapped: Iterable[Wrapped]) -> tuple[Any, ...]:
    """States that take part in a step with these modules: theirs, and once it is known those of their root's others."""
    found = {id(state): state for one in wrapped for state in (one.state, *one.state._state_ctx.all_states)}
    return tuple(found.values())


def stays_whole(wrapped: Wrapped, group: Any) -> bool:
    """Whether a group's parameters stay whole from one pass to the next.

    True without reshard after forward (which FSDP2 turns off for the root unless told otherwise), and
    without reshard after backward.
    """
    return (
        group.post_forward_mesh_info is None
        or (wrapped.is_root and bool(wrapped.state._auto_reshard_after_forward))
        or not group.reshard_after_backward
    )


def why_stock(group: Any) -> str | None:
    """Why a group's parameters cannot travel by a plan, or None if they can."""
    if getattr(group.mesh_info, "shard_mesh_dim", None) is None:
        return "replicated without a shard axis; nothing is gathered"
    for param in group.fsdp_params:
        local = param._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return (
                f"{param._module_info.param_name} is a {type(local).__name__} with an all-gather extension "
                "(fsdp_pre_all_gather), which decides at run time what travels; the group runs stock"
            )
    return None


def mesh_key(group: Any) -> tuple[Any, ...]:
    """Hashable; groups with the same key have the same `shard_groups`, which take a while on large meshes."""
    info = group.mesh_info
    return info.mesh, info.shard_mesh_dim, all(_alike_across_tp(param) for param in group.fsdp_params)


def shard_groups(group: Any) -> tuple[tuple[int, ...], ...]:
    """World ranks of the shard groups, this rank's and, where the mesh tells, those of all others.

    A mesh that was cut out of a larger one knows the larger one's ranks, and so where its siblings
    lie: the replicas of HSDP, the other ranks of tensor parallelism. Siblings are left out where
    tensor parallelism cut a parameter unevenly, since their shapes differ from this rank's.
    """
    mesh, axis, alike = mesh_key(group)
    every = _siblings(mesh) if alike else mesh.mesh.unsqueeze(0)
    rows = every.movedim(1 + axis, -1).reshape(-1, mesh.size(axis)).tolist()
    # a rank's shard is its place in the process group, which is by rank even if the mesh is not
    own = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
    if own == sorted(own):
        rows = [sorted(row) for row in rows]
    return tuple(sorted(tuple(row) for row in rows))


def meshes(group: Any) -> tuple[Any, ...]:
    """Device meshes over which the group is spread: FSDP2's own, and the tensor-parallel ones of its parameters."""
    specs = (_tensor_parallel(param) for param in group.fsdp_params)
    return (group.mesh_info.mesh, *(spec.mesh for spec in specs if spec is not None))


def mesh_rows(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """World ranks of the mesh and, where it was cut out of a larger one, those of its siblings, one row each."""
    return tuple(map(tuple, _siblings(mesh).flatten(1).tolist()))


def _siblings(mesh: Any) -> torch.Tensor:
    """Ranks of the mesh and of its siblings, one more dimension in front."""
    layout = getattr(mesh, "_layout", None)
    found: torch.Tensor = mesh.mesh.unsqueeze(0) if layout is None else layout.remap_to_tensor(mesh._rank_map)
    return found


def _tensor_parallel(param: Any) -> Any:
    """How tensor parallelism has spread a parameter, as a ``DTensorSpec``; None if it has not."""
    return getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)


def _alike_across_tp(param: Any) -> bool:
    """Whether every tensor-parallel rank holds a local tensor of the same shape."""
    spec = _tensor_parallel(param)
    if spec is None or spec.tensor_meta is None:
        return True
    extents = list(spec.tensor_meta.shape)
    for axis, placement in enumerate(spec.placements):
        dim = getattr(placement, "dim", None)  # that Shard and _StridedShard have, and no other
        if dim is None:
            continue
        extents[dim], rest = divmod(extents[dim], spec.mesh.size(axis))
        if rest:
            return False
    return True


def parameter_names(root: Any) -> dict[int, tuple[str, ...]]:
    """Names of every FSDP2 parameter within ``root`` by ``id(param)``, ties included.

    The first is the one that ``root.named_parameters()`` reports. Names do not depend on whether a
    parameter is sharded or whole at the moment.
    """
    modules: dict[int, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), []).append(name)
    order = {name: index for index, (name, _) in enumerate(root.named_parameters(remove_duplicate=False))}
    found: dict[int, tuple[str, ...]] = {}
    for wrapped in wrapped_modules(root):
        for group in wrapped.groups:
            for param in group.fsdp_params:
                names = {
                    f"{prefix}.{attribute}" if prefix else attribute
                    for module, attribute in owners(param)
                    for prefix in modules[id(module)]
                }
                found[id(param)] = tuple(sorted(names, key=lambda name: (order.get(name, len(order)), name)))
    return found


def local_shards(root: Any) -> dict[str, torch.Tensor]:
    """This rank's shard of every parameter that a plan carries, by name; empty if nothing is sharded."""
    names = parameter_names(root)
    return {
        names[id(param)][0]: resident(param).to_local().detach()
        for wrapped in wrapped_modules(root)
        for group in wrapped.groups
        if why_stock(group) is None
        for param in group.fsdp_params
    }


def owners(param: Any) -> Iterable[tuple[Any, str]]:
    """``(module, attribute)`` of every place that a parameter is registered at, ties included."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def whole_shape(param: Any) -> tuple[int, ...]:
    """Shape of the unsharded parameter; of the local tensor under tensor parallelism."""
    return tuple(param._orig_size)


def shard_dim(param: Any) -> int:
    """Tensor dimension that FSDP2 shards."""
    return int(param.fsdp_placement.dim)


def tie_key(param: Any) -> int | None:
    """Identity of the original parameter, equal for ties in different groups; None on torch 2.11."""
    uid: int | None = getattr(param, "_orig_param_uid", None)
    return uid


def resident(param: Any) -> Any:
    """The sharded parameter as of now.

    ``to``, ``to_empty`` and ``load_state_dict(assign=True)`` may put a new one on the module, which
    FSDP2 itself takes up only at the next forward.
    """
    if param.sharded_state.name != "SHARDED":
        return param.sharded_param
    return getattr(param._module_info.module, param._module_info.param_name)


def resident_ids(groups: Iterable[Any]) -> set[int]:
    """Identities of all sharded parameters: what an optimizer holds, whether they are whole at the moment or not."""
    return {id(resident(param)) for group in groups for param in group.fsdp_params}


def dtypes(param: Any) -> Dtypes:
    """Element types by the parameter's policy, as FSDP2 will settle them at the first forward."""
    now = resident(param)
    policy = param.mp_policy
    cast = policy.param_dtype is not None and now.dtype.is_floating_point
    storage = policy.param_dtype if cast else now.dtype
    if policy.reduce_dtype is not None:
        reduced = policy.reduce_dtype
    else:
        reduced = now.dtype if torch_version() >= (2, 15) else storage
    return Dtypes(now.dtype, storage, reduced, bool(now.requires_grad))


def is_whole(group: Any) -> bool:
    """Whether the modules see the group's whole parameters."""
    return bool(group.is_unsharded)


def is_pending(group: Any) -> bool:
    """Whether an all-gather was issued that nobody has waited for."""
    return group._all_gather_result is not None


def is_resharded_smaller(group: Any) -> bool:
    """Whether the group is sharded over the smaller mesh of ``reshard_after_forward=int``."""
    return bool(group.is_sharded_post_forward)


def reshards_smaller(group: Any) -> bool:
    """Whether the group will be sharded over a smaller mesh between forward and backward."""
    return bool(group._use_post_forward_mesh)


def is_busy(state: Any) -> bool:
    """Whether a forward or backward pass runs through this module at the moment."""
    return (
        state._training_state.name != "IDLE"
        or state._state_ctx.iter_forward_root is not None
        or any(group._training_state.name != "IDLE" for group in state_groups(state))
    )


def prefetches(state: Any) -> int:
    """Modules that the user has told this one to gather ahead, in forward or backward."""
    return max(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch))


def awaits_backward(group: Any) -> bool:
    """Whether forward passes were made that no backward pass has followed, with or without a graph."""
    return bool(getattr(group.comm_ctx, "post_forward_order", ()))  # made by lazy initialization


def is_in_pass(group: Any) -> bool:
    """Whether a forward or backward pass runs through the group, rather than a call of ``unshard``."""
    return bool(group._training_state.name != "IDLE")


def is_in_forward(group: Any) -> bool:
    """Whether the group is gathered for a forward pass."""
    return bool(group._training_state.name == "FORWARD")


def is_in_backward(group: Any) -> bool:
    """Whether the group is gathered for a backward pass."""
    return bool(group._training_state.name == "PRE_BACKWARD")


def reduces_now(group: Any) -> bool:
    """Whether the backward pass that runs through the group will reduce its gradients."""
    return bool(group.reduce_grads) and is_in_backward(group)


def reduce_settings(group: Any) -> tuple[Any, ...]:
    """From which FSDP2 derives the type and the factors of a reduction."""
    return (
        group._reduce_dtype,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        group.mesh_info.shard_process_group,
    )


def has_accumulated(group: Any) -> bool:
    """Whether gradients of earlier backward passes lie beside those of this one."""
    return any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params)


def is_offloaded(group: Any) -> bool:
    """Whether shards and their gradients live on the CPU."""
    return any(bool(param.offload_to_cpu) for param in group.fsdp_params)


def is_distributed(param: Any) -> bool:
    """Whether the whole parameter, and its gradient, is a distributed tensor."""
    return bool(param.is_dtensor)


def is_compiled(group: Any) -> bool:
    """Whether a module of the group is compiled as one, so that its backward pass is a single step."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in group.modules
    )
