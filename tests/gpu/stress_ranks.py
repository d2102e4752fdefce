"""A stress of a transport: thousands of collectives in FSDP2's order, late streams, every byte checked.

Run by `parity_ranks`. There is no training: what comes back is known beforehand and compared on the device, so
that the host never waits and runs far ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import random
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.session import Session
from tide.torch_types import to_torch
from tide.transport import open_transport


def stress_units() -> dict[str, tuple[Any, ...]]:
    """Small units of odd shapes: uneven, cut along other dims, a bundle of tiny ones, mixed types, one larger."""

    def p(name: str, *shape: int, dim: int = 0, **kinds: Any) -> Any:
        return Parameter(name, shape, dim, **kinds)

    same = {"shard_dtype": "bfloat16", "out_dtype": "bfloat16"}
    full = {"dtype": "float32", "grad_dtype": "float32"}
    units = {
        "root": (p("embed", 33, 24), p("norm", 24), p("head", 31, 24, **full)),
        "uneven": (p("up", 13, 12), p("bias", 13), p("gate", 2), p("one", 1, 7)),
        "dims": (p("experts", 4, 12, 8, dim=2), p("down", 4, 8, 12, dim=1), p("router", 4, 12)),
        "tiny": tuple(p(f"scale{i}", 3 + i) for i in range(9)),
        "large": (p("qkv", 1023, 257), p("out", 257, 1022, dim=1), p("norm", 257)),
        "narrow": (p("a", 301, 1, **same), p("b", 5, 3, 2, dim=2, **same), p("c", 64, 65, **same)),
        "float": (p("w", 127, 33, **full), p("b", 127, **full), p("frozen", 9, 9, grad_dtype=None)),
        "half": (p("w", 65, 66, dtype="float16", grad_dtype="float16"), p("u", 6, 1001, dim=1), p("v", 8)),
    }
    return {unit: tuple(replace(row, name=f"{unit}.{row.name}") for row in rows) for unit, rows in units.items()}


def values(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Random values that every rank can make."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(to_torch(dtype))


def cut(whole: Any, dim: int, owners: int, position: int) -> Any:
    """The shard of one owner, empty for the last ones where there are too few rows."""
    chunks = whole.chunk(owners, dim)
    return (chunks[position] if position < len(chunks) else whole.narrow(dim, 0, 0)).contiguous()


class Lanes:
    """Streams of the caller's, and delays on them; on a CPU there is one order only."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.chance = device, random.Random(seed)
        cuda = device == "cuda"
        self.gather, self.reduce = (torch.cuda.Stream(priority=-1) if cuda else None for _ in range(2))
        self.side = [torch.cuda.Stream() for _ in range(2)] if cuda else []
        self.delays = 0

    def on(self, stream: Any) -> Any:
        """The stream's context."""
        return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()

    def order(self, later: Any, earlier: Any = None) -> None:
        """What ``later`` gets from now on comes after what ``earlier`` has; None is the current stream."""
        if self.device == "cuda":
            current = torch.cuda.current_stream()
            (later or current).wait_stream(earlier or current)

    def mark(self) -> Any:
        """An event on the current stream."""
        return torch.cuda.current_stream().record_event() if self.device == "cuda" else None

    def after(self, event: Any) -> None:
        """The current stream goes on after the event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def delay(self, often: float = 0.12) -> None:
        """With some chance, keeps the current stream busy: mostly a little, now and then for milliseconds."""
        if self.device != "cuda" or self.chance.random() >= often:
            return
        longest = 12_000_000 if self.chance.random() < 0.02 else 800_000
        torch.cuda._sleep(int(self.chance.random() * longest))
        self.delays += 1

    def sync(self) -> None:
        """All that was issued has happened."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Trainer:
    """FSDP2's order of collectives over a session, without the training: what comes back is known beforehand."""

    VARIANTS = 3

    def __init__(self, session: Any, rank: int, world: int, lanes: Lanes, seed: int) -> None:
        self.session, self.lanes, self.world, device = session, lanes, world, lanes.device
        self.units = [unit.name for unit in session.compiled.spec.units]
        self.shared = random.Random(seed)  # the same on all ranks: what the ranks agree on
        self.shards: dict[tuple[str, int], list[Any]] = {}
        self.wholes: dict[tuple[str, int], list[Any]] = {}
        self.grads: dict[tuple[str, int], dict[int, Any]] = {}
        self.reduced: dict[tuple[str, int], dict[int, Any]] = {}
        for number, unit in enumerate(self.units):
            rows = session.compiled.spec.unit(unit).parameters
            for variant in range(self.VARIANTS):
                first = 10_000 * number + 1000 * variant
                key = unit, variant
                every = [values(p.shape, p.shard_dtype, first + i) for i, p in enumerate(rows)]
                self.shards[key] = [cut(w, p.dim, world, rank).to(device) for w, p in zip(every, rows, strict=True)]
                self.wholes[key] = [w.to(to_torch(p.dtype)).to(device) for w, p in zip(every, rows, strict=True)]
                chosen = [i for i, p in enumerate(rows) if p.trainable]
                of = [
                    {i: values(rows[i].shape, rows[i].grad_dtype, first + 100 * (r + 1) + i) for i in chosen}
                    for r in range(world)
                ]
                self.grads[key] = {i: grad.to(device) for i, grad in of[rank].items()}
                self.reduced[key] = {}
                for i in chosen:
                    total = self.total([cut(grads[i], rows[i].dim, world, rank).float() for grads in of]) / world
                    self.reduced[key][i] = total.to(to_torch(rows[i].out_dtype)).to(device)
        # One counter a stream, so that two streams never add to the same one at once.
        self.wrong = {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("gathered", "reduced")}
        self.counts = {"all_gather": 0, "resumed": 0, "reduce_scatter": 0}
        self.waiting: list[Any] = []
        self.variant: dict[str, int] = {}
        self.tickets: dict[str, Any] = {}

    def total(self, pieces: list[Any]) -> Any:
        """The sum in TIDE's order: the own node's ranks, then the other nodes' sums, by the rounds."""
        topology = self.session.compiled.topology
        own, size = topology.node_of(self.session.rank), topology.gpus_per_node
        sums = [functools.reduce(operator.add, pieces[n * size : (n + 1) * size]) for n in range(topology.nodes)]
        others = [sums[(own - 1 - j) % topology.nodes] for j in range(topology.nodes - 1)]
        return functools.reduce(operator.add, [sums[own], *others])

    def differ(self, counter: str, found: Any, expected: Any) -> None:
        """Counts the bytes that differ, on the device."""
        if found.numel():
            raw = (t.contiguous().view(-1).view(torch.uint8) for t in (found, expected))
            self.wrong[counter].add_((next(raw) != next(raw)).sum())

    def unshard(self, unit: str, resume: bool = False) -> None:
        """Issues the all-gather unless it is under way."""
        if unit in self.tickets:
            return
        if resume and self.session.resume(unit):
            self.counts["resumed"] += 1
            self.tickets[unit] = None
            return
        lanes = self.lanes
        if self.shared.random() < 0.5:  # as after an optimizer's step
            lanes.order(lanes.gather)
        with lanes.on(lanes.gather):
            lanes.delay()
            self.tickets[unit] = self.session.all_gather(unit, self.shards[unit, self.variant[unit]])
        self.counts["all_gather"] += 1

    def use(self, unit: str) -> None:
        """Reads the whole parameters on the compute stream, sometimes on a stream at its side as well."""
        lanes = self.lanes
        ticket = self.tickets.pop(unit)
        if ticket is not None:
            ticket.wait()
        lanes.delay()
        whole = self.session.whole(unit)
        rows = self.session.compiled.spec.unit(unit).parameters
        side = lanes.chance.choice(lanes.side) if lanes.side and lanes.chance.random() < 0.2 else None
        if side is not None:
            lanes.order(side)
        with lanes.on(side):
            if side is not None:
                lanes.delay(0.5)
            for p, expected in zip(rows, self.wholes[unit, self.variant[unit]], strict=True):
                self.differ("gathered", whole[p.name], expected)
        if side is not None:
            lanes.order(None, side)

    def reduce(self, unit: str) -> None:
        """Reduces fresh gradients on the reducing stream; they are spoilt as soon as they may be freed."""
        lanes, key = self.lanes, (unit, self.variant[unit])
        grads = {i: grad.clone() for i, grad in self.grads[key].items()}
        lanes.order(lanes.reduce)
        with lanes.on(lanes.reduce):
            lanes.delay()
            outs = self.session.new_outs(unit, list(grads), lanes.device)
            ticket = self.session.reduce_scatter(unit, grads, outs, divisor=float(self.world))
            ticket.wait_released()
            released = lanes.mark()
            ticket.wait()
            for i, expected in self.reduced[key].items():
                self.differ("reduced", outs[i], expected)
                outs[i].fill_(float("nan"))
        self.counts["reduce_scatter"] += 1
        self.waiting.append((released, grads))
        if len(self.waiting) > 1:
            self.free(self.waiting.pop(0))

    def free(self, held: Any) -> None:
        """As FSDP2 does when the next reduction comes: the gradients' memory is used for something else."""
        released, grads = held
        self.lanes.after(released)
        for grad in grads.values():
            grad.fill_(float("nan"))

    def step(self, ahead: int) -> None:
        """One training step: forward through all units, backward the other way round."""
        root, *blocks = self.units
        self.variant = {unit: self.shared.randrange(self.VARIANTS) for unit in self.units}
        self.unshard(root)
        self.use(root)
        for number, unit in enumerate(blocks):
            self.unshard(unit)
            for following in blocks[number + 1 : number + 1 + ahead]:
                self.unshard(following)
            self.use(unit)
            self.lanes.delay(0.05)
            self.session.release(unit)
        for number, unit in reversed(list(enumerate(blocks))):
            self.unshard(unit, resume=True)
            for following in reversed(blocks[max(number - ahead, 0) : number]):
                self.unshard(following)
            self.use(unit)
            self.session.release(unit)
            self.reduce(unit)
        self.session.release(root)
        self.reduce(root)
        for held in self.waiting:
            self.free(held)
        self.waiting.clear()
        self.lanes.order(None, self.lanes.reduce)  # the optimizer


