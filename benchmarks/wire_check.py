"""Steps between nodes through NCCL's puts and signals, on virtual nodes of one machine: no network is crossed.

    python benchmarks/wire_check.py --out wire_check.json              # starts the ranks of every section itself

Each section runs in ranks of its own under a time limit, so that one that hangs is told and ends. Topologies are
``nodes x ranks a node``; where there are more ranks than GPUs, ranks share them (NCCL_MULTI_RANK_GPU_ENABLE=1).

``order``     does one communicator hold back a put behind a wait of another stream (then more of them pay)?
``counters``  are signal counters apart for each index and context?
``raw``       1 GiB by ncclPutSignal beside the same by copy engine
``correct``   both collectives, bit for bit
``stress``    many of them, overlapping, delayed at random, poisoned between
``bytes``     bytes that each rank puts, beside the least that any schedule has to
``time``      both collectives of a Llama-3.1-70B block and the host's time, by puts and by copies
``late``      a rank that comes after the deadline: the others say so, and all end by themselves
``never``     a rank that never comes: the others say so, and end
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECTIONS = ("order", "counters", "raw", "correct", "stress", "bytes", "time", "late", "never")
GIB = 1 << 30


# Ranks --------------------------------------------------------------------------------------------


class Check:
    """The sections, as one rank runs them.

    Parameters
    ----------
    nodes : int
        Virtual nodes.
    communicators : int
        NCCL communicators, where a section does not compare them.
    signals : str
        What tells of a put, likewise.
    steps : int
        Of the stress.
    """

    def __init__(self, nodes: int, communicators: int, signals: str, steps: int) -> None:
        from cuda_check_support import Bench

        self.steps = steps
        self.bench = Bench(None, nodes, puts="nccl", communicators=communicators, wire_signals=signals)
        self.rank, per_node = self.bench.rank, self.bench.topology.gpus_per_node
        self.peer = (self.rank + per_node) % self.bench.world  # at the same place of the next node
        self.source = (self.rank - per_node) % self.bench.world

    def opened(self, size: int = 1 << 20, **settings: Any) -> tuple[Any, Any, Any]:
        """A session whose arena has room, its transport and its wire."""
        from tide.compiler.model import Parameter
        from tide.compiler.options import PlanOptions

        rows: dict[str, tuple[Parameter, ...]] = {"room": (Parameter("room.weight", (self.bench.world, size)),)}
        session: Any = self.bench.session(rows, PlanOptions(slots=1), **settings)
        return session, session.transport, session.transport.wire

    def meet(self) -> None:
        """All ranks, devices included."""
        import torch
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier()

    @staticmethod
    def passed(transport: Any, stream: int, seconds: float) -> bool:
        """Whether a stream comes to its end within some time."""
        driver, event = transport.driver, transport.driver.new_event()
        driver.check(driver.event_record(event, stream), "record")
        end = time.monotonic() + seconds
        while time.monotonic() < end and not driver.done(event):
            time.sleep(0.002)
        return bool(driver.done(event))

    def order(self, out: dict[str, Any]) -> None:
        """Rank 0 waits on one stream, then puts on another; its peer signals only after it has looked for the put."""
        import torch.distributed as dist

        from tide.compiler.steps import Lane

        for communicators in (1, 4):
            session, transport, wire = self.opened(communicators=communicators)
            first, second = transport.stream("check.a"), transport.stream("check.b")
            unit = session.compiled.spec.units[0].name
            there, back = wire.channel(unit, Lane.FREE), wire.channel(unit, Lane.PARTIAL)
            self.meet()
            came = False
            if self.rank == 0:
                wire.wait(first, [(1, self.peer, back)])()
                wire.put(second, self.peer, [(transport.arena.addresses[0], 0, 4096)], there)()
                came = self.passed(transport, second, 2.0)
            dist.barrier()
            if self.source == 0:
                wire.signal(first, 0, 1, back)()
                wire.wait(second, [(1, 0, there)])()
            self.meet()
            out[f"{communicators} communicator(s)"] = "streams independent" if came else "in order of issue"
            session.close()

    def counters(self, out: dict[str, Any]) -> None:
        """The peer of rank 0 waits on one counter while rank 0 raises another; then its own."""
        import torch.distributed as dist

        from tide.compiler.steps import Lane

        session, transport, wire = self.opened()
        unit = session.compiled.spec.units[0].name
        stream, mine = transport.stream("check.a"), wire.channel(unit, Lane.FREE)
        others = {
            "another index": mine._replace(signal=mine.signal + 1),
            "another context": mine._replace(context=mine.context + 1),
        }
        for label, other in others.items():
            self.meet()
            early = late = False
            if self.rank == 0:
                wire.signal(stream, self.peer, 3, other)()
            dist.barrier()
            if self.source == 0:
                wire.wait(stream, [(1, 0, mine)])()
                early = self.passed(transport, stream, 0.5)
            dist.barrier()
            if self.rank == 0:
                wire.signal(stream, self.peer, 1, mine)()
            if self.source == 0:
                late = self.passed(transport, stream, 5.0)
                wire.wait(stream, [(3, 0, other)])()
            self.meet()
            if self.bench.total(int(early)):
                out[label] = "MIXED UP: a wait passed on another counter's signals"
            else:
                out[label] = "apart" if self.bench.total(int(late)) else "LOST: the wait did not pass on its own signal"
        session.close()

    def raw(self, out: dict[str, Any]) -> None:
        """All ranks at once, to the next node: put and wait, and the copy engine."""
        import torch

        from tide.compiler.steps import Lane

        session, transport, wire = self.opened(GIB)
        driver, channel = transport.driver, wire.channel(0, Lane.PARTIAL)  # no gather uses it
        own, far = (transport.arena.addresses[rank] for rank in (self.rank, self.peer))
        stream = transport.stream("check.a")
        outside = torch.cuda.ExternalStream(stream)
        given, taken = transport.arena_tensor(0, GIB, torch.uint8), transport.arena_tensor(GIB, GIB, torch.uint8)
        given.fill_(self.rank + 1)
        for size in (GIB, 64 << 20, 1 << 20):
            put = wire.put(stream, self.peer, [(own, GIB, size)], channel)
            wait = wire.wait(stream, [(1, self.source, channel)])
            arrays = [(ctypes.c_int64 * 1)(value) for value in (far + GIB, own, size)]

            def by_put(put: Any = put, wait: Any = wait) -> None:
                outside.wait_stream(torch.cuda.current_stream())
                put()
                wait()
                torch.cuda.current_stream().wait_stream(outside)

            def by_copy(arrays: Any = arrays) -> None:
                outside.wait_stream(torch.cuda.current_stream())
                driver.check(driver.copy_batch(*map(ctypes.addressof, arrays), 1, stream), "copy")
                torch.cuda.current_stream().wait_stream(outside)

            row: dict[str, Any] = {}
            taken.zero_()
            self.meet()
            row["put GB/s"] = round(size / self.bench.timed(by_put, 9) / 1e9, 1)
            row["wrong"] = self.bench.total(int((taken[:size] != self.source + 1).sum()))
            row["put host us"] = self.bench.host(by_put)
            row["copy GB/s"] = round(size / self.bench.timed(by_copy, 9) / 1e9, 1)
            out[f"{size >> 20} MiB"] = row
            self.bench.say(f"raw      {size >> 20} MiB: {row}")
        session.close()

    def correct(self, out: dict[str, Any]) -> None:
        """Small units of every kind, and one block between two ranks."""
        from cuda_check import SMALL, correct
        from cuda_check_support import block_units

        large = {"llama": block_units()["llama"]} if self.bench.world == 2 else {}
        correct(self.bench, out, {**SMALL, **large})

    def stress(self, out: dict[str, Any]) -> None:
        """As in cuda_check."""
        from cuda_check import stress

        stress(self.bench, out, self.steps)

    def bytes(self, out: dict[str, Any]) -> None:
        """Bytes that a rank puts for one block, the most of all ranks, and puts that carry them."""
        from cuda_check_support import block_units
        from tide.compiler.compile import compile_spec
        from tide.compiler.model import Mesh, ModelSpec, Unit
        from tide.compiler.options import PlanOptions
        from tide.compiler.steps import Put
        from tide.transport.cuda.wire import segments

        topology, world = self.bench.topology, self.bench.world
        for name, rows in block_units().items():
            unit = Unit(name, rows, Mesh((tuple(range(world)),)))
            compiled = compile_spec(ModelSpec((unit,), "bytes"), topology, PlanOptions(slots=1))
            elements = sum(p.numel for p in rows)
            # Every node has to get what the other nodes own, over the ports of its ranks; sums travel in float32.
            least = elements * (topology.nodes - 1) / topology.nodes / topology.gpus_per_node
            for collective, width in (("all_gather", 2), ("reduce_scatter", 4)):
                most = calls = 0
                for rank in range(world):
                    steps = [s for _, _, s in compiled.program(name, collective, rank).steps() if isinstance(s, Put)]
                    pieces = [piece for step in steps for piece in segments(step.transfers)]
                    most = max(most, sum(piece.length for piece in pieces))
                    calls = max(calls, len(pieces))
                ratio = most / (width * least)
                out[f"{name} {collective}"] = {"bytes": most, "of the least": round(ratio, 4), "puts": calls}

    def time(self, out: dict[str, Any]) -> None:
        """One block by each way of carrying the steps between nodes."""
        from dataclasses import replace

        from cuda_check import _time_block
        from cuda_check_support import block_units
        from tide.compiler.options import PlanOptions

        rows = block_units()["llama"]
        twice = {f"llama{i}": tuple(replace(p, name=f"{i}.{p.name}") for p in rows) for i in range(2)}
        self.bench.measure_ceiling({})
        ways: dict[str, dict[str, Any]] = {
            f"{signals}, {number} comm.": {"wire_signals": signals, "communicators": number}
            for signals, number in (("nccl", 1), ("nccl", 4), ("word", 1), ("word", 4))
        }
        for label, settings in {**ways, "copies": {"puts": "copy"}}.items():
            session = self.bench.session(twice, PlanOptions(slots=2), **settings)
            out[label] = _time_block(self.bench, session, twice, label)
            session.close()

    def late(self, out: dict[str, Any]) -> None:
        """The last rank comes 3 s after the deadline."""
        self._missing(out, comes=True)

    def never(self, out: dict[str, Any]) -> None:
        """The last rank never comes."""
        self._missing(out, comes=False)

    def _missing(self, out: dict[str, Any], comes: bool) -> None:
        import torch
        import torch.distributed as dist

        from cuda_check import SMALL
        from tide.compiler.options import PlanOptions
        from tide.errors import PeerError
        from tide.transport.cuda import watchdog

        watchdog.RESPITE = 8.0
        session: Any = self.bench.session({"block0": SMALL["block0"]}, PlanOptions(slots=2), timeout=3.0)
        shards = self.bench.shards(SMALL["block0"], 0)
        session.all_gather("block0", shards).wait()
        torch.cuda.synchronize()
        dist.barrier()
        begin, message = time.perf_counter(), "nothing was raised"
        if self.rank == self.bench.world - 1:
            time.sleep(6 if comes else 15)
            if not comes:
                os._exit(0)
        try:
            session.all_gather("block0", shards).synchronize()
        except PeerError as error:
            message = str(error)
        row = {"rank": self.rank, "raised after s": round(time.perf_counter() - begin, 2), "message": message}
        print("RANK " + json.dumps(row), flush=True)
        torch.cuda.synchronize()  # where a host that knows nothing of it would hang
        row = {"rank": self.rank, "drained after s": round(time.perf_counter() - begin, 2)}
        print("RANK " + json.dumps(row), flush=True)
        out["outcome"] = "drained"


def rank_main(given: argparse.Namespace) -> None:
    """One section on one rank."""
    import torch
    import torch.distributed as dist

    import common
    from tide.transport.cuda import nccl

    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    if reason := nccl.unusable():
        raise SystemExit(f"wire_check: {reason}")
    check = Check(given.nodes, given.communicators, given.signals, given.steps)
    found: dict[str, Any] = {}
    getattr(check, given.section)(found)
    if check.rank == 0:
        given.out.write_text(json.dumps({"facts": common.facts(), "found": found}))
    sys.stdout.flush()
    sys.stderr.flush()
    if given.section in ("late", "never"):
        os._exit(0)  # communicators that were broken off are not to be destroyed
    dist.barrier()
    dist.destroy_process_group()


# Starting ------------------------------------------------------------------------------------------


def run(section: str, nodes: int, per_node: int, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts the ranks of a section, and says how they ended."""
    world, gpus = nodes * per_node, given.gpus
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = folder / f"{section}-{nodes}x{per_node}.json"
    command = [sys.executable, __file__, "--section", section, "--nodes", str(nodes), "--out", str(out)]
    command += ["--steps", str(given.steps), "--communicators", str(given.communicators), "--signals", given.signals]
    here = Path(__file__).resolve().parent
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if world > gpus else {}
    begin, ranks = time.monotonic(), []
    for rank in range(world):
        environment = {
            **os.environ,
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
        }
        log = (folder / f"{section}-{nodes}x{per_node}-{rank}.log").open("w+")
        ranks.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True), log))
    end, hung = begin + given.limit, False
    while any(process.poll() is None for process, _ in ranks):
        failed = any(process.poll() not in (None, 0) for process, _ in ranks)
        if failed and section not in ("late", "never"):
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            hung = not failed
            for process, _ in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    row: dict[str, Any] = {"section": section, "topology": f"{nodes}x{per_node}", "seconds": 0.0}
    row["seconds"] = round(time.monotonic() - begin, 1)
    row["exit codes"] = codes = [process.wait() for process, _ in ranks]
    logs = []
    for _, log in ranks:
        log.seek(0)
        logs.append(log.read())
        log.close()
    print(logs[0], end="", flush=True)
    if out.exists():
        row.update(json.loads(out.read_text()))
    row["said"] = [json.loads(line[5:]) for text in logs for line in text.splitlines() if line.startswith("RANK ")]
    if any(codes):
        row["logs"] = [text[-3000:] for text in logs]
    expected = all(code in (0, 76) for code in codes) if section == "never" else not any(codes)
    found = row.get("found")
    wrong = _bad(found) or (section == "correct" and any((found or {"": 1}).values()))
    row["outcome"] = "HUNG" if hung else "ok" if expected and not wrong else "FAILED"
    return row


