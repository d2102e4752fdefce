"""Trains two copies of a model side by side, one on stock FSDP2 and one attached, and compares them.

Losses, gradients and parameters have to be equal bit for bit wherever both sums have the same terms in the
same order, or are exact. Where only the order differs, both are held against the exact sum of the ranks'
gradients, within the bound that float32 (or the reduce type) gives for *any* order; the gradients of the
attached copy are then replaced by the stock ones, so that the bound concerns one reduction and nothing
piles up: losses and parameters stay comparable bit for bit.

With ``u`` the unit roundoff of the type that is summed in and ``W`` terms, ``W - 1`` additions in any order
give ``|computed - exact| <= (W - 1) u / (1 - (W - 1) u) * sum |g_i|`` (Higham, Accuracy and Stability of
Numerical Algorithms, 4.2). Division or multiplication adds one rounding, the cast to the reduce type another;
results below the smallest normal number are rounded absolutely. Several reductions of one step add up.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import data
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

import tide
from tide.compiler.options import PlanOptions
from tide.fsdp.introspect import torch_version

STEPS = 5
#: Where the same has been done for more steps elsewhere: one that learns, one that may bind anew, one like all others.
FEW = 3


@dataclass
class Side:
    """One of the two copies."""

    model: Any
    optimizer: torch.optim.Optimizer
    attachment: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def lossy(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in float32, whatever the model computes in."""
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def one_batch(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """The usual step up to the optimizer: the gradients are there when it returns."""
    ((tokens, targets),) = data(step, rank)
    loss = lossy(side.model, tokens, targets)
    loss.backward()
    return [loss.detach()]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes
    ----------
    name : str
        Shown when it fails.
    build : callable
        ``world_size -> model``, sharded; called once for each side, from the same random state.
    step : callable
        Forward and backward passes of one step.
    worlds : tuple of int
        Rank counts that it runs on.
    bounded : tuple of int
        Those of them where the order of the sums differs.
    reduce : torch.dtype
        Type of the reduction.
    attach : dict
        Arguments of ``tide.attach``.
    prepare : callable or None
        ``side -> None``, after attach.
    check : callable or None
        ``attachment -> None``, at the end.
    before : callable or None
        ``side -> None``, before each step of the optimizer.
    optimizer : callable
        ``model -> optimizer``.
    since : tuple of int
        First torch version that has the feature.
    """

    name: str
    build: Callable[[int], Any]
    step: Callable[[Side, int, int], list[torch.Tensor]] = one_batch
    worlds: tuple[int, ...] = (2,)
    bounded: tuple[int, ...] = ()
    reduce: torch.dtype = torch.float32
    attach: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Side], None] | None = None
    check: Callable[[Any], None] | None = None
    before: Callable[[Side], None] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False
    )
    since: tuple[int, int] = (2, 11)


class Mismatch(AssertionError):  # noqa: N818 - reads as what happened
    """The copies differ."""


def local(tensor: Any) -> torch.Tensor:
    """The part that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compare(what: str, stock: torch.Tensor, tide_: torch.Tensor) -> None:
    """Equal bit for bit; NaN is equal to itself."""
    stock, tide_ = local(stock).detach(), local(tide_).detach()
    if stock.dtype != tide_.dtype or stock.shape != tide_.shape:
        raise Mismatch(f"{what}: {tide_.dtype} {tuple(tide_.shape)}, stock {stock.dtype} {tuple(stock.shape)}")
    if not torch.equal(stock.flatten().view(torch.uint8), tide_.flatten().view(torch.uint8)):
        both = stock.double(), tide_.double()
        if torch.equal(torch.nan_to_num(both[0], nan=1e99), torch.nan_to_num(both[1], nan=1e99)):
            return  # 0 and -0, or two kinds of NaN
        raise Mismatch(f"{what}: differs by up to {(both[0] - both[1]).abs().max().item():.3g}")


@contextmanager
def recorded(reductions: dict[int, list[tuple[torch.Tensor, Any, float]]]) -> Iterator[None]:
    """Notes the whole gradients of this rank that go into stock reductions, by parameter."""
    stock = param_group.foreach_reduce

    def recording(params: Any, grads: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        for param, grad in zip(params, grads, strict=True):
            reductions.setdefault(id(param), []).append((grad.detach().clone(), param, group.size()))
        return stock(params, grads, group, *args, **kwargs)

    param_group.foreach_reduce = recording
    try:
        yield
    finally:
        param_group.foreach_reduce = stock


def gathered(rows: list[tuple[torch.Tensor, Any, float]]) -> list[torch.Tensor]:
    """Each of the gradients as every rank of its group has it, in float64.

    One collective a group: a small one for each gradient takes longer than the step.
    """
    groups: dict[Any, list[int]] = {}
    for index, (_, param, _) in enumerate(rows):
        groups.setdefault(param.mesh_info.shard_process_group, []).append(index)
    found: dict[int, torch.Tensor] = {}
    for group, indices in groups.items():
        flat = torch.cat([rows[index][0].double().flatten() for index in indices])
        everyone = [torch.empty_like(flat) for _ in range(group.size())]
        dist.all_gather(everyone, flat, group=group)
        parts = torch.stack(everyone).split([rows[index][0].numel() for index in indices], 1)
        for index, part in zip(indices, parts, strict=True):
            found[index] = part.view(-1, *rows[index][0].shape)
    return [found[index] for index in range(len(rows))]


def exact_and_bounds(
    rows: list[tuple[torch.Tensor, Any, float]], whole: list[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's shard of the exact mean, and how far sums in ``dtype`` and in float32 may be from it."""
    exact, bounds = None, []
    roundoff = torch.finfo(dtype).eps / 2
    for (grad, param, _), everyone in zip(rows, whole, strict=True):
        info = param.mesh_info
        width = info.shard_mesh_size
        dim = param.fsdp_placement.dim
        chunk = -(-grad.shape[dim] // width)
        start = min(chunk * info.shard_mesh_rank, grad.shape[dim])
        terms = everyone.narrow(dim + 1, start, min(chunk, grad.shape[dim] - start))
        mean, magnitude = terms.sum(0) / width, terms.abs().sum(0) / width
        errors = []
        for sums in (roundoff, torch.finfo(torch.float32).eps / 2):
            gamma = (width - 1) * sums / (1 - (width - 1) * sums)
            # one rounding of the mean, one of the cast, and underflow
            error = gamma * magnitude + (sums + roundoff) * (mean.abs() + gamma * magnitude) * (1 + sums)
            errors.append(error + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        if exact is None:
            exact, bounds = mean, errors
        else:  # a second reduction is added to the first
            exact = exact + mean
            for index, error in enumerate(errors):
                bound = bounds[index] + error
                bounds[index] = bound + torch.finfo(torch.float32).eps / 2 * (exact.abs() + bound)
    assert exact is not None
    return exact, *bounds


def check_bounds(case: Case, sides: tuple[Side, Side], reductions: dict[int, Any], step: int) -> None:
    """Both copies' gradients are as near to the exact mean as any order of summation comes."""
    names = {id(p): n for n, p in sides[0].model.named_parameters()}
    theirs = dict(sides[1].model.named_parameters())
    whole = iter(gathered([row for rows in reductions.values() for row in rows]))
    for rows in reductions.values():
        param = rows[0][1]
        name = names[id(param.sharded_param)]
        if theirs[name].grad is None:
            raise Mismatch(f"step {step}, {name}: no gradient")
        exact, loose, tight = exact_and_bounds(rows, [next(whole) for _ in rows], case.reduce)
        for side, grad, bound in (
            ("stock", param.sharded_param.grad, loose),
            ("tide", theirs[name].grad, tight),
        ):
            over = (local(grad).to(exact.device).double() - exact).abs() - bound
            if over.numel() and over.max() > 0:
                raise Mismatch(f"step {step}, {name}: {side} is {over.max().item():.3g} beyond the bound")


def make(case: Case, world: int) -> Side:
    """One copy, from the case's random state."""
    torch.manual_seed(7)
    model = case.build(world)
    return Side(model, case.optimizer(model))


def run_case(case: Case, rank: int, world: int, steps: int = STEPS) -> str:
    """Trains both copies; returns the attachment's report."""
    bounded = world in case.bounded
    stock, attached = make(case, world), make(case, world)
    attached.attachment = tide.attach(attached.model, **case.attach)
    try:
        for side in (stock, attached):
            if case.prepare is not None:
                case.prepare(side)
        for step in range(steps):
            reductions: dict[int, Any] = {}
            losses = []
            for side in (stock, attached):
                torch.manual_seed(step)
                if bounded and side is stock:
                    with recorded(reductions):
                        losses.append(case.step(side, step, rank))
                else:
                    losses.append(case.step(side, step, rank))
            for ours, theirs in zip(*losses, strict=True):
                compare(f"step {step}, loss", ours, theirs)
            if bounded:
                check_bounds(case, (stock, attached), reductions, step)
            theirs = dict(attached.model.named_parameters())
            for name, param in stock.model.named_parameters():
                mine, other = param.grad, theirs[name].grad
                if (mine is None) != (other is None):
                    raise Mismatch(f"step {step}, {name}: gradient {other is not None}, stock {mine is not None}")
                if mine is None:
                    continue
                if bounded:
                    local(other).copy_(local(mine))
                else:
                    compare(f"step {step}, gradient of {name}", mine, other)
            for side in (stock, attached):
                if case.before is not None:
                    case.before(side)
                side.optimizer.step()
                side.optimizer.zero_grad()
            for name, param in stock.model.named_parameters():
                compare(f"step {step}, {name}", param, theirs[name])
        if case.check is not None:
            case.check(attached.attachment)
        return attached.attachment.report()
    finally:
        if sys.exc_info()[0] is None:
            tide.detach(attached.model)


def run_cases(
    rank: int,
    world: int,
    names: tuple[str, ...] = (),
    part: int = 0,
    parts: int = 1,
    reuse: bool = False,
    early: bool = False,
) -> dict[str, str]:
    """Runs the table's cases for this world size, or a part of them; returns what went wrong, by name.

    With ``reuse``, gradients are received in vacated slots. With ``early``, there is an early part in every unit that
    can have one. Then, and on more than two ranks, there are few steps a case.
    """
    from fsdp_cases import CASES, with_early_parts

    version = torch_version()
    chosen = [
        case for case in CASES if world in case.worlds and (not names or case.name in names) and version >= case.since
    ]
    if reuse:
        chosen = [through_slots(case) for case in chosen if case.attach.get("options") is None]
    if early:
        chosen = [with_early_parts(case) for case in chosen]
    steps = FEW if early or world > 2 else STEPS
    return run_chosen(chosen[part::parts], rank, world, steps, told=bool(names))


def through_slots(case: Case) -> Case:
    """The case with slots that receive gradients."""
    return replace(case, attach={**case.attach, "options": PlanOptions(slot_reuse=True)})


def run_chosen(cases: Sequence[Case], rank: int, world: int, steps: int = STEPS, told: bool = False) -> dict[str, str]:
    """Runs these cases; returns what went wrong, by name, and with ``told`` prints how each went."""
    failures = {}
    for case in cases:
        since = time.perf_counter()
        try:
            report = run_case(case, rank, world, steps)
            wrong = ""
        except Mismatch as error:
            report, wrong = "", str(error)
        except Exception:  # with luck the other ranks raise as well, and the next case can run
            report, wrong = "", traceback.format_exc()
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, wrong)
        if any(everyone):
            failures[case.name] = "; ".join(f"rank {r}: {text}" for r, text in enumerate(everyone) if text)
        if told and rank == 0:
            print(
                f"--- {case.name}: {failures.get(case.name, 'ok')} {time.perf_counter() - since:.1f} s\n{report}",
                flush=True,
            )
    return failures


if __name__ == "__main__":  # python tests/fsdp/fsdp_parity.py 2 [--early] [case …]
    from fsdp_parity import run_cases as run

    from ranks import run_ranks

    try:
        early = "--early" in sys.argv
        names = tuple(name for name in sys.argv[2:] if name != "--early")
        found = run_ranks(run, int(sys.argv[1]), names, 0, 1, False, early, timeout=280)[0]
        print("\n".join(f"{name}: {text}" for name, text in found.items()) or "all equal")
    except AssertionError:
        traceback.print_exc()
