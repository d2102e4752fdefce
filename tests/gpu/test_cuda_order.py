"""The order in which ranks of several nodes issue their steps, and what they know of each other's programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.steps import INITIAL_CREDIT, Lane, Program, Put, Signal, Wait
from tide.topology import Links, Topology
from tide.transport.cuda.order import issue_order
from tide.transport.cuda.peers import Peers, even
from tide.transport.cuda.wire import PLACES, signals_given

#: As between virtual nodes: puts at the rate of copies.
FAST = Links(network=388e9)


def compiled_for(nodes: int, per_node: int, rows: int = 4096, links: Links = FAST, **options: object) -> Compiled:
    """A unit of two matrices and a vector; ``rows`` that the ranks do not divide make shards uneven."""
    world = nodes * per_node
    parameters = (Parameter("a", (rows, 1024)), Parameter("b", (rows // 2, 1024)), Parameter("c", (rows,)))
    spec = ModelSpec((Unit("u", parameters, Mesh((tuple(range(world)),))),), "test")
    given = PlanOptions(slots=1, **options)  # type: ignore[arg-type]
    return compile_spec(spec, Topology(nodes, per_node, links, virtual=True), given)


def peers_of(compiled: Compiled, collective: str) -> list[Peers]:
    """Every rank's view of the collective."""
    programs = compiled.programs("u", collective, 0)
    return [Peers(compiled, "u", rank, programs[rank], programs) for rank in programs]


def steps_of(peers: Peers) -> Iterator[tuple[str, int, object]]:
    """Stream, index and step in the order of issue."""
    for number, index in peers.order:
        stream = peers.program.streams[number]
        yield stream.name, index, stream.steps[index]


def finishes_in_one_queue(everyone: list[Peers]) -> bool:
    """Whether all ranks come to an end if each runs its steps strictly one after the other."""
    queues = [[step for _, _, step in steps_of(peers)] for peers in everyone]
    state, counts, moved = [0] * len(queues), Counter[tuple[int, int, Lane]](), True
    while moved:
        moved = False
        for who, queue in enumerate(queues):
            while state[who] < len(queue):
                step = queue[state[who]]
                if isinstance(step, Wait):
                    key = (step.peer, who, step.lane)
                    if counts[key] + INITIAL_CREDIT.get(step.lane, 0) < step.count:
                        break
                    counts[key] -= step.count
                elif isinstance(step, Signal):
                    counts[who, step.peer, step.lane] += step.count
                elif isinstance(step, Put):
                    counts[who, step.peer, step.lane] += 1
                state[who] += 1
                moved = True
    return all(at == len(queue) for at, queue in zip(state, queues, strict=True))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "rows", "options"),
    [
        (2, 1, 4096, {}),
        (3, 1, 4096, {"chunk_bytes": 1 << 18}),
        (2, 2, 4099, {}),
        (4, 2, 4099, {"route": "pull"}),
        (4, 2, 4096, {"slot_reuse": True, "chunk_bytes": 1 << 16}),
        (2, 4, 4096, {"switch_reduce": "on", "multicast": "on"}),
        (8, 4, 4096, {"chunk_bytes": 1 << 16}),
        (5, 4, 5120, {"chunk_bytes": 1 << 16}),
        (6, 3, 4099, {"chunk_bytes": 1 << 16}),
        (5, 4, 4096, {"chunk_bytes": 1 << 16, "slot_reuse": True}),
        (5, 4, 4096, {"switch_reduce": "on", "multicast": "on"}),
        (20, 1, 41, {"chunk_bytes": 1 << 12}),
        (9, 2, 7, {}),
    ],
)
def test_ranks_that_run_one_step_at_a_time_come_to_an_end(
    collective: str, nodes: int, per_node: int, rows: int, options: dict[str, object]
) -> None:
    compiled = compiled_for(nodes, per_node, rows, **options)
    everyone = peers_of(compiled, collective)
    for peers in everyone:
        for number, stream in enumerate(peers.program.streams):
            assert [step for which, step in peers.order if which == number] == list(range(len(stream.steps)))
    assert finishes_in_one_queue(everyone)


