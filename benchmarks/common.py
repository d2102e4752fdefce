"""What the benchmarks share: start-up, timing, tables, and results with the facts of the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from records import RESULTS, file_name
from tide.transport.cuda import nccl


def start() -> tuple[int, int]:
    """Joins the job that torchrun started; returns rank and world size."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    dist.all_reduce(torch.ones(1, device=device))  # NCCL wants a first collective before windows are registered
    torch.cuda.synchronize()
    return dist.get_rank(), dist.get_world_size()


def parser(description: str | None, repeats: int = 15) -> argparse.ArgumentParser:
    """Argument parser with the options every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="JSON file to write; by default below benchmarks/results")
    made.add_argument("--repeats", type=int, default=repeats, help=f"timed repeats (default {repeats})")
    return made


def facts() -> dict[str, Any]:
    """Hardware, versions, commit and date of this run."""
    import triton

    root = Path(__file__).parent.parent
    commit = os.environ.get("TIDE_COMMIT") or _command(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    driver = _command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "gpus": min(ranks, torch.cuda.device_count()),
        "ranks": ranks,
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": nccl.load().version_text,
        "python": platform.python_version(),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE", "unset"),
    }


def _command(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Results:
    """Rows of a benchmark with the facts of the machine; the file holds what has been measured so far.

    Parameters
    ----------
    name : str
        Name of the benchmark.
    out : Path, optional
        JSON file; by default below benchmarks/results, named by benchmark, machine and date.
    **more
        Entries of the file beside ``results``.
    """

    def __init__(self, name: str, out: Path | None, **more: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.more = more
        self._made = {"benchmark": name, **facts()}
        self.path = out or RESULTS / file_name(self._made)

    def add(self, *rows: dict[str, Any]) -> None:
        """Takes rows, and writes all of them on rank 0: a run that is cut short leaves what it has."""
        self.rows += rows
        self.write()

    def write(self) -> None:
        """Writes the file on rank 0, at once or not at all."""
        if dist.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self._made, **self.more, "results": self.rows}, indent=1)
            part = self.path.with_suffix(".part")
            part.write_text(text + "\n")
            part.replace(self.path)


def agreed(value: float) -> float:
    """The largest of the ranks' values: what follows from a measurement must be the same on every rank.

    A loop whose length each rank takes from its own clock ends in different collectives, and hangs.
    """
    tensor = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


#: Clock cycles of the pause before each timed call, about 20 ms: the host then has a lead, as in training.
PAUSE = 40_000_000


_token: list[torch.Tensor] = []


def aligned_pause(cycles: int = PAUSE) -> None:
    """Holds the current stream for so many cycles, then until every rank's has come as far.

    The clocks of GPUs differ, and hosts leave a barrier at different times: without the meeting on the device, the
    slowest rank's time would count how late the others began.
    """
    if not _token:
        _token.append(torch.zeros(1, device="cuda"))
    torch.cuda._sleep(cycles)
    dist.all_reduce(_token[0])


def timed(call: Callable[[], Any], repeats: int, warmup: int = 3) -> list[float]:
    """Milliseconds of each call on the current stream; ranks start together, the slowest rank counts."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        aligned_pause()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    tensor = torch.tensor(times, device="cuda")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def host_pace(repeats: int = 9) -> float:
    """Microseconds of a fixed piece of host work: 500 turns of a Python loop and 20 event records.

    Hosts of virtual machines run at half their pace for seconds on end. Taken beside a host time, it tells a slow
    second from a slow variant. Medians.
    """
    event, found = torch.cuda.Event(), []
    for _ in range(repeats):
        began = time.perf_counter()
        total = 0
        for turn in range(500):
            total += turn
        for _ in range(20):
            event.record()
        found.append((time.perf_counter() - began) * 1e6)
    return median(found)


def median(values: Iterable[float]) -> float:
    """Median."""
    return float(statistics.median(values))


def table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    """Aligned text; ``columns`` are ``(key, heading, format)``, absent values show as a dash."""
    cells = [[heading for _, heading, _ in columns]]
    for row in rows:
        cells.append([format(row[key], fmt) if row.get(key) is not None else "–" for key, _, fmt in columns])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
