"""Steps in which one rank leaves out blocks of equal shape, by control flow alone, under TIDE."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import MIXED, shard
from fsdp_jobs import Side, fresh, same, train
from fsdp_models import Stack, data
from fsdp_parity import lossy
from torch import nn

import tide
from tide.errors import PeerError
from tide.transport import open_transport


class Skipping(Stack):
    """Blocks may be left out, in forward, or behind a detached tensor in backward only."""

    skipped: Collection[int] = ()
    detached = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = layer(x)
            if number == self.detached:
                x = x.detach()
        out: torch.Tensor = self.head(x)
        return out


def _made(world: int, **options: Any) -> nn.Module:
    made: nn.Module = shard(Skipping(depth=5), **options)
    return made


def skipped(rank: int, world: int) -> list[tuple[str, float]]:
    """What each rank is told where rank 0 skips, and after how long; each time all detach and train on."""
    stock, side = fresh(_made, mp_policy=MIXED), fresh(_made, mp_policy=MIXED)
    told = []
    for blocks, detached in (((1,), -1), ((1, 2), -1), ((0, 1, 2), -1), ((), 2)):
        tide.attach(side.model, prefetch=2, transport=lambda c, r: open_transport("host", c, r, timeout=4.0))
        for s in (stock, side):
            train(s, rank, range(1))
        if rank == 0:
            side.model.skipped, side.model.detached = blocks, detached
        told.append(_step(side, rank, closure=detached >= 0))
        _refused(side)
        side.model.skipped, side.model.detached = (), -1
        tide.detach(side.model)
        side.optimizer.zero_grad()
        dist.barrier()
        for s in (stock, side):
            train(s, rank, range(1, 2))
        same(stock, side, f"after {blocks} were skipped")
    return told


def _step(side: Side, rank: int, closure: bool) -> tuple[str, float]:
    """A step up to the optimizer, which fails; also within the optimizer's, by a closure that says nothing of it."""
    ((tokens, targets),) = data(9, rank)
    begin, told = time.monotonic(), list[str]()

    def run() -> None:
        try:
            lossy(side.model, tokens, targets).backward()
        except PeerError as error:
            told.append(str(error))

    if closure:
        with pytest.raises(PeerError, match="the optimizer step is not taken"):
            side.optimizer.step(run)
    else:
        run()
    assert told, "the step went through"
    return told[0], time.monotonic() - begin


def _refused(side: Side) -> None:
    """No optimizer step is taken on what the failed collectives have left; that of another model is."""
    with pytest.raises(PeerError, match="the optimizer step is not taken, as its gradients are worthless: "):
        side.optimizer.step()
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    late = torch.optim.SGD([other], lr=1.0)
    late.step()
    assert not other.any()
    late.add_param_group({"params": side.optimizer.param_groups[0]["params"]})
    with pytest.raises(PeerError, match="the optimizer step is not taken"):
        late.step()


def options_that_differ(rank: int, world: int) -> str:
    """What attach says where one rank alone reuses the forward pass; then a compiled optimizer step, all alike."""
    side = fresh(_made, mp_policy=MIXED)
    with pytest.raises(PeerError) as caught:
        tide.attach(side.model, reuse_forward=rank == 1)
    tide.attach(side.model, reuse_forward=True)
    ((tokens, targets),) = data(0, rank)
    lossy(side.model, tokens, targets).backward()
    torch.compile(side.optimizer.step, backend="eager")()
    tide.detach(side.model)
    return str(caught.value)
