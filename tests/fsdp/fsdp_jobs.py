"""What ranks do in the tests of attach and detach beside the parity suite."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_cases import MIXED, mixed, second_dim, shard, stack
from fsdp_models import Block, Stack, data
from fsdp_parity import Side, compare, local, lossy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as fsdp_state
from torch.distributed.tensor import Shard

import tide
from tide.compiler.compile import Compiled
from tide.errors import AttachError, CapabilityError, InputError, PeerError, SlotError
from tide.fsdp import introspect, seam
from tide.transport import open_transport

#: Operators that move payload in stock FSDP2, and collectives of the process group.
COPIES = (
    "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
    "aten::_chunk_cat",
    "aten::split_with_sizes_copy",
    "aten::cat",
    "aten::_foreach_copy_",
)


def fresh(build: Any = stack, **options: Any) -> Side:
    """A model and its optimizer, from the same random state each time."""
    torch.manual_seed(7)
    model = build(dist.get_world_size(), **options)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))


def train(side: Side, rank: int, steps: range) -> list[torch.Tensor]:
    """Plain steps; the losses."""
    losses = []
    for step in steps:
        ((tokens, targets),) = data(step, rank)
        loss = lossy(side.model, tokens, targets)
        loss.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def same(one: Side, other: Side, what: str) -> None:
    """Parameters and optimizer states are equal bit for bit."""
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        compare(f"{what}: {name}", mine, theirs)
        for key, value in one.optimizer.state[mine].items():
            compare(f"{what}: {key} of {name}", value, other.optimizer.state[theirs][key])


def count_operators(rank: int, world: int, attached: bool) -> dict[str, int]:
    """Operators of one training step, forward and backward, of models sharded on dim 0 and on others."""
    sides = [fresh(mp_policy=MIXED), fresh(second_dim)]
    for side in sides:
        if attached:
            tide.attach(side.model)
        train(side, rank, range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for side in sides:
            ((tokens, targets),) = data(5, rank)
            lossy(side.model, tokens, targets).backward()
    for side in sides:
        tide.detach(side.model)
    counts = Counter(event.key for event in profile.key_averages() for _ in range(event.count))
    return {name: count for name, count in counts.items() if name in COPIES or name.startswith("c10d::")}


def identity(rank: int, world: int, movable: bool) -> None:
    """Parameters, their tensors and storages, optimizer state and checkpoints are the same objects and values.

    Where torch cannot point a storage elsewhere, whole parameters are new ones after attach and detach.
    """
    stock, side = fresh(mp_policy=MIXED), fresh(mp_policy=MIXED)
    train(stock, rank, range(2))
    train(side, rank, range(2))

    def objects() -> list[int]:
        model = side.model
        params = [p for w in introspect.wrapped_modules(model) for g in w.groups for p in g.fsdp_params]
        found = [
            *(id(p) for p in model.parameters()),
            *(id(s) for s in side.optimizer.state),
            *(p._sharded_param_data.data_ptr() for p in params),
        ]
        if movable:
            found += [id(p._unsharded_param) for p in params]
            found += [p._unsharded_param.untyped_storage()._cdata for p in params]
        return found

    before, names = objects(), list(side.model.state_dict())
    attachment = tide.attach(side.model)
    assert objects() == before, "attach made new objects"
    assert list(side.model.state_dict()) == names
    train(stock, rank, range(2, 5))
    train(side, rank, range(2, 5))
    assert objects() == before, "training made new objects"
    assert attachment.bindings == 1
    same(stock, side, "attached")
    tide.detach(side.model)
    assert objects() == before, "detach made new objects"
    assert not attachment.attached
    assert not seam.installed()
    train(stock, rank, range(5, 7))
    train(side, rank, range(5, 7))
    assert objects() == before, "stock FSDP2 made new objects after detach"
    same(stock, side, "detached")
    tide.attach(side.model)
    train(stock, rank, range(7, 9))
    train(side, rank, range(7, 9))
    assert objects() == before, "attaching again made new objects"
    same(stock, side, "attached again")
    tide.detach(side.model)


def checkpoints(rank: int, world: int, folder: str) -> None:
    """A checkpoint written under one loads under the other, and training goes on to the same values."""
    for number, (first, second) in enumerate(((True, False), (False, True), (True, True))):
        writer, reader = fresh(mp_policy=MIXED), fresh(mp_policy=MIXED)
        with torch.no_grad():
            for param in reader.model.parameters():
                local(param).fill_(0.5)
        for side, attached in ((writer, first), (reader, second)):
            if attached:
                tide.attach(side.model)
        train(writer, rank, range(3))
        train(reader, rank, range(10, 11))
        model, optimizer = get_state_dict(writer.model, writer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/{number}")
        model, optimizer = get_state_dict(reader.model, reader.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        set_state_dict(
            reader.model,
            reader.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        same(writer, reader, "loaded")
        losses = train(writer, rank, range(3, 5)), train(reader, rank, range(3, 5))
        for mine, theirs in zip(*losses, strict=True):
            compare("loss after loading", mine, theirs)
        same(writer, reader, "trained on")
        tide.detach(writer.model)
        tide.detach(reader.model)


def _resources() -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "KiB": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")) + threading.active_count(),
        "mappings": sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "tensors": sum(isinstance(item, torch.Tensor) for item in gc.get_objects()),
    }


def leaks(rank: int, world: int, steps: int) -> list[dict[str, int]]:
    """Attaches, trains, detaches, and again; what the process holds after each round."""
    side, found = fresh(), []
    for round_ in range(4):
        tide.attach(side.model, debug=round_ % 2 == 1)
        train(side, rank, range(steps // 4))
        tide.detach(side.model)
        train(side, rank, range(2))
        found.append(_resources())
    return found


def stale_use(rank: int, world: int) -> list[str]:
    """Uses parameters that were resharded, as a module does that is called without its hooks."""
    messages = []
    for attached in (False, True):
        side = fresh(attached_model, wrap=attached)
        ((tokens, targets),) = data(0, rank)
        held: list[torch.Tensor] = []
        side.model.layers[0].register_forward_hook(
            lambda module, args, out, held=held: held.append(module.seen), prepend=True
        )
        lossy(side.model, tokens, targets).backward()
        try:
            nn.functional.linear(torch.ones(1, 12), held[0])
            messages.append("no error")
        except RuntimeError as error:
            messages.append(str(error).split(" are out of bounds")[1])
        tide.detach(side.model)
    return messages


class Showing(nn.Module):
    """Keeps its whole weight where others can use it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 12)
        self.seen: torch.Tensor = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "seen", self.up.weight)
        return x + self.up(x)


