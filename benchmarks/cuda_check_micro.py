"""Micro-benchmarks for ``cuda_check.py``: single driver calls, ways to issue copies, signals, a profile."""

from __future__ import annotations

import ctypes
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cuda_check_support import MILLISECOND, Bench, block_units
from host_split import DriverClock, split
from tide.compiler.model import Parameter
from tide.compiler.options import PlanOptions
from tide.transport.cuda.words import STRIDE, VALUES


def issue(bench: Bench, out: dict[str, Any]) -> None:
    """Host time of single driver calls, and a unit's copies as a batch, one by one, and as a CUDA graph."""
    for name, parameters in block_units().items():
        session = bench.session({name: parameters}, PlanOptions(slots=2))
        shards = bench.shards(parameters, 0)
        session.all_gather(name, shards).wait()
        session.release(name)
        torch.cuda.synchronize()
        transport: Any = session.transport
        driver = transport.driver
        lowered = next(found for (_, unit), found in transport._lowered.items() if unit == name)
        copies, stream = lowered.copies, transport.stream("check")
        outside = torch.cuda.ExternalStream(stream)
        count, pitched = copies.count()
        arguments = [array.ctypes.data for array in (copies.destinations, copies.sources, copies.sizes)]
        rows = list(zip(copies.destinations.tolist(), copies.sources.tolist(), copies.sizes.tolist(), strict=True))

        def batch(arguments: Any = arguments, count: int = count, driver: Any = driver, stream: int = stream) -> None:
            driver.copy_batch(*arguments, count, stream)

        def loop(rows: Any = rows, driver: Any = driver, stream: int = stream) -> None:
            for row in rows:
                driver.copy(*row, stream)

        graph, capture = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=capture, capture_error_mode="thread_local"):
            handle = torch.cuda.current_stream().cuda_stream
            for row in rows:
                driver.check(driver.copy(*row, handle), "captured copy")

        def replay(graph: Any = graph, outside: Any = outside) -> None:
            with torch.cuda.stream(outside):
                graph.replay()

        for label, work in (("batch", batch), ("loop", loop), ("graph", replay)):

            def run(work: Callable[[], None] = work, outside: Any = outside) -> None:
                outside.wait_stream(torch.cuda.current_stream())
                work()
                torch.cuda.current_stream().wait_stream(outside)

            seconds, rate = bench.timed(run, 7), int(copies.sizes.sum())
            found = {"host us": _calls(work, 30, True), "ms": round(seconds * 1e3, 3)}
            found["GB/s"] = round(rate / seconds / 1e9, 1)
            out[f"{name} {label}"] = found
            bench.say(f"issue    {name:<6} {count} + {pitched} copies as {label:<6} {found}")
        if name == "llama":
            out["calls"] = _single_calls(transport, stream, lowered)
            bench.say(f"issue    host us of single calls: {out['calls']}")
        session.close()


def _calls(work: Callable[[], None], repeats: int, drain: bool = False) -> float:
    found = []
    for _ in range(repeats):
        if drain:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return round(statistics.median(found) * 1e6, 2)


def _single_calls(transport: Any, stream: int, lowered: Any) -> dict[str, float]:
    driver, own = transport.driver, transport.arena.addresses[transport.rank]
    peer = next(address for rank, address in transport.arena.addresses.items() if rank != transport.rank)
    place, event = transport.abort_offset + 2048, driver.new_event()
    array = (ctypes.c_uint64 * 12)(1, own + place, 0, 0, 0, 0, 2, own + place, 0, 0, 0, 0)
    starts = next(iter(lowered._starts.values()))[0]
    sizes = (ctypes.c_int64 * 8)(*[4096] * 8)
    ours = (ctypes.c_int64 * 8)(*[own + 8192 * i for i in range(8)])
    theirs = (ctypes.c_int64 * 8)(*[peer + 8192 * i for i in range(8)])
    batch = [ctypes.addressof(array) for array in (ours, theirs, sizes)]
    calls: dict[str, Callable[[], Any]] = {
        **{f"batch of {n} copies": functools.partial(driver.copy_batch, *batch, n, stream) for n in (1, 2, 4, 8)},
        "copy of 4096 bytes": lambda: driver.copy(ours[0], theirs[0], 4096, stream),
        "event record": lambda: driver.event_record(event, stream),
        "event wait": lambda: driver.stream_wait_event(stream, event, 0),
        "event query": lambda: driver.event_query(event),
        "wait value": lambda: driver.wait_value(stream, own + place, 0, 0),
        "write value to peer": lambda: driver.write_value(stream, peer + place, 0, 0),
        "wait in a batch": lambda: driver.memory_operations(stream, 1, ctypes.addressof(array), 0),
        "wait + write in a batch": lambda: driver.memory_operations(stream, 2, ctypes.addressof(array), 0),
        "copy of 4 bytes": lambda: driver.copy(peer + place, transport.value_table, 4, stream),
        "kernel": lambda: starts[0](stream),
        "current stream": driver.current_stream,
        "nvtx": lambda: (driver.range_push("x"), driver.range_pop()),
    }
    found = {name: _calls(call, 60) for name, call in calls.items()}
    found["launched by Triton"] = float("triton" in starts[0].__name__)
    return found