def stress(rank: int, world: int, given: argparse.Namespace, tell: Any) -> None:
    """Thousands of collectives in FSDP2's order, with delays, counted wrong byte by wrong byte."""
    from parity_ranks import settings_of, topology_of

    mesh = Mesh((tuple(range(world)),))
    rows = stress_units()
    spec = ModelSpec(tuple(Unit(name, rows[name], mesh, stays_whole=name == "root") for name in rows), "stress")
    tight = {
        "chunk_bytes": 4096,
        "bundle_bytes": 64,
        "min_run_bytes": 16,
        "min_put_run_bytes": 16,
        "piece_bytes": 4096,
    }
    sequences = (
        ("push, tight, poison", given.steps, True, 1, 2, tight),
        ("pull, tight, poison", given.steps // 3, True, 1, 2, {**tight, "route": "pull"}),
        ("push, kept, no poison", given.steps // 3, False, 1, 2, {}),
        ("pull, two ahead, poison", given.steps // 6, True, 2, 3, {"route": "pull"}),
        ("push, two ahead, poison", given.steps // 6, True, 2, 3, {"chunk_bytes": 16384}),
    )
    for name, steps, poison, ahead, slots, choices in sequences:
        compiled = compile_spec(spec, topology_of(world, given), PlanOptions(slots=slots, **choices))
        kind = "cuda" if given.device == "cuda" else "host"
        transport = open_transport(kind, compiled, rank, timeout=30.0, **settings_of(given))
        session = Session(compiled, transport, poison=poison)
        lanes = Lanes(given.device, 100 * given.seed + rank)
        trainer = Trainer(session, rank, world, lanes, given.seed)
        trainer.step(ahead)  # compiles what is not compiled yet
        lanes.sync()
        begin, issuing, behind = time.perf_counter(), 0.0, 0
        for step in range(steps):
            since = time.perf_counter()
            trainer.step(ahead)
            issuing += time.perf_counter() - since
            if step % 50 == 49:
                if given.device == "cuda":
                    behind = max(behind, len(transport.outstanding()))  # type: ignore[attr-defined]
                lanes.sync()
            elif lanes.chance.random() < 0.02:
                time.sleep(lanes.chance.random() * 0.01)  # a host that falls behind
        lanes.sync()
        seconds = time.perf_counter() - begin
        wrong = {counter: int(value) for counter, value in trainer.wrong.items()}
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, (wrong, lanes.delays, behind, round(1e6 * issuing)))
        bad = {f"rank {r}": w for r, (w, *_) in enumerate(everyone) if any(w.values())}
        total = trainer.counts["all_gather"] + trainer.counts["reduce_scatter"]
        tell(
            {
                "section": "stress",
                "name": name,
                "outcome": "failed" if bad else "passed",
                "why": f"wrong bytes: {bad}" if bad else "",
                "steps": steps + 1,
                "collectives": total,
                "counts": trainer.counts,
                "delays": [found[1] for found in everyone],
                "most outstanding": [found[2] for found in everyone],
                "host µs a collective": [round(found[3] / total, 1) for found in everyone],
                "seconds": round(seconds, 2),
            }
        )
        session.close()
        del trainer, session, transport
