"""Opening the transport: what is compared, and what each rank is told when something differs."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from host_cases import Case, block, mesh_of
from host_jobs import check_all_gather, exercise

from ranks import run_ranks
from tide.compiler.compile import Compiled
from tide.compiler.options import PlanOptions
from tide.errors import CapabilityError, InputError, PeerError, TideError
from tide.session import Session
from tide.topology import Topology
from tide.transport.agreement import agree, differences, ranks_text, resolve_timeout
from tide.transport.host import HostTransport, memory, transport
from tide.transport.host.signals import make_fence


def plan(world: int, hidden: int = 32, **options: int) -> Compiled:
    """A small plan."""
    return Case((block("a", 16, hidden),), PlanOptions(**options)).compile(Topology(1, world))  # type: ignore[arg-type]


def open_error(compiled: Compiled, **settings: object) -> str:
    """Kind and message of the error that opening gives."""
    try:
        HostTransport.open(compiled, **settings).close()  # type: ignore[arg-type]
    except TideError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differ_job(rank: int, world: int) -> list[str]:
    """Rank 1 differs in one thing after another."""
    told = [open_error(plan(world, put_bytes=8192 if rank == 1 else 4096))]
    told.append(open_error(plan(world, hidden=36 if rank == 1 else 32)))
    if rank == 1:
        transport.futex_works = lambda: False
    told.append(open_error(plan(world)))
    transport.futex_works = lambda: True
    version = torch.__version__
    if rank == 1:
        torch.__version__ = "9.9"  # type: ignore[assignment]
    told.append(open_error(plan(world)))
    torch.__version__ = version  # type: ignore[assignment]
    if rank == 1:
        transport.machine_identity = lambda: ("elsewhere", "far")
    told.append(open_error(plan(world)))
    transport.machine_identity = memory.machine_identity
    if rank == 1:
        memory.available_memory = lambda: 10 << 20  # type: ignore[assignment]
    told.append(open_error(plan(world, receive_depth=9000)))
    memory.available_memory = lambda: None  # type: ignore[assignment]
    if rank == 2:
        transport.Segment.map = classmethod(no_map)  # type: ignore[assignment]
    told.append(open_error(plan(world)))
    return told


def no_map(cls: type, path: str, arena: int) -> None:
    """Stands in for a system that does not let a rank see another's memory."""
    raise CapabilityError("cannot map it")


def test_differences_are_told_on_every_rank() -> None:
    """Options, parameters, abilities, versions, machines, memory: what differs, and where."""
    answers = run_ranks(differ_job, 3)
    assert answers[0] == answers[1] == answers[2]
    options, parameters, ability, version, machine, room, mapping = answers[0]
    assert options.startswith("PeerError: the ranks hold different plans:")
    assert "option put_bytes: 4096 on ranks 0, 2; 8192 on rank 1" in options
    assert "plan digest" in options
    assert "unit 'a' (parameters, dtypes, mesh)" in parameters
    assert "option put_bytes" not in parameters
    assert "futex: True on ranks 0, 2; False on rank 1" in ability
    assert "torch version" in version
    assert "9.9 on rank 1" in version
    assert machine.startswith("CapabilityError: the host transport needs all ranks on one machine")
    assert "[1] on far" in machine
    assert room.startswith("CapabilityError: rank 1: the plan's arenas need")
    assert "only 10 MiB are available" in room
    assert mapping == "CapabilityError: rank 2: cannot map it"


def absent_job(rank: int, world: int) -> list[tuple[str, float]]:
    """Each rank in turn does not come, then all do: the group is as good as before."""
    found = []
    for absent in range(world):
        start = time.monotonic()
        told = "" if rank == absent else open_error(plan(world), timeout=0.3)
        found.append((told, time.monotonic() - start))
        dist.barrier()
    exercise(plan(world), rank, 1)
    return found


