"""The two baselines that are not stock: FSDP2 with symmetric memory, and FSDP2 with free collectives.

On torch 2.12 and newer, symmetric memory is FSDP2's own switch. On 2.11 the same is built through
FSDP2's hooks for custom collectives: flat buffers in NCCL windows, all-gather by copy engine (CTA policy
zero), reduce-scatter by NCCL's symmetric kernels. That needs NCCL 2.31 or newer in the process.

The reduce-scatter is float32, as FSDP2 has it, and reads the peers' inputs in a window of a communicator of its
own. A CTA policy does not matter to it (no copy engine adds), the number of CTAs does: NCCL takes the fewest that
its cost model, with 44 GB/s a CTA on Hopper, finds enough. `SCATTERS` has the choices.
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

from nccl_baseline import DEFAULT, ZERO_CTA, Communicator
from tide.fsdp import introspect


def groups_of(model: nn.Module) -> list[Any]:
    """Every parameter group of a ``fully_shard``-ed model."""
    return [group for wrapped in introspect.wrapped_modules(model) for group in wrapped.groups]


class _FreeGather(AllGather):
    """Gathers nothing: its output is a buffer that was filled once with numbers such as weights are.

    Not with whatever memory holds: a GEMM of zeros, say, takes less power, hence less time, than one of numbers.
    """

    def __init__(self, buffers: dict[Any, torch.Tensor]) -> None:
        self.buffers = buffers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (tuple(size), dtype, device)
        if key not in self.buffers:
            self.buffers[key] = torch.randn(*size, dtype=dtype, device=device) * 0.02
        return self.buffers[key]

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        return None


class _FreeScatter(ReduceScatter):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        output_tensor.zero_()


def use_free_collectives(model: nn.Module) -> int:
    """Collectives that move nothing; weights and gradients are then wrong, times are a floor."""
    buffers: dict[Any, torch.Tensor] = {}
    for group in groups_of(model):
        _remember(group)
        group._all_gather_comm, group._reduce_scatter_comm = _FreeGather(buffers), _FreeScatter()
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


#: Reduce-scatters of the symmetric baseline: the communicator's CTA policy, and CTAs (None: NCCL's own choice).
SCATTERS: dict[str, tuple[int, int | None]] = {
    "zero": (ZERO_CTA, None),  # as the all-gather's
    "own": (DEFAULT, None),
}
#: Leaves the reduce-scatter to FSDP2 and NCCL's ordinary kernels.
ORDINARY = "stock"
#: What plain ``symm`` takes: a communicator with policy default whose kernels get this many CTAs, 64 at most.
SCATTER = "32"


class _WindowPool:
    """Flat buffers in one NCCL window, handed out again when no tensor uses them any more.

    FSDP2 drops its reference to a flat buffer only after the streams that could write the next one have waited
    for its last reader, so a free reference count is also the right order on the streams.

    Parameters
    ----------
    model : Module
        Sizes the buffers, for the largest group.
    itemsize : int
        Bytes of an element.
    count : int
        Buffers.
    policy, ctas : int, int or None
        CTA policy of the window's communicator, and how many its kernels get.
    """

    def __init__(self, model: nn.Module, itemsize: int, count: int, policy: int, ctas: int | None = None) -> None:
        largest = max(sum(p._sharded_param_data.numel() for p in group.fsdp_params) for group in groups_of(model))
        size = _round(itemsize * largest * dist.get_world_size())
        self.nbytes, self.size = count * size, size
        self.used: set[int] = set()
        self.free = [index * size for index in range(count)]
        self.live: list[tuple[Any, int]] = []
        self.comm = Communicator(self.nbytes, policy, ctas)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``size`` elements in a buffer that nobody uses."""
        still = []
        for storage, place in self.live:
            if storage.expired():
                self.free.append(place)
            else:
                still.append((storage, place))
        self.live = still
        if not self.free:
            raise RuntimeError("symmetric-memory baseline: all buffers are in use")
        place = min(self.free)  # as an allocator would: no more buffers than are in use at a time
        self.free.remove(place)
        self.used.add(place)
        tensor = self.comm.tensor(place, int(torch.Size(size).numel()), dtype)
        self.live.append((StorageWeakRef(tensor.untyped_storage()), place))
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
        return self.pool.take(size, dtype)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        self.pool.comm.all_gather(input_tensor, output_tensor)


class _SymmScatter(ReduceScatter):
    def __init__(self, pool: _WindowPool) -> None:
        self.pool = pool
        self.first = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        first, self.first = self.first, not self.first
        return self.pool.take(size, dtype) if first else torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.pool.comm.reduce_scatter_mean(input_tensor, output_tensor)


def windows_used() -> int:
    """Bytes of the windows that have ever been handed out: what a pool that grows as needed would hold."""
    return sum(len(pool.used) * pool.size for pool in _pools)


def use_symmetric_memory(model: nn.Module, scatter: str = "") -> int:
    """FSDP2 on symmetric memory; returns the bytes of its windows (0 where torch's allocator counts them).

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed.
    scatter : str
        One of `SCATTERS`, a number of CTAs, or ``"stock"``; `SCATTER` by default. torch's own switch has no choice.
    """
    root: Any = model
    if hasattr(root, "set_symm_mem_for_comm"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_symm_mem_for_comm()
        return 0
    scatter = scatter or SCATTER
    gather_pool = _WindowPool(model, 2, 3, ZERO_CTA)
    _pools.append(gather_pool)
    if scatter != ORDINARY:
        policy, ctas = SCATTERS[scatter] if scatter in SCATTERS else (DEFAULT, int(scatter))
        _pools.append(_WindowPool(model, 4, 2, policy, ctas))
    for group in groups_of(model):
        _remember(group)
        group._all_gather_comm = _SymmGather(gather_pool)
        if scatter != ORDINARY:
            group._reduce_scatter_comm = _SymmScatter(_pools[-1])
    return sum(pool.nbytes for pool in _pools)
