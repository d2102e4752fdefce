"""Memory against numbers derived by hand from the models' published shapes."""

from __future__ import annotations

import pytest
from report_support import public, tiny

from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.report import memory, receive_table
from tide.topology import Topology

# Llama-3.1-405B: width 16,384, inner 53,248, 8 key heads of 128, 126 blocks, vocabulary 128,256.
LLAMA_BLOCK = 2 * 16384 * 16384 + 2 * 1024 * 16384 + 3 * 53248 * 16384 + 2 * 16384
LLAMA_ROOT = 2 * 128256 * 16384 + 16384


LLAMA_HEAD = 128256 * 16384 + 16384  # and the norm before it: after the blocks, so first in backward


def test_llama_405b_on_64_ranks() -> None:
    """Every first dim divides by 64, so there is no padding."""
    assert LLAMA_BLOCK == 3_187_703_808
    assert 126 * LLAMA_BLOCK + LLAMA_ROOT == 405_853_388_800
    found = memory(public("Llama-3.1-405B", 8, 8), 0)
    shards = 405_853_388_800 * 4 // 64
    assert (found.row("shards").tide, found.row("shards").stock) == (shards, shards)
    # stock, at the end of a block's backward: root and block whole, the next gathered, the last one's float32
    # gradients being reduced, the head's gradient waiting for the embedding's. The last block that has a next
    # one: the reduced gradients of all after it are there.
    assert found.peaks["stock"] == "the backward of model.layers.1"
    assert found.row("reduced gradients").stock == 124 * LLAMA_BLOCK * 4 // 64
    assert found.row("unsharded parameters").stock == 2 * (LLAMA_ROOT + LLAMA_BLOCK)
    assert found.row("flat all-gather buffers").stock == 2 * LLAMA_BLOCK
    assert found.row("reduce-scatter input").stock == 4 * LLAMA_BLOCK
    assert found.row("whole gradients").stock == 2 * (LLAMA_HEAD + LLAMA_BLOCK)
    assert (
        found.stock
        == 94_555_722_752
        == (shards + 124 * LLAMA_BLOCK // 16 + 2 * (LLAMA_ROOT + LLAMA_HEAD) + (2 + 2 + 4 + 2) * LLAMA_BLOCK)
    )
    # symmetric memory: two flat buffers in forward, root and block; a reduce-scatter input of either
    windows = [2 * LLAMA_ROOT, 2 * LLAMA_BLOCK, 4 * LLAMA_BLOCK, 4 * LLAMA_ROOT]
    assert found.row("windows of flat buffers").symmetric == sum(-(-size >> 21 << 21) for size in windows)
    assert found.row("flat all-gather buffers").symmetric == found.row("reduce-scatter input").symmetric == 0
    # TIDE: the root's slot and two of a block's, each with a bundle of its two norms
    assert found.row("slots").tide == 2 * LLAMA_ROOT + 2 * (2 * LLAMA_BLOCK + 2 * 32768)
    # the first blocks' gradients, those of the second still read, and the head's
    assert found.peaks["tide"] == "the backward of model.layers.0"
    assert found.row("reduced gradients").tide == 125 * LLAMA_BLOCK * 4 // 64
    assert found.row("whole gradients").tide == 2 * (LLAMA_HEAD + 2 * LLAMA_BLOCK)
    assert found.row("running sums").tide == 0
    assert found.row("scratch").tide < 64 << 20


def test_llama_405b_on_1024_ranks() -> None:
    """Only the vocabulary does not divide: 126 rows a rank, 129,024 in all."""
    root = 2 * 129024 * 16384 + 16384
    found = memory(public("Llama-3.1-405B", 128, 8), 1023)
    assert found.row("shards").stock == (126 * LLAMA_BLOCK + root) * 4 // 1024
    assert found.row("unsharded parameters").stock == 2 * (root + LLAMA_BLOCK)
    assert found.row("flat all-gather buffers").stock == 2 * LLAMA_BLOCK
    assert found.row("reduce-scatter input").stock == 4 * LLAMA_BLOCK
    windows = found.row("windows of flat buffers").symmetric
    assert windows == pytest.approx(6 * (root + LLAMA_BLOCK), abs=4 << 21)
    # TIDE gathers no padding; the bundle now holds both norms and the two 1,024-row projections
    bundle = 2 * (2 * 16384 + 2 * 1024 * 16384)
    assert found.row("slots").tide == pytest.approx(2 * LLAMA_ROOT + 2 * (2 * LLAMA_BLOCK + bundle), abs=3 * 4096)


# DeepSeek-V3: width 7,168, 256 experts of 2,048, 3 dense blocks of 18,432, vocabulary 129,280.
def deepseek(round_up: int) -> tuple[int, int, int]:
    """Elements of root, dense block and block of experts, first dims rounded up to a multiple."""

    def up(rows: int) -> int:
        return -(-rows // round_up) * round_up

    attention = up(1536) * 7168 + up(1536) + up(24576) * 1536 + up(576) * 7168 + up(512) + up(32768) * 512
    attention += up(7168) * 16384 + 2 * up(7168)
    dense = attention + 2 * up(18432) * 7168 + up(7168) * 18432
    experts = up(256) * 7168 + 3 * up(256) * 2048 * 7168 + 2 * up(2048) * 7168 + up(7168) * 2048
    return 2 * up(129280) * 7168 + up(7168), dense, attention + experts


@pytest.mark.parametrize(("nodes", "experts"), [(8, 11_507_286_016), (128, 45_342_540_800)])
def test_deepseek_v3(nodes: int, experts: int) -> None:
    """64 ranks divide everything; 1,024 ranks have one expert each, and three of four are padding."""
    ranks = nodes * 8
    root, dense, block = deepseek(ranks)
    whole_root, _, whole_block = deepseek(1)
    assert block == experts
    found = memory(public("DeepSeek-V3", nodes, 8), 5)
    assert found.row("shards").stock == (root + 3 * dense + 58 * block) * 4 // ranks
    assert found.row("shards").tide == found.row("shards").stock
    head = 129280 * 7168 + 7168
    # the last block of experts before another such block, or the last one where what is reduced outweighs that
    assert found.peaks["stock"] == "the backward of model.layers.4"
    assert found.row("reduced gradients").stock == 56 * block * 4 // ranks
    assert found.row("flat all-gather buffers").stock == 2 * block
    assert found.row("unsharded parameters").stock == 2 * (root + block)
    assert found.row("reduce-scatter input").stock == 4 * block
    assert found.row("whole gradients").stock == 2 * (head + whole_block)
    assert found.peaks["tide"] == "the backward of model.layers.3"
    assert found.row("whole gradients").tide == 2 * (head + 2 * whole_block)
    # dense blocks take turns in the slots of blocks of experts
    slots = 2 * whole_root + 2 * 2 * whole_block
    assert slots < found.row("slots").tide < 1.01 * slots


def test_the_arena_is_accounted_for_in_full() -> None:
    compiled = public("Qwen3-30B-A3B", 2, 8)
    found = memory(compiled, 0)
    names = (
        "slots",
        "receive area",
        "partial and wire areas",
        "packed gradients",
        "spread area",
        "signals",
    )
    assert sum(found.row(name).tide for name in names) == compiled.arena.size
    for column in ("tide", "symmetric", "stock"):
        assert found.total(column) == getattr(found, column) == sum(getattr(row, column) for row in found.rows) > 0
    assert found.reuse == 0
    assert "reuse" not in found.peaks
    both = memory(compiled, 0, compiled)
    assert both.reuse == both.tide == found.tide
    assert both.peaks["reuse"] == both.peaks["tide"]


def test_running_sums_where_the_output_is_not_float32() -> None:
    compiled = tiny({"w": (1024, 64)}, gpus=4, parameter={"out_dtype": "bfloat16"})
    found = memory(compiled, 1)
    assert found.row("running sums").tide == 2 * 1024 * 64 * 4 // 4, "those of the step before are given up later"
    assert found.row("unsharded parameters").stock + found.row("reduce-scatter input").stock == 1024 * 64 * 2


def test_frozen_parameters_have_no_gradients() -> None:
    found = memory(tiny({"w": (1024, 64)}, gpus=4, parameter={"grad_dtype": None}), 0)
    assert found.row("reduced gradients").tide == found.row("whole gradients").tide == 0
    assert found.row("reduce-scatter input").stock == 0
    assert found.row("shards").tide == 1024 * 64 * 4 // 4


def test_groups_of_one_module_count_together_and_others_not() -> None:
    """Two groups of one block on different meshes, and a unit of which rank 0 holds nothing."""
    both, half = Mesh((tuple(range(4)),)), Mesh(((0, 1), (2, 3)))
    far = Mesh(((2, 3),))
    units = (
        Unit("block", (Parameter("block.a", (64, 64)),), both, lives_with=0),
        Unit("block.experts", (Parameter("block.e", (64, 128)),), half, lives_with=0),
        Unit("elsewhere", (Parameter("elsewhere.x", (4096, 4096)),), far),
    )
    compiled = compile_spec(ModelSpec(units, "moe"), Topology(1, 4), PlanOptions())
    found = memory(compiled, 0)
    assert found.row("shards").tide == 64 * 64 * 4 // 4 + 64 * 128 * 4 // 2
    # FSDP2 reduces the second group first, while the first is still whole
    assert found.peaks["stock"] == "the copy-in of the gradients of block"
    assert found.row("unsharded parameters").stock == 2 * 64 * 64
    assert found.row("reduce-scatter input").stock == 4 * 64 * 128
    assert found.row("whole gradients").tide == 2 * (64 * 64 + 64 * 128)
    assert memory(compiled, 3).row("shards").tide > 4096 * 4096


@pytest.mark.parametrize("output", [3 << 20, 25 << 20])
def test_receive_memory_does_not_grow_with_nodes(output: int) -> None:
    """At a fixed output per rank, by hand: two positions of 7 pieces and 2 sums, of 28 % of the output each."""
    rows = receive_table(output)
    assert [row.nodes for row in rows] == [2, 4, 8]
    chunk = output * 28 // 100
    if chunk * 2 > 4 << 20:
        by_hand = 2 * (7 * 2 + 2 * 4) * chunk
        assert rows[0].areas == pytest.approx(by_hand, rel=0.01)
    for row in rows:
        assert row.areas == pytest.approx(rows[0].areas, rel=0.05)
        assert row.spare == pytest.approx(rows[0].spare, rel=0.05)
        assert row.spare <= 24 << 20
        assert row.slot <= 2 * output * 8 * row.nodes
        assert row.stock == 4 * output * (8 * row.nodes + 1) > 2 * row.areas
