"""Shape tables of public models: published totals, names, and the reduced versions' pattern."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.compiler.read import read
from tide.compiler.shapes import MODELS, model_parameters, scaled
from tide.errors import InputError
from tide.topology import Topology

#: Parameters in all, as published; DeepSeek-V3's less its 58 × 256 routing biases, which no gradient trains.
PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Qwen3-30B-A3B": 30_532_122_624,
    "DeepSeek-V3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Wan2.2-A14B": 14_288_491_584,
}


def shards(extent: int, world: int) -> list[int]:
    """Rows of each rank, as FSDP2 chunks them."""
    chunk = -(-extent // world)
    return [min(max(extent - rank * chunk, 0), chunk) for rank in range(world)]


def short_by(extent: int, world: int) -> list[int | None]:
    """For each rank, by how many rows its shard is short of a full one; None where it is empty."""
    rows = shards(extent, world)
    return [rows[0] - n if n else None for n in rows]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_totals_are_the_published_ones(name: str) -> None:
    shapes = model_parameters(name)
    assert sum(math.prod(shape) for shape in shapes.values()) == MODELS[name].numel == PUBLISHED[name]


def test_names_follow_the_reference_implementations() -> None:
    llama = model_parameters("Llama-3.1-70B")
    assert llama["model.layers.12.self_attn.q_proj.weight"] == (8192, 8192)
    assert llama["model.layers.79.mlp.down_proj.weight"] == (8192, 28672)
    assert "model.layers.80.input_layernorm.weight" not in llama
    deepseek = model_parameters("DeepSeek-V3")
    assert deepseek["model.layers.2.mlp.gate_proj.weight"] == (18432, 7168)
    assert deepseek["model.layers.3.mlp.experts.w1"] == (256, 2048, 7168)
    assert "model.layers.60.mlp.shared_experts.up_proj.weight" in deepseek
    assert model_parameters("Wan2.2-A14B")["blocks.39.attn2.to_out.0.bias"] == (5120,)


def test_blocks_can_be_limited_per_kind() -> None:
    names = model_parameters("DeepSeek-V3", blocks=1)
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"0", "3"}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_scaled_keeps_the_divisibility_pattern(name: str) -> None:
    full, small = model_parameters(name, blocks=1), scaled(name, 1024, blocks=1)
    assert list(full) == list(small)
    for parameter, shape in full.items():
        assert len(small[parameter]) == len(shape)
        for world in range(1, 10):
            assert short_by(small[parameter][0], world) == short_by(shape[0], world), (parameter, world)
        assert all(few <= many for few, many in zip(small[parameter], shape, strict=True))
    assert max(math.prod(shape) for shape in small.values()) < 100_000


@given(
    world=st.integers(1, 40),
    extent=st.integers(1, 10**6),
)
def test_scaled_pattern_for_any_extent(world: int, extent: int) -> None:
    period, floor = world, (world - 1) ** 2 + 1
    reduced = extent if extent < floor else floor + (extent - floor) % period
    assert short_by(reduced, world) == short_by(extent, world)


def test_scaled_follows_the_sharded_dim() -> None:
    def middle(name: str, shape: tuple[int, ...]) -> int:
        return 1 if ".experts." in name else 0

    small = scaled("Qwen3-30B-A3B", 256, worlds=(8, 12), shard_dim=middle, blocks=1)
    experts = small["model.layers.0.mlp.experts.w1"]
    assert experts[0] == 2  # 128 of them, no longer sharded, yet still several runs
    assert experts[2] == 2048 // 256
    for world in (8, 12):
        assert short_by(experts[1], world) == short_by(768, world)


@pytest.mark.parametrize(("divisor", "worlds"), [(0, (4,)), (4, ()), (4, (0, 2))])
def test_scaled_refuses_nonsense(divisor: int, worlds: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"divisor .* and world sizes .* must be at least 1"):
        scaled("Llama-3.1-8B", divisor, worlds=worlds)


def test_unknown_model_names_the_closest() -> None:
    with pytest.raises(InputError, match=r"no shapes for model 'Llama-3\.1-7B'; did you mean 'Llama-3\.1-"):
        model_parameters("Llama-3.1-7B")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_reads_into_one_unit_a_block(name: str) -> None:
    spec = read(model_parameters(name), topology=Topology(8, 8))
    blocks = sum(kind.count for kind in MODELS[name].blocks)
    assert len(spec.units) == 1 + blocks
    assert spec.units[0].name == ""
    numbers = [int(unit.name.rpartition(".")[2]) for unit in spec.units[1:]]
    assert numbers == list(range(blocks))
    assert all(unit.mesh is spec.units[0].mesh for unit in spec.units)
