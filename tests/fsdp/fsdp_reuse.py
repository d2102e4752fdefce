"""Steps in which parameters change between a forward pass and its backward pass, under stock FSDP2 and TIDE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide


class Stack(nn.Module):
    """Four blocks: the last two are still in their slots when backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 33, bias=False), nn.ReLU(), nn.Linear(33, 16)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def _made(world: int) -> Stack:
    torch.manual_seed(5)
    model = Stack()
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _input(seed: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).requires_grad_()


def plain(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Nothing changes in between."""
    x = _input(0)
    model(x).backward()
    return [x.grad]


def two_forwards(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The optimizer steps between the backward passes of two forward passes."""
    x, y = _input(1), _input(2)
    first, second = model(x), model(y)
    first.backward()
    optimizer.step()
    second.backward()
    return [x.grad, y.grad]


def two_backwards(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters are edited between two backward passes of one forward pass."""
    x = _input(3)
    loss = model(x)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    loss.backward()
    return [x.grad]


def step_between(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The optimizer steps between forward and backward."""
    x = _input(4)
    model(x).backward()
    loss = model(x)
    optimizer.step()
    loss.backward()
    return [x.grad]


def load_between(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """A checkpoint is loaded between forward and backward."""
    state = {name: tensor.detach().clone() + 1.0 for name, tensor in model.state_dict().items()}
    x = _input(6)
    loss = model(x)
    model.load_state_dict(state)
    loss.backward()
    return [x.grad]


def edit_whole(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """A hook edits the whole parameters of a block during forward; FSDP2 gathers clean ones for backward."""

    def halve(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    handles = [block[0].register_forward_pre_hook(halve) for block in model.blocks]  # type: ignore[union-attr,index]
    x = _input(7)
    model(x).backward()
    for handle in handles:
        handle.remove()
    return [x.grad]


SCENARIOS: dict[str, Callable[[nn.Module, Any], list[torch.Tensor]]] = {
    f.__name__: f for f in (plain, two_forwards, two_backwards, step_between, load_between, edit_whole)
}


def compare(rank: int, world: int, reuse: bool) -> tuple[list[str], dict[str, int]]:
    """Names of scenarios whose gradients or parameters differ from stock, and how often a gather was spared."""
    wrong, kept = [], {}
    for name, scenario in SCENARIOS.items():
        runs = []
        for attached in (False, True):
            model = _made(world)
            attachment = tide.attach(model, strict=True, reuse_forward=reuse) if attached else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            found = []
            for _ in range(3):
                found += scenario(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found += [parameter.detach().to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
            runs.append(found)
            if attachment is not None:
                kept[name] = sum(attachment.unit(f"blocks.{i}").counts.kept for i in range(4))
                tide.detach(model)
        if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
            wrong.append(name)
    return wrong, kept