def _bad(found: Any) -> bool:
    """Whether a result speaks of wrong bytes or mixed-up counters."""
    if isinstance(found, dict):
        return any(bool(v) if k == "wrong" and isinstance(v, int) else _bad(v) for k, v in found.items())
    return isinstance(found, str) and found.startswith(("MIXED", "LOST"))


def main() -> int:
    """Every section on every topology, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; by default below benchmarks/results")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--topologies", default="2x1,2x2", help="nodes x ranks a node, comma-separated")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a section may take")
    parser.add_argument("--steps", type=int, default=400, help="of the stress")
    parser.add_argument("--communicators", type=int, default=1, help="where a section does not compare them")
    parser.add_argument("--signals", choices=("nccl", "word"), default="nccl", help="likewise")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        rank_main(given)
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    given.gpus = len(listed.splitlines())
    rows: list[dict[str, Any]] = []
    out = given.out or Path(__file__).parent / "results" / f"wire_check-{time.strftime('%Y-%m-%d')}.json"
    with tempfile.TemporaryDirectory() as folder:
        for topology in given.topologies.split(","):
            nodes, per_node = map(int, topology.split("x"))
            for section in given.only.split(","):
                rows.append(run(section, nodes, per_node, given, Path(folder)))
                print(f"-- {topology} {section}: {rows[-1]['outcome']} in {rows[-1]['seconds']} s", flush=True)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps({"benchmark": "wire_check", "results": rows}, indent=1) + "\n")
    print(f"\n{'topology':<9} {'section':<9} {'outcome':<7} {'s':>6}  found")
    for row in rows:
        _print(row)
    print(f"results: {out}")
    return 0 if all(row["outcome"] == "ok" for row in rows) else 1


def _print(row: dict[str, Any]) -> None:
    shown = {k: v for k, v in (row.get("found") or {}).items() if row["section"] != "time"}
    text = json.dumps(shown)[:400] if shown else ""
    print(f"{row['topology']:<9} {row['section']:<9} {row['outcome']:<7} {row['seconds']:>6}  {text}")
    for said in row["said"]:
        print(f"{'':<28}{json.dumps(said)[:500]}")
    for text in row.get("logs", []):
        print(f"{'':<28}… {text[-600:]}")


if __name__ == "__main__":
    sys.exit(main())
