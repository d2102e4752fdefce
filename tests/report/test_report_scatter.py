"""Descriptors: the bytes they name are the bytes that FSDP2's sharding means."""

from __future__ import annotations

import json
import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_support import public, tiny

from tide.compiler.scatter import (
    Descriptor,
    descriptor_count,
    descriptor_graph,
    descriptor_table,
    descriptors,
    locate,
)
from tide.errors import InputError


def test_one_run_each_for_dim_0() -> None:
    compiled = tiny({"w": (10, 3)}, gpus=4)  # 3, 3, 3 and 1 rows of three elements
    found = list(descriptors(compiled, "block", "block.w", rank=2))
    assert [d.source_rank for d in found] == [0, 1, 2, 3]
    assert {d.destination_rank for d in found} == {2}
    assert [d.slot_offset for d in found] == [0, 18, 36, 54]
    assert [d.run_bytes for d in found] == [18, 18, 18, 6]
    assert {(d.runs, d.source_pitch, d.destination_pitch, d.shard_offset) for d in found} == {(1, 0, 0, 0)}
    assert found[0] == Descriptor("block", "block.w", 0, 2, 0, 0, 0, 1, 18, 0, 0, "bfloat16", "float32")
    assert found[3].nbytes == 6


def test_pitched_runs_for_dim_1_with_a_cast() -> None:
    compiled = tiny({"a": (2, 2), "w": (5, 8, 3)}, gpus=4, dims={"w": 1})
    (second,) = [d for d in descriptors(compiled, "block", "block.w", rank=0) if d.source_rank == 1]
    assert (second.runs, second.run_bytes) == (5, 2 * 3 * 2)
    assert second.source_pitch == 2 * 3 * 4  # dense in the float32 shard
    assert second.destination_pitch == 8 * 3 * 2  # a row of bfloat16 storage
    assert second.slot_offset == 512 + 2 * 3 * 2  # w starts at the next multiple of 512


def test_ranks_without_a_shard_have_no_descriptor() -> None:
    compiled = tiny({"w": (2, 5)}, gpus=4)
    assert [d.source_rank for d in descriptors(compiled, "block", rank=3)] == [0, 1]
    assert descriptor_count(compiled, "block") == 2 * 4
    assert descriptor_count(compiled, "block", rank=0) == 2


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    ranks=st.integers(1, 7),
)
def test_descriptors_assemble_the_whole(shape: list[int], dim: int, ranks: int) -> None:
    """Copying the described bytes of every shard gives the whole parameter, each byte once."""
    dim %= len(shape)
    compiled = tiny({"w": tuple(shape)}, gpus=ranks, dims={"w": dim}, parameter={"shard_dtype": "bfloat16"})
    whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    chunk = -(-shape[dim] // ranks)
    shards = [
        np.take(whole, range(min(r * chunk, shape[dim]), min((r + 1) * chunk, shape[dim])), dim) for r in range(ranks)
    ]
    storage = np.zeros(whole.nbytes, dtype=np.uint8)
    written = np.zeros(whole.nbytes, dtype=int)
    for d in descriptors(compiled, "block", rank=ranks - 1):
        shard = np.ascontiguousarray(shards[d.source_rank]).reshape(-1).view(np.uint8)
        for run in range(d.runs):
            source, to = d.shard_offset + run * d.source_pitch, d.slot_offset + run * d.destination_pitch
            storage[to : to + d.run_bytes] = shard[source : source + d.run_bytes]
            written[to : to + d.run_bytes] += 1
    assert (written == 1).all()
    assert (storage.view(np.uint16).reshape(shape) == whole).all()


def test_table_and_iterator_agree_and_offsets_are_the_arenas() -> None:
    compiled = public("Qwen3-30B-A3B", 1, 4)
    unit = compiled.spec.units[3]
    table = descriptor_table(compiled, unit.name)
    found = list(descriptors(compiled, unit.name))
    assert len(table) == len(found) == descriptor_count(compiled, unit.name)
    assert table["slot_offset"].tolist() == [d.slot_offset for d in found]
    slot = compiled.arena.slots[compiled.arena.slot_of[unit.name]]
    assert {d.arena_offset - d.slot_offset for d in found} == {slot.offset}
    assert sum(d.nbytes for d in found if d.destination_rank == 0) == unit.nbytes


def test_graph_has_a_node_a_shard_and_an_edge_a_descriptor() -> None:
    compiled = tiny({"w": (2, 5), "v": (4, 2)}, gpus=4)
    graph = descriptor_graph(compiled, parameter="block.w")
    assert isinstance(graph, nx.MultiDiGraph)
    assert graph.number_of_nodes() == 8
    assert graph.number_of_edges() == 2 * 4
    shard, storage = ("shard", "block", "block.w", 1), ("storage", "block", "block.w", 3)
    assert graph.nodes[shard]["nbytes"] == 20  # one row of float32
    assert graph.nodes[("shard", "block", "block.w", 3)]["nbytes"] == 0
    assert graph.nodes[storage]["shape"] == [2, 5]
    (edge,) = graph.get_edge_data(shard, storage).values()
    assert edge["slot_offset"] == 10
    assert edge["nbytes"] == 10
    assert descriptor_graph(compiled).number_of_edges() == (2 + 4) * 4
    only = descriptor_graph(compiled, "block", rank=2)
    assert {data["destination_rank"] for _, _, data in only.edges(data=True)} == {2}


def test_graph_round_trips_through_json() -> None:
    graph = descriptor_graph(tiny({"w": (6, 4)}, gpus=3, dims={"w": 1}))
    text = json.dumps(nx.node_link_data(graph, edges="edges"))
    back = nx.node_link_graph(json.loads(text), edges="edges")
    assert dict(back.nodes(data=True)) == dict(graph.nodes(data=True))
    assert sorted(back.edges(data=True), key=str) == sorted(graph.edges(data=True), key=str)


def test_each_replica_of_a_hybrid_mesh_has_its_own_edges() -> None:
    compiled = tiny({"w": (4, 4)}, gpus=4, groups=((0, 2), (1, 3)))
    graph = descriptor_graph(compiled)
    assert {(source[3], to[3]) for source, to in graph.edges()} == {
        (0, 0), (2, 0), (0, 2), (2, 2), (1, 1), (3, 1), (1, 3), (3, 3)
    }  # fmt: skip


def test_too_large_a_graph_is_refused_with_the_remedy() -> None:
    compiled = public("Llama-3.1-70B", 8, 8)
    with pytest.raises(InputError, match=r"2,961,408 edges, more than 2,000,000; name a unit or a parameter"):
        descriptor_graph(compiled)
    assert descriptor_graph(compiled, rank=5).number_of_edges() == 2_961_408 // 64


def test_unknown_names_are_refused() -> None:
    compiled = tiny({"w": (4, 4)})
    with pytest.raises(InputError, match=r"no parameter 'w' in the plan; did you mean 'block\.w'"):
        locate(compiled, "w")
    with pytest.raises(InputError, match=r"unit 'block' has no parameter 'block\.v'; it has 'block\.w'"):
        list(descriptors(compiled, "block", "block.v"))


def test_table_of_a_thousand_ranks_is_fast() -> None:
    compiled = public("Llama-3.1-405B", 128, 8)
    start = time.perf_counter()
    table = descriptor_table(compiled, "model.layers.7", rank=17)
    assert len(table) == 9 * 1024
    assert time.perf_counter() - start < 0.5
