"""What a call of a collective costs the host, on the fake machine: its ends, and values of its waits and signals."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_support import Cluster, Machine, cluster
from test_cuda_logic import check_reduced, compiled_for, gather_without_waiting, scatter

from tide.compiler.options import PlanOptions
from tide.topology import Topology
from tide.transport.cuda import CudaTicket, CudaTransport
from tide.transport.cuda import operations as operations_module
from tide.transport.cuda.driver import MEM_OP_WAIT_32, MEM_OP_WORDS, laid_down
from tide.transport.cuda.operations import MemoryOperation, MemoryOperations
from tide.transport.cuda.words import MASK, STRIDE, VALUES

topologies = pytest.mark.parametrize(
    "topology",
    [Topology(1, 2), Topology(1, 4), Topology(2, 2, virtual=True)],
    ids=["2 ranks", "4 ranks", "2 nodes × 2 GPUs (virtual)"],
)


def transport_of(made: Cluster, rank: int) -> CudaTransport:
    transport = made.sessions[rank].transport
    assert isinstance(transport, CudaTransport)
    return transport


def drive(made: Cluster, tickets: Sequence[CudaTicket]) -> None:
    """Runs step by step: when the ends of a rank's collective are done, so are all of its streams."""
    machine, left = made.machine, list(tickets)
    while left:
        assert machine.go(1), "blocked for ever"
        for ticket in [t for t in left if all(t.transport.driver.done(event) for event in t.ends)]:
            own = set(ticket.transport._streams.values())
            behind = {key: len(queue) for key, queue in machine.queues.items() if queue and key[1] in own}
            assert not behind, f"rank {ticket.transport.rank}: {ticket.collective} has ended before {behind}"
            left.remove(ticket)


@topologies
@pytest.mark.parametrize("route", ["push", "pull"])
@pytest.mark.parametrize("seed", range(2))
def test_ends_of_an_all_gather_are_the_ends_of_all_streams(topology: Topology, route: str, seed: int) -> None:
    machine = Machine(seed)
    with cluster(compiled_for(topology, ["block0"], route=route), machine, poison=False) as made:
        drive(made, gather_without_waiting(made, "block0", seed))


@topologies
@pytest.mark.parametrize("slot_reuse", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_ends_of_a_reduce_scatter_are_the_ends_of_all_streams(topology: Topology, slot_reuse: bool, seed: int) -> None:
    machine = Machine(seed)
    options = PlanOptions(slots=2, chunk_bytes=512, put_bytes=4096, slot_reuse=slot_reuse)
    with cluster(compiled_for(topology, ["block0"], options), machine, poison=False) as made:
        outs = scatter(made, "block0", seed)
        tickets = [ticket for rank in range(topology.world_size) for ticket in transport_of(made, rank).outstanding()]
        assert len(tickets) == topology.world_size
        drive(made, tickets)
        machine.finish()
        check_reduced(made, "block0", seed, outs)


def test_a_stream_that_another_waits_for_has_no_end_of_its_own() -> None:
    """The pieces of a shard all leave after the last cast: the end of the casts' stream says nothing more."""
    with cluster(compiled_for(Topology(1, 2), ["block0"]), Machine(0), poison=False) as made:
        ticket, _ = gather_without_waiting(made, "block0", 0)
        transport = transport_of(made, 0)
        (lowered,) = transport._lowered.values()
        assert [stream for stream, _ in lowered.ends] == [transport.stream("ag.node")]
        assert len(ticket.ends) == 1
        assert set(lowered.streams) == {transport.stream("ag.node"), transport.stream("ag.place")}


@pytest.mark.parametrize(
    ("topology", "once"), [(Topology(1, 2), True), (Topology(2, 2, virtual=True), False)], ids=["one node", "two nodes"]
)
def test_gradients_and_all_are_waited_for_at_once_where_they_end_together(topology: Topology, once: bool) -> None:
    with cluster(compiled_for(topology, ["block0"]), Machine(0), poison=False) as made:
        outs = scatter(made, "block0", 0)
        ticket = transport_of(made, 0).outstanding()[-1]
        driver: Any = ticket.transport.driver
        driver.calls.clear()
        ticket.outputs = outs[0]
        assert ticket.wait_released() is once
        assert (ticket.outputs is None) is once
        waits = driver.calls.count("wait event")
        assert waits == len(ticket.released)
        assert (ticket.released == ticket.ends) is once
        made.machine.finish()
        check_reduced(made, "block0", 0, outs)


def test_arguments_laid_down_are_those_of_the_call() -> None:
    total = ctypes.CDLL(None)["labs"]
    total.argtypes, total.restype = (ctypes.c_long,), ctypes.c_long
    assert total(*laid_down(total, -(1 << 40))) == 1 << 40
    assert laid_down(max, 3, 4) == (3, 4)


def issued(many: int, operations: Sequence[Sequence[MemoryOperation]], calls: int) -> list[list[int]]:
    """Rows of (kind, address, value, flags) that the driver is given, with counters about to wrap around."""
    rows: list[list[int]] = []

    def run(stream: int, count: int, address: int, flags: int) -> int:
        words = list((ctypes.c_int64 * (count * MEM_OP_WORDS)).from_address(address))
        rows.extend(words[at : at + 4] for at in range(0, len(words), MEM_OP_WORDS))
        return 0

    device: Any = SimpleNamespace(
        driver=SimpleNamespace(memory_operations=run, check=None),
        write_to_peers=True,
        wait_flags=7,
        words=SimpleNamespace(sent=[VALUES - 2] * 4, consumed=[VALUES - 1] * 4),
        counters=SimpleNamespace(totals=[MASK - 1] * 4),
    )
    memory = MemoryOperations(device, sum(map(len, operations)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations_module, "MANY", many)
        steps = [call for batch in operations for call in memory.calls(1, batch)]
        advance = memory.advance()
    for _ in range(calls):
        advance()
        device.counters.totals[:] = [total + 1 for total in device.counters.totals]  # as a launch does
        for step in steps:
            step()
    return rows


@pytest.mark.parametrize("many", [0, 1000], ids=["by NumPy", "one by one"])
def test_values_of_waits_and_signals(many: int) -> None:
    chance = random.Random(3)
    operations = [
        [
            MemoryOperation(wait, chance.randrange(4), own or chance.randint(1, 3), 0 if own else wait, 64 * index, own)
            for index in range(chance.randint(1, 9))
            for wait, own in [chance.choice([(True, False), (False, False), (True, True)])]
        ]
        for _ in range(12)
    ]
    sent, consumed, own = [VALUES - 2] * 4, [VALUES - 1] * 4, [MASK - 1] * 4
    expected = []
    for _ in range(3):
        own = [total + 1 for total in own]
        for operation in (operation for batch in operations for operation in batch):
            index, kind = operation.index, MEM_OP_WAIT_32 if operation.wait else MEM_OP_WAIT_32 + 1
            if operation.own:
                expected.append([kind, operation.address, own[index] & MASK, 0])
                continue
            counters = consumed if operation.wait else sent
            counters[index] += operation.count
            value = (counters[index] - operation.credit) * STRIDE & MASK
            expected.append([kind, operation.address, value, 7 if operation.wait else 0])
    assert issued(many, operations, 3) == expected
