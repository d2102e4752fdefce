"""Steps in which an early part is of no use, or must not be used, under stock FSDP2 and TIDE."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fsdp_cases import MIXED, mixed, shard
from fsdp_jobs import same
from fsdp_models import Block, data
from fsdp_parity import Side, compare, local, lossy
from torch import nn

import tide
from tide.compiler.options import PlanOptions
from tide.errors import InputError, PeerError
from tide.fsdp import early, seam


class Parallel(nn.Module):
    """Two branches beside each other; the one that runs last has its gradients first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.order = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = {name: getattr(self, name)(x) for name in self.order}
        return sum(out[name] for name in sorted(out))  # type: ignore[return-value]


class Branches(nn.Module):
    """Embedding, blocks of parallel branches, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(Parallel() for _ in range(2))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ordered(order: str) -> Callable[[Side], None]:
    """Which branches run, and in which order."""

    def change(side: Side) -> None:
        for layer in side.model.layers:
            layer.order = order

    return change


class Run:
    """Two copies that take the same steps, one of them attached."""

    def __init__(self, rank: int, prepare: Callable[[nn.Module], None] | None = None, **options: Any) -> None:
        early.LEAST_BYTES = 1
        self.rank = rank
        self.sides = []
        for _ in range(2):
            torch.manual_seed(7)
            model = shard(Branches(), **options)
            if prepare is not None:
                prepare(model)
            self.sides.append(Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)))
        self.stock, self.side = self.sides
        self.attachment = tide.attach(self.side.model, early_reduce=True, reuse_forward=True, debug=True)

    def step(self, number: int, change: Callable[[Side], Any] | None = None, twice: bool = False) -> None:
        """One step of both; they must agree bit for bit."""
        for side in self.sides:
            if change is not None:
                change(side)
            for tokens, targets in data(number, self.rank, 1 + twice):
                lossy(side.model, tokens, targets).backward()
        for (name, mine), theirs in zip(self.stock.model.named_parameters(), self.side.model.parameters(), strict=True):
            if mine.grad is not None:
                compare(f"step {number}: gradient of {name}", mine.grad, theirs.grad)
        for side in self.sides:
            side.optimizer.step()
            side.optimizer.zero_grad()
        same(self.stock, self.side, f"step {number}")

    def counts(self, name: str = "layers.0") -> tuple[int, int]:
        """Early parts that were used, and dropped."""
        found = self.attachment.unit(name).counts
        return found.early, found.dropped

    def reason(self, name: str = "layers.0") -> str:
        """What the report says of a unit's early part."""
        return str(self.attachment.unit(name).early.remark)

    def end(self) -> None:
        """Detaches; nothing of it is left on the parameters."""
        params = [param for name in self.attachment._units for param in self.attachment.unit(name).params]
        tide.detach(self.side.model)
        whole = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
        hooks = [tensor._post_accumulate_grad_hooks for tensor in whole]
        assert not any(hooks), hooks


def _meddle(only_rank: int | None, rank: int) -> Callable[[Side], None]:
    """Doubles a gradient of the early part when the unit's last gradient comes, in place."""

    def change(side: Side) -> None:
        block = side.model.layers[0].a

        def hook(leaf: torch.Tensor) -> None:
            if only_rank in (None, rank):
                block.down.weight.grad.mul_(2.0)

        def register(module: nn.Module, args: Any) -> None:
            handle.remove()
            side.extra["hook"] = block.norm.weight.register_post_accumulate_grad_hook(hook)

        handle = block.register_forward_pre_hook(register)

    return change


def changed(rank: int, world: int) -> None:
    """A gradient is edited after it has been accumulated, on every rank."""
    run = Run(rank, mp_policy=MIXED)
    run.step(0)
    run.step(1)
    assert run.counts() == (1, 0), run.attachment.report()
    run.step(2, _meddle(None, rank))
    assert run.counts() == (1, 1), run.attachment.report()
    assert "changed after it had been accumulated" in run.reason()
    run.step(3)
    run.step(4)
    assert run.counts() == (1, 1), run.attachment.report()
    assert run.counts("layers.1") == (4, 0), run.attachment.report()
    for side in run.sides:
        side.extra["hook"].remove()
    run.end()