@pytest.mark.parametrize("rows", [1 << 14, 3 << 9])
def test_a_rank_of_many_makes_two_programs(rows: int) -> None:
    """Its own, and that of one peer which puts to it; also where the last ranks have empty shards."""
    compiled = compiled_for(32, 8, rows, chunk_bytes=1 << 16)
    programs = compiled.programs("u", "reduce_scatter", 3)
    peers = Peers(compiled, "u", 3, programs[3], programs)
    assert list(programs._made) == [3]
    assert peers.given(16 * 8 + 3)[Lane.PARTIAL] == peers.given(7 * 8 + 3)[Lane.PARTIAL]
    assert sorted(programs._made) == [3, 31 * 8 + 3]


@pytest.mark.parametrize("rows", [5120, 4100, 90])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_what_peers_are_taken_to_give_is_what_their_programs_give(rows: int, collective: str) -> None:
    compiled = compiled_for(5, 4, rows, chunk_bytes=1 << 12)
    found, programs = 0, compiled.programs("u", collective, 0)
    for rank in (0, 6, 19):
        peers = Peers(compiled, "u", rank, programs[rank], programs)
        for other in range(rank % 4, 20, 4):
            if other == rank:
                continue
            expected = signals_given(compiled.program("u", collective, other), rank)
            given = peers.given(other)
            assert {lane: counts for lane, counts in given.items() if counts} == expected
            found += len(expected)
    assert found


def test_shards_that_differ_are_noticed() -> None:
    assert even(compiled_for(2, 2, 4096).context("u", 0))
    assert not even(compiled_for(2, 2, 4099).context("u", 0))


# A communicator runs its calls in the order of issue ------------------------------------------------

#: Seconds of each kind of step.
PUT, KERNEL, SIGNAL = 1.0, 0.3, 0.01


def seconds_in_order(programs: list[Program], orders: list[list[tuple[int, int]]], communicators: int) -> float:
    """How long ranks on nodes of their own take, if a communicator's calls run in order of issue, each at a time."""
    lanes, arrived = PLACES[communicators], {}  # (from, to, lane) -> times of signals
    taken, ends = Counter[tuple[int, int, Lane]](), [Counter[object]() for _ in programs]
    state = [0] * len(programs)
    while any(at < len(order) for at, order in zip(state, orders, strict=True)):
        moved = False
        for who, order in enumerate(orders):
            while state[who] < len(order):
                number, index = order[state[who]]
                step = programs[who].streams[number].steps[index]
                crosses = isinstance(step, Put | Signal | Wait) and step.peer != who
                queues = [number, ("communicator", lanes[step.lane])] if crosses else [number]
                start = max(ends[who][queue] for queue in queues)
                if isinstance(step, Wait):
                    key = (step.peer, who, step.lane)
                    times = [0.0] * INITIAL_CREDIT.get(step.lane, 0) + arrived.get(key, [])
                    if len(times) < taken[key] + step.count:
                        break
                    taken[key] += step.count
                    stop = max(start, times[taken[key] - 1])
                else:
                    stop = start + (PUT if isinstance(step, Put) else SIGNAL if isinstance(step, Signal) else KERNEL)
                    if isinstance(step, Put | Signal):
                        count = step.count if isinstance(step, Signal) else 1
                        arrived.setdefault((who, step.peer, step.lane), []).extend([stop] * count)
                for queue in queues:
                    ends[who][queue] = stop
                state[who] += 1
                moved = True
        assert moved, "the ranks wait for each other"
    return max(float(end) for each in ends for end in each.values())


@pytest.mark.parametrize("communicators", [1, 4])
@pytest.mark.parametrize("depth", [2, 4])
def test_ranks_put_at_the_same_time(communicators: int, depth: int) -> None:
    """Not in turn, as they do where a rank issues its puts before the credits that its peer's puts wait for."""
    compiled = compiled_for(2, 1, 1 << 16, chunk_bytes=1 << 24, receive_depth=depth)
    everyone = peers_of(compiled, "reduce_scatter")
    programs = [peers.program for peers in everyone]
    puts = sum(isinstance(step, Put) for _, _, step in programs[0].steps())
    assert puts >= 6
    found = seconds_in_order(programs, [peers.order for peers in everyone], communicators)
    greedy = [issue_order(dict(enumerate(programs)), rank) for rank in range(2)]
    before = seconds_in_order(programs, greedy, communicators)
    assert found < 1.35 * puts * PUT + 3 * KERNEL
    assert before > 1.8 * puts * PUT


def test_programs_within_a_node_keep_few_calls() -> None:
    compiled = replace(compiled_for(1, 4))
    programs = compiled.programs("u", "reduce_scatter", 0)
    assert Peers(compiled, "u", 1, programs[1], programs).order == issue_order(programs, 1)