def attached_model(world: int, wrap: bool) -> Any:
    """A stack whose first block shows its weight."""
    model = Stack()
    model.layers[0] = Showing()
    shard(model)
    if wrap:
        tide.attach(model, debug=True)
    return model


def poisoned(rank: int, world: int) -> tuple[int, int]:
    """NaN in what a vacated slot holds, with debug and without."""
    found = []
    for debug in (True, False):
        side = fresh()
        attachment = tide.attach(side.model, debug=debug)
        train(side, rank, range(1))
        session = attachment.unit("layers.0").session
        flat = session.transport.alias("layers.0", 2)
        found.append(int(torch.isnan(flat).sum()))
        tide.detach(side.model)
    return found[0], found[1]


def between(rank: int, world: int) -> None:
    """Attaches and detaches between a forward pass and its backward pass."""
    stock, side = fresh(mp_policy=MIXED), fresh(mp_policy=MIXED)
    for step in range(4):
        ((tokens, targets),) = data(step, rank)
        losses = [lossy(s.model, tokens, targets) for s in (stock, side)]
        if step % 2 == 0:
            tide.attach(side.model)
        else:
            tide.detach(side.model)
        for loss, s in zip(losses, (stock, side), strict=True):
            loss.backward()
            s.optimizer.step()
            s.optimizer.zero_grad()
        same(stock, side, f"step {step}")


def accumulated(rank: int, world: int) -> None:
    """Gradients that were accumulated before attach or detach are reduced after it."""
    stock, side = fresh(), fresh()

    def accumulate(step: int) -> None:
        for s in (stock, side):
            s.model.set_requires_gradient_sync(False)
            ((tokens, targets),) = data(step, rank)
            lossy(s.model, tokens, targets).backward()
            s.model.set_requires_gradient_sync(True)

    accumulate(9)
    tide.attach(side.model)
    train(stock, rank, range(10, 11))
    train(side, rank, range(10, 11))
    same(stock, side, "accumulated before attach")
    accumulate(11)
    tide.detach(side.model)
    train(stock, rank, range(12, 13))
    train(side, rank, range(12, 13))
    same(stock, side, "accumulated before detach")