def _divide(factor: float) -> Callable[[Side], None]:
    def change(side: Side) -> None:
        for module in [side.model, *side.model.layers]:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)

    return change


def _without_sync(run: Run, step: int) -> None:
    for side in run.sides:
        side.model.set_requires_gradient_sync(False)
        lossy(side.model, *data(step, run.rank)[0]).backward()
        side.model.set_requires_gradient_sync(True)


def passes(rank: int, world: int) -> None:
    """Several backward passes a step, and then another divide factor."""
    run = Run(rank, mp_policy=mixed(None, torch.float32))
    run.step(0, _divide(3.0))
    run.step(1, twice=True)
    assert run.counts() == (2, 0), run.attachment.report()
    _without_sync(run, 7)
    assert run.counts() == (2, 0), run.attachment.report()
    run.step(2)  # reduces both: they are accumulated in place, as their type is that of the reduction
    assert run.counts() == (3, 0), run.attachment.report()
    run.step(3, _divide(5.0))
    run.step(4)
    assert run.counts() == (3, 0), run.attachment.report()
    assert "another factor" in run.reason()
    run.end()


def accumulated(rank: int, world: int) -> None:
    """Gradients of an earlier backward pass in the type of the reduction, after early parts without."""
    run = Run(rank, mp_policy=MIXED)
    run.step(0)
    run.step(1)
    _without_sync(run, 8)
    run.step(2)
    run.step(3)
    assert run.counts() == (1, 0), run.attachment.report()
    assert "earlier backward passes" in run.reason()
    run.end()


def other_parameters(rank: int, world: int) -> None:
    """Parameters of the early part, or of the rest, get no gradient in some steps, on every rank."""
    run = Run(rank)

    run.step(0)
    run.step(1)
    run.step(2, ordered("a"))  # b's gradients, which come first, are not there at all
    run.step(3, ordered("ab"))
    assert run.counts() == (1, 0), run.attachment.report()
    assert "other parameters have gradients" in run.reason()
    run.end()

    run = Run(rank)
    run.step(0)
    run.step(1)

    def freeze(side: Side) -> None:
        for layer in side.model.layers:
            layer.a.norm.requires_grad_(False)

    run.step(2, freeze)  # whose gradients come last
    run.step(3)
    assert run.counts() == (1, 1), run.attachment.report()
    assert "other parameters have gradients" in run.reason()
    run.end()


def another_order(rank: int, world: int) -> None:
    """Gradients come in another order than in the first step, on every rank."""
    run = Run(rank)
    run.step(0)
    run.step(1)
    run.step(2, ordered("ba"))
    run.step(3)
    assert run.counts() == (1, 0), run.attachment.report()
    assert "another order" in run.reason()
    run.end()


def broken_off(rank: int, world: int) -> None:
    """Backward ends in an exception when the early part is under way; FSDP2 recovers, and so does TIDE."""
    run = Run(rank, mp_policy=MIXED)
    run.step(0)
    run.step(1)

    def fail(module: nn.Module, args: Any) -> None:
        module.weight.register_hook(lambda grad: 1 / 0)

    for side in run.sides:
        # the norm's weight, which is in the rest
        handle = side.model.layers[0].a.norm.register_forward_pre_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            lossy(side.model, *data(2, rank)[0]).backward()
            raise AssertionError("backward went through")
        handle.remove()
        side.model.reset_iter_state()
        side.optimizer.zero_grad()
        for wrapped in tide.fsdp.introspect.wrapped_modules(side.model):
            for group in wrapped.groups:
                for param in group.fsdp_params:
                    param._unsharded_param.grad = None
                    (param._unsharded_param._backward_hooks or {}).clear()
    assert run.attachment.unit("layers.0").early._part is not None
    run.step(3)
    run.step(4)
    assert run.counts() == (3, 1), run.attachment.report()
    run.end()


