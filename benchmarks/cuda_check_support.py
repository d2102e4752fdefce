"""Data and clocks for ``cuda_check.py``."""

from __future__ import annotations

import functools
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from copy_rate import copy_engine_rate
from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.shapes import model_parameters
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.cuda import CudaTransport, Settings

#: Cycles of a kernel that sleeps for about a millisecond.
MILLISECOND = 2_000_000


def block_units() -> dict[str, tuple[Parameter, ...]]:
    """One block of each model that the goals speak of."""
    chosen = {
        "llama": ("Llama-3.1-70B", ".layers.0."),
        "qwen": ("Qwen3-30B-A3B", ".layers.0."),
        "wan": ("Wan2.2-A14B", "blocks.0."),
    }
    return {
        name: tuple(Parameter(fqn, shape) for fqn, shape in model_parameters(model, blocks=1).items() if key in fqn)
        for name, (model, key) in chosen.items()
    }


def whole_of(p: Parameter, index: int, turn: int) -> torch.Tensor:
    """The whole parameter as every rank can make it."""
    generator = torch.Generator("cuda").manual_seed(1000 * turn + index)
    return torch.randn(p.shape, generator=generator, device="cuda", dtype=torch.float32).to(to_torch(p.shard_dtype))


def cut(whole: torch.Tensor, dim: int, owners: int, position: int) -> torch.Tensor:
    """FSDP2's chunk of a rank."""
    chunks = torch.chunk(whole, owners, dim)
    if position < len(chunks):
        return chunks[position].contiguous()
    return whole.new_empty([0 if i == dim else n for i, n in enumerate(whole.shape)])


def bf16_equal(found: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Elements whose bits differ from the cast whole, on the device."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    return (found.view(kind) != whole.to(found.dtype).view(kind)).sum()


class Bench:
    """Ranks, clocks and data.

    Parameters
    ----------
    provider : str or None
        Arena provider to use.
    nodes : int
        Virtual nodes.
    **settings
        Settings of the transport in every session that says nothing else.
    """

    def __init__(self, provider: str | None, nodes: int = 1, **settings: Any) -> None:
        self.rank, self.world, self.provider = dist.get_rank(), dist.get_world_size(), provider
        self.topology = Topology(nodes, self.world // nodes, virtual=nodes > 1)
        self.settings = settings
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Where ranks share a device, only gloo is sure to bring them together.
        self.meeting = torch.device("cpu") if dist.get_backend() == "gloo" else self.device
        self.side = torch.cuda.Stream(priority=-1)
        self.ceiling = 0.0
        self.described = False

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def random(self, seed: int) -> random.Random:
        """A generator of its own."""
        return random.Random(seed)

    def total(self, value: int) -> int:
        """Sum over the ranks."""
        tensor = torch.tensor(value, device=self.meeting)
        dist.all_reduce(tensor)
        return int(tensor)

    def environment(self) -> dict[str, Any]:
        """Hardware and versions."""
        from importlib.metadata import version

        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return {
            "device": torch.cuda.get_device_name(),
            "world": self.world,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "nccl": nccl,
        }

    def session(
        self,
        units: dict[str, tuple[Parameter, ...]],
        options: PlanOptions,
        poison: bool = False,
        timeout: float = 20.0,
        **settings: Any,
    ) -> Session:
        """A session over all ranks; the unit ``sync`` is for alignment."""
        mesh = Mesh((tuple(range(self.world)),))
        rows = [Unit(name, parameters, mesh) for name, parameters in units.items()]
        rows.append(Unit("sync", (Parameter("sync.weight", (64 * self.world, 64)),), mesh, stays_whole=True))
        compiled = compile_spec(ModelSpec(tuple(rows), "check"), self.topology, options)
        transport = CudaTransport.open(
            compiled, timeout=timeout, provider=self.provider, settings=Settings(**{**self.settings, **settings})
        )
        if not self.described:
            self.described = True
            for key, value in transport.describe():
                self.say(f"         {key}: {value}")
        self._last = Session(compiled, transport, poison)
        self._sync = [torch.ones(64, 64, device=self.device)]
        return self._last

    def shards(self, parameters: Sequence[Parameter], turn: int) -> list[torch.Tensor]:
        """This rank's shards."""
        return [cut(whole_of(p, i, turn), p.dim, self.world, self.rank) for i, p in enumerate(parameters)]

    def gradients(
        self, parameters: Sequence[Parameter], turn: int
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """This rank's gradients, and the reduced shards that must come out (mean over the ranks)."""
        mine, expected = {}, {}
        own, per_node = self.rank // self.topology.gpus_per_node, self.topology.gpus_per_node
        divisor = torch.full((), float(self.world), device=self.device)
        for i, p in enumerate(parameters):
            if p.grad_dtype is None:
                continue
            sums: dict[int, torch.Tensor] = {}
            for rank in range(self.world):
                generator = torch.Generator("cuda").manual_seed(77 + 1000 * turn + 31 * rank + i)
                grad = torch.randn(p.shape, generator=generator, device="cuda", dtype=to_torch(p.grad_dtype))
                if rank == self.rank:
                    mine[i] = grad
                piece, node = cut(grad, p.dim, self.world, self.rank).float(), rank // per_node
                sums[node] = sums[node] + piece if node in sums else piece
            # The own node's sum, then the others' in the order of the rounds.
            total = functools.reduce(
                torch.add, [sums[(own - j) % self.topology.nodes] for j in range(self.topology.nodes)]
            )
            expected[i] = (total / divisor).to(to_torch(p.out_dtype))
        return mine, expected

    # Clocks ------------------------------------------------------------------------------------

    def align(self, session: Session) -> None:
        """Brings the ranks' current streams to the same moment, with the host well ahead."""
        torch.cuda._sleep(MILLISECOND)
        session.all_gather("sync", self._sync).wait()
        session.release("sync")

    def timed(self, work: Callable[[], None], repeats: int = 11) -> float:
        """Seconds of the slowest rank, median of the repeats, first ones left out."""
        session = self._last
        pairs = []
        for _ in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.align(session)
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
            torch.cuda.synchronize()
        times = torch.tensor([b.elapsed_time(e) for b, e in pairs[2:]], device=self.meeting)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return statistics.median(times.tolist()) / 1e3

    def host(self, work: Callable[[], None], repeats: int = 21) -> float:
        """Microseconds of the host, median."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return round(statistics.median(found) * 1e6, 1)

    def host_in_a_row(self, work: Callable[[], None], repeats: int) -> float:
        """Microseconds of the host for each of many calls in a row, the device behind a kernel that sleeps."""
        found = []
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(10 * MILLISECOND)
            begin = time.perf_counter()
            for _ in range(repeats):
                work()
            found.append((time.perf_counter() - begin) / repeats)
        torch.cuda.synchronize()
        return round(min(found) * 1e6, 1)

    def measure_ceiling(self, out: dict[str, Any]) -> None:
        """Copies of 1 GiB between neighbours and to all peers, by all ranks at once."""
        if self.world < 2:
            return
        rates = copy_engine_rate(provider=self.provider)
        out.update({f"{name} GB/s": round(rate, 1) for name, rate in rates.items()})
        self.ceiling = max(rates.values())
        self.say(f"ceiling  {out}")
