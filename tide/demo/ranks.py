"""What each CPU rank of the demonstration does."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import tide
from tide.demo.llama import SMALL, Llama

#: Repeats of each timed call; the median is shown.
REPEATS = 5


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def _model(world_size: int) -> Llama:
    torch.manual_seed(0)
    model = Llama(SMALL)
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, SMALL.vocab, (2, 48), generator=generator)


def _loss(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _whole_numbers(like: torch.Tensor, rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * index + rank)
    return torch.randint(-64, 65, like.shape, generator=generator).to(like.dtype)


def _median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[len(times) // 2]


def gather_and_reduce(rank: int, world_size: int, port: int, queue: Any) -> None:
    """All-gather and reduce-scatter of a model that FSDP2 has sharded, by both; compares every byte."""
    _start(rank, world_size, port)
    model = _model(world_size)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with tide.compile_plan(model) as plan:
        for module in modules:
            module.unshard()
        whole: dict[str, torch.Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
        # What autograd forms is replaced by whole numbers, whose sums are exact in any order: FSDP2 adds in
        # gloo's order and TIDE rank by rank, so only exact sums must agree in every bit. Real gradients follow.
        real: dict[str, torch.Tensor] = {}
        exact = {name: _whole_numbers(tensor, rank, index) for index, (name, tensor) in enumerate(whole.items())}
        replace = [True]
        for name, parameter in model.named_parameters():

            def hook(grad: torch.Tensor, name: str = name) -> torch.Tensor:
                real[name] = grad.clone()
                return exact[name] if replace[0] else grad

            parameter.register_hook(hook)
        for module in modules:
            module.reshard()

        def stock_reduce() -> dict[str, torch.Tensor]:
            model.zero_grad()
            _loss(model, _batch(rank, 0)).backward()
            for module in modules:
                module.reshard()
            return {name: _local(p.grad) for name, p in model.named_parameters() if p.grad is not None}

        gathered = plan.all_gather()
        wrong_gather = sum(not _same(gathered[name], whole[name]) for name in whole)
        expected = stock_reduce()
        reduced = plan.reduce_scatter(exact)
        wrong_reduce = sum(not _same(reduced[name], expected[name]) for name in expected)
        replace[0] = False
        expected = stock_reduce()
        reduced = plan.reduce_scatter(real)
        # Each of the world_size - 1 additions rounds once, relative to a partial sum no larger than the sum of
        # all absolute values; the mean of absolute values comes from TIDE too.
        sizes = plan.reduce_scatter({name: grad.abs() for name, grad in real.items()})
        unit = 2.0**-24
        beyond = sum(
            int(((reduced[n].double() - expected[n].double()).abs() > 2 * (world_size + 1) * unit * sizes[n]).sum())
            for n in expected
        )
        reordered = sum(not _same(reduced[name], expected[name]) for name in expected)

        def stock_gather() -> None:
            for module in modules:
                module.unshard()
            for module in modules:
                module.reshard()

        rows = [
            ("all-gather, TIDE", _median_ms(plan.all_gather)),
            ("all-gather, FSDP2 unshard() over gloo", _median_ms(stock_gather)),
            ("reduce-scatter, TIDE", _median_ms(lambda: plan.reduce_scatter(real))),
        ]
        counts = torch.tensor([wrong_gather, wrong_reduce, beyond, reordered])
        dist.all_reduce(counts)
    if rank == 0:
        size = sum(tensor.nbytes for tensor in whole.values()) / 2**20
        lines = [
            f"{len(whole)} parameters, {size:.1f} MiB whole in bf16, sharded by FSDP2 over {world_size} ranks",
            f"all-gather against unshard():                        {counts[0]} of {len(whole) * world_size} differ",
            f"reduce-scatter of whole numbers against FSDP2's:     {counts[1]} of {len(whole) * world_size} differ",
            f"reduce-scatter of the real gradients against FSDP2's: {counts[2]} elements beyond float32 rounding, "
            f"{counts[3]} of {len(whole) * world_size} shards added in another order",
        ]
        lines += [f"{name:<40} {ms:8.1f} ms" for name, ms in rows]
        queue.put((lines, not bool(counts[:3].any())))
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, world_size: int, port: int, queue: Any, steps: int) -> None:
    """The same training run twice, stock and attached; compares losses and final weights."""
    _start(rank, world_size, port)
    runs: list[tuple[list[float], list[float], dict[str, torch.Tensor]]] = []
    for attached in (False, True):
        model = _model(world_size)
        if attached:
            tide.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses, times = [], []
        for step in range(steps):
            dist.barrier()
            began = time.perf_counter()
            loss = _loss(model, _batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - began) * 1e3)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world_size)
        if attached:
            tide.detach(model)
        runs.append((losses, times, {name: _local(p).clone() for name, p in model.named_parameters()}))
    (stock_losses, stock_times, stock), (tide_losses, tide_times, ours) = runs
    wrong = torch.tensor(sum(not _same(ours[name], stock[name]) for name in stock))
    dist.all_reduce(wrong)
    if rank == 0:
        lines = ["step    loss stock    loss TIDE     ms stock    ms TIDE"]
        for step in range(steps):
            lines.append(
                f"{step:4d} {stock_losses[step]:13.8f} {tide_losses[step]:12.8f}"
                f" {stock_times[step]:12.1f} {tide_times[step]:10.1f}"
            )
        lines.append(f"weights after {steps} AdamW steps: {wrong} of {len(stock) * world_size} shards differ")
        lines.append("(step times on CPU ranks show that both run, not what GPUs would gain)")
        queue.put((lines, not bool(wrong) and stock_losses == tide_losses))
    dist.barrier()
    dist.destroy_process_group()


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor."""
    local: torch.Tensor = tensor.to_local()
    return local


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and equal bytes."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
