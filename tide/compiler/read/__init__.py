"""First pass: from whatever a user has of a model to a `ModelSpec`.

torch is imported only when a module is read, and never for a list of parameters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from tide.compiler.model import Mesh, ModelSpec
from tide.compiler.read.listing import read_file, read_listing
from tide.compiler.read.policy import Policy, ShardDim, check_ranks
from tide.errors import InputError
from tide.topology import Topology

if TYPE_CHECKING:
    from tide.scope import Scope

__all__ = ["Policy", "needs_padding", "read", "scope_of"]


def read(
    model: Any,
    *,
    topology: Topology | None = None,
    mesh: Mesh | None = None,
    wrap: Any = None,
    policy: Any = None,
    shard_dim: ShardDim | None = None,
    ignored_params: Collection[Any] = (),
    reshard_after_forward: bool = True,
    scope: Scope | None = None,
) -> ModelSpec:
    """Parameters, units and shard groups of a model.

    Parameters
    ----------
    model : torch.nn.Module, mapping, str, path or ModelSpec
        A module that FSDP2 has sharded; a plain module, on the meta device if need be; a mapping of
        names to shapes and dtypes; a ``.json`` file of that; a ``.safetensors`` file, its index, or
        the folder of a checkpoint; or a `ModelSpec`, which is only checked.
    topology : Topology, optional
        Where the ranks are. Needed for everything that FSDP2 has not sharded.
    mesh : Mesh, optional
        Shard groups; by default all ranks of the topology are one.
    wrap : optional
        How to cut the model into units, see `read_module` and `read_listing`; by default each block
        of each list of blocks, then the root's rest.
    policy : Policy or MixedPrecisionPolicy, optional
        Mixed precision; nothing is cast without one.
    shard_dim : callable, optional
        ``(name, shape) -> dim`` to shard; 0 by default.
    ignored_params : collection of parameters or names
        Left out of the plan.
    reshard_after_forward : bool
        Whether units give up their storage after the forward pass.
    scope : Scope, optional
        Of a module that FSDP2 has sharded: the ranks that hold it, see :func:`scope_of`.

    Raises
    ------
    InputError
        For anything that cannot be read, naming it and the remedy. Options other than ``topology``
        are refused for a module that FSDP2 has sharded, which has its own answers.
    """
    if topology is not None and not isinstance(topology, Topology):
        raise InputError(f"topology: expected tide.Topology, got {type(topology).__name__}")
    options = {
        "mesh": mesh,
        "wrap": wrap,
        "policy": policy,
        "shard_dim": shard_dim,
        "ignored_params": ignored_params,
        "reshard_after_forward": reshard_after_forward,
    }
    spec = _dispatch(model, topology, options, scope)
    if topology is not None:
        check_ranks(spec, topology)
    return spec


def _dispatch(model: Any, topology: Topology | None, options: dict[str, Any], scope: Scope | None) -> ModelSpec:
    if isinstance(model, ModelSpec):
        _refuse(options, "a ModelSpec")
        return model
    if isinstance(model, str | os.PathLike):
        return read_file(model, topology=topology, **options)
    if isinstance(model, Mapping):
        return read_listing(model, topology=topology, **options)
    # whoever has a module has imported torch
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        if _is_sharded(model):
            from tide.compiler.read.fsdp import read_fsdp

            _refuse(options, "a fully_shard-ed module")
            return read_fsdp(model, topology=topology, scope=scope)
        from tide.compiler.read.module import read_module

        return read_module(model, topology=topology, **options)
    raise InputError(
        f"cannot read a model from a {type(model).__name__}; pass a torch module, a mapping of names to "
        "(shape, dtype), or the path of a .json or .safetensors file"
    )


def scope_of(model: Any, ranks: Any = None) -> Scope | None:
    """The ranks that hold a module that FSDP2 has sharded, in a running job; None of anything else.

    Raises
    ------
    InputError
        If ``ranks`` are given for anything else, or cannot be; see :func:`tide.fsdp.scope.scope_of`.
    """
    torch, dist = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    if torch is None or not isinstance(model, torch.nn.Module) or not _is_sharded(model):
        if ranks is not None:
            raise InputError("ranks: only a fully_shard-ed module is on ranks of a job; leave it out, or pass mesh=")
        return None
    if dist is None or not dist.is_initialized():
        return None
    from tide.fsdp import scope

    return scope.scope_of(model, ranks)


def _is_sharded(model: Any) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:  # then nothing was sharded; the import takes seconds
        return False
    from tide.fsdp import introspect

    return introspect.has_fsdp(model)


def needs_padding(model: Any) -> bool:
    """Whether FSDP2 cuts the whole parameters anew, padding and all: ``reshard_after_forward`` is a number of ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module) or not _is_sharded(model):
        return False
    from tide.compiler.read import fsdp

    return fsdp.needs_padding(model)


def _refuse(options: dict[str, Any], what: str) -> None:
    defaults = {"ignored_params": (), "reshard_after_forward": True}
    given = [name for name, value in options.items() if value != defaults.get(name)]
    if given:
        raise InputError(
            f"{', '.join(given)}: {what} already says so itself; "
            "leave the option out, or pass a plain module or a list of parameters"
        )
