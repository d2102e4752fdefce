"""The CUDA transport without a GPU: order of issue, counters, arguments, and whole collectives on a fake machine."""

from __future__ import annotations

import ctypes
import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_support import Cluster, FakeDriver, Machine, cluster, word_at

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import ROUTES, PlanOptions
from tide.compiler.place import align
from tide.compiler.shard import shard
from tide.compiler.steps import Buffer, Copy, Lane, Place, Program, Region, Signal, Stream, Transfer, Wait
from tide.errors import InputError, PeerError, PlanError
from tide.kernels import accumulate as sums
from tide.kernels import switch_reduce as switched
from tide.kernels.segments import PROGRAM_WORDS
from tide.report.memory import _MOST_DESCRIBED, _PROGRAMS, scratch_nbytes
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.base import Binding
from tide.transport.cuda import CudaTicket, CudaTransport, Settings
from tide.transport.cuda import tables as tables_module
from tide.transport.cuda import transport as transport_module
from tide.transport.cuda.bases import Bases
from tide.transport.cuda.copies import LONG_RUN, CopyArrays
from tide.transport.cuda.launcher import parameters_of, plain_launch
from tide.transport.cuda.lowered import Lowered
from tide.transport.cuda.order import issue_order
from tide.transport.cuda.request import arena_bytes
from tide.transport.cuda.staging import MOST, Staging
from tide.transport.cuda.tables import LaunchSet
from tide.transport.cuda.words import MASK, STRIDE, VALUES, encode, reached, value_table

P = Parameter
TIGHT = PlanOptions(
    slots=2,
    chunk_bytes=512,
    put_bytes=4096,
    bundle_bytes=64,
    min_run_bytes=16,
    min_put_run_bytes=16,
    piece_bytes=512,
)
#: The routes of an all-gather; "multicast" pushes once, to the fake machine's multicast address.
routes = pytest.mark.parametrize("route", [*ROUTES, "multicast"])


def block(name: str, **kinds: str | None) -> tuple[Parameter, ...]:
    shapes = {"q": (48, 48), "kv": (12, 48), "up": (81, 48), "down": (48, 81), "norm": (48,), "bias": (5,)}
    return tuple(P(f"{name}.{key}", shape, **kinds) for key, shape in shapes.items())  # type: ignore[arg-type]


UNITS: dict[str, tuple[Parameter, ...]] = {
    "block0": block("block0"),
    "block1": block("block1"),
    "block2": block("block2", shard_dtype="bfloat16"),
    "uneven": (P("u.a", (13, 7)), P("u.b", (3, 50)), P("u.c", (1,)), P("u.d", (5, 129)), P("u.e", (0, 4))),
    "dims": (P("d.a", (6, 16, 10), 1), P("d.b", (4, 6, 24), 2), P("d.c", (3, 11), 1), P("d.d", (9, 2, 400), 1)),
    "mixed": (
        P("m.a", (10, 30), 0, "float32", "float32", "float32"),
        P("m.b", (9, 31), 0, "bfloat16", "float32", "bfloat16", "bfloat16"),
        P("m.c", (64, 3), 1, "float16", "float32", "float16"),
        P("m.d", (8, 8), 0, "float64", "float64", None),
        P("m.e", (19,), 0, "bool", "bool", None),
    ),
}


def compiled_for(
    topology: Topology,
    names: Sequence[str] = tuple(UNITS),
    options: PlanOptions = TIGHT,
    route: str = PlanOptions().route,
) -> Compiled:
    mesh = Mesh((tuple(range(topology.world_size)),))
    options = replace(options, multicast="on") if route == "multicast" else replace(options, route=route)
    return compile_spec(ModelSpec(tuple(Unit(name, UNITS[name], mesh) for name in names), "test"), topology, options)


