"""What ranks do in the tests of models on a part of the world."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import fsdp_models
import pytest
import torch
import torch.distributed as dist
from fsdp_cases import MIXED, all_on_tide, mesh, on_two_meshes, shard, stack
from fsdp_jobs import train
from fsdp_models import Block, Stack
from fsdp_parity import Case, Side, compare, local, run_case
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import tide
from tide.compiler.compile import Compiled
from tide.errors import PeerError
from tide.fsdp import early, introspect
from tide.fsdp.introspect import torch_version
from tide.transport import open_transport

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

    def __init__(self, schedule: Any, grid: DeviceMesh, parts: int, depth: int = 2, **options: Any) -> None:
        group, place = grid.get_group("pp"), grid.get_local_rank("pp")
        count = parts * grid.size(0)
        mine = range(place, count, grid.size(0))
        torch.manual_seed(7)
        every = [Part(index, count, depth) for index in range(count)]
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
    "GPipe": (ScheduleGPipe, 1, {"depth": 4}, {}),
    "GPipe, bf16, early": (ScheduleGPipe, 1, {"mp_policy": MIXED}, {"early_reduce": True}),
    "1F1B": (Schedule1F1B, 1, {"reshard_after_forward": False}, {}),
    "1F1B, resharded": (Schedule1F1B, 1, {"mp_policy": MIXED}, {"debug": True, "reuse_forward": True}),
    "interleaved": (ScheduleInterleaved1F1B, 2, {"reshard_after_forward": False}, {}),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2, {"reshard_after_forward": False}, {}),
    "interleaved, aside": (ScheduleInterleaved1F1B, 2, {"depth": 3}, {}),
}


def pipelines(rank: int, world: int, names: tuple[str, ...], steps: int = 2) -> dict[str, list[str]]:
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


# Models on some of the ranks -------------------------------------------------------------------


def on(ranks: Any, *names: str) -> DeviceMesh:
    """A mesh of these ranks; made on every rank, so that its process groups have the same names."""
    return DeviceMesh(fsdp_models.DEVICE, ranks, mesh_dim_names=names or ("dp",))


def fresh_on(mesh: DeviceMesh, seed: int = 7, **options: Any) -> Side:
    torch.manual_seed(seed)
    model = shard(Stack(2).to(fsdp_models.DEVICE), mesh=mesh, **options)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))


def same_training(stock: Side, attached: Side, rank: int, steps: range, what: str) -> None:
    for step in steps:
        for ours, theirs in zip(
            train(stock, rank, range(step, step + 1)), train(attached, rank, range(step, step + 1)), strict=True
        ):
            compare(f"{what}, step {step}, loss", ours, theirs)
        for (name, ours), theirs in zip(stock.model.named_parameters(), attached.model.parameters(), strict=True):
            compare(f"{what}, step {step}, {name}", ours, theirs)


def replicas_and_experts(rank: int, world: int) -> list[str]:
    """HSDP, and experts on a mesh of their own, on ranks 2 to 5; ranks 0 and 1 do nothing."""
    grid = on([[2, 3], [4, 5]], "replicate", "shard")
    expert_grid = on([[2, 3], [4, 5]], "ep", "efsdp")
    dense = on([2, 3, 4, 5])
    if rank < 2:
        return []
    reports = [run_case(Case("HSDP", lambda _: stack(mesh=grid, mp_policy=MIXED), check=all_on_tide), rank, 4, 3)]
    if torch_version() >= (2, 12):
        experts = Case("experts", lambda _: on_two_meshes(dense, expert_grid["efsdp"]), bounded=(4,), check=all_on_tide)
        reports.append(run_case(experts, rank, 4, 3))
    return reports


def two_nodes(rank: int, world: int) -> str:
    """Ranks 3 and 4 of 8, the last of one node and the first of another."""
    both = on([3, 4])
    if rank not in (3, 4):
        return ""
    stock, attached = fresh_on(both, mp_policy=MIXED), fresh_on(both, mp_policy=MIXED)
    attachment = tide.attach(attached.model)
    same_training(stock, attached, rank, range(3), "two nodes")
    plan = attachment.plan
    assert plan is not None
    assert plan.rank == rank - 3
    tide.detach(attached.model)
    return str(plan.topology)


def plan_on_a_part(rank: int, world: int, *ranks: int) -> str:
    """A plan's own collectives on two ranks, with gradients of another type than planned, too."""
    mine = on(list(ranks))
    if rank not in ranks:
        return ""
    side = fresh_on(mine)
    expected = {name: param.full_tensor() for name, param in side.model.named_parameters()}
    with tide.compile_plan(side.model) as plan:
        for name, tensor in plan.all_gather().items():
            compare(f"whole {name}", expected[name].detach(), tensor)
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(rank)
            grads = {name: torch.randn(p.shape).to(p.device, dtype) for name, p in side.model.named_parameters()}
            for name, tensor in plan.reduce_scatter(grads).items():
                both = [torch.empty_like(grads[name]) for _ in range(2)]
                dist.all_gather(both, grads[name], group=mine.get_group())
                mean = (both[0].float() + both[1].float()) / 2
                compare(f"gradient of {name}", mean.chunk(2)[plan.rank] if len(mean) > 1 else tensor, tensor)
        plan.release()
        return repr(plan)


