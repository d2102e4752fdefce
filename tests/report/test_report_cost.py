"""The predicted clock against times worked out by hand, and its shortcuts against the full run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from report_support import LINKS, public, tiny

from tide.compiler.clock import clock
from tide.compiler.cost import predict, summary
from tide.compiler.steps import Lane, Signal, Stream
from tide.errors import InputError, PlanError

MEGA = 1_000_000  # elements; bfloat16 storage of 2 MB, float32 shards


def test_all_gather_of_two_ranks_by_hand() -> None:
    compiled = tiny({"w": (MEGA,)}, gpus=2)
    found = predict(compiled, "block", "all_gather", 1)
    # place half: read 4 and write 2 bytes an element; tell the peer; pull its half
    place = 1e-7 + 500_000 * 6 / 1e10
    pull = 1e-6 + 500_000 * 2 / 1e9
    assert found.seconds == pytest.approx(place + 1e-5 + pull)
    assert found.sm_seconds == pytest.approx(500_000 * 6 / 1e10)
    assert (found.kernels, found.transfers, found.puts) == (1, 1, 0)
    assert (found.nvlink_bytes, found.network_bytes) == (MEGA, 0)
    assert found.released == found.seconds
    assert found.bound == "copy engine"


def test_reduce_scatter_of_two_ranks_by_hand() -> None:
    compiled = tiny({"w": (MEGA,)}, gpus=2)
    found = predict(compiled, "block", "reduce_scatter", 0)
    # one chunk: credit; push half; tell; sum two pieces of bfloat16 into float32
    push = 1e-6 + 500_000 * 2 / 1e9
    total = 1e-7 + 500_000 * (2 + 2 + 4) / 1e10
    assert found.seconds == pytest.approx(1e-5 + push + 1e-5 + total)
    assert found.nvlink_bytes == MEGA
    assert found.released == found.seconds  # the sum reads the own gradient


def test_all_gather_of_two_nodes_by_hand() -> None:
    compiled = tiny({"w": (MEGA,)}, nodes=2, gpus=1)
    found = predict(compiled, "block", "all_gather", 0)
    place, put = 1e-7 + 500_000 * 6 / 1e10, 1e-4 + 500_000 * 2 / 1e8
    assert found.seconds == pytest.approx(max(place, 1e-4) + put)  # the put waits for FREE from the other node
    assert (found.network_bytes, found.network_bytes_in, found.nvlink_bytes) == (MEGA, MEGA, 0)
    assert found.bound == "network"


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (4, 2), (3, 4), (8, 1)])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_one_rank_stands_for_all_where_shards_are_even(nodes: int, gpus: int, collective: str) -> None:
    compiled = tiny({"w": (96 * 1024, 16), "b": (9600,), "v": (960, 48)}, nodes, gpus, dims={"v": 1})
    group = clock(compiled, "block", collective, 0, "group")
    whole = summary(compiled, group, 0)
    for scope in ("rank", "node"):
        course = clock(compiled, "block", collective, 0, scope)
        assert course.assumed == 0
        assert summary(compiled, course, 0).seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert len(group.events) == nodes * gpus
    assert group.seconds >= whole.seconds


def test_uneven_shards_end_near_the_full_run() -> None:
    compiled = public("gpt-oss-20b", 2, 8)
    for collective in ("all_gather", "reduce_scatter"):
        full = summary(compiled, clock(compiled, "model.layers.0", collective, 3, "group"), 3)
        near = summary(compiled, clock(compiled, "model.layers.0", collective, 3, "node"), 3)
        assert near.seconds == pytest.approx(full.seconds, rel=0.2)


def test_the_port_bounds_what_arrives_when_the_other_side_is_unlike() -> None:
    # rank 0 owns all and sends; rank 1 owns nothing, so seen from rank 1 alone nothing mirrors the arrival
    compiled = tiny({"w": (1, MEGA)}, nodes=2, gpus=1)
    course = clock(compiled, "block", "all_gather", 1, "rank")
    assert summary(compiled, course, 1).seconds >= 2 * MEGA / LINKS.network
    assert course.assumed > 0 or summary(compiled, course, 1).network_bytes_in == 2 * MEGA


def test_bytes_on_each_link() -> None:
    compiled = public("Llama-3.1-70B", 8, 8)
    unit = compiled.spec.units[1]
    gather = predict(compiled, unit.name, "all_gather", 9)
    # seven peers' rails within the node, and seven other nodes' shards over the network
    assert gather.nvlink_bytes == pytest.approx(unit.nbytes * 7 / 8, rel=1e-3)
    assert gather.network_bytes == gather.network_bytes_in == pytest.approx(unit.nbytes * 7 / 64, rel=1e-3)
    reduce = predict(compiled, unit.name, "reduce_scatter", 9)
    assert reduce.nvlink_bytes == unit.nbytes * 7 // 8
    assert reduce.network_bytes == 2 * unit.nbytes * 7 // 64  # float32 across nodes
    assert reduce.network_bytes_in == reduce.network_bytes


def test_waits_start_when_reached_and_streams_do_not_overlap_themselves() -> None:
    compiled = public("Llama-3.1-8B", 2, 2)
    course = clock(compiled, "model.layers.0", "reduce_scatter", 0)
    for events in course.events.values():
        for before, after in pairwise(events):
            if before.stream == after.stream:
                assert after.index == before.index + 1
                assert after.start == before.stop
        assert all(event.stop >= event.start >= 0 for event in events)


def test_one_rank_alone_only_places() -> None:
    compiled = tiny({"w": (1000, 10)}, gpus=1)
    found = predict(compiled, "block", "all_gather", 0)
    assert (found.nvlink_bytes, found.network_bytes, found.kernels) == (0, 0, 1)
    assert predict(compiled, "block", "reduce_scatter", 0).seconds > 0


def test_a_lost_signal_stops_the_clock_with_an_error() -> None:
    compiled = tiny({"w": (MEGA,)}, gpus=2)
    program = compiled.program("block", "all_gather", 1)
    steps = tuple(
        step for step in program.streams[0].steps if not (isinstance(step, Signal) and step.lane is Lane.READY)
    )
    damaged = replace(program, streams=(Stream(program.streams[0].name, steps),))
    with pytest.raises(PlanError, match=r"rank 0, stream ag\.node, step \d+ waits for ever for READY of rank 1"):
        predict(compiled.with_program("block", 1, damaged), "block", "all_gather", 0)


def test_unknown_scope_and_rank_are_refused() -> None:
    compiled = tiny({"w": (MEGA,)}, gpus=2)
    with pytest.raises(InputError, match="no scope 'cluster'"):
        clock(compiled, "block", "all_gather", 0, "cluster")
    with pytest.raises(InputError, match="rank 2 holds no shard"):
        predict(compiled, "block", "all_gather", 2)
