"""The parity suite of tests/fsdp, a stress of the transport and a watch on memory, as ranks of one device each.

Two ranks on two GPUs, or on CPUs to try the script itself::

    torchrun --nproc-per-node 2 tests/gpu/parity_ranks.py parity --debug
    python tests/gpu/parity_ranks.py stress --device cpu --steps 20         # starts its ranks itself

Every section says what it found as JSON lines in ``--out``, case by case, so that a run that is cut short still
tells how far it came. Wrong values never stop a case half way, as the other rank would then wait for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS.parent, TESTS, TESTS / "fsdp", TESTS / "gpu"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

SECTIONS = ("parity", "stress", "memory", "summary")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS, nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes that the ranks are spread over")
    parser.add_argument("--puts", choices=("auto", "nccl", "copy"), default="auto", help="steps between them")
    parser.add_argument("--communicators", type=int, default=1, help="of NCCL, for those steps")
    parser.add_argument("--signals", choices=("nccl", "word"), default="nccl", help="what tells of a put")
    parser.add_argument("--debug", action="store_true", help="parity: poison vacated slots, delay random streams")
    parser.add_argument("--early", action="store_true", help="parity: with early_reduce=True, however small the part")
    parser.add_argument("--reuse", action="store_true", help="parity: with PlanOptions(slot_reuse=True)")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="parity: this case")
    parser.add_argument("--part", type=int, default=0, help="parity: every PARTS-th case from this one on")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=300, help="stress: steps of the first sequence; memory: two thirds"
    )
    parser.add_argument("--seed", type=int, default=0, help="stress: of delays and order")
    parser.add_argument("--after", type=Path, help="begin when this file is there, or after --patience seconds")
    parser.add_argument("--patience", type=float, default=40.0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no new case begins")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds after which ranks that hang are shown")
    parser.add_argument("--out", type=Path, help="file for JSON lines, written by rank 0; summary: folder of them")
    return parser.parse_args(argv)


# A rank ------------------------------------------------------------------------------------------


def topology_of(world: int, given: argparse.Namespace) -> Any:
    """The ranks on the nodes that were asked for."""
    from tide.topology import Topology

    return Topology(given.nodes, world // given.nodes, virtual=given.nodes > 1)


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Settings of the transport, by what was asked for; none on CPUs."""
    if given.device == "cpu":
        return {}
    from tide.transport.cuda import Settings

    return {"settings": Settings(puts=given.puts, communicators=given.communicators, wire_signals=given.signals)}


def transport_of(given: argparse.Namespace) -> Any:
    """What `tide.attach` takes: a name, or how to open one with other settings."""
    from tide.transport import open_transport

    name = {"cuda": "cuda", "cpu": "host"}[given.device]
    if given.nodes == 1:
        return name
    return lambda compiled, rank: open_transport(name, compiled, rank, **settings_of(given))


