"""The CUDA transport by itself on real GPUs: right bytes under stress, and times against the copy engines.

    torchrun --nproc-per-node 2 benchmarks/cuda_check.py --out cuda_check.json

Sections (``--only`` picks some): ``ceiling``, ``correct``, ``stress``, ``time``, ``variants``, ``sweep``,
``issue``, ``split``, ``signals``, ``trace``, ``fail``. What is timed is aligned on the device first, by a small gather
behind a kernel that sleeps, so that neither the host nor a late peer is in the figure; each figure is the slowest
rank's, the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cuda_check_micro import issue, signal_times, splits, trace
from cuda_check_support import Bench, bf16_equal, block_units, whole_of
from tide.compiler.model import Parameter
from tide.compiler.options import MIB, ROUTES, PlanOptions
from tide.errors import PeerError
from tide.kernels.launch import Tuning

P = Parameter
SMALL: dict[str, tuple[Parameter, ...]] = {
    "uneven0": (
        P("u0.a", (1301, 257)),
        P("u0.b", (3, 5000)),
        P("u0.c", (1,)),
        P("u0.d", (5, 12901)),
        P("u0.e", (0, 4)),
    ),
    "dims0": (
        P("d0.a", (64, 160, 100), 1),
        P("d0.b", (40, 60, 240), 2),
        P("d0.c", (30, 11), 1),
        P("d0.d", (2048, 1024), 1),
    ),
    "tiny0": tuple(P(f"t0.{i}", (17 + i,)) for i in range(40)),
    "block0": (P("b0.q", (1024, 1024)), P("b0.up", (4096, 1024)), P("b0.norm", (1024,)), P("b0.bias", (4096,))),
    "mixed0": (
        P("m0.a", (333, 100), 0, "float32", "float32", "float32"),
        P("m0.b", (64, 128), 0, "bfloat16", "bfloat16"),
        P("m0.c", (99, 31), 0, "float16", "float32", "float16"),
        P("m0.d", (64, 33), 0, "bfloat16", "float32", None),
    ),
}


def small_units() -> dict[str, tuple[Parameter, ...]]:
    """Three of each kind, so that slots change hands."""
    return {
        name.replace("0", str(turn)): tuple(replace(p, name=f"{turn}.{p.name}") for p in parameters)
        for turn in range(3)
        for name, parameters in SMALL.items()
    }


# Correctness --------------------------------------------------------------------------------------


def correct(bench: Bench, out: dict[str, Any], units: Mapping[str, tuple[Parameter, ...]] | None = None) -> None:
    """Each block once, bit for bit: gathers against the whole, reductions against the sum in float32."""
    # Where ranks share devices, the large blocks would only take their time.
    blocks = block_units() if bench.world <= torch.cuda.device_count() else {}
    units = units if units is not None else {**blocks, **SMALL}
    for name, parameters in units.items():
        session = bench.session({name: parameters}, PlanOptions(slots=2), poison=True)
        wrong = 0
        for turn in range(2):
            shards = bench.shards(parameters, turn)
            session.all_gather(name, shards).wait()
            for index, p in enumerate(parameters):
                wrong += int(bf16_equal(session.whole(name)[p.name], whole_of(p, index, turn)))
            grads, expected = bench.gradients(parameters, turn)
            outs = session.new_outs(name, list(grads), bench.device)
            session.reduce_scatter(name, grads, outs, divisor=float(bench.world)).wait()
            wrong += sum(int((outs[i] != expected[i]).sum()) for i in grads)
            session.release(name)
        out[name] = bench.total(wrong)
        bench.say(f"correct  {name:<16} {out[name]} wrong elements")
        session.close()


def stress(bench: Bench, out: dict[str, Any], steps: int) -> None:
    """Gathers and reductions of many units over two slots, overlapping, delayed at random, poisoned between."""
    for signals in ("write", "copy"):
        units = small_units()
        session = bench.session(units, PlanOptions(slots=2, chunk_bytes=1 * MIB), poison=True, signals=signals)
        # Each rank draws its own delays, and all draw the same units.
        shared, own = bench.random(0), bench.random(1 + bench.rank)
        shards = {name: bench.shards(rows, 0) for name, rows in units.items()}
        wholes = {name: [whole_of(p, i, 0) for i, p in enumerate(rows)] for name, rows in units.items()}
        grads = {name: bench.gradients(rows, 0) for name, rows in units.items()}
        outs = {name: session.new_outs(name, list(grads[name][0]), bench.device) for name in units}
        gather, reduce = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        torch.cuda.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
        held: list[tuple[str, Any]] = []
        reducing: list[tuple[str, Any]] = []
        begin, collectives = time.perf_counter(), 0
        transport: Any = session.transport

        def delay(stream: Any = None, own: Any = own) -> None:
            if own.random() < 0.3:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(int(own.random() ** 4 * 2e6))

        for _ in range(steps):
            name = shared.choice(list(units))
            if session.occupant(name) is not None:
                unit, ticket = held.pop(0)
                _finish(session, unit, ticket, wholes[unit], wrong, delay)
                if session.occupant(name) is not None:
                    continue
            with torch.cuda.stream(gather):
                delay()
                held.append((name, session.all_gather(name, shards[name])))
            if own.random() < 0.2:
                delay(torch.cuda.ExternalStream(transport.stream(own.choice(["ag.node", "rs.push", "rs.sum"]))))
            if shared.random() < 0.7:
                unit = shared.choice(list(units))
                if len(reducing) > 1 or any(unit == other for other, _ in reducing):
                    for other, ticket in reducing:
                        ticket.wait()
                        for i, expected in grads[other][1].items():
                            wrong += (outs[other][i] != expected).sum()
                    reducing.clear()
                for tensor in outs[unit].values():
                    tensor.fill_(float("nan"))
                reduce.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(reduce):
                    delay()
                    ticket = session.reduce_scatter(unit, grads[unit][0], outs[unit], divisor=float(bench.world))
                    reducing.append((unit, ticket))
                collectives += 1
            collectives += 1
            while len(held) > shared.choice([0, 1]):
                unit, ticket = held.pop(0)
                _finish(session, unit, ticket, wholes[unit], wrong, delay)
        for other, ticket in reducing:
            ticket.wait()
            for i, expected in grads[other][1].items():
                wrong += (outs[other][i] != expected).sum()
        for unit, ticket in held:
            _finish(session, unit, ticket, wholes[unit], wrong, delay)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        out[signals] = {"collectives": collectives, "wrong": bench.total(int(wrong)), "seconds": round(seconds, 2)}
        bench.say(f"stress   signals={signals}: {out[signals]}")
        session.close()


def _finish(
    session: Any, unit: str, ticket: Any, whole: Sequence[torch.Tensor], wrong: torch.Tensor, delay: Callable[[], None]
) -> None:
    ticket.wait()
    delay()
    for tensor, expected in zip(session.whole(unit).values(), whole, strict=True):
        wrong += bf16_equal(tensor, expected)
    session.release(unit)


# Times --------------------------------------------------------------------------------------------


def times(bench: Bench, out: dict[str, Any]) -> None:
    """Both collectives of each block, alone, one after another, and beside each other."""
    for name, parameters in block_units().items():
        twice = {f"{name}{i}": tuple(replace(p, name=f"{i}.{p.name}") for p in parameters) for i in range(2)}
        session = bench.session(twice, PlanOptions(slots=2))
        out[name] = _time_block(bench, session, twice, "as compiled")
        session.close()


def _time_block(bench: Bench, session: Any, units: dict[str, Any], label: str, only: str = "") -> dict[str, Any]:
    first, second = units
    crossing = sum(2 * p.numel for p in units[first]) * (bench.world - 1) // bench.world
    row: dict[str, Any] = {"bytes": crossing}

    def note(key: str, seconds: float, scale: float = 1.0) -> None:
        rate = scale * crossing / seconds / 1e9
        share = rate / bench.ceiling if bench.ceiling else 0.0
        row[key] = {"ms": round(seconds * 1e3, 4), "GB/s": round(rate, 1), "of ceiling": round(share, 3)}
        figures = f"{seconds * 1e3:8.3f} ms {rate:7.1f} GB/s {share:6.1%}"
        bench.say(f"time     {first[:-1]:<6} {label:<18} {key:<24} {figures}")

    def host(key: str, work: Callable[[], None], repeats: int) -> None:
        row[f"host us {key}"] = found = {"after idle": bench.host(work), "in a row": bench.host_in_a_row(work, repeats)}
        bench.say(f"host     {first[:-1]:<6} {label:<18} {key:<24} {found}")

    def gather() -> None:
        session.all_gather(first, shards[first]).wait()
        session.release(first)

    def in_turn() -> None:
        # As in training: the next unit is asked for from a stream that does not wait for compute.
        tickets = []
        bench.side.wait_stream(torch.cuda.current_stream())
        for i in range(8):
            unit = (first, second)[i % 2]
            with torch.cuda.stream(bench.side):
                tickets.append((unit, session.all_gather(unit, shards[unit])))
            if i:
                done, ticket = tickets[i - 1]
                ticket.wait()
                session.release(done)
        tickets[-1][1].wait()
        session.release(tickets[-1][0])

    if only != "scatter":
        shards = {unit: bench.shards(rows, 0) for unit, rows in units.items()}
        note("gather", bench.timed(gather))
        note("gathers in turn", bench.timed(in_turn, 7) / 8)
        host("gather", gather, 20)
    if only == "gather":
        return row
    grads, _ = bench.gradients(units[first], 0)
    outs = session.new_outs(first, list(grads), bench.device)
    moved = {i: [g, g.clone()] for i, g in grads.items()}
    turn = [0]

    def scatter() -> None:
        session.reduce_scatter(first, grads, outs, divisor=float(bench.world)).wait()

    def scatter_moved() -> None:
        turn[0] += 1
        session.reduce_scatter(first, {i: g[turn[0] % 2] for i, g in moved.items()}, outs).wait()

    def both() -> None:
        bench.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(bench.side):
            ticket = session.all_gather(first, shards[first])
        scatter()
        ticket.wait()
        session.release(first)

    note("scatter", bench.timed(scatter))
    host("scatter", scatter, 10)
    if not only:
        host("scatter, gradients moved", scatter_moved, 10)
        note("gather beside scatter", bench.timed(both), 2.0)
    return row


def variants(bench: Bench, out: dict[str, Any]) -> None:
    """Both routes of the all-gather, with either kind of signal."""
    for name, parameters in block_units().items():
        twice = {f"{name}{i}": tuple(replace(p, name=f"{i}.{p.name}") for p in parameters) for i in range(2)}
        for signals in ("write", "copy"):
            for route in ROUTES:
                session = bench.session(twice, PlanOptions(slots=2, route=route), signals=signals)
                label = f"{route}, {signals}"
                out[f"{name}, {label}"] = _time_block(bench, session, twice, label)
                out[f"{name}, {label}, wrong"] = _wrong(bench, session, twice)
                session.close()


def _wrong(bench: Bench, session: Any, units: dict[str, Any]) -> int:
    """Wrong elements of a gather of each unit, over all ranks."""
    wrong = 0
    for unit, parameters in units.items():
        session.all_gather(unit, bench.shards(parameters, 5)).wait()
        for index, p in enumerate(parameters):
            wrong += int(bf16_equal(session.whole(unit)[p.name], whole_of(p, index, 5)))
        session.release(unit)
    wrong = bench.total(wrong)
    bench.say(f"variants {wrong} wrong elements in {', '.join(units)}")
    return wrong


def sweep(bench: Bench, out: dict[str, Any]) -> None:
    """CTAs and tiles of the kernels, and the size of a chunk."""
    parameters = block_units()["llama"]
    units = {"llama0": parameters}
    crossing = sum(2 * p.numel for p in parameters) * (bench.world - 1) // bench.world
    shards = bench.shards(parameters, 0)
    grads, _ = bench.gradients(parameters, 0)
    for mib in (25, 51, 102, 204):
        session = bench.session(units, PlanOptions(slots=2, chunk_bytes=mib * MIB))
        outs = session.new_outs("llama0", list(grads), bench.device)
        transport: Any = session.transport

        def scatter(session: Any = session, outs: Any = outs) -> None:
            session.reduce_scatter("llama0", grads, outs).wait()

        tunings = [Tuning(ctas=ctas) for ctas in (8, 16, 24, 32, 48, 64, 132)]
        if mib == 51:
            tunings += [
                Tuning(ctas=24, warps=w, block=b, shared=s << 10) for w, b, s in ((4, 4096, 128), (16, 8192, 192))
            ]
            tunings += [Tuning(ctas=24, shared=192 << 10), Tuning(ctas=24, block=2048), Tuning(ctas=24, stages=1)]
        for tuning in tunings if mib in (51, 102) else [Tuning(ctas=32)]:
            _retune(transport, accumulate=tuning)
            seconds = bench.timed(scatter, 7)
            share = crossing / seconds / 1e9 / bench.ceiling
            shape = f"{tuning.warps} warps, tile {tuning.block}, {tuning.shared >> 10} K, {tuning.stages} stages"
            label = f"{mib} MiB, {tuning.ctas} CTAs, {shape}"
            out[f"scatter, chunk {label}"] = {"ms": round(seconds * 1e3, 3), "of ceiling": round(share, 3)}
            bench.say(
                f"sweep    chunk {label:<52} {seconds * 1e3:7.3f} ms {share:6.1%} host {bench.host(scatter, 9)} us"
            )
        if mib == 51:
            for ctas in (8, 16, 32, 64, 132):
                _retune(transport, place=Tuning(ctas=ctas))

                def gather(session: Any = session) -> None:
                    session.all_gather("llama0", shards).wait()
                    session.release("llama0")

                seconds = bench.timed(gather, 7)
                out[f"gather, {ctas} CTAs"] = {"ms": round(seconds * 1e3, 3)}
                bench.say(f"sweep    gather, {ctas} CTAs {seconds * 1e3:7.3f} ms")
        session.close()


def _retune(transport: Any, **tunings: Tuning) -> None:
    torch.cuda.synchronize()
    for name, tuning in tunings.items():
        setattr(transport._device, name, tuning)
    transport._lowered.clear()


def fail(bench: Bench, out: dict[str, Any]) -> None:
    """The last rank stays away from a gather: the others say so within the deadline, and nothing hangs."""
    units = {"block0": SMALL["block0"]}
    session: Any = bench.session(units, PlanOptions(slots=2), timeout=3.0)
    shards = bench.shards(SMALL["block0"], 0)
    session.all_gather("block0", shards).wait()
    torch.cuda.synchronize()
    dist.barrier()
    begin, message = time.perf_counter(), "nothing was raised"
    try:
        if bench.rank < bench.world - 1:
            session.all_gather("block0", shards).synchronize()
        else:
            time.sleep(5)
            session.all_gather("block0", shards).synchronize()
            time.sleep(2)
            session.all_gather("block0", shards).synchronize()
    except PeerError as error:
        message = str(error)
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    session.close()
    out[f"rank {bench.rank}"] = {"seconds": round(seconds, 2), "message": message}
    print(
        f"fail     rank {bench.rank}: {seconds:.2f} s: {message} (closed in {time.perf_counter() - begin:.2f} s)",
        flush=True,
    )
    dist.barrier()


SECTIONS = ("ceiling", "correct", "stress", "time", "variants", "sweep", "issue", "split", "signals", "trace", "fail")


def main() -> None:
    """Runs the sections."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", default="")
    options.add_argument("--only", default=",".join(SECTIONS))
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--provider", default=None)
    options.add_argument("--nodes", type=int, default=1, help="virtual nodes")
    given = options.parse_args()
    only = given.only.split(",")
    rank = int(os.environ["LOCAL_RANK"])
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    bench = Bench(given.provider, given.nodes)
    results: dict[str, Any] = {"environment": bench.environment()}
    bench.say(json.dumps(results["environment"]))
    sections: dict[str, Callable[[dict[str, Any]], None]] = {
        "ceiling": bench.measure_ceiling,
        "correct": lambda out: correct(bench, out),
        "stress": lambda out: stress(bench, out, given.steps),
        "time": lambda out: times(bench, out),
        "variants": lambda out: variants(bench, out),
        "sweep": lambda out: sweep(bench, out),
        "issue": lambda out: issue(bench, out),
        "split": lambda out: splits(bench, out),
        "signals": lambda out: signal_times(bench, out),
        "trace": lambda out: trace(bench, out, os.path.dirname(given.out) or "."),
        "fail": lambda out: fail(bench, out),
    }
    for name in only:
        begin = time.perf_counter()
        try:
            sections[name](results.setdefault(name, {}))
        except Exception:
            # The other ranks may wait for this one: the launcher ends them.
            traceback.print_exc()
            os._exit(1)
        bench.say(f"-- {name}: {time.perf_counter() - begin:.1f} s")
        if given.out and rank == 0:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
