"""Steps between nodes as NCCL's one-sided calls, without a GPU: counts, contexts, bytes, refusals and faults."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import pytest
from cuda_support import Machine, cluster
from test_cuda_logic import (
    TIGHT,
    UNITS,
    check_gathered,
    check_reduced,
    compiled_for,
    cut,
    gather,
    routes,
    scatter,
    values,
)

from tide.compiler.options import PlanOptions
from tide.compiler.steps import Buffer, Lane, Program, Put, Region, Signal, Stream, Transfer, Wait
from tide.errors import CapabilityError, InputError, PeerError, TransportError
from tide.topology import Topology
from tide.transport.cuda import Settings
from tide.transport.cuda import watchdog as watchdog_module
from tide.transport.cuda.request import arena_request
from tide.transport.cuda.wire import COMMUNICATORS, CONTEXTS, LANES, Tally, Wire, needs_of, segments, signals_given

#: Real nodes: peers of other nodes have no address here.
REAL = [Topology(2, 1), Topology(2, 2), Topology(3, 1)]
#: Communicators, whether each runs in order of issue, and what tells of a put.
FEW = [
    (Topology(2, 1), 1, True, "nccl"),
    (Topology(2, 2), 2, True, "nccl"),
    (Topology(3, 1), 4, True, "nccl"),
    (Topology(3, 2), 1, False, "nccl"),
    (Topology(2, 2), 1, True, "word"),
    (Topology(3, 1), 4, False, "word"),
]


def wired(communicators: int = 1, signals: str = "nccl") -> Settings:
    return Settings(4, 4, puts="nccl", communicators=communicators, wire_signals=signals)


@pytest.mark.parametrize(("topology", "communicators", "serial", "signals"), FEW, ids=str)
@routes
def test_every_unit_over_the_wire(
    topology: Topology, communicators: int, serial: bool, signals: str, route: str
) -> None:
    """Bytes of both collectives with peers of other nodes out of reach, slots in use again, poison between."""
    compiled = compiled_for(topology, route=route)
    machine = Machine(1)
    with cluster(compiled, machine, settings=wired(communicators, signals), serial=serial) as made:
        for turn, (number, unit) in itertools.product(range(2), enumerate(UNITS)):
            seed = 1000 * turn + 10 * number
            gather(made, unit, seed, between=7)
            machine.finish()
            check_gathered(made, unit, seed)
            outs = scatter(made, unit, seed, 0.5, between=7)
            machine.finish()
            check_reduced(made, unit, seed, outs, 0.5)
            for session in made.sessions:
                session.release(unit)
        kinds = {call[0] for fake in made.nccl for call in fake.calls}
        assert kinds == ({"put"} if signals == "word" else {"put", "signal", "wait"})


@pytest.mark.parametrize(("communicators", "signals"), [(1, "nccl"), (2, "nccl"), (4, "nccl"), (1, "word")])
@pytest.mark.parametrize(("seed", "shared"), [(0, False), (1, True)], ids=["free queues", "one queue"])
def test_collectives_overlap_over_the_wire(seed: int, communicators: int, shared: bool, signals: str) -> None:
    """Several under way at once, each communicator in order of issue, and all streams in one queue: nothing blocks."""
    topology = Topology(2, 2)
    compiled = compiled_for(topology)
    machine = Machine(seed, shared)
    with cluster(compiled, machine, settings=wired(communicators, signals)) as made:
        reduced = []
        for turn in range(12):
            unit = list(UNITS)[turn % len(UNITS)]
            gather(made, unit, turn, between=machine.random.choice([0, 0, 3, 50]))
            if turn % 2:
                reduced.append((unit, turn, scatter(made, unit, turn, between=machine.random.choice([0, 2, 40]))))
            if machine.random.random() < 0.4:
                machine.finish()
                check_gathered(made, unit, turn)
            for session in made.sessions:
                session.release(unit)
        machine.finish()
        for unit, turn, outs in reduced:
            check_reduced(made, unit, turn, outs)
        for session in made.sessions:
            assert not session.transport.heads()  # type: ignore[attr-defined]


@pytest.mark.parametrize("topology", REAL, ids=str)
@routes
def test_as_many_signals_are_taken_as_given(topology: Topology, route: str) -> None:
    """Counted over the calls that were made: each counter ends at what its waits have consumed."""
    compiled = compiled_for(topology, route=route)
    machine = Machine(2)
    with cluster(compiled, machine, settings=wired()) as made:
        for unit in UNITS:
            gather(made, unit, 1)
            outs = scatter(made, unit, 1)
            machine.finish()
            check_reduced(made, unit, 1, outs)
            for session in made.sessions:
                session.release(unit)
        given, taken = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        crossed = 0
        for rank, fake in enumerate(made.nccl):
            for kind, peer, signal, context, *rest in fake.calls:
                assert topology.node_of(peer) != topology.node_of(rank)
                if kind == "wait":
                    taken[peer, rank, signal, context] += rest[0]
                else:
                    given[rank, peer, signal, context] += 1
                    crossed += rest[0] if kind == "put" else 0
        assert given == taken
        assert sum(given.values()) > 100
        assert crossed == sum(
            step.transfers[i].nbytes
            for unit in UNITS
            for collective in ("all_gather", "reduce_scatter")
            for rank in range(topology.world_size)
            for _, _, step in compiled.program(unit, collective, rank).steps()
            if isinstance(step, Put)
            for i in range(len(step.transfers))
        ) + sum(
            _padding(compiled.program(unit, "reduce_scatter", r)) for unit in UNITS for r in range(topology.world_size)
        )


def _padding(program: Program) -> int:
    """Bytes between the segments of partial sums."""
    puts = [step for _, _, step in program.steps() if isinstance(step, Put)]
    return sum(sum(s.length for s in segments(p.transfers)) - sum(t.nbytes for t in p.transfers) for p in puts)


def test_a_partial_sum_is_one_put() -> None:
    compiled = compiled_for(Topology(2, 2))
    puts = [s for _, _, s in compiled.program("block0", "reduce_scatter", 0).steps() if isinstance(s, Put)]
    assert max(len(put.transfers) for put in puts) > 1
    assert all(len(segments(put.transfers)) == 1 for put in puts)


def test_segments() -> None:
    def storage(offset: int, pitch: int = 0) -> Region:
        return Region(Buffer.STORAGE, 0, offset, pitch)

    found = segments(
        [
            Transfer(storage(0), storage(100), 1, 50),
            Transfer(storage(50), storage(150), 1, 10),  # touches on both sides
            Transfer(storage(60), storage(161), 1, 4),  # on one
            Transfer(storage(1000, 64), storage(1000, 64), 3, 64),  # dense
            Transfer(storage(2000, 64), storage(3000, 80), 3, 16),  # strided
        ]
    )
    assert [(s.src_offset, s.dst_offset, s.length) for s in found] == [
        (0, 100, 60),
        (60, 161, 4),
        (1000, 1000, 192),
        (2000, 3000, 16),
        (2064, 3080, 16),
        (2128, 3160, 16),
    ]
    ring = [Transfer(Region(Buffer.PARTIAL, 0, at), Region(Buffer.WIRE, 0, at + 512), 1, 4) for at in (0, 256, 768)]
    assert [s.length for s in segments(ring)] == [260, 4]  # padding is less than 256 bytes
    with pytest.raises(TransportError, match="both have to be in the arena"):
        segments([Transfer(Region(Buffer.GRAD, 0, 0), storage(0), 1, 4)])


def _program(position: int, **streams: tuple[Signal | Wait | Put, ...]) -> Program:
    return Program("all_gather", position, tuple(Stream(name, steps) for name, steps in streams.items()))


def test_tally_counts_segments() -> None:
    def region(offset: int) -> Region:
        return Region(Buffer.STORAGE, 0, offset)

    three = tuple(Transfer(region(100 * i), region(100 * i), 1, 10) for i in range(3))
    sender = _program(0, a=(Put(1, three, Lane.WIRE), Signal(1, Lane.WIRE, 2), Put(1, three[:1], Lane.WIRE)))
    assert signals_given(sender, 1) == {Lane.WIRE: [3, 1, 1, 1]}
    tally = Tally({0: signals_given(sender, 1)}.__getitem__, 1)
    assert tally.take(0, Lane.WIRE, 1) == 3
    assert tally.take(0, Lane.WIRE, 2) == 2
    with pytest.raises(TransportError, match="leaves 1 signals WIRE of position 0"):
        tally.finish()
    assert tally.take(0, Lane.WIRE, 1) == 1
    tally.finish()
    with pytest.raises(TransportError, match="waits for 5 signals WIRE of position 0, whose program gives 4"):
        tally.take(0, Lane.WIRE, 1)


def test_a_lane_belongs_to_one_stream() -> None:
    sender = _program(0, a=(Signal(1, Lane.FREE),), b=(Signal(1, Lane.FREE),))
    with pytest.raises(TransportError, match="streams a and b both signal on FREE"):
        signals_given(sender, 1)


@pytest.mark.parametrize("communicators", COMMUNICATORS)
def test_channels_are_distinct(communicators: int) -> None:
    compiled = compiled_for(Topology(2, 1), options=replace(TIGHT, slots=None))
    needs = needs_of(compiled.arena, communicators)
    handles = list(range(communicators))
    wire = Wire(None, handles, handles, compiled.arena, compiled.topology, 0, lambda: None)  # type: ignore[arg-type]
    found = {(unit, lane): wire.channel(unit, lane) for unit in UNITS for lane in LANES}
    # Indices differ from unit to unit and lane to lane, so that it does not matter whether contexts share them. The
    # switch's lanes have those of the lanes that they replace.
    used = [channel.signal for (_, lane), channel in found.items() if lane not in (Lane.SPREAD, Lane.SPREAD_CREDIT)]
    assert sorted(used) == list(range(needs.signals))
    assert {lane: c.context for (_, lane), c in found.items()} == CONTEXTS
    # Two lanes of one context are signalled from one stream of a program: only one of them occurs in it.
    assert CONTEXTS[Lane.SPREAD] == CONTEXTS[Lane.PARTIAL]
    assert len({CONTEXTS[lane] for lane in LANES}) == len(LANES) - 1
    assert {c.communicator for c in found.values()} == set(handles)
    places = {lane: c.communicator for (_, lane), c in found.items()}
    if communicators > 1:
        gather, reduce = (
            {places[lane] for lane in LANES if (lane in (Lane.FREE, Lane.WIRE)) is of} for of in (True, False)
        )
        assert not gather & reduce
    if communicators == 4:
        kinds = (Lane.FREE, Lane.WIRE, Lane.PARTIAL, Lane.WIRE_CREDIT)
        assert len({places[lane] for lane in kinds}) == 4
        assert places[Lane.SPREAD] == places[Lane.PARTIAL]
        assert places[Lane.SPREAD_CREDIT] == places[Lane.WIRE_CREDIT]
    assert needs.contexts == 1 + max(CONTEXTS.values())
    with pytest.raises(TransportError, match="PUSHED do not cross nodes"):
        wire.channel("block0", Lane.PUSHED)


def test_neighbouring_waits_share_a_call() -> None:
    calls = []

    class Recorder:
        def function(self, name: str):
            return lambda *arguments: calls.append((name, arguments)) or 0

        def check(self, result: int, name: str) -> None:
            raise AssertionError(name)

    compiled = compiled_for(Topology(3, 1))
    wire = Wire(Recorder(), [7], [8], compiled.arena, compiled.topology, 0, lambda: None)
    channel = wire.channel("block1", Lane.WIRE)
    wire.wait(5, [(2, 1, channel), (1, 2, channel), (3, 1, channel)])()
    ((name, (number, _, communicator, stream)),) = calls
    assert (name, number, communicator, stream) == ("ncclWaitSignal", 2, 7, 5)


# Refusals -----------------------------------------------------------------------------------------


def test_what_is_asked_of_the_arena() -> None:
    def request(topology: Topology, **settings: object):
        return arena_request(compiled_for(topology, ["block0"]), 1, Settings(**settings))  # type: ignore[arg-type]

    one = request(Topology(1, 2))
    assert (list(one.reachable), one.needs) == ([0, 1], None)
    virtual = request(Topology(2, 2, virtual=True))
    assert list(virtual.reachable) == [0, 1, 2, 3]
    assert virtual.needs is not None
    assert not virtual.required
    assert request(Topology(2, 2, virtual=True), puts="nccl").required
    assert request(Topology(2, 2, virtual=True), puts="copy").needs is None
    real = request(Topology(2, 2), communicators=2)
    assert list(real.reachable) == [0, 1]
    assert real.required
    assert real.needs is not None
    assert real.needs.communicators == 2
    with pytest.raises(CapabilityError, match="puts='copy' reaches ranks of one machine only"):
        request(Topology(2, 2), puts="copy")


def test_too_many_units_are_refused() -> None:
    """Each needs signal indices of its own, unless flag words are put: then nobody looks at NCCL's signals."""
    arena = compiled_for(Topology(2, 1), ["block0"]).arena
    words = replace(arena.words, units={f"block{i}": arena.words.units["block0"] for i in range(10_000)})
    with pytest.raises(InputError, match=r"10000 units.*Settings\(wire_signals='word'\)"):
        needs_of(replace(arena, words=words), 1)
    assert needs_of(replace(arena, words=words), 1, words=True).signals == 1