def rank_main(rank: int, world: int, given: argparse.Namespace, store: str = "") -> list[dict[str, Any]]:
    """Runs the sections that were asked for; the rows that rank 0 writes."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TIDE_TIMEOUT", "20")
    import fsdp_models
    import torch
    import torch.distributed as dist
    from stress_ranks import stress

    begin = time.perf_counter()
    fsdp_models.DEVICE = given.device
    backend = "gloo"
    if given.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        # New tensors full of NaN: an element that nobody writes shows, instead of what the other copy left there.
        torch.utils.deterministic.fill_uninitialized_memory = given.debug
    where = {"init_method": store, "rank": rank, "world_size": world} if store else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=30), **where)
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        if rank == 0:
            rows.append(row)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    try:
        if given.device == "cuda":
            dist.all_reduce(torch.zeros(1, device="cuda"))  # NCCL's communicator
            torch.cuda.synchronize()
        tell({"section": "start", "seconds": round(time.perf_counter() - begin, 2)})
        until = time.monotonic() + given.patience
        while given.after is not None and not given.after.exists() and time.monotonic() < until:
            time.sleep(0.05)
        run = {"parity": parity, "stress": stress, "memory": memory}
        for section in given.section:
            begin = time.perf_counter()
            try:
                run[section](rank, world, given, tell)
            except Exception:
                tell({"section": section, "name": "-", "outcome": "failed", "why": traceback.format_exc()})
                raise
            tell({"section": section, "name": "all", "seconds": round(time.perf_counter() - begin, 2)})
        return rows
    finally:
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


# Parity ------------------------------------------------------------------------------------------


def extra_cases() -> list[Any]:
    """Lines of the table that only a GPU can run."""
    from fsdp_cases import FP32, MIXED, mixed, stack
    from fsdp_parity import Case
    from torch.distributed.fsdp import CPUOffloadPolicy

    def premultiplied(side: Any) -> None:
        for module in [side.model, *side.model.layers]:
            module.set_gradient_divide_factor(4.0)

    return [
        Case("CPU offload, pinned", lambda w: stack(offload_policy=CPUOffloadPolicy(), mp_policy=MIXED)),
        Case("CPU offload, float32", lambda w: stack(offload_policy=CPUOffloadPolicy(), mp_policy=mixed(None, FP32))),
        Case("divide, premultiplied by both", lambda w: stack(mp_policy=MIXED), prepare=premultiplied),
    ]


@contextmanager
def delayed(seed: int, device: str) -> Iterator[None]:
    """Random delays on whatever stream a collective of TIDE is issued from, and on the one that reads it."""
    import torch

    from tide.session import Session

    if device != "cuda":
        yield
        return
    chance, stock = random.Random(seed), (Session.all_gather, Session.reduce_scatter, Session.release)

    def late(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if chance.random() < 0.25:
                torch.cuda._sleep(int(chance.random() * 600_000))
            return call(*args, **kwargs)

        return run

    Session.all_gather, Session.reduce_scatter, Session.release = map(late, stock)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.all_gather, Session.reduce_scatter, Session.release = stock  # type: ignore[method-assign]


def parity(rank: int, world: int, given: argparse.Namespace, tell: Any) -> None:
    """Every case of the table for this number of ranks: losses, gradients, parameters bit for bit."""
    import fsdp_parity
    import torch
    import torch.distributed as dist
    from fsdp_cases import CASES, with_early_parts
    from fsdp_parity import Mismatch, run_case

    from tide.fsdp.introspect import torch_version

    wrong: list[str] = []
    strict = fsdp_parity.compare

    def noting(*args: Any) -> None:
        try:
            strict(*args)
        except Mismatch as error:
            wrong.append(str(error))

    fsdp_parity.compare = noting
    transport = {"cuda": "cuda", "cpu": "host"}[given.device]
    where = {"topology": topology_of(world, given)} if given.nodes > 1 else {}
    version, began = torch_version(), time.monotonic()
    cases = [*CASES, *(extra_cases() if given.device == "cuda" else ())]
    for case in cases[given.part :: given.parts]:
        row = {"section": "parity", "debug": given.debug, "name": case.name}
        if given.only and case.name not in given.only:
            continue
        if world not in case.worlds:
            tell({**row, "outcome": "other", "why": f"needs {' or '.join(map(str, case.worlds))} ranks"})
            continue
        if version < case.since:
            needs = ".".join(map(str, case.since))
            tell({**row, "outcome": "skipped", "why": f"torch {needs} or later has what it needs"})
            continue
        late = [time.monotonic() - began > given.limit]
        dist.broadcast_object_list(late, 0)  # all or none
        if late[0]:
            tell({**row, "outcome": "skipped", "why": "no time left"})
            continue
        begin, report = time.perf_counter(), ""
        wrong.clear()
        if given.early:
            case = with_early_parts(case)
        if given.reuse:
            if case.attach.get("options") is not None:
                tell({**row, "outcome": "other", "why": "has plan options of its own"})
                continue
            case = fsdp_parity.through_slots(case)
        attach = {**case.attach, "transport": transport_of(given), **where}
        if given.debug:
            attach["debug"] = True
        try:
            with delayed(rank * 1000 + len(case.name), given.device) if given.debug else contextlib.nullcontext():
                report = run_case(replace(case, attach=attach), rank, world)
        except Exception:
            wrong.append(traceback.format_exc())
        everyone: list[list[str]] = [[]] * world
        dist.all_gather_object(everyone, wrong[:3])
        row["seconds"] = round(time.perf_counter() - begin, 2)
        if given.device == "cuda":
            row["bytes"] = torch.cuda.memory_allocated()
        why = "; ".join(f"rank {r}: {' | '.join(texts)}" for r, texts in enumerate(everyone) if texts)
        groups = report.split(", ")[0].split(": ")[-1]
        if f"transport {transport}" not in report and not why:
            why = f"did not run on the {transport} transport: {report}"
        tell({**row, "outcome": "failed" if why else "passed", "why": why, "groups": groups})
    fsdp_parity.compare = strict


# Memory ------------------------------------------------------------------------------------------


def memory(rank: int, world: int, given: argparse.Namespace, tell: Any) -> None:
    """What is allocated and reserved does not grow over attached steps."""
    import fsdp_parity
    import torch
    import torch.distributed as dist
    from fsdp_cases import MIXED, stack
    from fsdp_parity import Case, make

    import tide

    case = Case("memory", lambda w: stack(depth=6, mp_policy=MIXED))
    side = make(case, world)
    tide.attach(side.model, transport=transport_of(given), topology=topology_of(world, given))
    samples: list[tuple[int, int]] = []
    steps = max(2 * given.steps // 3, 20)
    begin = time.perf_counter()
    for step in range(steps):
        fsdp_parity.one_batch(side, step, rank)
        side.optimizer.step()
        side.optimizer.zero_grad()
        if step % 10 == 9 and given.device == "cuda":
            torch.cuda.synchronize()
            samples.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    seconds = time.perf_counter() - begin
    tide.detach(side.model)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, samples)
    grown = [any(row[-1][k] > row[1][k] for row in everyone if row) for k in range(2)]
    tell(
        {
            "section": "memory",
            "name": f"{steps} attached steps",
            "outcome": "failed" if any(grown) else "passed",
            "why": "grew: " + ", ".join(w for w, g in zip(("allocated", "reserved"), grown, strict=True) if g)
            if any(grown)
            else "",
            "allocated": [sorted({a for a, _ in row[1:]}) for row in everyone],
            "reserved": [sorted({r for _, r in row[1:]}) for row in everyone],
            "seconds": round(seconds, 2),
        }
    )


# Starting ----------------------------------------------------------------------------------------


def start(given: argparse.Namespace, world: int = 2) -> list[dict[str, Any]]:
    """Starts the ranks and returns rank 0's rows."""
    from ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        rows: list[dict[str, Any]] = run_ranks(rank_main, world, given, store, timeout=given.timeout, init=False)[0]
        return rows


