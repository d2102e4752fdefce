"""What ranks do in the tests of ``Plan``; functions that a forked rank can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import tide
from tide.fsdp.introspect import local_shards

#: So small that the weights are cut.
PIECES: dict[str, Any] = {"piece_bytes": 512, "chunk_bytes": 512}


class Block(nn.Module):
    """Uneven, tiny and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 37)
        self.down = nn.Linear(37, 24, bias=False)
        self.gate = nn.Parameter(torch.randn(1, 5, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.gate.sum()


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def sharded(world: int, reduce_dtype: torch.dtype = torch.float32) -> Model:
    """The model as FSDP2 shards it; the same weights on every rank."""
    torch.manual_seed(3)
    model = Model()
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def whole_model(rank: int, world: int, variants: tuple[tuple[int | None, str], ...]) -> list[str]:
    """Gathers a live model by TIDE and by FSDP2, and reduces known gradients; returns what differs.

    Under one plan after the other, by slots and route: each is opened where one was closed.
    """
    model = sharded(world)
    return [
        f"slots={slots}, {route}: {text}"
        for slots, route in variants
        for text in _under_a_plan(model, rank, world, tide.PlanOptions(slots=slots, route=route, **PIECES))
    ]


def _under_a_plan(model: Model, rank: int, world: int, options: tide.PlanOptions) -> list[str]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    wrong = []
    with tide.compile_plan(model, options=options) as plan:
        for _ in range(2):
            gathered = plan.all_gather()
            for module in modules:
                module.unshard()
            for name, parameter in model.named_parameters():
                if not torch.equal(gathered[name], parameter.detach()):
                    wrong.append(f"all_gather {name}")
            for module in modules:
                module.reshard()
            with torch.no_grad():  # the next round must see the new weights
                for parameter in model.parameters():
                    parameter.add_(1.0)
            plan.release()
        if "open: transport host, arena: memfd, " not in str(plan.report()):
            wrong.append("report of the open transport")
        for unit in plan.units:
            plan.all_gather(unit.name)
            plan.release(unit.name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            wrong += reduced_wrongly(plan, rank, world, dtype)
    return wrong


def reduced_wrongly(plan: tide.Plan, rank: int, world: int, dtype: torch.dtype) -> list[str]:
    """Reduces gradients of one type, every other one a transposed view; returns the names that differ."""

    def grad(name: str, shape: tuple[int, ...], source: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * source + len(name) + sum(shape))
        return torch.randn(shape, generator=generator).to(dtype)

    grads, expected = {}, {}
    for unit in plan.units:
        for index, p in enumerate(unit.parameters):
            pieces = [grad(p.name, p.shape, source) for source in range(world)]
            mine = pieces[rank]
            grads[p.name] = mine.t().contiguous().t() if index % 2 == 0 and mine.dim() == 2 else mine
            total = pieces[0].float()
            for piece in pieces[1:]:
                total = total + piece.float()
            rows = -(-p.shape[0] // world)
            expected[p.name] = (total / world)[rank * rows : (rank + 1) * rows]
    found = plan.reduce_scatter(grads)
    return [f"reduce_scatter {dtype} {name}" for name, shard in expected.items() if not torch.equal(found[name], shard)]


def refusals(rank: int, world: int) -> dict[str, str]:
    """Messages of calls that must be refused, each before anything is lost: the plan works afterwards."""
    messages: dict[str, str] = {}
    with tide.compile_plan(sharded(world), options=tide.PlanOptions(slots=1)) as plan:

        def refused(what: str, call: Any) -> None:
            try:
                call()
            except tide.TideError as error:
                messages[what] = f"{type(error).__name__}: {error}"

        zeros = {p.name: torch.zeros(p.shape, dtype=torch.bfloat16) for unit in plan.units for p in unit.parameters}
        refused("missing", lambda: plan.reduce_scatter({k: v for k, v in zeros.items() if k != "head.bias"}))
        refused("shape", lambda: plan.reduce_scatter({**zeros, "head.bias": torch.zeros(12, dtype=torch.bfloat16)}))
        refused("unknown", lambda: plan.reduce_scatter({**zeros, "tail": torch.zeros(1)}))
        refused("dtype", lambda: plan.reduce_scatter({**zeros, "head.bias": torch.zeros(11, dtype=torch.float64)}))
        refused("divisor", lambda: plan.reduce_scatter(zeros, divide=0))
        refused("open", lambda: plan.open("host", timeout=5))
        refused("unit", lambda: plan.all_gather("layers.9"))
        plan.all_gather("layers.0")
        refused("slot", lambda: plan.all_gather("layers.1"))
        plan.release("layers.0")
        refused("shards", lambda: plan.all_gather("layers.1", shards={}))
        shards = local_shards(plan._model)
        up = shards["layers.1.up.weight"]
        for what, other in {
            "transposed": up.t().contiguous(),
            "whole": torch.zeros(37, 24),
            "none": None,
            "sparse": torch.zeros(up.shape).to_sparse(),
            "distributed": plan._model.layers[1].up.weight,
        }.items():
            refused(
                what, lambda other=other: plan.all_gather("layers.1", shards={**shards, "layers.1.up.weight": other})
            )
        plan.all_gather("layers.1")
    dist.barrier()
    return messages


def different_types(rank: int, world: int, before: torch.dtype) -> str:
    """Rank 0 reduces float32 gradients, the others bfloat16: bytes would be wrong if nobody noticed.

    All have reduced both before, so that neither is new to them.
    """
    plan = tide.compile_plan(sharded(world))
    plan.open("host", timeout=1.5)

    def reduce(dtype: torch.dtype) -> None:
        plan.reduce_scatter({p.name: torch.ones(p.shape, dtype=dtype) for unit in plan.units for p in unit.parameters})

    reduce(torch.float32)
    reduce(before)
    try:
        reduce(torch.float32 if rank == 0 else torch.bfloat16)
    except tide.TideError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        plan.close()
    return "no error"