def overlapping(rank: int, world: int) -> list[str]:
    """Models on ranks 0 and 1, 1 and 2, and on all of them, alike but for their values, in one process at a time.

    Rank 1 makes more process groups than the others: what joins the ranks must not depend on their number. The first
    has a transport of the user's own.
    """
    parts = [on([0, 1]), on([1, 2]), on([0, 1, 2])]

    def opened(compiled: Compiled, place: int) -> Any:
        return open_transport("host", compiled, place, group=parts[0].get_group(), timeout=20)

    held = [part for part in parts if rank in part.mesh.tolist()]
    pairs = [tuple(fresh_on(part, seed=number) for _ in range(2)) for number, part in enumerate(held)]
    attachments = [
        tide.attach(attached.model, transport=opened if part is parts[0] else "auto")
        for part, (_, attached) in zip(held, pairs, strict=True)
    ]
    for step in range(3):
        for part, (stock, attached) in zip(held, pairs, strict=True):
            if part.size() == 2:
                same_training(stock, attached, rank, range(step, step + 1), str(part))
            else:
                train(attached, rank, range(step, step + 1))
            if step == 1 and part is not parts[1]:
                tide.detach(attached.model)
    for _, attached in pairs:
        tide.detach(attached.model)
    return [attachment.report().splitlines()[0] for attachment in attachments]


def alone_on_a_part(rank: int, world: int) -> str:
    """A stage of one rank has nothing to send, and nobody to wait for."""
    parts = [on([0]), on([1])]
    side = fresh_on(parts[rank])
    attachment = tide.attach(side.model)
    train(side, rank, range(1))
    tide.detach(side.model)
    return attachment.report()


# Failures --------------------------------------------------------------------------------------


def killed_in_a_stage(rank: int, world: int) -> str:
    """Rank 3 dies; rank 2, with which it shares a model, learns so and detaches; ranks 0 and 1 go on."""
    stages = [on([0, 1]), on([2, 3])]
    side = fresh_on(stages[rank // 2], mp_policy=MIXED)
    tide.attach(side.model)
    train(side, rank, range(1))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < 2:
        train(side, rank, range(1, 4))
        tide.detach(side.model)
        return ""
    before = {name: held.clone() for name, held in introspect.local_shards(side.model).items()}
    with pytest.raises(PeerError) as told:
        train(side, rank, range(1, 2))
    tide.detach(side.model)
    for name, held in introspect.local_shards(side.model).items():
        compare(f"shard of {name}", before[name], held)
    return str(told.value)


def killed_in_a_pipeline(rank: int, world: int) -> str:
    """Rank 3 dies in the middle of a schedule; every other rank gets an error, and has its shards after detach."""
    grid = mesh((2, 2), ("pp", "dp"))
    pipeline = Pipeline(Schedule1F1B, grid, 1)
    (model,), (side,) = pipeline.models, pipeline.sides
    tide.attach(model)
    pipeline.step(0, rank)
    side.optimizer.step()
    side.optimizer.zero_grad()
    before = {name: held.clone() for name, held in introspect.local_shards(model).items()}
    if rank == 3:
        passes = itertools.count()

        def die(*_: Any) -> None:
            if next(passes) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        model.layers[1].register_forward_pre_hook(die)
    with pytest.raises(RuntimeError) as told:  # the schedule's own, of TIDE's or of gloo's
        pipeline.step(1, rank)
    if rank < 2:
        model.reset_iter_state()  # nothing of TIDE's has failed here
    tide.detach(model)
    for name, held in introspect.local_shards(model).items():
        compare(f"shard of {name}", before[name], held)
    error: BaseException | None = told.value
    while error is not None and not isinstance(error, PeerError):
        error = error.__cause__
    return str(error)


def crossed(rank: int, world: int) -> str:
    """Two models of the same shapes, attached in one order on one rank and in the other on its peer."""
    both = on([0, 1])
    if rank > 1:
        return ""
    sides = [fresh_on(both, seed) for seed in (1, 2)]
    for side in sides if rank == 0 else reversed(sides):
        tide.attach(side.model)
    before = [local(param).clone() for param in sides[0].model.parameters()]
    with pytest.raises(PeerError) as told:
        train(sides[0], rank, range(1))
    for side in sides:
        tide.detach(side.model)
    for held, param in zip(before, sides[0].model.parameters(), strict=True):
        compare("shard", held, param)
    return str(told.value)


def other_models(rank: int, world: int) -> str:
    """The ranks of a stage hold different models."""
    stages = [on([0, 1]), on([2, 3])]
    torch.manual_seed(7)
    model = shard(Stack(3 if rank == 3 else 2), mesh=stages[rank // 2])
    if rank < 2:
        tide.attach(model)
        tide.detach(model)
        return ""
    with pytest.raises(PeerError) as told:
        tide.attach(model)
    return str(told.value)


def other_ranks(rank: int, world: int) -> str:
    """The ranks do not agree on who holds the model."""
    both = on([0, 1])
    if rank > 1:
        return ""
    side = fresh_on(both)
    with pytest.raises(PeerError) as told:
        tide.attach(side.model, ranks=[0, 1, 2] if rank == 0 else [0, 1])
    return str(told.value)