def summary(folder: Path) -> int:
    """Gathers the JSON lines of a folder into ``summary.json`` and a table; 1 if anything failed."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    (folder / "summary.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    for row in rows:
        if row["section"] in ("stress", "memory") and "outcome" in row:
            print(" ".join(f"{key}={value}" for key, value in row.items() if value != "" and key != "section"))
    table = [row for row in rows if row["section"] == "parity" and "outcome" in row]
    for debug in (False, True):
        of = [row for row in table if row["debug"] is debug]
        counts = {kind: sum(row["outcome"] == kind for row in of) for kind in ("passed", "failed", "skipped", "other")}
        slowest = sorted(of, key=lambda row: row.get("seconds", 0.0))[-2:]
        print(f"parity debug={debug}: {counts}; slowest {[(row['name'], row.get('seconds')) for row in slowest]}")
    for row in table:
        if row["outcome"] == "skipped" and not row["debug"]:
            print(f"  skipped {row['name']}: {row['why']}")
    failed = [row for row in rows if row.get("outcome") == "failed"]
    for row in failed:
        print(f"FAILED {row['section']} {row['name']} debug={row.get('debug')}: {row['why'][-700:]}")
    return 1 if failed or not rows else 0


def main() -> int:
    """The ranks' part under torchrun, else all of it."""
    given = options()
    if given.section == ["summary"]:
        return summary(given.out)
    if "RANK" in os.environ:
        rows = rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given)
    else:
        from parity_ranks import start as started  # by its name as a module, by which ranks find it

        rows = started(given)
    failed = [row for row in rows if row.get("outcome") == "failed"]
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
