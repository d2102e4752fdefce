"""Host time of TIDE's transport without a GPU: what a call of ``CudaTransport.run`` costs in Python.

Real plans of the models' blocks, the real transport and ctypes' real conversions, but every driver call goes to a C
function that does nothing. So the microseconds leave out what the driver takes; its calls are counted instead. The
best of many calls is shown, as other work on the machine only adds to it::

    python benchmarks/host_time.py --ranks 2,4,8 --profile qwen:reduce_scatter
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import itertools
import pstats
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cuda_check_support import block_units
from host_split import DriverClock, split
from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import align
from tide.compiler.shard import shard
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.cuda import CudaTransport, Settings
from tide.transport.cuda import driver as driver_module
from tide.transport.cuda.arena import Arena
from tide.transport.cuda.launcher import plain_launch
from tide.transport.cuda.request import arena_bytes
from tide.transport.cuda.tables import LaunchSet

#: Times that each collective is issued.
CALLS = 400
#: Sets of gradients that take turns, so that their addresses change from call to call.
TURNS = 3


class _Nothing:
    """A library whose functions take any arguments and return 0: the current rounding mode is to the nearest."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libm.so.6")

    def __getattr__(self, name: str) -> Any:
        function = self._library["fegetround"]  # a new function object each time, with a signature of its own
        if name in driver_module._SIGNATURES:
            function.argtypes = driver_module._SIGNATURES[name]
        setattr(self, name, function)
        return function


class NoDriver(driver_module.Driver):
    """The driver's interface, over functions that do nothing."""

    def __init__(self) -> None:
        self._library: Any = _Nothing()
        self._bound = threading.local()
        self._context, self.device, self.version = 0, 0, 13000
        self.max_pitch, self.wait_flags = 1 << 31, driver_module.WAIT_GEQ
        self._attributes = driver_module._Attributes()
        self._first = ctypes.c_size_t(0)
        self._handles = itertools.count(1)
        self.copy_batch = self._find_batch()
        self._name_calls()

    def new_stream(self) -> int:
        """A number."""
        return next(self._handles)

    new_event = new_stream

    def current_stream(self) -> int:
        """Handle of the stream that a caller would be on."""
        return 1 << 40

    def range_push(self, name: str) -> None:
        """Nothing."""

    def range_pop(self) -> None:
        """Nothing."""


def _bind(self: LaunchSet, variant: Any, launch: Any, scalars: tuple[float, ...]) -> Callable[[int], None]:
    parameters = ", ".join([".param .u64 t", *(".param .f32 s" for _ in scalars)])
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(num_warps=8, shared=0), function=1, asm={"ptx": f".entry k({parameters})"}
    )
    direct = plain_launch(compiled, self.memory.data_ptr(), scalars, launch.programs, self.driver.launch)
    check = self.driver.check
    assert direct is not None

    def start(stream: int) -> None:
        if result := direct(stream):
            check(result, "kernel launch")

    return start


def _tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device, owner: object) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


@contextmanager
def session(model: str, ranks: int) -> Iterator[Session]:
    """Rank 0 of a plan of one block; the peers' arenas are addresses that nobody touches."""
    unit = Unit(model, block_units()[model], Mesh((tuple(range(ranks)),)))
    compiled = compile_spec(ModelSpec((unit,), "host time"), Topology(1, ranks), PlanOptions(slots=1))
    size, _ = arena_bytes(compiled)
    memory = torch.empty(size + 4096, dtype=torch.uint8)  # never written to but for a few pages
    addresses = {rank: align(memory.data_ptr(), 4096) + (rank << 44) for rank in range(ranks)}
    with (
        mock.patch("tide.transport.cuda.transport.tensor_at", _tensor_at),
        mock.patch.object(LaunchSet, "_bind", _bind),
    ):
        arena = Arena("none", addresses, memory, lambda: None)
        transport = CudaTransport(compiled, 0, arena, NoDriver(), torch.device("cpu"), Settings(), 3600.0)
        made = Session(compiled, transport)
        try:
            yield made
        finally:
            made.close()


class Calls:
    """One block's collectives, to be issued again and again."""

    def __init__(self, made: Session, ranks: int) -> None:
        self.session, self.turn = made, 0
        self.unit = made.compiled.spec.units[0]
        parameters = self.unit.parameters
        numels = [int(shard(p, ranks).numel[0]) for p in parameters]
        self.shards = [torch.empty(n, dtype=to_torch(p.shard_dtype)) for n, p in zip(numels, parameters, strict=True)]
        self.turns = [
            (
                {i: torch.empty(p.shape, dtype=to_torch(p.grad_dtype or "bfloat16")) for i, p in enumerate(parameters)},
                dict(enumerate(torch.empty(sum(numels)).split(numels))),
            )
            for _ in range(TURNS)
        ]

    def all_gather(self) -> None:
        """As a forward pass has it."""
        self.session.all_gather(self.unit.name, self.shards).wait()
        self.session.release(self.unit.name)

    def reduce_scatter(self) -> None:
        """With other addresses than the last time."""
        self.turn = (self.turn + 1) % TURNS
        grads, outs = self.turns[self.turn]
        ticket = self.session.reduce_scatter(self.unit.name, grads, outs, 1.0, 2.0)
        if not ticket.wait_released():
            ticket.wait()


def measure(model: str, ranks: int, collective: str, profiled: bool) -> dict[str, float]:
    """Least microseconds of a call, by part, and the calls of functions that it makes."""
    with session(model, ranks) as made:
        calls = Calls(made, ranks)
        issue = getattr(calls, collective)
        for _ in range(TURNS):
            issue()
        row = split(made.transport, collective, issue, CALLS, min)
        counts = []
        for _ in range(TURNS):
            profile = cProfile.Profile()
            profile.runcall(issue)
            found: Any = pstats.Stats(profile)
            counts.append(found.total_calls)
        row["functions"] = min(counts)
        if profiled:
            profile = cProfile.Profile()
            for _ in range(CALLS):
                profile.runcall(issue)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return row


def driver_calls(model: str, ranks: int, collective: str) -> dict[str, float]:
    """Driver calls of one collective, by kind; those that not every call makes by their mean."""
    with session(model, ranks) as made:
        clock = DriverClock(made.transport.driver)  # type: ignore[attr-defined]
        calls = Calls(made, ranks)
        for turn in range(2 * TURNS + 2):
            if turn == 2:  # what comes first is prepared first
                clock.clear()
            getattr(calls, collective)()
        return {name: round(count / (2 * TURNS), 1) for name, (count, _) in clock.row().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,qwen,wan")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--profile", help="MODEL:COLLECTIVE; prints where its time goes")
    arguments = parser.parse_args()
    for ranks in map(int, arguments.ranks.split(",")):
        for model in arguments.models.split(","):
            for collective in ("all_gather", "reduce_scatter"):
                row = measure(model, ranks, collective, arguments.profile == f"{model}:{collective}")
                kinds = driver_calls(model, ranks, collective)
                figures = ", ".join(f"{key} {value:5.1f}" for key, value in row.items())
                print(f"{ranks} ranks  {model:<6} {collective:<14} {figures}")
                print(f"{'':25} driver calls {sum(kinds.values()):.1f}: {kinds}")


if __name__ == "__main__":
    main()
