"""The table of the parity suite: everything that FSDP2 offers, each on a small model.

A case of a real model is one more line: `build` makes and shards it, `step` runs it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import fsdp_models
import torch
from fsdp_models import Block, Deep, LoraStack, MoE, Stack, Towers, TpStack, Twice, data
from fsdp_parity import Case, Side, lossy, one_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tide.compiler.options import PlanOptions
from tide.fsdp import early
from tide.topology import Topology

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
EVERY = (2, 3, 4)


@cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once a process: a mesh makes process groups, which stay."""
    return init_device_mesh(fsdp_models.DEVICE, shape, mesh_dim_names=names)


def shard(model: Any, **options: Any) -> Any:
    """As users do: each block, then the root."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def stack(world: int = 0, *, depth: int = 3, tied: bool = False, dtype: Any = None, **options: Any) -> Any:
    """A sharded stack of blocks."""
    return shard(Stack(depth, tied, dtype), **options)


def mixed(param: Any, reduce: Any, **more: Any) -> MixedPrecisionPolicy:
    """A policy."""
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, **more)


# Steps -----------------------------------------------------------------------------------------


def accumulate(*, sync: bool = False, keep_whole: bool = False, last: bool = False) -> Any:
    """Three micro-batches a step."""

    def step(side: Side, step: int, rank: int) -> list[torch.Tensor]:
        losses = []
        for number, (tokens, targets) in enumerate(data(step, rank, 3)):
            final = number == 2
            if not sync:
                side.model.set_requires_gradient_sync(final)
            if keep_whole:
                side.model.set_reshard_after_backward(final)
            if last:
                side.model.set_is_last_backward(final)
            loss = lossy(side.model, tokens, targets)
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def partial_all_reduce(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """HSDP: reduce-scatter each micro-batch, all-reduce the last."""
    losses = []
    for number, (tokens, targets) in enumerate(data(step, rank, 2)):
        side.model.set_requires_all_reduce(number == 1)
        loss = lossy(side.model, tokens, targets)
        loss.backward()
        losses.append(loss.detach())
    return losses


def with_scaler(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Scaled loss, unscaled gradients."""
    scaler = side.extra.setdefault("scaler", torch.amp.GradScaler(fsdp_models.DEVICE, init_scale=256.0))
    ((tokens, targets),) = data(step, rank)
    loss = lossy(side.model, tokens, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(side.optimizer)
    scaler.update()
    return [loss.detach()]


def clip(side: Side) -> None:
    """Gradient clipping, as part of the optimizer's step."""
    torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)