def refused_between(rank: int, world: int) -> list[str]:
    """Where torch cannot move what a graph holds, attach and detach say so, and nothing has changed."""
    stock, side = fresh(), fresh()
    told = []
    for call in (tide.attach, tide.detach):
        if call is tide.detach:
            tide.attach(side.model)
        losses = [lossy(s.model, *data(len(told), rank)[0]) for s in (stock, side)]
        try:
            call(side.model)
            told.append("no error")
        except AttachError as error:
            told.append(str(error))
        for loss, s in zip(losses, (stock, side), strict=True):
            loss.backward()
            s.optimizer.step()
            s.optimizer.zero_grad()
        same(stock, side, call.__name__)
    del losses, loss  # which keep the graph, even when it has been used
    with torch.no_grad():  # no graph, no obstacle
        lossy(side.model, *data(3, rank)[0])
    tide.detach(side.model)
    train(stock, rank, range(5, 6))
    train(side, rank, range(5, 6))
    same(stock, side, "detached afterwards")
    return told


def refused(rank: int, world: int) -> dict[str, str]:
    """What attach refuses, and what it says."""
    told = {}

    def note(what: str, kind: type[Exception], call: Any) -> None:
        try:
            call()
        except kind as error:
            told[what] = str(error)
        else:
            told[what] = "no error"
        assert not seam.installed() or what in ("twice", "slot")

    note("plain", AttachError, lambda: tide.attach(Stack()))
    note("slots", InputError, lambda: tide.attach(shard(Stack()), slots=0))
    note("transport", InputError, lambda: tide.attach(shard(Stack()), transport="pigeon"))
    doubles = shard(Stack(dtype=torch.float64))
    note("strict", AttachError, lambda: tide.attach(doubles, strict=True))
    model = stack()
    tide.attach(model, strict=True)
    note("twice", AttachError, lambda: tide.attach(model))
    model.layers[0].unshard()
    note("slot", SlotError, lambda: model.layers[2].unshard())
    model.layers[0].reshard()
    tide.detach(model)
    seen: list[str] = []

    class Inside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note("busy", AttachError, lambda: tide.attach(model))
            seen.append("ran")
            return x

    model.layers.append(Inside())
    model.depth_used = 4
    train(Side(model, torch.optim.SGD(model.parameters(), lr=0.1)), rank, range(1))
    assert seen
    stock = param_group.foreach_all_gather
    from tide.fsdp import versions

    param_group.foreach_all_gather = lambda params, group: None
    versions.problem.cache_clear()
    try:
        note("version", CapabilityError, lambda: tide.attach(model))
    finally:
        param_group.foreach_all_gather = stock
        versions.problem.cache_clear()
    return told


class Quantized(torch.Tensor):
    """A tensor with FSDP2's all-gather extension, as float8 training has them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor) -> None:
        self.inner = data

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        plain = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        wrapped = {
            "aten::detach",
            "aten::new_zeros",
            "aten::slice.Tensor",
            "aten::split.Tensor",
            "aten::view",
            "aten::as_strided",
            "aten::clone",
            "aten::_to_copy",
        }
        if func._schema.name in {name.split(".")[0] for name in wrapped}:
            return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)
        if func._schema.name == "aten::copy_":
            return args[0]
        return out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


def fallbacks(rank: int, world: int) -> dict[str, str]:
    """Groups that run stock beside others that do not; the reports."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class Mine(DefaultAllGather):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Mine.calls += 1
            return super().__call__(*args, **kwargs)

    class MyReduce(DefaultReduceScatter):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            MyReduce.calls += 1
            return super().__call__(*args, **kwargs)

    reports = {}
    stock, side = fresh(), fresh()
    side.model.layers[1].set_custom_all_gather(Mine())
    attachment = tide.attach(side.model)
    train(stock, rank, range(2))
    train(side, rank, range(2))
    assert Mine.calls == 4
    side.model.layers[2].set_custom_reduce_scatter(MyReduce())
    train(stock, rank, range(2, 4))
    train(side, rank, range(2, 4))
    assert MyReduce.calls == 2
    same(stock, side, "custom comms")
    reports["custom"] = attachment.report()
    tide.detach(side.model)

    def extended(world: int) -> Any:
        model = Stack()
        weight = model.layers[1].up.weight
        model.layers[1].up.weight = nn.Parameter(Quantized(weight.detach().clone()))
        return shard(model)

    model = extended(world)
    attachment = tide.attach(model)
    reports["extension"] = attachment.report()
    tide.detach(model)

    for kind in ("stock", "tide"):
        torch.manual_seed(7)
        doubles = Stack(dtype=torch.float64)
        shard(doubles)
        other = Side(doubles, torch.optim.AdamW(doubles.parameters(), lr=1e-2, foreach=False))
        if kind == "tide":
            attachment = tide.attach(doubles)
        train(other, rank, range(2))
        reports[kind] = repr(float(sum(local(p).detach().sum() for p in doubles.parameters())))
    reports["double"] = attachment.report()
    tide.detach(doubles)
    return reports


