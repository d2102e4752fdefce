"""Runs a function as several ranks: real processes with a gloo process group, quickly.

Ranks are forked from a server process that has imported torch once, so starting four takes a fraction of a
second and each test gets fresh processes, which it may kill::

    def rank_main(rank, world_size, factor):      # at module level, as it is sent by name
        ...
        return tensor

    results = run_ranks(rank_main, 4, 2.0)        # [of rank 0, of rank 1, …], or RanksFailed

Assertions in ranks are not rewritten by pytest; give them a message where the values matter.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Inherited by the server and the ranks; more threads would only get in each other's way.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

#: Imported once, by the server. What is not there is skipped, and then each rank imports it: FSDP2 imports
#: Dynamo with the first DTensor, which takes a rank as long as many steps of training.
PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "networkx",
    "pytest",
    "hypothesis",
    "tide.fsdp.attachment",
    "tide.transport.host",
)
#: Seconds that the other ranks get to end after one has failed.
GRACE = 10.0


class RanksFailed(AssertionError):  # noqa: N818 - reads as what happened
    """Some ranks raised, died or did not end; ``failures`` has the text of each."""

    def __init__(self, failures: Mapping[int, str], world_size: int) -> None:
        self.failures = dict(failures)
        ranks = ", ".join(str(rank) for rank in failures)
        super().__init__(
            f"rank(s) {ranks} of {world_size} failed\n"
            + "\n".join(f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in failures.items())
        )


_context: multiprocessing.context.ForkServerContext | None = None


def start_server() -> multiprocessing.context.ForkServerContext:
    """The context that forks ranks; the server starts with the first rank, and ends with this process."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(list(PRELOAD))
    return _context


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    may_die: Collection[int] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in ``world_size`` processes and returns what they return.

    Parameters
    ----------
    fn : callable
        Defined at the top level of a module.
    world_size : int
        Number of processes.
    *args
        Picklable.
    timeout : float
        Seconds for all to end; those that have not are shown with their stacks, and killed.
    init : bool
        Initialise the default process group with gloo, and destroy it in the end.
    may_die : collection of int
        Ranks that are meant to be killed: their result is then None.
    env : mapping, optional
        Environment variables of the ranks, beside the launcher's usual ones.

    Raises
    ------
    RanksFailed
        With the traceback of every rank that failed; after the first, the others get ``GRACE`` seconds.
    """
    context = start_server()
    scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
    task = pickle.dumps((fn, args))
    processes, pipes = [], {}
    failures: dict[int, str] = {}
    results: list[Any] = [None] * world_size
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, task, rank, world_size, str(scratch), dict(env or {}), init, timeout),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        deadline = time.monotonic() + timeout
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    good, content = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    code = processes[rank].exitcode
                    good, content = rank in may_die, None if rank in may_die else f"died with exit code {code}"
                pipe.close()
                if good:
                    results[rank] = content
                else:
                    failures[rank] = content
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in pipes.values():
            failures[rank] = f"did not end\n{_stacks(processes[rank].pid, scratch / f'stacks-{rank}')}"
        if failures:
            raise RanksFailed(failures, world_size)
        for process in processes:
            process.join(5)
        return results
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(5)
            process.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _stacks(pid: int | None, path: Path) -> str:
    """Python stacks of a rank that hangs; empty if it is not able to tell."""
    if pid is None or not path.exists():
        return ""
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return ""
    end = time.monotonic() + 2
    while path.stat().st_size == 0 and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.05)
    return path.read_text()


def _rank_main(
    pipe: Connection,
    task: bytes,
    rank: int,
    world_size: int,
    scratch: str,
    env: Mapping[str, str],
    init: bool,
    timeout: float,
) -> None:
    """What a rank's process does."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(env)
    gc.freeze()  # what was imported: walking it would copy the server's memory into every rank
    with open(f"{scratch}/stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            if init:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{scratch}/store",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout),
                )
                dist.barrier()  # a rank that ends at once would close connections that others still make
            fn, args = pickle.loads(task)
            answer = True, fn(rank, world_size, *args)
            content = pickle.dumps(answer)
        except BaseException:
            content = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(content)
        pipe.close()
        sys.stdout.flush()
        if init and dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
