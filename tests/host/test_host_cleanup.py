"""Nothing is left: no shared memory, descriptors or threads, however a rank ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from host_cases import Case, block
from host_jobs import check_all_gather

from ranks import RanksFailed, run_ranks
from tide.compiler.compile import Compiled
from tide.errors import TransportError
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.host import HostTransport


def plan(world: int) -> Compiled:
    """A small plan."""
    return Case((block("a"),)).compile(Topology(1, world))


def arenas(pid: str | int = "self") -> set[str]:
    """Inodes of the arenas that a process maps or has open."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:tide-arena" in line:
                found.add(line.split()[4])
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:tide-arena" in os.readlink(descriptor):
                found.add(str(descriptor.stat().st_ino))
    except OSError:  # it has just ended
        pass
    return found


def holders(inodes: set[str]) -> list[str]:
    """Processes that still hold one of them."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if arenas(path.name) & inodes]


def names() -> set[str]:
    """What is in /dev/shm that could be ours."""
    return {name for name in os.listdir("/dev/shm") if "tide" in name or "torch" in name}


def end_job(rank: int, world: int, how: str, log: str) -> None:
    """One collective with the transport left open, then the end."""
    compiled = plan(world)
    session = Session(compiled, HostTransport.open(compiled, timeout=20))
    check_all_gather(session, compiled.spec.unit("a"), 0)
    Path(f"{log}/{rank}").write_text(" ".join(arenas()))
    while len(list(Path(log).iterdir())) < world:
        time.sleep(0.01)
    time.sleep(0.1)
    if how == "exception":
        raise RuntimeError("on purpose")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "close":
        session.close()


@pytest.mark.parametrize("how", ["return", "close", "exception", "signal", "kill"])
def test_memory_is_gone(how: str, tmp_path: Path) -> None:
    """After any end no process holds an arena, and there never was a name for one."""
    before = names()
    everyone = range(2)
    if how == "exception":
        with pytest.raises(RanksFailed, match="on purpose"):
            run_ranks(end_job, 2, how, str(tmp_path))
    else:
        run_ranks(end_job, 2, how, str(tmp_path), may_die=everyone if how in ("signal", "kill") else ())
    seen = {inode for rank in everyone for inode in (tmp_path / str(rank)).read_text().split()}
    assert len(seen) == 2
    end = time.monotonic() + 3
    while (left := holders(seen)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
    assert names() == before


def leak_job(rank: int, world: int, rounds: int) -> tuple[list[int], set[str]]:
    """Opens and closes; counts descriptors, threads and arenas."""
    compiled = plan(world)

    def counts() -> list[int]:
        gc.collect()
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(arenas())]

    def once() -> None:
        session = Session(compiled, HostTransport.open(compiled, timeout=20))
        check_all_gather(session, compiled.spec.unit("a"), 0)
        session.close()

    once()
    first = counts()
    for _ in range(rounds):
        once()
    last = counts()
    return [b - a for a, b in zip(first, last, strict=True)], arenas()


@pytest.mark.parametrize("world", [1, 3])
def test_no_leak_over_many_openings(world: int) -> None:
    """50 times open, gather, close."""
    for growth, left in run_ranks(leak_job, world, 50):
        assert max(growth) <= 0  # gloo may still have been closing sockets at first
        assert left == set()


def fork_job(rank: int, world: int) -> str:
    """A forked child may read what it inherited, but runs no collective and harms nobody."""
    compiled = plan(world)
    session = Session(compiled, HostTransport.open(compiled, timeout=20))
    unit = compiled.spec.unit("a")
    check_all_gather(session, unit, 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert session.whole("a")["a.q"].shape == (48, 48)
            check_all_gather(session, unit, 1)
        except TransportError as error:
            code = 0 if "before this process was forked" in str(error) else 2
        session.close()  # must not tell the peers that this rank has closed
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child could use the transport"
    check_all_gather(session, unit, 2)
    session.close()
    return "fine"


def test_fork() -> None:
    """Loader processes are forked from ranks."""
    assert run_ranks(fork_job, 2) == ["fine"] * 2


def test_tensors_outlive_the_transport() -> None:
    """Closing does not pull memory from under a tensor; the last tensor frees it."""
    gc.collect()
    before = arenas()
    compiled = plan(1)
    session = Session(compiled, HostTransport.open(compiled))
    check_all_gather(session, compiled.spec.unit("a"), 0)
    kept = session.whole("a")["a.norm"]
    copy = kept.clone()
    session.close()
    del session
    gc.collect()
    assert len(arenas() - before) == 1
    assert torch.equal(kept, copy)
    del kept
    gc.collect()
    assert arenas() == before


def test_arena_tensor() -> None:
    """A storage of exactly its own size, at its place, that cannot be resized."""
    compiled = plan(1)
    transport = HostTransport.open(compiled)
    whole = transport.arena_tensor(0, compiled.arena.size, torch.uint8)
    for dtype in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"):
        tensor = transport.arena_tensor(1024, 24, to_torch(dtype))
        storage = tensor.untyped_storage()
        assert tensor.shape == (24,)
        assert tensor.dtype == to_torch(dtype)
        assert storage.nbytes() == 24 * tensor.itemsize
        assert tensor.storage_offset() == 0
        assert storage.data_ptr() == tensor.data_ptr() == whole.data_ptr() + 1024
        assert not storage.resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        storage.resize_(0)
    empty = transport.arena_tensor(512, 0, torch.float32)
    assert empty.shape == (0,)
    assert empty.untyped_storage().nbytes() == 0
    for offset, numel in ((-4, 1), (compiled.arena.size - 4, 2)):
        with pytest.raises(ValueError, match="outside an arena"):
            transport.arena_tensor(offset, numel, torch.float32)
    assert dict(transport.describe())["arena"].startswith("memfd")
    transport.close()


LAUNCHED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch.distributed as dist
from host_jobs import run_cases
dist.init_process_group("gloo")
run_cases(dist.get_rank(), dist.get_world_size(), 1, ("dense, tight",))
dist.destroy_process_group()
print("done", flush=True)
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """Started by torchrun, as users do it."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    answer = subprocess.run(
        [*command, str(here), str(here.parents[1])], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("done") == 2