def test_settings_of_the_wire_are_checked() -> None:
    with pytest.raises(InputError, match="puts must be 'auto', 'nccl' or 'copy', got 'rdma'"):
        Settings(puts="rdma")
    with pytest.raises(InputError, match="communicators must be one of"):
        Settings(communicators=3)
    with pytest.raises(InputError, match="wire_signals must be 'nccl' or 'word', got 'bell'"):
        Settings(wire_signals="bell")


# Faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", [True, False], ids=["late", "never"])
def test_missing_rank_of_another_node(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], comes: bool
) -> None:
    """It is named, NCCL is broken off, and a process whose streams stay stuck ends itself."""
    ended: list[int] = []

    def ends(code: int) -> None:
        ended.append(code)
        made.sessions[0].transport.watchdog._stop.set()  # type: ignore[attr-defined]

    monkeypatch.setattr(watchdog_module.os, "_exit", ends)
    monkeypatch.setattr(watchdog_module, "RESPITE", 4.0 if comes else 0.5)
    compiled = compiled_for(Topology(2, 1), ["block0"])
    machine = Machine(0)
    with cluster(compiled, machine, settings=wired(), timeout=0.2) as made:
        first, second = made.sessions
        shards = [
            [cut(values(p.shape, p.shard_dtype, i), p.dim, 2, rank) for i, p in enumerate(UNITS["block0"])]
            for rank in range(2)
        ]
        ticket = first.all_gather("block0", shards[0])
        transport = first.transport
        limit = time.monotonic() + 20
        while transport.broken is None and time.monotonic() < limit:  # type: ignore[attr-defined]
            machine.go(100)
            time.sleep(0.02)
        message = r"rank 0: all_gather of unit 'block0'.*ag\.wire waits at step \d+ for 1 signal\(s\) FREE of rank 1"
        with pytest.raises(PeerError, match=message):
            ticket.wait()
        while not made.nccl[0].aborted and time.monotonic() < limit:
            time.sleep(0.02)
        assert made.nccl[0].aborted == 1
        if comes:
            second.all_gather("block0", shards[1])
            machine.finish()
            while transport.heads() and time.monotonic() < limit:  # type: ignore[attr-defined]
                time.sleep(0.02)
            monkeypatch.setattr(watchdog_module, "RESPITE", 0.0)
            time.sleep(0.5)
            assert not ended
        else:
            while not ended and time.monotonic() < limit:
                time.sleep(0.02)
            assert ended == [watchdog_module.EXIT_CODE]
            said = capfd.readouterr().err
            assert "FREE of rank 1 through NCCL" in said
            assert "this process ends itself" in said
            second.all_gather("block0", shards[1])
            machine.finish()


