"""What ranks do in the tests of models on a part of the world."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import MIXED, mesh, shard
from fsdp_jobs import train
from fsdp_models import Block, Stack
from fsdp_parity import Side, compare, local
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import tide
from tide.errors import PeerError
from tide.fsdp import early, introspect

MICROBATCHES = 4


class Part(nn.Module):
    """What one stage of a pipeline holds: blocks, with the embedding before the first and the head after the last."""

    def __init__(self, index: int, count: int, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12) if index == 0 else None
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False) if index == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def cross_entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())


class Pipeline:
    """The parts that one rank holds, sharded within their stages, and the schedule that trains them."""

    def __init__(self, schedule: Any, grid: DeviceMesh, parts: int, **options: Any) -> None:
        group, place = grid.get_group("pp"), grid.get_local_rank("pp")
        count = parts * grid.size(0)
        mine = range(place, count, grid.size(0))
        torch.manual_seed(7)
        every = [Part(index, count) for index in range(count)]
        dims = tuple(name for name in grid.mesh_dim_names or () if name != "pp")
        self.models = [shard(every[index], mesh=grid[dims], **options) for index in mine]
        self.sides = [Side(m, torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False)) for m in self.models]
        stages = [
            PipelineStage(model, index, count, torch.device("cpu"), group=group)
            for model, index in zip(self.models, mine, strict=True)
        ]
        self.schedule = schedule(stages if parts > 1 else stages[0], MICROBATCHES, loss_fn=cross_entropy)
        self.first, self.last = 0 in mine, count - 1 in mine

    def step(self, step: int, rank: int) -> list[torch.Tensor]:
        """One training step up to the optimizer; the losses of the microbatches on the last stage."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens, targets = torch.randint(17, (2, 2 * MICROBATCHES, 5), generator=generator).unbind()
        losses: list[torch.Tensor] = []
        arguments = (tokens,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=targets, losses=losses)
        else:
            self.schedule.step(*arguments)
        return [loss.detach() for loss in losses]


def same_parts(stock: Pipeline, attached: Pipeline, what: str) -> None:
    """Gradients are equal bit for bit, and parameters after a step of the optimizer."""
    for number, (one, other) in enumerate(zip(stock.sides, attached.sides, strict=True)):
        theirs = dict(other.model.named_parameters())
        for name, param in one.model.named_parameters():
            compare(f"{what}, part {number}, gradient of {name}", param.grad, theirs[name].grad)
        for side in (one, other):
            side.optimizer.step()
            side.optimizer.zero_grad()
        for name, param in one.model.named_parameters():
            compare(f"{what}, part {number}, {name}", param, theirs[name])


SCHEDULES: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    "GPipe": (ScheduleGPipe, 1, {}, {}),
    "GPipe, bf16, early": (ScheduleGPipe, 1, {"mp_policy": MIXED}, {"early_reduce": True}),
    "1F1B": (Schedule1F1B, 1, {"reshard_after_forward": False}, {}),
    "1F1B, resharded": (Schedule1F1B, 1, {"mp_policy": MIXED}, {"debug": True, "reuse_forward": True}),
    "interleaved": (ScheduleInterleaved1F1B, 2, {"reshard_after_forward": False}, {}),
    "interleaved, slots": (ScheduleInterleaved1F1B, 2, {}, {"slots": 3}),
}


def pipelines(rank: int, world: int, names: tuple[str, ...], steps: int = 3) -> dict[str, list[str]]:
    """Trains pipelines under stock FSDP2 and attached; the reports of this rank's parts."""
    grid = mesh((2, world // 2), ("pp", "dp"))
    early.LEAST_BYTES = 1
    found = {}
    for name in names:
        schedule, parts, sharding, options = SCHEDULES[name]
        stock, attached = (Pipeline(schedule, grid, parts, **sharding) for _ in range(2))
        attachments = [tide.attach(model, **options) for model in attached.models]
        stage = tuple(dist.get_process_group_ranks(grid.get_group("dp")))
        assert [attachment.scope.ranks for attachment in attachments] == [stage] * parts, name
        for step in range(steps):
            losses = [side.step(step, rank) for side in (stock, attached)]
            for ours, theirs in zip(*losses, strict=True):
                compare(f"{name}, step {step}, loss", ours, theirs)
            same_parts(stock, attached, f"{name}, step {step}")
        found[name] = [attachment.report() for attachment in attachments]
        for model in attached.models:
            tide.detach(model)
        losses = [side.step(steps, rank) for side in (stock, attached)]
        same_parts(stock, attached, f"{name}, detached")
    return found