def splits(bench: Bench, out: dict[str, Any]) -> None:
    """Where the host's time of each block's collectives goes, in a row, with the device behind a pause."""

    def ready(turn: int) -> None:
        if turn % 5 == 0:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(10 * MILLISECOND)

    for name, parameters in block_units().items():
        for timed in (False, True):  # the driver's calls apart, as their clock takes time itself
            session = bench.session({name: parameters}, PlanOptions(slots=2))
            transport: Any = session.transport
            clock = DriverClock(transport.driver) if timed else None
            shards, (grads, _) = bench.shards(parameters, 0), bench.gradients(parameters, 0)
            outs = session.new_outs(name, list(grads), bench.device)

            def gather(session: Any = session, name: str = name, shards: Any = shards) -> None:
                session.all_gather(name, shards).wait()
                session.release(name)

            def scatter(session: Any = session, name: str = name, grads: Any = grads, outs: Any = outs) -> None:
                ticket = session.reduce_scatter(name, grads, outs, 1.0, float(bench.world))
                if not ticket.wait_released():
                    ticket.wait()

            for collective, issue in (("all_gather", gather), ("reduce_scatter", scatter)):
                for turn in range(5):
                    ready(turn)
                    issue()
                row: dict[str, Any]
                if clock is None:
                    row = split(transport, collective, issue, 25, statistics.median, ready)
                    row = {key: round(value, 1) for key, value in row.items()}
                else:
                    clock.clear()
                    issue()
                    row = {kind: f"{count} in {spent:.1f} us" for kind, (count, spent) in clock.row().items()}
                out[f"{name} {collective}{' driver' if timed else ''}"] = row
                bench.say(f"split    {name:<6} {collective:<14} {row}")
            session.close()


def signal_times(bench: Bench, out: dict[str, Any]) -> None:
    """Microseconds from a signal to the end of the peer's wait, by stream write and by copy, idle and loaded.

    The signal goes round through all ranks; a round is one way from each to the next.
    """
    if bench.world < 2:
        return
    size, rounds = 1 << 28, 100
    session = bench.session({"room": (Parameter("room.weight", (bench.world, size)),)}, PlanOptions(slots=1))
    transport: Any = session.transport
    driver, rank = transport.driver, bench.rank
    own, other = transport.arena.addresses[rank], transport.arena.addresses[(rank + 1) % bench.world]
    stream, load = transport.stream("check"), transport.stream("load")
    outside, loading = torch.cuda.ExternalStream(stream), torch.cuda.ExternalStream(load)
    arrays = [(ctypes.c_int64 * 1)(value) for value in (own + size, other, size)]
    place, value = transport.abort_offset + 2048, 0
    for mode in ("write", "copy"):
        for loaded in (False, True):
            results = []
            for _ in range(5):
                bench.align(session)
                outside.wait_stream(torch.cuda.current_stream())
                loading.wait_stream(torch.cuda.current_stream())
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if loaded:
                    for _ in range(8):
                        driver.check(driver.copy_batch(*map(ctypes.addressof, arrays), 1, load), "load")
                begin.record(outside)
                for turn in range(rounds):
                    value += 1
                    word = (value * STRIDE) & 0xFFFFFFFF
                    for first in (rank == 0, rank != 0):
                        if not first:
                            driver.check(driver.wait_value(stream, own + place, word, 0), "wait")
                        elif mode == "write":
                            driver.check(driver.write_value(stream, other + place, word, 0), "write")
                        else:
                            source = transport.value_table + 4 * (value % VALUES)
                            driver.check(driver.copy(other + place, source, 4, stream), "copy")
                    if turn == 0:
                        begin.record(outside)
                end.record(outside)
                torch.cuda.synchronize()
                dist.barrier()
                results.append(begin.elapsed_time(end) * 1e3 / (rounds - 1) / bench.world)
            key = f"{mode}, {'loaded' if loaded else 'idle'}"
            out[key] = round(statistics.median(results), 2)
            bench.say(f"signals  {key:<16} {out[key]:6.2f} us one way")
    session.close()


def trace(bench: Bench, out: dict[str, Any], folder: str) -> None:
    """Kernels and copies of one gather and one reduction, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    units = {
        "llama": block_units()["llama"],
        "dims": (Parameter("d.a", (64, 160, 400), 1), Parameter("d.b", (2048, 4096), 1)),
    }
    session = bench.session(units, PlanOptions(slots=None))
    for unit, parameters in units.items():
        shards = bench.shards(parameters, 0)
        grads, _ = bench.gradients(parameters, 0)
        outs = session.new_outs(unit, list(grads), bench.device)
        jobs: dict[str, Callable[[], None]] = {
            "gather": lambda unit=unit, shards=shards: session.all_gather(unit, shards).wait(),  # type: ignore[misc]
            "scatter": lambda unit=unit, g=grads, o=outs: session.reduce_scatter(unit, g, o).wait(),  # type: ignore[misc]
        }
        for label, job in jobs.items():
            for _ in range(2):
                job()
            torch.cuda.synchronize()
            dist.barrier()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                bench.align(session)
                job()
                torch.cuda.synchronize()
            rows: dict[str, list[float]] = {}
            for event in profiler.events():
                if str(event.device_type).endswith("CUDA") and "spin" not in event.name:
                    row = rows.setdefault(event.name.split("(")[0][:60], [0, 0.0])
                    row[0] += 1
                    row[1] += event.device_time_total / 1e3
            out[f"{unit} {label}"] = rows
            for name, (count, total) in sorted(rows.items(), key=lambda item: -item[1][1])[:6]:
                bench.say(f"trace    {unit:<6} {label:<8} {name:<60} x{count:<4} {total:8.3f} ms")
            if bench.rank == 0 and unit == "llama":
                profiler.export_chrome_trace(os.path.join(folder, f"trace_{label}.json.gz"))
        del grads, outs
    session.close()