def evaluate_between(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """A forward pass without gradients, without resharding, before each training step."""
    ((tokens, targets),) = data(step + 50, rank)
    side.model.set_reshard_after_forward(False)
    side.model.eval()
    with torch.inference_mode() if step % 2 else torch.no_grad():
        before = lossy(side.model, tokens, targets).clone()
    for module in side.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    side.model.set_reshard_after_forward(True)
    side.model.train()
    return [before, *one_batch(side, step, rank)]


def freeze_in_turn(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Every other step trains every other block only."""
    for number, layer in enumerate(side.model.layers):
        for param in layer.parameters():
            param.requires_grad_((number + step) % 2 == 0)
    return one_batch(side, step, rank)


def unused_layer(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """The last block is skipped in some steps, on every rank."""
    side.model.depth_used = 3 - step % 2
    return one_batch(side, step, rank)


def unused_on_one_rank(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """One rank's loss does not use a parameter of the root; zeros take its place."""
    ((tokens, targets),) = data(step, rank)
    loss = lossy(side.model, tokens, targets)
    if rank == 0:
        loss = loss + side.model.bonus.sum() * 0.5
    loss.backward()
    return [loss.detach()]


def by_hand(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Unshards ahead by hand, with and without a handle, and reshards by hand."""
    layers = side.model.layers
    handle = layers[0].unshard(async_op=True)
    layers[1].unshard()
    seen = layers[1].up.weight.detach().float().sum()
    handle.wait()
    layers[1].reshard()
    return [seen, *one_batch(side, step, rank)]


def two_forwards(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Two forward passes, then their backward passes."""
    losses = [lossy(side.model, tokens, targets) for tokens, targets in data(step, rank, 2)]
    sum(losses).backward()
    return [loss.detach() for loss in losses]


def towers(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """One batch for both towers."""
    return one_batch(side, step, rank)


# Models ----------------------------------------------------------------------------------------


def hsdp(world: int, **options: Any) -> Any:
    """Two replicas."""
    return stack(mesh=mesh((2, world // 2), ("replicate", "shard")), **options)


def tensor_parallel(world: int) -> Any:
    """Two tensor-parallel ranks in each of two shards."""
    grid = mesh((2, world // 2), ("dp", "tp"))
    model = TpStack()
    for layer in model.layers:
        parallelize_module(layer, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return shard(model, mesh=grid["dp"])


def spmd(world: int) -> Any:
    """Parameters that are distributed over the whole mesh before they are sharded."""
    from torch.distributed.fsdp import DataParallelMeshDims

    grid = mesh((2, world // 2), ("dp", "tp"))
    model = Stack()
    replicated = [Replicate(), Replicate()]
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), grid, replicated)))
    return shard(model, mesh=grid, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def spmd_batch(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Inputs that are distributed as well, equal on both tensor-parallel ranks."""
    grid = mesh((2, 2), ("dp", "tp"))
    ((tokens, targets),) = data(step, grid.get_local_rank("dp"))
    with implicit_replication():
        out = side.model(tokens)
        out = out.to_local() if hasattr(out, "to_local") else out
        loss = nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
        loss.backward()
    return [loss.detach()]


def two_meshes(world: int) -> Any:
    """Experts on a mesh of their own, cut out of one of the same ranks as the rest's."""
    return on_two_meshes(mesh((world,), ("dp",)), mesh((2, world // 2), ("ep", "efsdp"))["efsdp"])


def on_two_meshes(dense: DeviceMesh, experts: DeviceMesh) -> Any:
    """Experts on a mesh of their own: two groups in a block."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    own = ShardPlacementResult(Shard(0), FSDPMeshInfo(experts, shard_mesh_dim=0))
    rest = ShardPlacementResult(Shard(0), FSDPMeshInfo(dense, shard_mesh_dim=0))
    model = MoE()

    def place(layer: Any) -> Any:
        expert = {id(p) for p in layer.experts.parameters()}
        return lambda param: own if id(param) in expert else rest

    for layer in model.layers:
        fully_shard(layer, mesh=dense, shard_placement_fn=place(layer))
    return fully_shard(model, mesh=dense)


def nested_experts(world: int) -> Any:
    """Experts wrapped within wrapped blocks."""
    model = MoE(depth=3)
    for layer in model.layers:
        fully_shard(layer.experts)
    return shard(model)


def nested_blocks(world: int) -> Any:
    """A wrapped module within each wrapped block, and parameters beside it."""
    model = Deep()
    for layer in model.layers:
        fully_shard(layer[0])
    return shard(model)


def second_dim(world: int, **options: Any) -> Any:
    """Sharded along dim 1 where that divides evenly."""

    def place(param: nn.Parameter) -> Shard | None:
        even = [dim for dim in range(1, param.ndim) if param.shape[dim] % world == 0]
        return Shard(even[-1]) if even else None

    model = MoE()
    return shard(model, shard_placement_fn=place, **options)


def grouped(world: int) -> Any:
    """Embedding and head in one group, tied."""
    model = Stack(tied=True)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.embed, model.head])
    return fully_shard(model)


def prefetching(world: int) -> Any:
    """Two modules ahead, both ways, more layers than slots."""
    model = stack(depth=5)
    layers = model.layers
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 : index + 3]))
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(index - 2, 0) : index])))
    return model


def mistargeted(world: int) -> Any:
    """Prefetches what is not needed next, into the slot of what is."""
    model = stack(depth=4)
    layers = model.layers
    layers[0].set_modules_to_forward_prefetch([layers[3]])
    layers[3].set_modules_to_backward_prefetch([layers[1]])
    return model


def prefetching_too_much(world: int) -> Any:
    """Gathers a block ahead that is not used at all."""
    model = stack(depth=4)
    model.layers[2].set_modules_to_forward_prefetch([model.layers[3]])
    model.depth_used = 3
    return model


def frozen(dtype: Any = None, **options: Any) -> Any:
    """Frozen parameters among trainable ones."""
    return lambda world: shard(LoraStack(dtype=dtype), **options)


def ignoring(world: int) -> Any:
    """One parameter of each block is ignored."""
    model = Stack()
    ignored = {layer.gate for layer in model.layers}
    for layer in model.layers:
        fully_shard(layer, ignored_params=ignored)
    return fully_shard(model, ignored_params=ignored)


def on_meta(world: int) -> Any:
    """Sharded before it has memory."""
    with torch.device("meta"):
        model = Stack()
    return shard(model)


def materialize(side: Side) -> None:
    """Memory and values, after attach."""
    side.model.to_empty(device=fsdp_models.DEVICE)
    generator = torch.Generator().manual_seed(3)
    for param in side.model.parameters():
        whole = torch.randn(param.shape, generator=generator) * 0.3
        with torch.no_grad():
            param.copy_(torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements))


def load(side: Side) -> None:
    """Other values, after attach: new storage on the way, by load_state_dict(assign=True)."""
    state = side.model.state_dict()
    side.model.load_state_dict({name: value.clone() * 0.5 for name, value in state.items()}, assign=True)


def to_bf16(side: Side) -> None:
    """Another element type, after attach and before the first step."""
    side.model.to(BF16)


def checkpointed(reentrant: bool, outside: bool) -> Any:
    """Activation checkpointing of each block, inside or outside of what is wrapped."""

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def build(world: int) -> Any:
        model = Stack()
        for index, layer in enumerate(model.layers):
            model.layers[index] = Checkpointed(fully_shard(layer) if outside else layer)
            if not outside:
                fully_shard(model.layers[index])
        return fully_shard(model)

    return build


def segments(world: int) -> Any:
    """One checkpoint over three wrapped blocks: all are whole at once while they are computed again."""
    model = stack(depth=6)
    model.segment = 3
    return model


def compiled(world: int) -> Any:
    """Each block compiled, then wrapped."""
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return shard(model)


def two_towers(world: int) -> Any:
    """Each tower a root of its own blocks."""
    model = Towers()
    for tower in (model.left, model.right):
        for layer in tower.layers:
            fully_shard(layer)
    return fully_shard(model)


def optimizer_in_backward(model: Any) -> torch.optim.Optimizer:
    """Each parameter is stepped as soon as its gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def hook(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(hook)
    return torch.optim.SGD(model.parameters(), lr=0.0)


def divide(factor: float, force: bool = False) -> Any:
    """A divide factor of the user's."""

    def build(world: int) -> Any:
        model = stack(mp_policy=MIXED)
        for module in [model, *model.layers]:
            module.set_gradient_divide_factor(factor)
            if force:
                module.set_force_sum_reduction_for_comms(True)
        return model

    return build


def premultiply(side: Side) -> None:
    """Gradients multiplied by 1/4 in the sum, for which gloo has no operation: stock divides afterwards instead."""
    for module in [side.model, *side.model.layers]:
        module.set_gradient_divide_factor(4.0)
        if side.attachment is None:
            module.set_force_sum_reduction_for_comms(True)


def force_sum(world: int, **options: Any) -> Any:
    """Sums only, divided afterwards."""
    model = stack(**options)
    for module in [model, *model.layers]:
        module.set_force_sum_reduction_for_comms(True)
    return model


def hooked(world: int) -> Any:
    """A hook on the flat reduced gradients, padding and all."""
    model = stack()
    for module in [model, *model.layers]:
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(1 + reduced.abs().sum().clamp(max=1.0)))
    return model


def unused_params(world: int) -> Any:
    """Zeros for parameters without a gradient."""
    model = Stack()
    model.bonus = nn.Parameter(torch.ones(5))
    shard(model)
    for module in [model, *model.layers]:
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)
    return model


def no_backward_gather(world: int) -> Any:
    """An embedding that is not gathered in backward."""
    model = Stack()
    fully_shard(model.embed)
    model.embed.set_unshard_in_backward(False)
    return shard(model)


def more_buffers(world: int) -> Any:
    """Several reductions' inputs in flight, on a process group of their own."""
    model = stack()
    for module in [model, *model.layers]:
        if hasattr(module, "set_reduce_scatter_max_input_buffers"):
            module.set_reduce_scatter_max_input_buffers(2)
    return model


def odd_shapes(world: int) -> Any:
    """Parameters with fewer rows than ranks, of one element, and large enough for several pieces."""
    model = Stack()
    model.layers[0].gate = nn.Parameter(torch.ones(2, 5)[:, 0].contiguous())
    model.layers[1] = nn.Sequential(nn.Linear(12, 1), nn.Linear(1, 12, bias=False), Block(12, 301))
    return shard(model)


def all_on_tide(attachment: Any) -> None:
    """Nothing ran stock, nothing was gathered aside."""
    text = attachment.report()
    assert "stock FSDP2" not in text, text
    assert "aside" not in text, text


def slots_shared(attachment: Any) -> None:
    """Blocks take turns in two slots; one does for what is wrapped inside of them, of which one at a time is whole."""
    all_on_tide(attachment)
    arena = attachment.compiled.arena
    assert [len(slot.units) for slot in arena.slots] == [1, 2, 3, 1], arena.slots


def put_off(attachment: Any) -> None:
    """Prefetches gave way to what was needed."""
    all_on_tide(attachment)
    assert f"evicted {attachment.steps}" in attachment.report(), attachment.report()
    assert f"declined {attachment.steps}" in attachment.report(), attachment.report()


def learned(attachment: Any) -> None:
    """Slots did not fit at first, and do now: the counts are those since the last binding."""
    assert attachment.bindings > 1, attachment.report()
    all_on_tide(attachment)


# The table -------------------------------------------------------------------------------------

CASES = (
    Case("float32", stack, worlds=EVERY, bounded=(3, 4), check=all_on_tide),
    Case("float32 debug", stack, attach={"debug": True}, check=all_on_tide),
    Case("bf16, reduced in float32", lambda w: stack(mp_policy=MIXED), worlds=EVERY, check=all_on_tide),
    Case(
        "bf16, reduced in bf16", lambda w: stack(mp_policy=mixed(BF16, BF16)), worlds=EVERY, bounded=(3, 4), reduce=BF16
    ),
    Case("bf16 and no reduce type", lambda w: stack(mp_policy=mixed(BF16, None))),
    Case("float32, reduced in bf16", lambda w: stack(mp_policy=mixed(None, BF16))),
    Case("bf16 model", lambda w: stack(dtype=BF16)),
    Case("bf16 model, reduced in float32", lambda w: stack(dtype=BF16, mp_policy=mixed(None, FP32)), worlds=(2, 4)),
    Case("fp16, reduced in float32", lambda w: stack(mp_policy=mixed(FP16, FP32)), step=with_scaler),
    Case("fp16, reduced in fp16", lambda w: stack(mp_policy=mixed(FP16, None)), step=with_scaler),
    Case("output type", lambda w: stack(mp_policy=mixed(BF16, FP32, output_dtype=BF16, cast_forward_inputs=False))),
    Case("reshard off", lambda w: stack(reshard_after_forward=False), check=all_on_tide),
    Case(
        "root reshards too", lambda w: stack(mp_policy=MIXED), prepare=lambda s: s.model.set_reshard_after_forward(True)
    ),
    Case("reshard to 2 ranks", lambda w: stack(reshard_after_forward=2), worlds=(4,), bounded=(4,), check=all_on_tide),
    Case("reshard to 2 ranks, bf16", lambda w: stack(reshard_after_forward=2, mp_policy=MIXED), worlds=(4,)),
    Case("accumulate without sync", stack, step=accumulate(), worlds=(2, 3), bounded=(3,)),
    Case(
        "accumulate without sync, bf16",
        lambda w: stack(mp_policy=MIXED),
        step=accumulate(),
        worlds=(2, 3),
        bounded=(3,),
    ),
    Case("accumulate without sync, bf16 reduce", lambda w: stack(mp_policy=mixed(BF16, BF16)), step=accumulate()),
    Case("accumulate with sync", stack, step=accumulate(sync=True, last=True), worlds=(2, 4), bounded=(4,)),
    Case("accumulate, kept whole", lambda w: stack(mp_policy=MIXED), step=accumulate(keep_whole=True)),
    Case("two forwards, one backward", stack, step=two_forwards),
    Case("explicit prefetch", prefetching, worlds=(2, 3), bounded=(3,), check=all_on_tide),
    Case("mistargeted prefetch", mistargeted, worlds=(2, 3), bounded=(3,), check=put_off),
    Case("prefetch of what is not used", prefetching_too_much, check=all_on_tide),
    Case("HSDP", hsdp, worlds=(4,), check=all_on_tide),
    Case("HSDP, bf16", lambda w: hsdp(w, mp_policy=MIXED), worlds=(4,)),
    Case("HSDP, partial all-reduce", hsdp, step=partial_all_reduce, worlds=(4,)),
    Case("HSDP, reshard to 2", lambda w: hsdp(w, reshard_after_forward=False), worlds=(4,)),
    Case("TP and FSDP", tensor_parallel, worlds=(4,), check=all_on_tide),
    Case("experts on a mesh of their own", two_meshes, worlds=(4,), bounded=(4,), check=all_on_tide, since=(2, 12)),
    Case("distributed parameters", spmd, step=spmd_batch, worlds=(4,), check=all_on_tide, since=(2, 12)),
    Case("two nodes", lambda w: stack(mp_policy=MIXED), worlds=(4,), attach={"topology": Topology(2, 2)}),
    Case(
        "two nodes, reshard to 2",
        lambda w: stack(reshard_after_forward=2, mp_policy=MIXED),
        worlds=(4,),
        attach={"topology": Topology(2, 2)},
    ),
    Case("pulled", stack, attach={"options": PlanOptions(route="pull")}, check=all_on_tide),
    Case(
        "pulled, reshard to 2, debug",
        lambda w: stack(reshard_after_forward=2, mp_policy=MIXED),
        worlds=(4,),
        attach={"options": PlanOptions(route="pull"), "debug": True},
    ),
    Case("a rank a node", lambda w: stack(), worlds=(3,), bounded=(3,), attach={"topology": Topology(3, 1)}),
    Case("experts wrapped in blocks", nested_experts, check=slots_shared),
    Case("blocks within blocks", nested_blocks, check=all_on_tide),
    Case("dim 1 and 2", second_dim, worlds=(2, 4), bounded=(4,), check=all_on_tide),
    Case("dim 1 and 2, bf16", lambda w: second_dim(w, mp_policy=MIXED), step=accumulate(), worlds=(2, 3), bounded=(3,)),
    Case("odd shapes", odd_shapes, worlds=(2, 4), bounded=(4,), check=all_on_tide),
    Case("frozen parameters", frozen()),
    Case("frozen parameters, mixed", frozen(mp_policy=MIXED), worlds=(2, 3)),
    Case("frozen bf16 beside float32", frozen(BF16)),
    Case("frozen in turn", stack, step=freeze_in_turn),
    Case("ignored parameters", ignoring),
    Case("tied in the root", lambda w: stack(tied=True), worlds=(2, 3), bounded=(3,)),
    Case("grouped and tied", grouped),
    Case("CPU offload", lambda w: stack(offload_policy=CPUOffloadPolicy(pin_memory=False), mp_policy=MIXED)),
    Case("meta, then to_empty", on_meta, prepare=materialize, check=all_on_tide),
    Case("load_state_dict", lambda w: stack(mp_policy=MIXED), prepare=load, check=all_on_tide),
    Case("to bf16", stack, prepare=to_bf16, check=all_on_tide),
    Case("divide by the group's size", divide(2.0)),
    Case("divide, sums forced", divide(3.0, force=True), worlds=(2, 3)),
    Case("divide, premultiplied", lambda w: stack(mp_policy=MIXED), prepare=premultiply),
    Case("sums forced", lambda w: force_sum(w, mp_policy=MIXED), worlds=(2, 3)),
    Case("sums forced, fp16", lambda w: force_sum(w, mp_policy=mixed(FP16, FP32)), step=with_scaler),
    Case("all-reduce hook", hooked),
    Case("optimizer in backward", stack, optimizer=optimizer_in_backward),
    Case("checkpoint inside", checkpointed(False, False)),
    Case("checkpoint outside", checkpointed(False, True)),
    Case("reentrant checkpoint", checkpointed(True, False)),
    Case("checkpoint over three blocks", segments, check=learned, since=(2, 12)),
    Case("checkpoint over three blocks, slots", segments, attach={"slots": 3}, check=all_on_tide),
    Case("compiled blocks", compiled, check=all_on_tide),
    Case("gradient clipping", lambda w: stack(mp_policy=MIXED), before=clip),
    Case("block not used", stack, step=unused_layer),
    Case("parameter not used on a rank", unused_params, step=unused_on_one_rank, since=(2, 13)),
    Case("blocks used twice", lambda w: shard(Twice())),
    Case("towers with frozen embeddings", two_towers, check=learned, since=(2, 12)),
    Case("evaluation in between", stack, step=evaluate_between),
    Case("by hand", stack, step=by_hand),
    Case("not gathered in backward", no_backward_gather),
    Case("more buffers", more_buffers),
)


# Early reduction -------------------------------------------------------------------------------

#: Cases in which no unit reduces early: what they reduce was accumulated in another type, is offloaded, or distributed.
NEVER_EARLY = frozenset(
    {
        "accumulate without sync, bf16",
        "accumulate, kept whole",
        "dim 1 and 2, bf16",
        "CPU offload",
        "CPU offload, pinned",
        "CPU offload, float32",
        "distributed parameters",
    }
)


def with_early_parts(case: Case) -> Case:
    """The case with early reduction, however small the early part would be."""

    def prepare(side: Side) -> None:
        early.LEAST_BYTES = 1
        if case.prepare is not None:
            case.prepare(side)

    def check(attachment: Any) -> None:
        if case.check is not None:
            case.check(attachment)
        happened = ", early " in attachment.report()
        assert happened == (case.name not in NEVER_EARLY), attachment.report()

    return replace(case, attach={**case.attach, "early_reduce": True}, prepare=prepare, check=check)