def orders(rank: int, world: int) -> list[str]:
    """Ranks whose gradients come in different orders have no early part; what rank 0 logs."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tide").addHandler(handler)
    run = Run(rank)
    for side in run.sides:
        ordered("ab" if rank == 0 else "ba")(side)
    for number in range(3):
        run.step(number)
    assert run.counts() == (0, 0), run.attachment.report()
    assert run.counts("") == (2, 0), run.attachment.report()
    assert "different orders" in run.reason()
    run.end()
    return told


def bound_anew(rank: int, world: int) -> None:
    """Another plan for the same model: what was settled stays."""
    run = Run(rank)
    run.step(0)
    run.step(1)
    run.step(2, lambda side: side.model.set_reshard_after_forward(False))
    assert run.attachment.bindings == 2
    assert run.counts() == (1, 0), run.attachment.report()
    run.end()


def train_norms(model: nn.Module, wanted: bool) -> None:
    """Whether the norms of the second branches are trained."""
    for layer in model.layers:
        layer.b.norm.requires_grad_(wanted)


def other_trainables(rank: int, world: int) -> None:
    """Another plan, since a unit trains more parameters: its early part is learned anew."""
    run = Run(rank, lambda model: train_norms(model, False))
    run.step(0)
    run.step(1)
    before = run.attachment.unit("layers.0").early.choice
    run.step(2, lambda side: train_norms(side.model, True))
    assert run.attachment.bindings == 2
    assert run.counts() == (0, 0), run.attachment.report()
    run.step(3)
    after = run.attachment.unit("layers.0").early.choice
    assert run.counts() == (1, 0), run.attachment.report()
    assert len(after.every) > len(before.every)
    run.end()


def refused(rank: int, world: int) -> str:
    """What attach says of early parts and slots that receive."""
    model = shard(Branches())
    try:
        tide.attach(model, early_reduce=True, options=PlanOptions(slot_reuse=True))
    except InputError as error:
        tide.attach(model, early_reduce=True)  # the model is as it was
        tide.detach(model)
        return str(error)
    return "not refused"


def other_factors(rank: int, world: int) -> None:
    """FSDP2 turns out to divide in another way than the early part was reduced with."""
    run = Run(rank)
    run.step(0)
    run.step(1)
    part = run.attachment.unit("layers.0").early
    part._terms = replace(part._terms, divisor=7.0)
    run.step(2)
    run.step(3)
    assert run.counts() == (1, 1), run.attachment.report()
    assert "in another way" in run.reason()
    run.end()


def one_rank_alone(rank: int, world: int) -> str:
    """One rank edits a gradient: what it is told, and the others by their deadlines; all can detach then."""
    run = Run(rank)
    run.step(0)
    run.step(1)
    _meddle(0, rank)(run.side)
    try:
        lossy(run.side.model, *data(2, rank)[0]).backward()
    except PeerError as error:
        tide.detach(run.side.model)  # also where it was not the transport that failed
        return str(error)
    return f"no error: {sum(local(p.grad).sum() for p in run.side.model.parameters() if p.grad is not None)}"


def forgotten(rank: int, world: int) -> None:
    """A model that goes away while it is attached: nothing keeps it, nor its arenas."""
    for steps in (1, 2):  # while early parts are learned, and when they are reduced
        run = Run(rank)
        for step in range(steps):
            run.step(step)
        del run
        gc.collect()
        assert "memfd:tide" not in Path("/proc/self/maps").read_text(), f"arenas are mapped after {steps} steps"
        assert not seam.installed()


SCENARIOS = (
    changed,
    passes,
    accumulated,
    other_parameters,
    another_order,
    broken_off,
    bound_anew,
    other_trainables,
    other_factors,
    forgotten,
)


def scenarios(rank: int, world: int) -> None:
    """All of those in which ranks go on, one after the other."""
    for scenario in SCENARIOS:
        scenario(rank, world)