def values(shape: Sequence[int], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if to_torch(dtype).is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(to_torch(dtype))
    return torch.randint(0, 2, tuple(shape), generator=generator).to(to_torch(dtype))


def cut(whole: torch.Tensor, dim: int, owners: int, position: int) -> torch.Tensor:
    chunks = torch.chunk(whole, owners, dim)
    if position < len(chunks):
        return chunks[position].contiguous()
    return whole.new_empty([0 if i == dim else n for i, n in enumerate(whole.shape)])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# Order of issue -----------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(1, 4), Topology(2, 2, virtual=True), Topology(3, 1)])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@routes
def test_order_is_complete_and_keeps_streams(topology: Topology, collective: str, route: str) -> None:
    compiled = compiled_for(topology, ["block0", "uneven"], route=route)
    for unit in ("block0", "uneven"):
        programs = {rank: compiled.program(unit, collective, rank) for rank in range(topology.world_size)}
        for rank, program in programs.items():
            order = issue_order(programs, rank)
            for number, stream in enumerate(program.streams):
                assert [step for which, step in order if which == number] == list(range(len(stream.steps)))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@routes
def test_order_puts_self_signals_before_their_waits(collective: str, route: str) -> None:
    compiled = compiled_for(Topology(2, 2, virtual=True), ["block0"], route=route)
    programs = {rank: compiled.program("block0", collective, rank) for rank in range(4)}
    for rank, program in programs.items():
        given: dict[Lane, int] = {}
        for number, index in issue_order(programs, rank):
            step = program.streams[number].steps[index]
            if isinstance(step, Signal) and step.peer == rank:
                given[step.lane] = given.get(step.lane, 0) + step.count
            elif isinstance(step, Wait) and step.peer == rank:
                given[step.lane] = given.get(step.lane, 0) - step.count
                assert given[step.lane] >= 0, f"{step} is issued before its signal"
        assert given, "no signal to itself was looked at"


def test_order_refuses_programs_that_block_each_other() -> None:
    def waits_first(position: int, peer: int) -> Program:
        steps = (Wait(peer, Lane.READY), Signal(peer, Lane.READY))
        return Program("all_gather", position, (Stream("ag.node", steps),))

    with pytest.raises(PlanError, match=r"stream ag\.node of position 0 can never pass step 0"):
        issue_order({0: waits_first(0, 1), 1: waits_first(1, 0)}, 0)


# Words --------------------------------------------------------------------------------------------


def test_counter_words_wrap() -> None:
    table = value_table()
    assert len(table) == VALUES
    assert int(table[1]) == STRIDE
    for start in (0, 1, VALUES - 2, VALUES - 1, VALUES, 10 * VALUES + 3):
        word = int(table[start % VALUES])
        assert word == encode(start)
        for ahead in (0, 1, 7, VALUES // 2 - 1):
            assert reached(encode(start + ahead), word)
        for behind in (1, 7, VALUES // 2 - 1):
            assert not reached(encode(start - behind), word)
    assert encode(VALUES) == 0
    assert encode(VALUES - 1) <= MASK


# Arguments ----------------------------------------------------------------------------------------


def test_copy_arguments() -> None:
    compiled = compiled_for(Topology(1, 2), ["block0"])
    bases = Bases(compiled.arena, 0, {0: 1 << 20, 1: 5 << 20}, 0)
    copies = CopyArrays()

    def storage(offset: int, pitch: int = 0) -> Region:
        return Region(Buffer.STORAGE, 0, offset, pitch)

    first = copies.add(bases, [Transfer(storage(64), storage(64), 1, 100)], 1, True)
    grad, piece = Region(Buffer.GRAD, 3, 40), Region(Buffer.RECEIVE, 0, 16)
    second = copies.add(
        bases,
        [
            Transfer(grad, piece, 1, 8),
            Transfer(grad._replace(pitch=300), piece._replace(pitch=200), 3, 100),
            Transfer(storage(0, 2 * LONG_RUN), storage(0, LONG_RUN), 2, LONG_RUN),
            Transfer(storage(0, 50), storage(10, 50), 4, 50),
        ],
        1,
        False,
    )
    copies.finish()
    addresses = bases.addresses()
    addresses[bases.tensors[Buffer.GRAD, 3]] = 7000
    copies.rebase(addresses)
    slot, receive = compiled.arena.slots[0].offset, compiled.arena.receive.receive
    own, peer = (1 << 20) + slot, (5 << 20) + slot
    assert (first.first, first.last, second.first, second.last) == (0, 1, 1, 5)
    assert copies.destinations.tolist() == [own + 64, (5 << 20) + receive + 16, peer, peer + LONG_RUN, peer + 10]
    assert copies.sources.tolist() == [peer + 64, 7040, own, own + 2 * LONG_RUN, own]
    assert copies.sizes.tolist() == [100, 8, LONG_RUN, LONG_RUN, 200]
    assert copies.pitched.shape == (1, 16)
    assert copies.pitched[0, [4, 6, 11, 13, 14, 15]].tolist() == [7040, 300, (5 << 20) + receive + 16, 200, 100, 3]
    assert copies.widest_pitch() == 300


def test_staging_never_overwrites_what_is_under_way() -> None:
    machine = Machine()
    driver = FakeDriver(machine, 0)
    staging = Staging(driver, torch.device("cpu"))
    memory = np.zeros((3 * MOST, 4), np.int64)
    for turn in range(3 * MOST):
        staging.fill(np.full(4, turn, np.int64))
        ticket: Any = SimpleNamespace(finished=False, ends=[driver.new_event()])
        staging.send(memory[turn].ctypes.data, 1, ticket)
        driver.event_record(ticket.ends[0], 1)
    assert len(staging._buffers) == MOST
    machine.finish()
    assert memory[:, 0].tolist() == list(range(3 * MOST))


def test_a_table_needs_no_other_buffer_once_its_collective_has_ended() -> None:
    machine = Machine()
    staging = Staging(FakeDriver(machine, 0), torch.device("cpu"))
    for turn in range(5):
        ticket: Any = SimpleNamespace(finished=False, ends=[])
        staging.fill(np.full(4, turn, np.int64))
        staging.send(np.zeros(4, np.int64).ctypes.data, 1, ticket)
        assert len(staging._buffers) == min(turn + 1, 2)
        ticket.finished = turn > 0  # the first collective takes long


# Collectives --------------------------------------------------------------------------------------


def gather(cluster: Cluster, unit: str, seed: int, between: int = 0) -> None:
    """All ranks gather, and their caller's stream waits."""
    gather_without_waiting(cluster, unit, seed, between, CudaTicket.wait)


def gather_without_waiting(
    cluster: Cluster, unit: str, seed: int, between: int = 0, then: Callable[[CudaTicket], None] | None = None
) -> list[CudaTicket]:
    """All ranks gather; with each ticket, `then` is called at once."""
    tickets = []
    for session in cluster.sessions:
        parameters = cluster.compiled.spec.unit(unit).parameters
        group, position = cluster.compiled.group(unit, session.rank)
        wholes = [values(p.shape, p.shard_dtype, seed + i) for i, p in enumerate(parameters)]
        shards = [cut(w, p.dim, len(group), position) for w, p in zip(wholes, parameters, strict=True)]
        ticket = session.all_gather(unit, shards)
        assert isinstance(ticket, CudaTicket)
        tickets.append(ticket)
        if then is not None:
            then(ticket)
        cluster.machine.go(between)
    return tickets


def check_gathered(cluster: Cluster, unit: str, seed: int, sessions: Sequence[Session] | None = None) -> None:
    for session in cluster.sessions if sessions is None else sessions:
        for i, p in enumerate(cluster.compiled.spec.unit(unit).parameters):
            expected = values(p.shape, p.shard_dtype, seed + i).to(to_torch(p.dtype))
            assert torch.equal(bits(session.whole(unit)[p.name]), bits(expected)), f"rank {session.rank}, {p.name}"


def scatter(
    cluster: Cluster, unit: str, seed: int, scale: float = 1.0, between: int = 0, subset: Sequence[int] | None = None
) -> list[dict[int, torch.Tensor]]:
    """All ranks reduce; returns the outputs, which hold the result once the machine has finished."""
    outs = []
    for session in cluster.sessions:
        parameters = cluster.compiled.spec.unit(unit).parameters
        chosen = [i for i, p in enumerate(parameters) if p.trainable] if subset is None else list(subset)
        grads = {
            i: values(parameters[i].shape, parameters[i].grad_dtype or "", seed + 100 * session.rank + i)
            for i in chosen
        }
        out = session.new_outs(unit, chosen, "cpu")
        session.reduce_scatter(unit, grads, out, scale, float(len(cluster.sessions))).wait()
        cluster.kept.append(grads)  # the CPU's allocator knows no streams: freed memory is used again at once
        outs.append(out)
        cluster.machine.go(between)
    return outs


def check_reduced(
    cluster: Cluster, unit: str, seed: int, outs: list[dict[int, torch.Tensor]], scale: float = 1.0
) -> None:
    world = len(cluster.sessions)
    parameters = cluster.compiled.spec.unit(unit).parameters
    for session in cluster.sessions:
        team = cluster.compiled.context(unit, session.rank).team
        node, _ = team.seat(session.rank)
        for i, out in outs[session.rank].items():
            p = parameters[i]
            pieces = [
                cut(values(p.shape, p.grad_dtype or "", seed + 100 * rank + i), p.dim, world, session.rank).float()
                for rank in range(world)
            ]

            def node_sum(which: int, pieces: list[torch.Tensor] = pieces, team=team) -> torch.Tensor:
                total = pieces[team.grid[which][0]]
                for rank in team.grid[which][1:]:
                    total = total + pieces[rank]
                return total

            total = node_sum(node)
            for j in range(1, team.nodes):
                total = total + node_sum((node - j) % team.nodes)
            expected = (total * scale / world).to(to_torch(p.out_dtype))
            assert torch.equal(bits(out), bits(expected)), f"rank {session.rank}, {p.name}"


TOPOLOGIES = [Topology(1, 2), Topology(1, 3), Topology(2, 2, virtual=True), Topology(3, 1, virtual=True)]


@pytest.mark.parametrize("signals", ["write", "copy"])
@pytest.mark.parametrize("shared", [False, True], ids=["free queues", "one queue"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@routes
def test_every_unit_on_a_fake_machine(topology: Topology, shared: bool, signals: str, route: str) -> None:
    """Bytes of both collectives, over slots in use again, with poison between, in random order of the streams."""
    compiled = compiled_for(topology, route=route)
    machine = Machine(1, shared)
    with cluster(compiled, machine, settings=Settings(4, 4, signals, "copy")) as made:
        for turn in range(2):
            for number, unit in enumerate(UNITS):
                seed = 1000 * turn + 10 * number
                gather(made, unit, seed, between=7)
                machine.finish()
                check_gathered(made, unit, seed)
                outs = scatter(made, unit, seed, 0.5, between=7)
                machine.finish()
                check_reduced(made, unit, seed, outs, 0.5)
                for session in made.sessions:
                    session.release(unit)
        machine.finish()
        for session in made.sessions:  # all vacated and poisoned
            assert all(bool((bits(t) == 0xFF).all()) for t in session.storage("mixed"))
            transport = session.transport
            assert transport.words.consumed != [0] * len(transport.words.consumed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("topology", [Topology(1, 2), Topology(2, 2, virtual=True)], ids=str)
@routes
def test_collectives_overlap(seed: int, topology: Topology, route: str) -> None:
    """Gathers and reductions of several units under way at once, the host far ahead of the device."""
    compiled = compiled_for(topology, route=route)
    machine, chance = Machine(seed, shared_queues=seed % 2 == 1), random.Random(seed)
    with cluster(compiled, machine, settings=Settings(2, 2, "write" if seed % 3 else "copy", "copy")) as made:
        reduced = []
        for turn in range(12):
            unit = list(UNITS)[turn % len(UNITS)]
            gather(made, unit, turn, between=chance.choice([0, 0, 3, 50]))
            if turn % 2:
                reduced.append((unit, turn, scatter(made, unit, turn, between=chance.choice([0, 2, 40]))))
            if chance.random() < 0.5:
                machine.finish()
                check_gathered(made, unit, turn)
            for session in made.sessions:
                session.release(unit)
        machine.finish()
        for unit, turn, outs in reduced:
            check_reduced(made, unit, turn, outs)
        for session in made.sessions:
            transport = session.transport
            assert not transport.heads()  # type: ignore[attr-defined]
            assert not transport.outstanding()  # type: ignore[attr-defined]
            assert len(transport.books.pool) < 200  # type: ignore[attr-defined]


SHARING = ["block0", "block1", "block2"]  # two slots: the first and the last share one


@routes
def test_a_slot_is_not_written_before_it_is_vacated(route: str) -> None:
    """What the caller's stream still does with a slot comes before the next unit's bytes, without any wait."""
    compiled = compiled_for(Topology(1, 2), SHARING, route=route)
    machine = Machine(3)
    seen = []
    with cluster(compiled, machine, poison=False) as made:
        gather(made, "block0", 5)
        for session in made.sessions:
            flat = session.storage("block0")[0]
            machine.put(session.rank, machine.current, lambda flat=flat: seen.append(flat.clone()) or True)
            session.release("block0")
        gather(made, "block2", 50)  # the same slot
        machine.finish()
        check_gathered(made, "block2", 50)
    expected = values((48, 48), "float32", 5).bfloat16().view(-1)
    assert all(torch.equal(flat, expected) for flat in seen)


def delay(cluster: Cluster, *names: str) -> None:
    """Lets streams of these names go on only when no other can."""
    for session in cluster.sessions:
        transport = session.transport
        cluster.machine.last |= {transport.stream(name) for name in names}  # type: ignore[attr-defined]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
@routes
def test_poison_comes_before_the_next_unit(topology: Topology, seed: int, route: str) -> None:
    """However late the fill is: nobody, peers included, writes the slot before."""
    compiled = compiled_for(topology, SHARING, route=route)
    machine = Machine(seed)
    with cluster(compiled, machine, poison=True) as made:
        gather(made, "block0", 5)
        machine.finish()
        delay(made, "poison")
        for session in made.sessions:
            session.release("block0")
        gather(made, "block2", 50)
        machine.finish()
        check_gathered(made, "block2", 50)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("late", ["ag.place", "ag.node", "ag.wire"])
@routes
def test_poison_comes_after_a_gather_that_nobody_waited_for(topology: Topology, late: str, route: str) -> None:
    """Rank 0 lets go of a unit unused: its slot is poisoned all over, and its peers get the unit unharmed."""
    compiled = compiled_for(topology, SHARING, route=route)
    machine = Machine(1)
    with cluster(compiled, machine, poison=True) as made:
        delay(made, late)
        first, *others = made.sessions
        tickets = gather_without_waiting(made, "block0", 5)
        for ticket in tickets[1:]:
            ticket.wait()
        first.release("block0")
        machine.finish()
        assert all(bool((bits(flat) == 0xFF).all()) for flat in first.storage("block0"))
        check_gathered(made, "block0", 5, others)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("late", ["ag.place", "ag.node", "ag.wire"])
@pytest.mark.parametrize("released", [True, False], ids=["released", "gathered again"])
@routes
def test_a_gather_that_nobody_waited_for_is_not_overtaken(
    topology: Topology, late: str, released: bool, route: str
) -> None:
    """The next one into the slot does not change what rank 0 still sends, nor is it written over by that."""
    compiled = compiled_for(topology, SHARING, route=route)
    machine = Machine(2)
    second = "block2" if released else "block0"
    seen = []
    with cluster(compiled, machine, poison=False) as made:
        delay(made, late)
        for session, ticket in zip(made.sessions, gather_without_waiting(made, "block0", 5), strict=True):
            if session.rank > 0:
                ticket.wait()
                flat = session.storage("block0")[0]
                machine.put(session.rank, machine.current, lambda flat=flat: seen.append(flat.clone()) or True)
            if released:
                session.release("block0")
        gather(made, second, 50)
        machine.finish()
        check_gathered(made, second, 50)
    expected = values((48, 48), "float32", 5).bfloat16().view(-1)
    assert len(seen) == len(made.sessions) - 1
    assert all(torch.equal(flat, expected) for flat in seen)


@pytest.mark.parametrize("poison", [True, False])
def test_a_claim_without_peers_ends_when_its_slot_is_vacated(poison: bool) -> None:
    compiled = compiled_for(Topology(1, 2), SHARING)
    machine = Machine(1)
    with cluster(compiled, machine, poison=poison) as made:
        gather(made, "block0", 5)
        machine.finish()
        seen = []
        session = made.sessions[0]
        other = machine.current + 1000  # a stream of the caller's on which the last reader is late
        machine.last.add(other)
        before, machine.current = machine.current, other
        machine.put(0, other, lambda: seen.append("read") or True)
        session.release("block0")
        machine.current = before
        delay(made, "poison")
        claim = Program("claim", 0, (Stream("claim", ()),))
        session.transport.run(claim, Binding("block2", 0, (0, 1))).wait()
        flat = session.storage("block0")[0]
        machine.put(0, before, lambda: seen.append("write") or bool(flat.fill_(3).numel()))
        machine.finish()
        assert seen == ["read", "write"]
        assert bool((flat == 3).all())


def test_running_sums_live_as_long_as_the_reduction() -> None:
    """Nobody else holds them, and a wait on another stream than the caller's does not make them free."""
    compiled = compiled_for(Topology(3, 1, virtual=True), ["mixed"])
    machine = Machine(0)
    with cluster(compiled, machine) as made:
        made_here = weakref.WeakSet()
        original = torch.empty

        def spy(*shape: object, **kinds: object) -> torch.Tensor:
            out = original(*shape, **kinds)  # type: ignore[call-overload]
            if kinds.get("dtype") is torch.float32:
                made_here.add(out)
                made.kept.append(out.untyped_storage())  # where the test fails, nothing else is to be harmed
            return out

        outs = []
        for session in made.sessions:
            grads = {1: values((9, 31), "float32", session.rank)}
            made.kept.append(grads)
            outs.append(session.new_outs("mixed", [1], "cpu"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", spy)
                ticket = session.reduce_scatter("mixed", grads, outs[-1])
            ticket.wait()
            ticket.wait_released()
        assert len(made_here) == 3
        machine.finish()
        for session in made.sessions:
            session.transport.heads()  # type: ignore[attr-defined]
        assert not made_here


def placed_beside(compiled: Compiled, unit: str, rank: int) -> Program:
    """A gather whose Place has a stream of its own and waits for the pulls of the program before, by a self-signal."""
    (main,) = compiled.program(unit, "all_gather", rank).streams
    place = next(step for step in main.steps if isinstance(step, Place))
    pulls = [step for step in main.steps if isinstance(step, Copy)]
    peer = 1 - rank
    head = (Wait(rank, Lane.DONE), Wait(peer, Lane.DONE), place, Signal(rank, Lane.PLACED))
    tail = (Wait(rank, Lane.PLACED), Signal(peer, Lane.READY), Wait(peer, Lane.READY), *pulls)
    ends = (Signal(peer, Lane.DONE), Signal(rank, Lane.DONE), *main.steps[-1:])
    return Program("all_gather", rank, (Stream("ag.place", head), Stream("ag.node", tail + ends)))


@pytest.mark.parametrize("seed", range(4))
def test_signals_to_oneself_reach_the_next_program(seed: int) -> None:
    compiled = compiled_for(Topology(1, 2), SHARING, route="pull")
    for unit in ("block0", "block1", "block2"):
        for rank in range(2):
            assert isinstance(compiled.program(unit, "all_gather", rank).streams[0].steps[-1], Place)  # the bundle's
            compiled = compiled.with_program(unit, rank, placed_beside(compiled, unit, rank))
    machine = Machine(seed, shared_queues=seed % 2 == 1)
    with cluster(compiled, machine) as made:
        for turn in range(9):
            unit = f"block{turn % 3}"
            gather(made, unit, 10 * turn, between=(turn * seed) % 20)
            if turn % 2:
                machine.finish()
                check_gathered(made, unit, 10 * turn)
            for session in made.sessions:
                session.release(unit)


PTX = """
.visible .entry kernel(
\t.param .u64 .ptr .global .align 16 kernel_param_0,
\t.param .f32 kernel_param_1,
\t.param .u64 .ptr .global .align 1 kernel_param_2
)
.reqntid 256
"""


def test_launch_arguments_are_read_from_the_kernel() -> None:
    assert parameters_of(PTX) == [8, 4, 8]
    assert parameters_of(PTX.replace(".f32 ", ".align 64 .b8 ").replace("_1,", "_1[128],")) is None
    assert parameters_of("nothing") is None


@pytest.mark.parametrize("scratch", [0, 1 << 20])
def test_scratch_memory_is_the_first_argument_that_is_not_ours(scratch: int) -> None:
    ptx = ".entry k(.param .u64 k_0, .param .f32 k_1, .param .u64 k_2, .param .u64 k_3)"
    metadata = SimpleNamespace(num_warps=4, shared=100, global_scratch_size=256 if scratch else 0)
    compiled = SimpleNamespace(metadata=metadata, function=7, asm={"ptx": ptx})
    calls = []

    def launch(*arguments: Any) -> int:
        *shape, pointers, extra = arguments
        values = [ctypes.cast(pointers[place], ctypes.POINTER(ctypes.c_uint64))[0] for place in (0, 2, 3)]
        calls.append((shape, values, extra))
        return 0

    start = plain_launch(compiled, 1 << 30, [1.0], 5, launch, scratch)
    assert start is not None
    assert start(99) == 0
    assert calls == [([7, 5, 1, 1, 128, 1, 1, 100, 99], [1 << 30, scratch, 0], None)]
    if scratch:
        assert plain_launch(compiled, 1 << 30, [1.0], 5, launch) is None, "nowhere to put descriptors"
        bare = SimpleNamespace(**{**vars(compiled), "asm": {"ptx": ".entry k(.param .u64 k_0, .param .f32 k_1)"}})
        assert plain_launch(bare, 1 << 30, [1.0], 5, launch, scratch) is None


def test_subset_of_the_gradients_and_wider_ones() -> None:
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    with cluster(compiled, machine) as made:
        outs = scatter(made, "block0", 3, subset=[0, 2])
        machine.finish()
        check_reduced(made, "block0", 3, outs)
        wide = []
        for session in made.sessions:
            grads = {1: values((12, 48), "float32", session.rank)}
            out = session.new_outs("block0", [1], "cpu")
            session.reduce_scatter("block0", grads, out)
            wide.append(out[1])
        machine.finish()
        whole = values((12, 48), "float32", 0) + values((12, 48), "float32", 1)
        for rank, out in enumerate(wide):
            assert torch.equal(out, cut(whole, 0, 2, rank))


@routes
def test_tables_take_no_more_memory_than_is_stated(route: str) -> None:
    compiled = compiled_for(Topology(1, 3), route=route)
    machine = Machine(0)
    with cluster(compiled, machine, settings=Settings()) as made:
        for unit in compiled.spec.units:
            gather(made, unit.name, 1)
            machine.finish()
            for session in made.sessions:
                session.release(unit.name)
            outs = scatter(made, unit.name, 2)
            machine.finish()
            check_reduced(made, unit.name, 2, outs)
        for session in made.sessions:
            taken = tables_of(session)
            assert taken <= scratch_nbytes(compiled, session.rank) <= 12 * taken


def tables_of(session: Session) -> int:
    """Bytes that a transport takes beside the arena's layout, as torch's allocator counts them."""
    transport = session.transport
    assert isinstance(transport, CudaTransport)
    sets = [launches for lowered in transport._lowered.values() for launches in lowered.sets.values()]
    beside = arena_bytes(transport.compiled)[0] - transport.compiled.arena.size
    return beside + sum(align(launches.memory.nbytes, 512) for launches in sets)


def test_tables_of_odd_parameters_and_of_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several segments each; reductions through the slot and beside it."""
    rows = tuple(P(f"odd.{index}", (2, 8209 + index), 0, "float32", "bfloat16", "bfloat16") for index in range(400))
    monkeypatch.setitem(UNITS, "odd", rows)
    compiled = compiled_for(Topology(1, 2), ["odd"], PlanOptions(slot_reuse=True, bundle_bytes=0))
    machine = Machine(0)
    with cluster(compiled, machine, settings=Settings()) as made:
        gather(made, "odd", 1)
        held = scatter(made, "odd", 2)
        machine.finish()
        for session in made.sessions:
            session.release("odd")
        outs = scatter(made, "odd", 3)
        machine.finish()
        check_reduced(made, "odd", 2, held)
        check_reduced(made, "odd", 3, outs)
        for session in made.sessions:
            transport = session.transport
            assert isinstance(transport, CudaTransport)
            assert len(transport._lowered) == 3
            launches = [
                launch
                for lowered in transport._lowered.values()
                for found in lowered.sets.values()
                for step in found.launches
                for launch in step
            ]
            blocks = sum(len(launch.job.blocks) for launch in launches)
            records = sum(
                (launch.length - max(1, len(launch.job.steps)) * launch.programs * PROGRAM_WORDS)
                // launch.job.division.segment_words
                for launch in launches
            )
            assert records > 1.5 * blocks
            taken = tables_of(session)
            assert taken <= scratch_nbytes(compiled, session.rank) <= 4 * taken


@pytest.mark.parametrize("pieces", [1, sums.BULK_PIECES, sums.BULK_PIECES + 1, 16])
def test_launches_that_make_descriptors(pieces: int) -> None:
    """The report counts scratch memory for those of few operands only."""
    tuning = sums.default_tuning(pieces, Settings().accumulate_ctas)
    assert tuning.bulk == (pieces + 1 < _MOST_DESCRIBED)
    assert tuning.ctas == Settings().place_ctas == switched.DEFAULT.ctas == _PROGRAMS


def test_an_arena_outlives_a_transport_that_nobody_closed() -> None:
    """Peers may still write to it: an address that is mapped no more would end their processes."""
    compiled = compiled_for(Topology(1, 2), ["block0"])
    with cluster(compiled, Machine(0)) as made:
        closed = made.sessions.pop()
        owners = []
        for transport in (closed.transport, made.sessions.pop().transport):
            assert isinstance(transport, CudaTransport)
            transport.arena.owner = owner = torch.zeros(1)
            owners.append(weakref.ref(owner))
            transport.watchdog.stop()  # it has lost the device, say
        closed.close()
        del closed, transport, owner
        gc.collect()
        assert owners[0]() is None
        assert owners[1]() is not None
        (arena,) = [arena for arena in transport_module._OPEN if arena.owner is owners[1]()]
        transport_module._OPEN.discard(arena)


def test_programs_that_are_given_up_stay_until_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are kept prepared; what is under way keeps its tables and events, whatever comes after it."""
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    closed: list[Lowered] = []
    close = Lowered.close
    monkeypatch.setattr(Lowered, "close", lambda lowered: (closed.append(lowered), close(lowered)))
    with cluster(compiled, machine) as made:
        transports = [session.transport for session in made.sessions]
        for transport in transports:
            transport.most_prepared = 3
        reduced = []
        for number, subset in enumerate([[0], [1], [2], [0, 1], [0, 2], [1, 2], [0], [1]]):
            reduced.append((number, scatter(made, "block0", number, subset=subset)))
            for transport in transports:
                assert len(transport._lowered) <= 3  # type: ignore[attr-defined]
        before = [len(transport._retired) for transport in transports]  # type: ignore[attr-defined]
        assert min(before) >= 5, "none of them has ended yet"
        machine.finish()
        for number, outs in reduced:
            check_reduced(made, "block0", number, outs)
        assert not closed
        outs = scatter(made, "block0", 9, subset=[0, 1, 2])
        assert len(closed) == sum(before) + len(transports), "those, and one more each that made room"
        machine.finish()
        check_reduced(made, "block0", 9, outs)


def test_gradients_move_between_calls() -> None:
    """New addresses, also on another place relative to 16 bytes."""
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    room = torch.zeros(2, 48 * 48 + 64, dtype=torch.bfloat16)
    with cluster(compiled, machine) as made:
        for shift in (0, 64, 1, 3, 0):
            kept, outs = [], []
            for session in made.sessions:
                view = room[session.rank, shift : shift + 48 * 48].view(48, 48)
                view.copy_(values((48, 48), "bfloat16", shift + session.rank))
                out = session.new_outs("block0", [0], "cpu")
                session.reduce_scatter("block0", {0: view}, out).wait()
                kept.append(view.clone())
                outs.append(out[0])
            machine.finish()
            whole = kept[0].float() + kept[1].float()
            assert all(torch.equal(out, cut(whole, 0, 2, rank)) for rank, out in enumerate(outs)), shift


def driver_calls(programs: dict[int, Program], rank: int, signals: str) -> int:
    """Calls of one gather and the wait for it, launches left out, once its slot has been vacated before.

    The caller's stream is recorded once; each stream waits for that and for the vacated slot, unless it begins after
    another one. The end of each stream is recorded and waited for, unless another one waits for it. A signal to
    oneself is recorded, and waited for if from another stream; neighbouring copy steps are one batch. Neighbouring
    waits and signals are one call, but signals that are copies are one each.
    """
    program = programs[rank]
    lasts = [stream.steps[-1] for stream in program.streams]
    calls = 1 + 2 * sum(not (isinstance(last, Signal) and last.peer == rank) for last in lasts)
    for stream in program.streams:
        first = stream.steps[0]
        calls += 0 if isinstance(first, Wait) and first.peer == rank else 2
    last: tuple[int, int] | None = None
    givers: dict[Lane, list[int]] = {}
    neighbours: tuple[int, bool] | None = None  # stream of the call that the next memory operation may join
    for number, index in issue_order(programs, rank):
        step = program.streams[number].steps[index]
        if not isinstance(step, Signal | Wait) or step.peer == rank:
            neighbours = None
        if isinstance(step, Copy):
            before = program.streams[number].steps[index - 1] if last == (number, index - 1) else None
            calls += not isinstance(before, Copy)
        elif isinstance(step, Signal) and step.peer == rank:
            givers.setdefault(step.lane, []).append(number)
            calls += 1
        elif isinstance(step, Wait) and step.peer == rank:
            calls += givers[step.lane].pop(0) != number
        elif isinstance(step, Signal | Wait):
            joins = isinstance(step, Wait) or signals == "write"
            calls += not (joins and neighbours == (number, True))
            neighbours = number, joins
        last = number, index
    return calls


@pytest.mark.parametrize("signals", ["write", "copy"])
@pytest.mark.parametrize(("route", "calls"), [("push", 11), ("pull", 9)])
def test_few_driver_calls(signals: str, route: str, calls: int) -> None:
    """A gather of one unit between two ranks takes a handful of calls, however many parameters it has."""
    compiled = compiled_for(Topology(1, 2), ["block0"], PlanOptions(slots=2), route)
    programs = {rank: compiled.program("block0", "all_gather", rank) for rank in range(2)}
    machine = Machine(0)
    with cluster(compiled, machine, settings=Settings(4, 4, signals), poison=False) as made:
        shards = [
            [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, rank) for i, p in enumerate(UNITS["block0"])]
            for rank in range(2)
        ]
        driver = made.sessions[0].transport.driver  # type: ignore[attr-defined]
        for _ in range(3):
            driver.calls.clear()
            for session, mine in zip(made.sessions, shards, strict=True):
                session.all_gather("block0", mine).wait()
            first = list(driver.calls)
            machine.finish()
            for session in made.sessions:
                session.release("block0")
        assert first.count("batch of copies") == 1
        assert len(first) == driver_calls(programs, 0, signals) == calls + (signals == "copy"), first


def test_copies_to_all_peers_share_a_call() -> None:
    """With more peers a piece takes no more calls: waits for all of them, then one batch to all of them."""
    counts = []
    for ranks in (2, 4):
        machine = Machine(0)
        with cluster(compiled_for(Topology(1, ranks), ["block0"]), machine, poison=False) as made:
            gather(made, "block0", 4)
            driver = made.sessions[0].transport.driver  # type: ignore[attr-defined]
            counts.append(driver.calls.count("batch of copies"))
            machine.finish()
            check_gathered(made, "block0", 4)
    assert 0 < counts[1] <= counts[0], counts


@routes
def test_without_batches_copies_go_one_by_one(route: str) -> None:
    compiled = compiled_for(Topology(1, 2), ["block0", "dims"], route=route)
    machine = Machine(0)
    with cluster(compiled, machine, batches=False) as made:
        for unit in ("block0", "dims"):
            gather(made, unit, 4)
            machine.finish()
            check_gathered(made, unit, 4)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "lane"), [("push", "FREE"), ("pull", "READY")])
def test_missing_peer_is_named_and_the_streams_are_set_free(route: str, lane: str) -> None:
    """Named with what is missing first: a push needs the peer's slot, a pull its shard."""
    compiled = compiled_for(Topology(1, 2), ["block0"], route=route)
    machine = Machine(0)
    with cluster(compiled, machine, timeout=0.2) as made:
        first = made.sessions[0]
        first.transport.names = (4, 9)  # of the world, in which the plan is a part
        shards = [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, 0) for i, p in enumerate(UNITS["block0"])]
        ticket = first.all_gather("block0", shards)
        transport = first.transport
        limit = time.monotonic() + 20
        while transport.broken is None and time.monotonic() < limit:  # type: ignore[attr-defined]
            machine.go(100)
            time.sleep(0.02)
        with pytest.raises(PeerError, match=rf"rank 4: all_gather of unit 'block0'.*ag\.node.*{lane} of rank 9"):
            ticket.wait()
        with pytest.raises(PeerError, match="look at its output"):
            first.all_gather("block0", shards)
        machine.drain()


@pytest.mark.parametrize(("when", "told"), [("behind", True), ("before", False), ("never", False)])
def test_an_optimizer_step_behind_a_failed_collective_is_told(when: str, told: bool) -> None:
    """The device runs it once the streams are set free: parameters are not to be saved then."""
    compiled = compiled_for(Topology(1, 2), ["block0", "block1"])
    machine = Machine(0)
    with cluster(compiled, machine, timeout=0.2) as made:
        gather(made, "block0", 1)
        machine.finish()  # both ranks are through with it: a step behind it is no fault
        first = made.sessions[0]
        if when == "before":
            first.transport.updating()
        shards = [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, 0) for i, p in enumerate(UNITS["block1"])]
        ticket = first.all_gather("block1", shards)
        if when == "behind":
            ticket.wait()  # as FSDP2 has the stream wait on which the optimizer runs
            first.transport.updating()
        until_failed(machine, [first])
        with pytest.raises(PeerError) as caught:
            ticket.wait()
        assert ("An optimizer step had been issued behind it" in str(caught.value)) == told
        machine.drain()


def failing(made: Cluster, machine: Machine, ranks: Sequence[int]) -> None:
    """Rank 0 gathers what its peer does not; runs until the transports of these ranks are broken."""
    first = made.sessions[0]
    shards = [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, 0) for i, p in enumerate(UNITS["block1"])]
    first.all_gather("block1", shards)
    until_failed(machine, [made.sessions[rank] for rank in ranks])


def until_failed(machine: Machine, sessions: Sequence[Session]) -> None:
    """Runs until the deadlines have passed, or 20 seconds."""
    limit = time.monotonic() + 20
    while any(session.transport.failure is None for session in sessions) and time.monotonic() < limit:
        machine.go(100)
        time.sleep(0.01)


def test_an_idle_peer_takes_note_before_streams_are_set_free() -> None:
    """Set free, they may push to its memory; it takes no optimizer step any more then, and has spoilt none."""
    compiled = compiled_for(Topology(1, 2), ["block0", "block1"])
    machine = Machine(0)
    with cluster(compiled, machine, timeout=0.5) as made:
        gather(made, "block0", 1)
        machine.finish()
        first, second = (session.transport for session in made.sessions)
        seen: list[str | None] = []
        release = first.watchdog._release  # type: ignore[attr-defined]
        first.watchdog._release = lambda: (seen.append(second.failure), release())  # type: ignore[attr-defined]
        second.updating()
        failing(made, machine, (0, 1))
        while not seen:
            machine.go(100)
            time.sleep(0.01)
        assert seen[0] is not None, "set free before the peer took note"
        assert "rank 1: rank 0 in all_gather of unit 'block1' gave up" in str(second.failure)
        assert "An optimizer step" not in str(second.failure)
        with pytest.raises(PeerError, match="rank 0 in all_gather of unit 'block1' gave up"):
            made.sessions[1].release("block0")
        machine.drain()


@pytest.mark.parametrize("update", [True, False])
def test_a_peer_that_does_not_take_note_in_time_is_told_so(update: bool) -> None:
    """It may have been stopped with work on its device, which what was set free elsewhere has spoilt."""
    compiled = compiled_for(Topology(1, 2), ["block0", "block1"])
    machine = Machine(0)
    with cluster(compiled, machine, timeout=0.2) as made:
        gather(made, "block0", 1)
        machine.finish()
        first, second = (session.transport for session in made.sessions)
        look, stopped = second.watchdog.look, [True]  # type: ignore[attr-defined]
        second.watchdog.look = lambda: None if stopped[0] else look()  # type: ignore[attr-defined]
        if update:
            second.updating()
        failing(made, machine, (0,))
        limit = time.monotonic() + 20
        while not first.watchdog._noted and time.monotonic() < limit:  # type: ignore[attr-defined]
            machine.go(100)
            time.sleep(0.01)
        assert second.failure is None
        stopped[0] = False
        while second.failure is None and time.monotonic() < limit:
            machine.go(100)
            time.sleep(0.01)
        assert ("An optimizer step had been issued behind it" in str(second.failure)) == update
        machine.drain()


def test_wrong_tensors_are_refused() -> None:
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    with cluster(compiled, machine) as made:
        session = made.sessions[0]
        out = session.new_outs("block0", [0], "cpu")
        program = compiled.program("block0", "reduce_scatter", 0, [0])
        binding = Binding("block0", 0, (0, 1), {(Buffer.OUT, 0): out[0]})
        with pytest.raises(InputError, match=r"no tensor for grad\[0\]"):
            session.transport.run(program, binding)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="signals must be"):
        Settings(signals="semaphore")
    with pytest.raises(InputError, match="place_ctas must be at least 1"):
        Settings(place_ctas=0)


def test_shards_table_agrees() -> None:
    """The tests' own cutting is FSDP2's."""
    for parameters in UNITS.values():
        for p in parameters:
            for owners in (2, 3, 4):
                numel = [cut(torch.empty(p.shape), p.dim, owners, r).numel() for r in range(owners)]
                assert numel == shard(p, owners).numel.tolist()


def test_a_collective_that_broke_off_is_set_free_and_keeps_its_tensors() -> None:
    """What was issued of it may wait for peers, and read and write its tensors later; the peers are told."""
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    with cluster(compiled, machine, timeout=0.2) as made:
        gather(made, "block0", 1)
        machine.finish()
        first, transport = made.sessions[0], made.sessions[0].transport
        assert isinstance(transport, CudaTransport)
        (lowered,) = transport._lowered.values()

        def interrupt() -> None:
            raise KeyboardInterrupt

        lowered.operations.append(interrupt)
        shards = [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, 0) for i, p in enumerate(UNITS["block0"])]
        held = [weakref.ref(shard) for shard in shards]
        with pytest.raises(KeyboardInterrupt):
            first.all_gather("block0", shards)
        del shards
        gc.collect()
        assert all(ref() is not None for ref in held)
        limit = time.monotonic() + 20
        while transport.outstanding() and time.monotonic() < limit:
            machine.go(100)
            transport.heads()
            time.sleep(0.02)
        machine.finish()
        assert word_at(transport.arena.addresses[1] + transport.abort_offset) != 0