def interrupted(rank: int, world: int) -> None:
    """An exception in a step, recovery as FSDP2 offers it, and on."""
    stock, side = fresh(), fresh()
    tide.attach(side.model)
    for s in (stock, side):
        train(s, rank, range(1))
        hook = s.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            train(s, rank, range(1, 2))
        hook.remove()
        s.model.reset_iter_state()
        train(s, rank, range(2, 4))
    same(stock, side, "after an exception")
    _before_a_step(side, rank)
    tide.detach(side.model)
    for s in (stock, side):
        train(s, rank, range(4, 6))
    same(stock, side, "after an error before a step")


def _before_a_step(side: Side, rank: int) -> None:
    """An error when TIDE looks at the model, before a forward pass begins."""
    found = side.model._get_fsdp_state()._tide_attachment

    def refuse() -> None:
        raise AttachError("a group has to run stock FSDP2")

    found.refresh = refuse
    with contextlib.suppress(AttachError):
        train(side, rank, range(4, 5))
        raise AssertionError("it was not looked at")


def _break_off(side: Side, rank: int, where: str, act: Any) -> str:
    """A step in which rank 1 does something before its second block; the error of the others."""
    layer = side.model.layers[1]
    if where == "forward":
        hook = layer.register_forward_pre_hook(lambda *_: act() if rank == 1 else None)
    else:
        hook = layer.register_forward_hook(
            lambda module, args, out: (out.register_hook(lambda grad: act() if rank == 1 else None), out)[1]
        )
    try:
        train(side, rank, range(90, 91))
    except PeerError as error:
        return str(error)
    finally:
        hook.remove()
    raise AssertionError("the step went through")


def failed(rank: int, world: int) -> None:
    """A rank comes too late, all detach in the middle of the step, train on with stock FSDP2, and attach again."""
    stock, side = fresh(mp_policy=MIXED), fresh(mp_policy=MIXED)
    for where in ("forward", "backward, as before torch 2.13", "backward of a part"):
        if where.endswith("2.13") and hasattr(fsdp_state.FSDPState, "_reset_iter_state"):
            del fsdp_state.FSDPState._reset_iter_state
        model = side.model.layers[1] if where.endswith("part") else side.model
        tide.attach(model, transport=lambda c, r: open_transport("host", c, r, timeout=0.5), debug=True)
        for s in (stock, side):
            train(s, rank, range(2))
        assert "rank 1" in _break_off(side, rank, where.split()[0].strip(","), lambda: time.sleep(1.0))
        tide.detach(model)
        side.optimizer.zero_grad()
        dist.barrier()
        for s in (stock, side):
            train(s, rank, range(2, 4))
        same(stock, side, f"after a failure in {where}")


def detached_in_backward(rank: int, world: int) -> str:
    """A hook detaches after a failure, under autograd's feet; what it is told."""
    side, told = fresh(mp_policy=MIXED), []
    attachment = tide.attach(side.model)

    def detach(grad: torch.Tensor) -> None:
        attachment._session.transport.fail("given up")
        with pytest.raises(AttachError) as error:
            tide.detach(side.model)
        told.append(str(error.value))

    side.model.layers[1].register_forward_hook(lambda module, args, out: (out.register_hook(detach), out)[1])
    with pytest.raises(PeerError, match="given up"):
        train(side, rank, range(1))
    tide.detach(side.model)
    return told[0]


class Lost(dist.Work):
    """A collective of a process group that has failed."""

    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("Connection closed by peer")


