"""Peers that die, hang, leave or differ: an error that names them, on every rank, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from host_cases import Case, block, cut, team, values
from host_jobs import check_all_gather, check_reduce_scatter

from ranks import run_ranks
from tide.compiler.compile import Compiled
from tide.compiler.model import Mesh
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Buffer
from tide.errors import InputError, PeerError, TransportError
from tide.session import Session
from tide.topology import Topology
from tide.transport.base import Binding
from tide.transport.host import HostTransport, operations
from tide.transport.host.liveness import Process, alive, this_process


def compiled_for(world: int, *meshes: Mesh, nodes: int = 1, route: str = "push") -> Compiled:
    """Two blocks that share a slot."""
    case = Case((block("a"), block("b")), PlanOptions(slots=1, route=route))
    return case.compile(Topology(nodes=nodes, gpus_per_node=world // nodes, virtual=True), meshes)


def loop_until_failure(session: Session, seconds: float = 20) -> str:
    """Runs collectives until one fails, and returns the message."""
    end = time.monotonic() + seconds
    index = 0
    while time.monotonic() < end:
        for unit in session.compiled.spec.units:
            try:
                check_all_gather(session, unit, index)
                session.release(unit.name)
                check_reduce_scatter(session, unit, index)
            except PeerError as error:
                return str(error)
            index += 1
    raise AssertionError("no failure was seen")


def kill_job(rank: int, world: int, nodes: int, victim: int, log: str) -> tuple[str, float, str]:
    """Rank ``victim`` is killed from a thread of its own, at any point of a collective."""
    session = Session(compiled := compiled_for(world, nodes=nodes), HostTransport.open(compiled, timeout=30))
    if rank == victim:

        def kill() -> None:
            time.sleep(0.3)
            Path(log).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()
    message = loop_until_failure(session)
    seen = time.time()
    session.release("b")
    try:
        session.all_gather("a", shards_of(compiled, "a", rank))
        again = "no error"
    except PeerError as error:
        again = str(error)
    session.close()
    return message, seen - float(Path(log).read_text()), again


def shards_of(compiled: Compiled, unit: str, rank: int) -> list[torch.Tensor]:
    """Some shards."""
    _, group, position = team(compiled, unit, rank)
    rows = compiled.spec.unit(unit).parameters
    return [cut(values(p.shape, p.shard_dtype, 0), p.dim, len(group), position) for p in rows]


@pytest.mark.parametrize(("nodes", "world", "victim"), [(1, 2, 1), (1, 4, 0), (2, 4, 2)])
def test_killed_peer(nodes: int, world: int, victim: int, tmp_path: Path) -> None:
    """SIGKILL in the middle of a collective: every other rank raises within two seconds, and stays broken."""
    results = run_ranks(kill_job, world, nodes, victim, str(tmp_path / "log"), may_die=(victim,))
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        message, delay, again = result
        assert f"rank {victim}" in message
        assert "died" in message or f"gave up because of rank {victim}" in message
        assert "unit 'a'" in message or "unit 'b'" in message
        assert "stream " in message
        assert "step " in message
        assert "wait for " in message
        assert delay < 2.0
        assert "broke earlier" in again
        assert message in again


def hang_job(rank: int, world: int, route: str) -> tuple[str, float]:
    """Rank 1 comes too late."""
    session = Session(compiled := compiled_for(world, route=route), HostTransport.open(compiled, timeout=0.6))
    if rank == 1:
        time.sleep(1.5)
    start = time.monotonic()
    try:
        session.all_gather("a", shards_of(compiled, "a", rank))
    except PeerError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no failure was seen")


@pytest.mark.parametrize(("route", "lane"), [("push", "FREE"), ("pull", "READY")])
def test_hung_peer(route: str, lane: str) -> None:
    """A deadline for those that wait; the late one learns at once that they gave up because of it."""
    (first, took), (late, _), (third, _) = run_ranks(hang_job, 3, route)
    assert "rank 1 did not answer within 0.6 s; unit 'a', all_gather, stream ag.node, step" in first
    assert f"wait for {lane} from rank 1 (0 of 1 signals here)" in first
    assert "TIDE_TIMEOUT" in first
    assert 0.6 <= took < 1.4
    assert "rank 1" in third
    assert "gave up because of rank 1" in late


def poison_job(rank: int, world: int) -> str:
    """Rank 1 never reads, so rank 0 must not overwrite."""
    compiled = compiled_for(world, route="pull")
    session = Session(compiled, HostTransport.open(compiled, timeout=0.4), poison=True)
    if rank == 1:
        time.sleep(1.0)
        return ""
    unit = compiled.spec.unit("a")
    # As if its all-gather had run here: the credit that exists from the start is used up.
    transport = session.transport
    assert isinstance(transport, HostTransport)
    team = compiled.context("a", rank).team
    word = compiled.arena.words.units["a"].word(team, operations.Lane.DONE, 0, 1)
    transport._context.consumed[word] = 1
    session._occupant[0] = unit.name
    try:
        session.release("a")
    except PeerError as error:
        return str(error)
    raise AssertionError("poisoned a slot that a peer had not read")


def test_poison_waits_for_the_readers() -> None:
    """A slot is not overwritten before every reader has said that it is done."""
    message = run_ranks(poison_job, 2)[0]
    assert "rank 1 did not answer" in message
    assert "unit 'a', poison" in message
    assert "DONE from rank 1" in message


def leave_job(rank: int, world: int) -> str:
    """Rank 1 closes its transport."""
    session = Session(compiled := compiled_for(world), HostTransport.open(compiled, timeout=20))
    unit = compiled.spec.unit("a")
    check_all_gather(session, unit, 0)
    if rank == 1:
        session.close()
        time.sleep(0.5)
        return ""
    return loop_until_failure(session)


def test_closed_peer() -> None:
    """A peer that closed its transport is told apart from one that died."""
    assert "rank 1 has closed its transport" in run_ranks(leave_job, 2)[0]


def apart_job(rank: int, world: int, collective: str) -> list[str]:
    """Rank 0 leaves one collective out, of units that use the same memory: bytes and signals would suffice."""
    session = Session(compiled := compiled_for(world), HostTransport.open(compiled, timeout=20))
    told = []
    for unit in ("a", "b", "a") if rank else ("a", "a"):
        try:
            if collective == "all_gather":
                session.all_gather(unit, shards_of(compiled, unit, rank))
                session.release(unit)
            else:
                check_reduce_scatter(session, compiled.spec.unit(unit), 0)
        except PeerError as error:
            told.append(str(error))
            break
    dist.barrier()
    session.close()
    return told


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_ranks_in_different_collectives_are_told(collective: str) -> None:
    """No result is taken from it: the error comes with the collective that differs, and at once."""
    start = time.monotonic()
    for rank, told in enumerate(run_ranks(apart_job, 3, collective)):
        assert len(told) == 1, f"rank {rank}: {told}"
        assert "is in another collective than rank" in told[0] or "gave up because of rank" in told[0]
        assert f"unit '{'b' if rank else 'a'}', {collective}" in told[0]
    assert time.monotonic() - start < 15


def chain_job(rank: int, world: int) -> str:
    """Ranks 0 and 1 share a unit, 1 and 2 the other; 2 dies."""
    compiled = compiled_for(world, Mesh(((0, 1),)), Mesh(((1, 2),)))
    session = Session(compiled, HostTransport.open(compiled, timeout=20))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for unit in ("b", "a"):
            if compiled.spec.unit(unit).mesh.locate(rank):
                session.all_gather(unit, shards_of(compiled, unit, rank))
    except PeerError as error:
        time.sleep(0.3)  # alive, so that rank 0 sees why rank 1 does not come
        return str(error)
    raise AssertionError("no failure was seen")


def test_cause_is_passed_on() -> None:
    """A rank that has nothing to do with the dead one still learns who it was."""
    first, second, _ = run_ranks(chain_job, 3, may_die=(2,))
    assert "rank 2 (process" in second
    assert "died; unit 'b'" in second
    assert "rank 1 gave up because of rank 2; unit 'a'" in first


def early_exit_job(rank: int, world: int) -> str:
    """Rank 0 is gone while rank 1, which was slow, still reads from it."""
    compiled = compiled_for(world)
    session = Session(compiled, HostTransport.open(compiled, timeout=20))
    unit = compiled.spec.unit("a")
    if rank == 1:
        move, slow = operations.Move.run, time.sleep

        def late(self: operations.Move, call: operations.Call) -> bool:
            slow(0.5)
            return move(self, call)

        operations.Move.run = late  # type: ignore[method-assign]
    check_all_gather(session, unit, 0)
    if rank == 0:
        os._exit(0)
    check = session.whole("a")["a.q"].clone()
    assert torch.equal(check, session.whole("a")["a.q"])
    return "whole"


def test_a_peer_may_end_when_it_has_done_its_part() -> None:
    """Its memory lives on while others map it, and its end is no failure."""
    assert run_ranks(early_exit_job, 2, may_die=(0,), init=True)[1] == "whole"


# One rank ----------------------------------------------------------------------------------------


def test_wrong_tensors_are_refused_before_anything_moves() -> None:
    """The message names parameter and tensor; the transport stays usable."""
    compiled = compiled_for(1)
    transport = HostTransport.open(compiled)
    session = Session(compiled, transport)
    shards = shards_of(compiled, "a", 0)
    program = compiled.program("a", "all_gather", 0)

    def run(tensors: list[torch.Tensor | None]) -> None:
        bound = {(Buffer.SHARD, i): t for i, t in enumerate(tensors) if t is not None}
        transport.run(program, Binding("a", 0, (0,), bound))

    for broken, text in (
        (None, "a.q: its shard tensor is missing"),
        (shards[0].double(), "a.q: its shard tensor must be float32, got torch.float64"),
        (shards[0].t(), "a.q: its shard tensor is not contiguous"),
        (shards[0][:3], "a.q: its shard tensor holds 576 bytes, but 9216 are needed"),
        (shards[0].to("meta"), "a.q: its shard tensor is on meta"),
    ):
        with pytest.raises(InputError) as caught:
            run([broken, *shards[1:]])
        assert text in str(caught.value)
    run(list(shards))
    assert torch.equal(session.whole("a")["a.q"], shards[0].bfloat16())
    session.close()


def test_an_interrupt_breaks_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how far a collective came that was left by an exception."""
    compiled = compiled_for(1)
    transport = HostTransport.open(compiled)
    session = Session(compiled, transport)
    shards = shards_of(compiled, "a", 0)

    def interrupt(self: object, call: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operations.Convert, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.all_gather("a", shards)
    with pytest.raises(PeerError, match=r"broke earlier.*KeyboardInterrupt"):
        session.all_gather("a", shards)
    session.close()
    session.close()
    with pytest.raises(TransportError, match="has been closed"):
        transport.arena_tensor(0, 1, torch.float32)


def test_liveness() -> None:
    """Alive, reaped, zombie, and a number that another process has now."""
    me = this_process()
    assert alive(me)
    assert not alive(Process(me.pid, me.started + 1))
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    stat = Path(f"/proc/{child}/stat").read_bytes()
    process = Process(child, int(stat[stat.rindex(b")") + 2 :].split()[19]))
    assert alive(process)
    os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert not alive(process)  # a zombie: its parent has not asked yet
    os.waitpid(child, 0)
    assert not alive(process)
