"""Finds the ranks that hold a model, from what FSDP2 and tensor parallelism know of their meshes.

They are the smallest set that contains this rank and, with a rank, everybody whom it shares a mesh of the model's
with: the shard groups, the replicas of HSDP, the tensor-parallel mesh of a parameter. Other axes of the mesh that
these were cut out of do not count: under pipeline parallelism they lead to stages that hold other models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import index
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tide.errors import InputError
from tide.fsdp import introspect
from tide.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def scope_of(model: Any, ranks: Collection[int] | ProcessGroup | None = None) -> Scope:
    """The ranks that hold ``model``.

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed, it or modules inside of it.
    ranks : collection of int or ProcessGroup, optional
        World ranks, if the meshes do not tell.

    Raises
    ------
    InputError
        If the ranks given cannot be, or the meshes do not tell with whom the other ranks share theirs.
    """
    if ranks is None:
        return Scope.of(_closure(model))
    if isinstance(ranks, dist.ProcessGroup):
        from tide.transport.agreement import world_ranks

        return Scope.of(world_ranks(ranks))
    try:
        return Scope.of([rank if isinstance(rank, bool) else index(rank) for rank in ranks])
    except TypeError:
        raise InputError(
            f"ranks: expected world ranks, such as [2, 3], or a process group, got {type(ranks).__name__} {ranks!r}"
        ) from None


def _closure(model: Any) -> set[int]:
    relations = [{rank: row for row in rows for rank in row} for rows in _rows(model)]
    found: set[int] = set()
    new = {dist.get_rank()}
    while new:
        found |= new
        reached: set[int] = set()
        for rank in new:
            for row_of in relations:
                if rank not in row_of:
                    raise InputError(
                        f"the model's meshes do not tell which ranks hold it: rank {rank} does, but one of the meshes "
                        f"({_row_text(row_of[dist.get_rank()])} on this rank) does not say with whom rank {rank} "
                        "shares its own. Cut all meshes out of one DeviceMesh, or pass ranks= with all ranks that "
                        "hold the model"
                    )
                reached.update(row_of[rank])
        new = reached - found
    return found


def _rows(model: Any) -> Iterator[tuple[tuple[int, ...], ...]]:
    """For each mesh of the model's, the ranks that share it: this rank's, and those of others where it tells."""
    seen: set[Any] = set()
    for wrapped in introspect.wrapped_modules(model):
        for group in wrapped.groups:
            for mesh in introspect.meshes(group):
                if mesh not in seen and mesh.size() > 1:
                    seen.add(mesh)
                    yield introspect.mesh_rows(mesh)


def _row_text(row: tuple[int, ...]) -> str:
    return f"ranks {', '.join(map(str, row[:8]))}{', …' if len(row) > 8 else ''}"
