"""The two baselines that are not stock: FSDP2 with symmetric memory, and FSDP2 with free collectives.

On torch 2.12 and newer, symmetric memory is FSDP2's own switch. On 2.11 the same is built through
FSDP2's hooks for custom collectives: flat buffers in NCCL windows, all-gather by copy engine (CTA policy
zero), reduce-scatter by NCCL's symmetric kernels. That needs NCCL 2.31 or newer in the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.multiprocessing.reductions import StorageWeakRef

from nccl_baseline import Communicator
from tide.fsdp import introspect


def groups_of(model: nn.Module) -> list[Any]:
    """Every parameter group of a ``fully_shard``-ed model."""
    return [group for wrapped in introspect.wrapped_modules(model) for group in wrapped.groups]


class _FreeGather(AllGather):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        return None


class _FreeScatter(ReduceScatter):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        output_tensor.zero_()


def use_free_collectives(model: nn.Module) -> int:
    """Collectives that move nothing; weights and gradients are then wrong, times are a floor."""
    for group in groups_of(model):
        _remember(group)
        group._all_gather_comm, group._reduce_scatter_comm = _FreeGather(), _FreeScatter()
    return 0


def _remember(group: Any) -> None:
    group._benchmark_comms = (group._all_gather_comm, group._reduce_scatter_comm)


def detach_baseline(model: nn.Module) -> None:
    """Gives the groups their own collectives back and frees the windows."""
    for group in groups_of(model):
        if (comms := group.__dict__.pop("_benchmark_comms", None)) is not None:
            group._all_gather_comm, group._reduce_scatter_comm = comms
    while _pools:
        _pools.pop().close()


_pools: list[_WindowPool] = []


class _WindowPool:
    """Flat buffers in one NCCL window, handed out again when no tensor uses them any more.

    FSDP2 drops its reference to a flat buffer only after the streams that could write the next one have waited
    for its last reader, so a free reference count is also the right order on the streams.
    """

    def __init__(self, model: nn.Module) -> None:
        largest = max(sum(p._sharded_param_data.numel() for p in group.fsdp_params) for group in groups_of(model))
        world = dist.get_world_size()
        sizes = {"gather": (2 * largest * world, 3), "in": (4 * largest * world, 2)}
        self.free: dict[str, list[int]] = {}
        offset = 0
        for kind, (size, count) in sizes.items():
            self.free[kind] = [offset + index * _round(size) for index in range(count)]
            offset += count * _round(size)
        self.nbytes = offset
        self.sizes = {kind: _round(size) for kind, (size, _) in sizes.items()}
        self.used: dict[str, set[int]] = {kind: set() for kind in sizes}
        self.comm = Communicator(offset)
        self.live: dict[str, list[tuple[Any, int]]] = {kind: [] for kind in sizes}

    def take(self, kind: str, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``size`` elements in a buffer that nobody uses."""
        still = []
        for storage, place in self.live[kind]:
            if storage.expired():
                self.free[kind].append(place)
            else:
                still.append((storage, place))
        self.live[kind] = still
        if not self.free[kind]:
            raise RuntimeError(f"symmetric-memory baseline: all {kind} buffers are in use")
        place = min(self.free[kind])  # as an allocator would: no more buffers than are in use at a time
        self.free[kind].remove(place)
        self.used[kind].add(place)
        tensor = self.comm.tensor(place, int(torch.Size(size).numel()), dtype)
        self.live[kind].append((StorageWeakRef(tensor.untyped_storage()), place))
        return tensor.view(*size)

    def close(self) -> None:
        """Frees the window and the communicator."""
        self.comm.close()


def _round(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


class _SymmGather(AllGather):
    def __init__(self, pool: _WindowPool) -> None:
        self.pool = pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.pool.take("gather", size, dtype)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        self.pool.comm.all_gather(input_tensor, output_tensor)


class _SymmScatter(ReduceScatter):
    def __init__(self, pool: _WindowPool) -> None:
        self.pool = pool
        self.first = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        first, self.first = self.first, not self.first
        return self.pool.take("in", size, dtype) if first else torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.pool.comm.reduce_scatter_mean(input_tensor, output_tensor)


def windows_used() -> int:
    """Bytes of the windows that have ever been handed out: what a pool that grows as needed would hold."""
    return sum(len(places) * pool.sizes[kind] for pool in _pools for kind, places in pool.used.items())


def use_symmetric_memory(model: nn.Module) -> int:
    """FSDP2 on symmetric memory; returns the bytes of its windows (0 where torch's allocator counts them)."""
    root: Any = model
    if hasattr(root, "set_symm_mem_for_comm"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_symm_mem_for_comm()
        return 0
    pool = _WindowPool(model)
    _pools.append(pool)
    for group in groups_of(model):
        _remember(group)
        group._all_gather_comm, group._reduce_scatter_comm = _SymmGather(pool), _SymmScatter(pool)
    return pool.nbytes