def test_what_is_stuck_when_its_transport_is_closed_keeps_its_tensors() -> None:
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine = Machine(0)
    with cluster(compiled, machine) as made:
        session = made.sessions[0]
        shards = [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, 0) for i, p in enumerate(UNITS["block0"])]
        held = [weakref.ref(shard) for shard in shards]
        session.all_gather("block0", shards)
        assert isinstance(session.transport, CudaTransport)
        session.transport.watchdog.timeout = -10.0  # nothing to wait for
        session.close()
        del shards, made.sessions[0], session
        gc.collect()
        alive = [ref() is not None for ref in held]
        for queue in machine.queues.values():
            queue.clear()
        made.sessions.pop().close()
    assert all(alive)


def test_tables_that_could_not_be_made_are_made_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other places relative to 16 bytes take other tables; when there is no memory for them, the old ones are gone."""
    compiled = compiled_for(Topology(1, 2), ["block0"])
    machine, made_anew = Machine(0), []
    make = LaunchSet._make
    monkeypatch.setattr(LaunchSet, "_make", lambda found, addresses: (made_anew.append(found), make(found, addresses)))
    with cluster(compiled, machine) as made:
        outs = scatter(made, "block0", 1)
        machine.finish()
        check_reduced(made, "block0", 1, outs)
        session = made.sessions[0]
        odd = {
            i: torch.empty(p.numel + 1, dtype=to_torch(p.grad_dtype or ""))[1:].view(p.shape)
            for i, p in enumerate(UNITS["block0"])
        }

        def full(*args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(tables_module, "torch", SimpleNamespace(empty=full, int64=torch.int64))
            with pytest.raises(torch.OutOfMemoryError):
                session.reduce_scatter("block0", odd, session.new_outs("block0", list(odd), "cpu"))
        broken_off = made_anew.pop()
        made_anew.clear()
        outs = scatter(made, "block0", 2)
        assert broken_off in made_anew
        machine.finish()
        check_reduced(made, "block0", 2, outs)