def test_a_rank_that_does_not_come() -> None:
    """Opening too has a deadline."""
    for rank, found in enumerate(run_ranks(absent_job, 3)):
        for absent, (told, took) in enumerate(found):
            if rank != absent:
                assert told.startswith("PeerError: the ranks could not exchange their plans within 0.3 s: ")
                assert f": rank {absent} did not come (" in told
                assert took < 5


def groups_job(rank: int, world: int) -> list[str]:
    """Plans on a group of some ranks, and on one that is not gloo."""
    told = [open_error(plan(2)), open_error(plan(world), rank=(rank + 1) % world)]
    odd = dist.new_group([1, 3], backend="gloo")
    if rank in (1, 3):
        small = plan(2)
        session = Session(small, HostTransport.open(small, group=odd))
        check_all_gather(session, small.spec.unit("a"), 0)
        session.close()
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl"
    exercise(plan(world), rank, 1)
    if rank in (1, 3):
        HostTransport.open(plan(2), group=odd).close()
    dist.get_backend = backend
    return told


def test_process_groups() -> None:
    """Sizes and ranks are checked; subgroups work; a group of another backend gets a gloo one beside it."""
    for rank, (size, other) in enumerate(run_ranks(groups_job, 4)):
        assert size.startswith("InputError: the plan was compiled for 2 ranks, but the process group has 4")
        assert other == (
            f"InputError: rank {(rank + 1) % 4} was asked for, but this process is rank {rank} of its process group"
        )


def test_no_process_group() -> None:
    """One rank needs none; several are told how to get one."""
    assert not dist.is_initialized()
    with pytest.raises(InputError, match=r"2 ranks, but there is no process group.*torchrun.*init_process_group"):
        HostTransport.open(plan(2))
    with pytest.raises(InputError, match="rank 3 is outside a plan of 1 rank"):
        HostTransport.open(plan(1), rank=3)
    HostTransport.open(plan(1), rank=0).close()


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, environment, default."""
    monkeypatch.delenv("TIDE_TIMEOUT", raising=False)
    assert resolve_timeout() == 60.0
    monkeypatch.setenv("TIDE_TIMEOUT", "2.5")
    assert resolve_timeout() == 2.5
    assert resolve_timeout(4) == 4.0
    for text in ("soon", "-1", "0", "nan", "inf", "1e10", "1e300"):
        monkeypatch.setenv("TIDE_TIMEOUT", text)
        with pytest.raises(InputError, match=f"TIDE_TIMEOUT must be a positive number of seconds.*, got '{text}'"):
            resolve_timeout()


def test_unknown_architecture() -> None:
    """No claim about an ordering that nobody has thought about."""
    with pytest.raises(CapabilityError, match="x86_64 and aarch64, not of riscv64"):
        make_fence("riscv64")


def test_texts() -> None:
    """Ranks in short, and differences in the order of the facts."""
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([5, 0, 1, 2, 8]) == "ranks 0–2, 5, 8"
    assert differences([{"a": 1, "b": 2}, {"a": 1, "c": 3}]) == [
        "b: 2 on rank 0; absent on rank 1",
        "c: absent on rank 0; 3 on rank 1",
    ]


def many_job(rank: int, world: int) -> str:
    """Everything differs."""
    try:
        agree({f"fact {i}": rank for i in range(20)}, None, None, 10, "facts")
    except PeerError as error:
        return str(error)
    return ""


def test_long_lists_are_cut() -> None:
    """A model that differs altogether does not print all of its units."""
    message = run_ranks(many_job, 2)[0]
    assert "… and 14 more" in message
    assert message.count("\n") < 10


def test_plan_on_meta_sizes_is_refused_before_memory_is_touched() -> None:
    """A plan for a large machine says so instead of ending in the middle of a collective."""
    case = Case((("big", (dataclasses.replace(block("b")[1][0], name="w", shape=(1 << 20, 1 << 20)),)),))
    with pytest.raises(CapabilityError, match=r"arenas need .* MiB on this machine \(1 × .* MiB\), but only"):
        HostTransport.open(case.compile(Topology(1, 1), (mesh_of(1),)))
