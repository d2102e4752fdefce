"""Makes plans: from a model, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide.compiler.compile import compile_spec
from tide.compiler.options import PlanOptions, with_prefetch
from tide.compiler.read import needs_padding, read, scope_of
from tide.compiler.verify import verify
from tide.errors import InputError
from tide.plan import Plan
from tide.plan_file import parse_plan
from tide.topology import Topology, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tide.compiler.model import Mesh, ModelSpec
    from tide.scope import Scope


def compile_plan(
    model: Any,
    *,
    topology: Topology | None = None,
    ranks: Collection[int] | ProcessGroup | None = None,
    wrap: Any = None,
    policy: Any = None,
    shard_dim: Callable[[str, tuple[int, ...]], int] | None = None,
    mesh: Mesh | None = None,
    ignored_params: Collection[Any] = (),
    reshard_after_forward: bool = True,
    rank: int | None = None,
    options: PlanOptions | None = None,
    prefetch: int | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """Compiles the addressing plan of a model.

    Parameters
    ----------
    model : Module, mapping, str or Path
        A ``fully_shard``-ed module (its real groups, meshes, placements and dtypes are used); a plain
        module, also on the meta device; a mapping of names to shapes and dtypes; a JSON file of such a
        mapping; a ``.safetensors`` file or index.
    topology : Topology, optional
        Needed for all but a ``fully_shard``-ed module, where the launcher's environment tells it.
    ranks : collection of int or ProcessGroup, optional
        World ranks that hold a ``fully_shard``-ed module, if they are not those that its meshes tell; see
        :func:`tide.attach`. The plan's ranks are their places in ascending order.
    wrap : optional
        Which submodules are units; see :func:`tide.compiler.read.read`.
    policy : optional
        Element types of storage and reduction; see :func:`tide.compiler.read.read`.
    shard_dim : callable, optional
        ``(name, shape) -> dim`` for models that are not sharded yet; dim 0 by default.
    mesh : Mesh, optional
        Shard groups of a model that is not sharded yet; by default all ranks are one group.
    ignored_params : collection, optional
        Parameters or names to leave out, for models that are not sharded yet.
    reshard_after_forward : bool
        For models that are not sharded yet: whether units give their storage up after the forward pass.
    rank : int, optional
        The rank of the plan that holds it: by default this process's place among those that hold the model, the
        process group's rank, else ``$RANK``, else 0.
    options : PlanOptions, optional
        Slots, bundling, chunking, routes. With ``multicast="auto"`` or ``switch_reduce="auto"`` and a process group
        of the topology's size the call is collective over its ranks: both are off unless every rank's switch can.
    prefetch : int, optional
        Modules that are gathered ahead of the one in use: another way to say ``options.slots``, which is one more.
    memory_limit : int, optional
        Bytes that a rank has for what :meth:`tide.Plan.report` counts under TIDE (optimizer state and activations are
        not in it). If the options need more, others are chosen that fit, at the least predicted cost; the report says
        what was given up.

    Returns
    -------
    Plan
        Verified in the cheap form; call :meth:`tide.Plan.verify` for the full proof.

    Raises
    ------
    InputError
        If the model, its mesh or the topology cannot be planned for; nothing is changed.
    MemoryLimitError
        If nothing fits ``memory_limit``; the message names the smallest limit that would do.
    """
    scope = scope_of(model, ranks)
    spec = read(
        model,
        topology=topology,
        mesh=mesh,
        wrap=wrap,
        policy=policy,
        shard_dim=shard_dim,
        ignored_params=ignored_params,
        reshard_after_forward=reshard_after_forward,
        scope=scope,
    )
    if topology is None:
        topology = Topology.discover(_world_size(spec)) if scope is None else scope.topology()
    if options is not None and not isinstance(options, PlanOptions):
        raise InputError(f"options: expected tide.PlanOptions, got {type(options).__name__}")
    options = with_prefetch(options or PlanOptions(), prefetch)
    if needs_padding(model) and not options.padded_storage:
        options = replace(options, padded_storage=True)
    options = _settled(options, topology, scope)
    rank = _checked(_current_rank(scope) if rank is None else rank, topology)
    remarks: tuple[str, ...] = ()
    if memory_limit is None:
        compiled = compile_spec(spec, topology, options)
    else:
        from tide.report.fit import fit

        fitted = fit(spec, topology, options, memory_limit)
        compiled, remarks = fitted.compiled, fitted.remarks
    verify(compiled, full=False)
    return Plan(compiled, rank, model if hasattr(model, "named_parameters") else None, remarks, scope)


def load_plan(source: str | Path, *, rank: int | None = None) -> Plan:
    """Loads a plan that :meth:`tide.Plan.to_json` wrote.

    Parameters
    ----------
    source : str or Path
        A file, or the JSON text itself.
    rank : int, optional
        The rank that holds the plan; by default the one it was written for.

    Raises
    ------
    InputError
        If the text is no plan, is of another format version, or does not compile to the digest it states.
    """
    compiled, written_for = parse_plan(source)
    return Plan(compiled, _checked(written_for if rank is None else rank, compiled.topology))


def _settled(options: PlanOptions, topology: Topology, scope: Scope | None) -> PlanOptions:
    """Asks the ranks of a running job what their switch can do, where the plan depends on it."""
    if "auto" not in (options.multicast, options.switch_reduce):
        return options
    from tide.transport.switch import settled

    return settled(options, topology, None if scope is None else scope.group())


def _checked(rank: Any, topology: Topology) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < topology.world_size:
        raise InputError(f"rank {rank!r} is outside {topology} with {topology.world_size} ranks")
    return rank


def _world_size(spec: ModelSpec) -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else spec.world_size


def _current_rank(scope: Scope | None) -> int:
    import sys

    if scope is not None:
        return scope.rank

    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return whole_number("RANK", 0)
