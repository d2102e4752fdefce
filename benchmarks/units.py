"""One FSDP2 unit under test: its all-gather and its reduce-scatter, driven alone, by any variant.

FSDP2's own entry points are called (``unshard``; the group's ``post_backward`` with gradients put in
place), so that each variant is timed with all that it really does: casts, packing, copy-out, chunk-cat.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

import tide
from baselines import detach_baseline, groups_of, use_symmetric_memory

VARIANTS = ("stock", "symm", "tide")


class Unit:
    """A block that FSDP2 has sharded, with one of the variants attached.

    Parameters
    ----------
    make : callable
        Builds the module on the CUDA device.
    variant : str
        ``stock``, ``symm`` or ``tide``.
    """

    def __init__(self, make: Callable[[], nn.Module], variant: str) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self.variant = variant
        with torch.device("cuda"):
            self.module: Any = make()
            for index, parameter in enumerate(self.module.parameters()):
                torch.manual_seed(index)
                with torch.no_grad():
                    parameter.normal_()
        whole = {name: p.detach().to(torch.bfloat16) for name, p in self.module.named_parameters()}
        self.nbytes = sum(2 * p.numel() for p in self.module.parameters())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        fully_shard(self.module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self.module._get_fsdp_state()._lazy_init()
        if variant == "symm":
            use_symmetric_memory(self.module)
        elif variant == "tide":
            tide.attach(self.module, strict=True)
        (self.group,) = groups_of(self.module)
        self.whole = [whole[p._param_fqn] for p in self.group.fsdp_params]
        self.rank = dist.get_rank()
        self.grads: list[torch.Tensor] = []

    def gather(self) -> None:
        """All-gather into storage, seen from the current stream."""
        self.module.unshard()

    def free(self) -> None:
        """Reshards."""
        self.module.reshard()

    def wrong_gather(self) -> int:
        """Elements that differ from the whole parameters, over all ranks, after :meth:`gather`."""
        found = [p.unsharded_param.detach() for p in self.group.fsdp_params]
        bad = sum((a.view(torch.int16) != b.view(torch.int16)).sum() for a, b in zip(found, self.whole, strict=True))
        return _total(bad)

    def prepare_reduce(self) -> None:
        """Makes the unit whole with a gradient on every parameter, as at the end of its backward."""
        if not self.grads:
            generator = torch.Generator("cuda").manual_seed(100 + self.rank)
            self.grads = [
                torch.randn(p.shape, device="cuda", dtype=torch.bfloat16, generator=generator) for p in self.whole
            ]
        self.module.unshard()
        for parameter, grad in zip(self.group.fsdp_params, self.grads, strict=True):
            parameter.unsharded_param.grad = grad
            parameter.sharded_param.grad = None

    def reduce(self) -> None:
        """Reduce-scatter of the gradients, seen from the current stream."""
        self.group._training_state = TrainingState.PRE_BACKWARD
        self.group.post_backward()
        self.group.finalize_backward()
        self.group._training_state = TrainingState.IDLE

    def reduced(self) -> list[torch.Tensor]:
        """This rank's shards of the mean gradient, after :meth:`reduce`."""
        return [p.sharded_param.grad.to_local() for p in self.group.fsdp_params]

    def wrong_reduce(self) -> int:
        """Elements beyond one rounding of a float32 sum from the float64 mean, over all ranks."""
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        world = dist.get_world_size()
        for shard, grad in zip(self.reduced(), self.grads, strict=True):
            pieces = [torch.empty_like(grad) for _ in range(world)]
            dist.all_gather(pieces, grad)
            rows = -(-grad.shape[0] // world)
            mine = [p[self.rank * rows : (self.rank + 1) * rows] for p in pieces]
            for begin in range(0, shard.shape[0], 4096):
                part = [p[begin : begin + 4096].double() for p in mine]
                bound = sum(p.abs() for p in part) * world * 2.0**-24
                bad += ((shard[begin : begin + 4096].double() - sum(part) / world).abs() > bound).sum()
        return _total(bad)

    def close(self) -> None:
        """Detaches the variant and drops the module."""
        torch.cuda.synchronize()
        self.module.reshard()
        if self.variant == "tide":
            tide.detach(self.module)
        detach_baseline(self.module)
        self.__dict__.clear()


def _total(count: Any) -> int:
    tensor = torch.as_tensor(count, device="cuda", dtype=torch.int64).clone()
    dist.all_reduce(tensor)
    return int(tensor)


def copy_engine_rate(nbytes: int = 1 << 30) -> dict[str, float]:
    """Peer copies by copy engine on this machine, in GB/s: every rank pulls from, then pushes to the next one."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    handle = symmetric.rendezvous(buffer, dist.group.WORLD)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    remote = handle.get_buffer(peer, (nbytes,), torch.uint8)
    local = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    rates = {}
    for name, source, target in (("pull", remote, local), ("push", local, remote)):
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                begin.record()
                target.copy_(source)
                end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        rate = torch.tensor(nbytes / min(times) / 1e6, device="cuda")
        dist.all_reduce(rate, dist.ReduceOp.MIN)
        rates[name] = float(rate)
    return rates