class Optional(Block):
    """A block with small parameters that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))
        self.used = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + getattr(self, self.used).sum() if self.used else y


def optional(world: int) -> Any:
    """A stack with one such block."""
    model = Stack()
    model.layers[1] = Optional()
    return shard(model)


def other_gradients(rank: int, world: int) -> list[str]:
    """Gradients that are there on one rank only are never summed with others; what it says. Then on with stock."""
    told = []
    # What all use in one step after the other, and what each rank uses then.
    for before, then in ((("one",), ("one", "")), (("one", ""), ("one", "")), (("",), ("one", "two"))):
        sides = fresh(optional), fresh(optional)
        tide.attach(sides[1].model, transport=lambda c, r: open_transport("host", c, r, timeout=1.0))

        def step(number: int, used: str, sides: Any = sides) -> None:
            for side in sides:
                side.model.layers[1].used = used
                train(side, rank, range(number, number + 1))
            same(*sides, f"{used} in step {number}")

        for number, used in enumerate(before):
            step(number, used)
        model = sides[1].model
        model.layers[1].used = then[rank]
        try:
            lossy(model, *data(9, rank)[0]).backward()
            told.append("no error")
        except PeerError as error:
            told.append(str(error))
        tide.detach(model)
        sides[1].optimizer.zero_grad()
        dist.barrier()
        step(8, "one")
    return told


def frozen_alone(rank: int, world: int) -> str:
    """Rank 1 freezes a block, for which the plan stays as it is: its peer would take other blocks' gradients for it."""
    side = fresh()
    tide.attach(side.model)
    train(side, rank, range(1))
    side.model.layers[1].requires_grad_(rank == 0)
    try:
        train(side, rank, range(1, 2))
    except PeerError as error:
        tide.detach(side.model)
        return str(error)
    return "no error"


def killed(rank: int, world: int) -> str:
    """A rank dies in backward; the other one detaches without it, and has its shards."""
    side = fresh(mp_policy=MIXED)
    tide.attach(side.model)
    train(side, rank, range(1))
    before = {name: held.clone() for name, held in introspect.local_shards(side.model).items()}
    told = _break_off(side, rank, "backward", lambda: os.kill(os.getpid(), signal.SIGKILL))
    lost = param_group.AllGatherResult(torch.empty(0), None, Lost(), [], [], [])
    introspect.groups_of(side.model)[0]._all_gather_result = lost
    tide.detach(side.model)
    for name, held in introspect.local_shards(side.model).items():
        compare(f"shard of {name}", before[name], held)
    return told


def own_transport(rank: int, world: int) -> list[str]:
    """A transport that the user opens."""
    opened: list[str] = []

    def factory(compiled: Compiled, rank: int) -> Any:
        opened.append(compiled.digest)
        return open_transport("host", compiled, rank, timeout=20)

    side = fresh(mp_policy=mixed(torch.bfloat16, torch.float32))
    attachment = tide.attach(side.model, transport=factory)
    train(side, rank, range(1))
    assert attachment.compiled is not None
    assert opened == [attachment.compiled.digest]
    tide.detach(side.model)
    return opened


def alone(rank: int, world: int) -> str:
    """One rank: nothing to send."""
    side = fresh()
    attachment = tide.attach(side.model)
    train(side, rank, range(2))
    text = attachment.report()
    tide.detach(side.model)
    return text


def dim_one(rank: int, world: int) -> str:
    """What FSDP2 itself cannot do is left to it."""
    model = Stack()
    for layer in model.layers:
        fully_shard(
            layer,
            reshard_after_forward=2,
            shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 and p.shape[-1] % 4 == 0 else None,
        )
    fully_shard(model)
    attachment = tide.attach(model)
    text = attachment.report()
    tide.detach(model)
    return text


def rebinding(rank: int, world: int) -> None:
    """How often the plan is made anew when the model is configured differently, and what it is then."""
    side = fresh(mp_policy=MIXED)
    model, layers = side.model, side.model.layers
    attachment = tide.attach(model)

    def after(what: str, bindings: int) -> list[bool]:
        train(side, rank, range(2))
        assert attachment.bindings == bindings, f"{what}: bound {attachment.bindings} times"
        plan = attachment.plan
        assert plan is not None
        return [plan.spec.unit(f"layers.{index}").stays_whole for index in range(3)]

    assert after("attach", 1) == [False] * 3
    model.set_reshard_after_forward(False)
    assert after("reshard off", 2) == [True] * 3
    model.set_reshard_after_forward(True)
    assert after("reshard on", 3) == [False] * 3
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers[index + 1 :]))
    after("prefetch", 4)
    assert attachment.slots == 3
    for _ in range(2):  # to and fro: the plan of the first time serves the second as well
        layers[1].requires_grad_(False)
        after("frozen", 4)
        layers[1].requires_grad_(True)
        after("trained", 4)
    for _ in range(2):
        model.set_reshard_after_backward(False)
        after("kept", 5)
        model.set_reshard_after_backward(True)
        assert after("given up", 5) == [True] * 3
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    after("loaded", 5)
    text = str(attachment.plan.report()) if attachment.plan is not None else ""
    assert "layers.0" in text
    tide.detach(model)
    assert attachment.plan is None
