"""The kernels by themselves on one GPU: bandwidth over the number of CTAs, SM time, and host time of a launch.

    python benchmarks/kernels.py --out kernels.json

GB/s counts every byte that a kernel has to read or write, once. SM time is CTAs × duration: what a kernel takes
away from compute that runs beside it. The ceilings in the same run: a copy by all SMs, and the stock way to the
same result. Every configuration's result is compared with the reference ("wrong" counts differing elements).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common import facts, median, table
from tide.kernels import AccumulateTable, PlaceItem, PlaceTable, SumItem, Tuning

CTAS = (8, 16, 32, 64, 132)

# stages=0 takes what fits `shared`; stages=1 does not copy ahead.
CONFIGURATIONS = (
    Tuning(block=2048, warps=8, stages=1),
    Tuning(block=8192, warps=16, stages=1),
    Tuning(block=2048, warps=4, shared=128 << 10),
    Tuning(block=2048, warps=8, shared=128 << 10),
    Tuning(block=4096, warps=8, shared=64 << 10),
    Tuning(block=4096, warps=8, shared=128 << 10),
    Tuning(block=4096, warps=8, shared=192 << 10),
    Tuning(block=4096, warps=16, shared=128 << 10),
    Tuning(block=4096, warps=16, shared=192 << 10),
    Tuning(block=8192, warps=16, shared=192 << 10),
    Tuning(block=2048, warps=4, shared=192 << 10, bulk=True),
    Tuning(block=4096, warps=4, shared=192 << 10, bulk=True),
    Tuning(block=4096, warps=8, shared=192 << 10, bulk=True),
    Tuning(block=8192, warps=8, shared=192 << 10, bulk=True),
    Tuning(block=8192, warps=16, shared=192 << 10, bulk=True),
)

COLUMNS = (
    ("what", "kernel", ""),
    ("block", "block", "d"),
    ("warps", "warps", "d"),
    ("stages", "stages", "d"),
    ("bulk", "bulk", "d"),
    ("ctas", "CTAs", "d"),
    ("ms", "ms", ".3f"),
    ("gbps", "GB/s", ".0f"),
    ("sm_ms", "SM·ms", ".1f"),
    ("wrong", "wrong", "d"),
)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call. What it touches exceeds the L2 cache, so nothing is flushed."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 10) -> float:
    """Host microseconds of a call; the best round, as the figure is the code's and not the machine's."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Number of elements that are not equal."""
    return int((found != expected).sum())


def row(
    what: str, milliseconds: float, moved: int, ctas: int | None, tuning: Tuning | None, **more: Any
) -> dict[str, Any]:
    """One result."""
    made = {"what": what, "ctas": ctas, "ms": milliseconds, "gbps": moved / milliseconds / 1e6, **more}
    if ctas is not None:
        made["sm_ms"] = ctas * milliseconds
    if tuning is not None:
        made = {**asdict(tuning), "configured_stages": tuning.stages, **made}
    return made


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print results, fastest configuration of each number of CTAs marked by its place."""
    print(table(rows, COLUMNS), flush=True)


def sweep(
    what: str,
    moved: int,
    loaded: int,
    make: Callable[[Tuning], Any],
    launch: Callable[[Any], None],
    check: Callable[[], int],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Every configuration with every number of CTAs; ``loaded`` is bytes read for each element."""
    rows = []
    for configuration in CONFIGURATIONS:
        if options.bulk and not configuration.bulk:
            continue
        for ctas in options.ctas:
            tuning = Tuning(**{**asdict(configuration), "ctas": ctas})
            made = make(tuning)
            milliseconds = timed(lambda made=made: launch(made), options.repeats)
            stages = tuning.stages_for(loaded)
            rows.append(row(what, milliseconds, moved, ctas, tuning) | {"stages": stages, "wrong": check()})
    show(rows)
    for ctas in options.ctas:
        best = max((found for found in rows if found["ctas"] == ctas), key=lambda found: found["gbps"])
        print(
            f"best of {ctas} CTAs: {best['gbps']:.0f} GB/s, block {best['block']}, {best['warps']} warps, "
            f"{best['stages']} stages, bulk {best['bulk']}"
        )
    print(flush=True)
    return rows