@pytest.mark.parametrize("signals", ["nccl", "word"])
def test_ranks_of_other_nodes_get_nothing_of_what_failed(monkeypatch: pytest.MonkeyPatch, signals: str) -> None:
    """Rank 1 gives up; rank 0 of its node, which waits for it, would sum and put what never came."""
    ended: list[int] = []
    monkeypatch.setattr(watchdog_module.os, "_exit", ended.append)
    monkeypatch.setattr(watchdog_module, "RESPITE", 0.5)
    compiled = compiled_for(Topology(2, 2), ["block0"], PlanOptions(slots=2))  # one chunk an owner
    machine, unit = Machine(0), "block0"
    with cluster(compiled, machine, settings=wired(4, signals), timeout=60.0) as made:
        gather(made, unit, 1)
        machine.finish()
        parameters = compiled.spec.unit(unit).parameters
        grads = {i: values(p.shape, p.grad_dtype or "", i) for i, p in enumerate(parameters) if p.trainable}
        tickets, outs = {}, {}
        for rank in (0, 2, 3):
            session = made.sessions[rank]
            outs[rank] = session.new_outs(unit, list(grads), "cpu")
            for out in outs[rank].values():
                out.fill_(12345.0)
            tickets[rank] = session.reduce_scatter(unit, grads, outs[rank], 1.0, 4.0)
        made.sessions[1].transport.fail("rank 1 gives up")
        limit = time.monotonic() + 20
        while not ended and time.monotonic() < limit:
            machine.go(1000)
            time.sleep(0.01)
        assert ended == [watchdog_module.EXIT_CODE], "rank 0 stays stuck, and ends itself rather than hang"
        assert "was given up by rank 1" in str(made.sessions[0].transport.failure)
        for rank in (2, 3):
            transport = made.sessions[rank].transport
            assert not transport.books.is_finished(tickets[rank]), rank  # type: ignore[attr-defined]
        for session in made.sessions:
            session.transport.watchdog.stop()  # type: ignore[attr-defined]
            session.transport.watchdog.timeout = -10.0  # type: ignore[attr-defined]
        for queue in machine.queues.values():
            queue.clear()


def test_larger_runs_travel_as_they_are() -> None:
    """Short runs between nodes travel in the bundle, long ones as puts of their own."""
    for size, bundled in ((0, False), (1 << 20, True)):
        options = PlanOptions(slots=2, bundle_bytes=0, min_run_bytes=0, min_put_run_bytes=size)
        compiled = compiled_for(Topology(2, 1), ["dims"], options)
        assert (compiled.layouts["dims"].bundle is not None) is bundled
        inside = compiled_for(Topology(1, 2), ["dims"], options)
        assert inside.layouts["dims"].bundle is None
