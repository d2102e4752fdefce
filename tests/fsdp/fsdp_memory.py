"""What ranks do in the tests of memory: training steps whose every tensor is counted."""

from __future__ import annotations

import gc
import re
from typing import Any

import torch
import torch.distributed as dist
from fsdp_cases import grouped, nested_blocks, nested_experts, second_dim, stack, two_towers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import tide
from tide.fsdp import introspect
from tide.report import memory

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Counted(TorchDispatchMode):
    """Bytes of all tensors that are alive, and the most there ever were; as torch's allocator on a GPU counts.

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed. Its shards are counted from the beginning, its whole parameters by their storages, which
        FSDP2 resizes; not those in the arena.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        groups = [group for wrapped in introspect.wrapped_modules(model) for group in wrapped.groups]
        self.params = [param for group in groups for param in group.fsdp_params]
        self.shards = sum(param._sharded_param_data.untyped_storage().nbytes() for param in self.params)
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive."""
        self.live = {key: found for key, found in self.live.items() if not found[0].expired()}
        whole = 0
        for param in self.params:
            for tensor in [*getattr(param, "all_gather_outputs", ()), param._sharded_param_data]:
                storage = tensor.untyped_storage()
                self.live.pop(storage._cdata, None)
                if tensor is not param._sharded_param_data and not hasattr(param, "_tide_unit"):
                    whole += storage.nbytes()
        return self.shards + whole + sum(nbytes for _, nbytes in self.live.values())


class Gather(AllGather):
    """Moves nothing: gloo takes memory of its own, which is not FSDP2's."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        return None


class Scatter(ReduceScatter):
    """Moves nothing."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        return None


def quieten(model: nn.Module, attachment: Any) -> None:
    """Leaves out of the count what collectives on the CPU take themselves."""
    if attachment is None:
        for wrapped in introspect.wrapped_modules(model):
            for group in wrapped.groups:
                group._all_gather_comm, group._reduce_scatter_comm = Gather(), Scatter()
        return
    session: Any = attachment._session
    carry_out = session.transport.run

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return carry_out(*args)

    session.transport.run = run


class Model(nn.Module):
    """Blocks of one or two layers between an embedding and a head."""

    def __init__(self, width: int = 256, blocks: int = 5, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    """The model, wrapped as users do."""
    torch.manual_seed(3)
    model = Model()
    for block in model.blocks:
        if kind == "nested":
            fully_shard(block[1], mp_policy=MIXED)
        fully_shard(block, mp_policy=MIXED)
    if kind == "head apart":
        fully_shard(model.embed, mp_policy=MIXED)
        fully_shard(model.head, mp_policy=MIXED, reshard_after_forward=False)
    if kind == "prefetch":
        for index, block in enumerate(model.blocks):
            block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
            block.set_modules_to_backward_prefetch(list(reversed(model.blocks[max(index - 2, 0) : index])))
    return fully_shard(model, mp_policy=MIXED)


def stated_and_measured(rank: int, world: int, kind: str) -> dict[str, tuple[int, int]]:
    """Peak of a step by the plan's statement, and as counted, for stock FSDP2 and for TIDE."""
    found = {}
    for column in ("stock", "tide"):
        model = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        attachment = tide.attach(model, strict=True)
        assert attachment.compiled is not None
        stated = memory(attachment.compiled, rank)
        arena = attachment.compiled.arena.size
        if column == "stock":
            tide.detach(model)
        quieten(model, attachment if column == "tide" else None)
        tokens = torch.arange(2).view(1, 2)
        counted = Counted(model)
        for step in range(3):
            if step == 1:  # the first makes what the others find
                counted.peak = 0
            with counted:
                model(tokens).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if column == "tide":
            text = attachment.report()
            assert "aside" not in text, text
            scratch = stated.row("scratch").tide  # of GPUs only
            found["tide"] = stated.tide - scratch, counted.peak + arena
            tide.detach(model)
        else:
            found["stock"] = stated.stock, counted.peak
        dist.barrier()
    return found


def same_plans(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """Digests of the plans that are compiled from models and attached to them, where they differ."""
    wrong = {}
    builders: dict[str, Any] = {
        "blocks": stack,
        "mixed": lambda w: stack(mp_policy=MIXED),
        "kept whole": lambda w: stack(reshard_after_forward=False),
        "resharded over one rank": lambda w: stack(reshard_after_forward=1),
        "nested blocks": nested_blocks,
        "nested experts": nested_experts,
        "embedding and head in one group": grouped,
        "another dim": second_dim,
        "towers": two_towers,
    }
    for name, make in builders.items():
        torch.manual_seed(1)
        model = make(world)
        plan = tide.compile_plan(model, prefetch=1)
        attachment = tide.attach(model, prefetch=1)
        assert attachment.compiled is not None
        again = tide.compile_plan(model, prefetch=1)  # with the parameters in the arena
        if not plan.digest == attachment.compiled.digest == again.digest:
            wrong[name] = str(plan.spec), str(attachment.compiled.spec)
        assert plan.compiled.arena.slots == attachment.compiled.arena.slots, name
        text = attachment.report()
        assert re.search(r"transport host, arena: memfd, \d+ bytes, mapped by every rank in \d+\.\d{3} s", text), text
        tide.detach(model)
    return wrong


def changing_subsets(rank: int, world: int, steps: int) -> list[dict[str, int]]:
    """A block of many layers of which each step trains others; what is kept, now and then."""
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(9))
    tops = nn.Sequential(Several(model))
    fully_shard(tops[0], mp_policy=MIXED)
    fully_shard(tops)
    optimizer = torch.optim.SGD(tops.parameters(), lr=1e-3)
    attachment = tide.attach(tops, strict=True)
    session: Any = attachment._session
    noted = []
    for step in range(steps):
        tops[0].chosen = 1 + step * 37 % 511  # the same on every rank
        tops(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // 5) == steps // 5 - 1:
            gc.collect()
            noted.append(
                {
                    "programs": len(attachment.compiled._partial),  # type: ignore[union-attr]
                    "prepared": len(session.transport._prepared),
                    "most": session.transport.most_prepared,
                    "tensors": sum(isinstance(found, torch.Tensor) for found in gc.get_objects()),
                    "bindings": attachment.bindings,
                }
            )
    tide.detach(tops)
    return noted


class Several(nn.Module):
    """Applies some of its layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.chosen = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for index, layer in enumerate(self.layers) if self.chosen >> index & 1)