def accumulate(pieces: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """bf16 pieces into fp32, with a divisor, as in a reduce-scatter among ``pieces`` ranks."""
    count = options.mib << 18
    parts = [torch.randn(count, device="cuda").bfloat16() for _ in range(pieces)]
    out = torch.empty(count, device="cuda")
    item = SumItem(tuple(part.data_ptr() for part in parts), 0, out.data_ptr(), 1, count, (0,) * pieces, 0, 0)
    expected = parts[0].float()
    for part in parts[1:]:
        expected += part
    expected /= torch.full((), float(pieces), device="cuda")

    def check() -> int:
        found = wrong(out, expected)
        out.zero_()
        return found

    rows = sweep(
        f"accumulate {pieces} x bf16 to fp32",
        count * (2 * pieces + 4),
        2 * pieces,
        lambda tuning: AccumulateTable([item], tuning=tuning),
        lambda made: made.launch(divisor=float(pieces)),
        check,
        options,
    )

    def stock() -> None:
        torch.add(parts[0], 0.0, out=out)
        for part in parts[1:]:
            out.add_(part)
        out.mul_(1.0 / pieces)

    return [*rows, row(f"torch, {pieces} pieces", timed(stock, options.repeats), count * (2 * pieces + 4), None, None)]


def place(options: argparse.Namespace) -> list[dict[str, Any]]:
    """fp32 shards into bf16 storage: one flat block, and one in many strided runs."""
    count = options.mib << 18
    source = torch.randn(count, device="cuda")
    out = torch.empty(2 * count, dtype=torch.bfloat16, device="cuda")
    expected = source.bfloat16()
    rows = []
    for what, runs, pitch in (("flat", 1, 0), ("strided", count // 4096, 8192)):
        item = PlaceItem(
            source.data_ptr(), out.data_ptr(), runs, count // runs, 4096, pitch, torch.float32, torch.bfloat16
        )
        view = out.as_strided((runs, count // runs), (max(pitch, 1), 1))

        def check(view: torch.Tensor = view) -> int:
            found = wrong(view, expected.view(view.shape))
            out.zero_()
            return found

        rows += sweep(
            f"place fp32 to bf16, {what}",
            6 * count,
            4,
            lambda tuning, item=item: PlaceTable([item], tuning=tuning),
            lambda made: made.launch(),
            check,
            options,
        )
        stock = timed(lambda view=view: view.copy_(source.view(view.shape)), options.repeats)
        rows.append(row(f"torch copy, {what}", stock, 6 * count, None, None))
    return rows


def ceiling(options: argparse.Namespace) -> dict[str, Any]:
    """A copy by all SMs: the bandwidth that a kernel could have."""
    source = torch.randn(options.mib << 18, device="cuda")
    out = torch.empty_like(source)
    return row("torch copy fp32", timed(lambda: out.copy_(source), options.repeats), 8 * source.numel(), None, None)


def host() -> dict[str, float]:
    """Host time of a launch, and of a launch with other addresses, with 1 and with 64 items."""
    source = torch.zeros(64 << 12, device="cuda")
    half = torch.zeros(64 << 12, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    found = {}
    for count in (1, 64):
        starts = [index << 12 for index in range(count)]
        cast = PlaceTable(
            [
                PlaceItem(
                    source[start:].data_ptr(),
                    half[start:].data_ptr(),
                    1,
                    4096,
                    0,
                    0,
                    torch.float32,
                    torch.bfloat16,
                )
                for start in starts
            ]
        )
        total = AccumulateTable(
            [
                SumItem((half[start:].data_ptr(),) * 2, 0, source[start:].data_ptr(), 1, 4096, (0, 0), 0, 0)
                for start in starts
            ]
        )
        ways = [[source[start + shift :].data_ptr() for start in starts] for shift in (0, 4)]
        turn = [0]

        def move(cast: PlaceTable = cast, ways: list[list[int]] = ways, turn: list[int] = turn) -> None:
            turn[0] = 1 - turn[0]
            cast.move(ways[turn[0]], stream=stream)

        found[f"place launch, {count} items"] = host_us(lambda cast=cast: cast.launch(stream))
        found[f"place launch, current stream, {count} items"] = host_us(lambda cast=cast: cast.launch())
        found[f"place move, {count} items"] = host_us(move)
        found[f"accumulate launch, {count} items"] = host_us(lambda total=total: total.launch(1.0, 2.0, stream))
    for name, value in found.items():
        print(f"{name:<40} {value:6.1f} µs")
    return found


def main() -> None:
    """Run all, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--mib", type=int, default=128, help="MiB of a sum's fp32 output (default 128)")
    parser.add_argument("--repeats", type=int, default=10, help="timed launches of a configuration (default 10)")
    parser.add_argument("--ctas", type=int, nargs="+", default=CTAS, help="numbers of CTAs")
    parser.add_argument("--bulk", action="store_true", help="only configurations with bulk copies")
    parser.add_argument("--pieces", type=int, nargs="*", default=(2, 8), help="sums to run, by pieces (default 2 8)")
    parser.add_argument("--sums-only", action="store_true", help="neither casts nor host times")
    options = parser.parse_args()
    torch.manual_seed(0)
    times = {} if options.sums_only else host()
    rows: list[dict[str, Any]] = []

    def take(found: list[dict[str, Any]], shown: Sequence[dict[str, Any]]) -> None:
        rows.extend(found)
        show(shown)
        if options.out is not None:
            made = {"benchmark": "kernels", **facts(), "mib": options.mib, "host_us": times, "results": rows}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(made, indent=1) + "\n")

    found = [ceiling(options)]
    take(found, found)
    for pieces in options.pieces:
        found = accumulate(pieces, options)
        take(found, found[-1:])
    if not options.sums_only:
        found = place(options)
        take(found, [entry for entry in found if entry["what"].startswith("torch")])


if __name__ == "__main__":
    main()
