"""Sound plans prove, and run right in the executor that shares nothing with the proof."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_executor import Execution
from verify_strategies import plans

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.shapes import MODELS, model_parameters
from tide.compiler.verify import Proof, verify
from tide.errors import InputError
from tide.topology import Topology

COLLECTIVES = ("all_gather", "reduce_scatter")


def model(name: str, world: int, groups: tuple[tuple[int, ...], ...] | None = None, dim: int = 0) -> ModelSpec:
    """A public model's first blocks of each kind, one unit a block, at full size."""
    mesh = Mesh(groups or (tuple(range(world)),))
    units: dict[str, list[Parameter]] = {}
    for row, shape in model_parameters(name, blocks=1).items():
        head = row.split(".")
        cut = next((i for i, part in enumerate(head) if part.isdigit()), None)
        parameter = Parameter(row, shape, min(dim, len(shape) - 1))
        units.setdefault("root" if cut is None else ".".join(head[: cut + 1]), []).append(parameter)
    return ModelSpec(tuple(Unit(unit, tuple(p), mesh, unit == "root") for unit, p in units.items()), name)


def run(compiled: Compiled, unit: Unit, seed: int) -> None:
    """Two of each collective of a unit, one after the other, on each shard group."""
    for group in unit.mesh.groups:
        Execution(compiled, unit.name, "all_gather", group[0], 2, seed).run()
        if any(p.trainable for p in unit.parameters):
            Execution(compiled, unit.name, "reduce_scatter", group[0], 2, seed).run()


@given(plans(), st.integers(0, 10**6))
@settings(max_examples=40)
def test_random_plans_prove_and_run(compiled: Compiled, seed: int) -> None:
    proof = verify(compiled)
    assert proof.ranks == tuple(range(compiled.topology.world_size))
    for unit in compiled.spec.units:
        run(compiled, unit, seed)


@given(plans(largest=80, most=2, topologies=[(2, 1), (3, 1), (2, 2), (3, 2), (4, 2)]), st.integers(0, 10**6))
@settings(max_examples=15)
def test_plans_with_several_puts_prove(compiled: Compiled, seed: int) -> None:
    del seed
    verify(compiled)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 2), (2, 2), (3, 3), (2, 4)])
def test_public_models_prove(name: str, nodes: int, local: int) -> None:
    compiled = compile_spec(model(name, nodes * local), Topology(nodes, local), PlanOptions(slots=2))
    proof = verify(compiled)
    whole = sum(unit.nbytes for unit in compiled.spec.units)
    assert proof.nbytes >= whole * nodes * local  # every byte of every rank's storage, once


@pytest.mark.parametrize("name", sorted(MODELS))
def test_public_models_sharded_along_the_last_dim_prove(name: str) -> None:
    verify(compile_spec(model(name, 6, dim=2), Topology(3, 2), PlanOptions(slots=2)))


def test_sixty_four_ranks_of_a_70b_model_prove() -> None:
    compiled = compile_spec(model("Llama-3.1-70B", 64), Topology(8, 8), PlanOptions(slots=2))
    proof = verify(compiled)
    assert proof.ranks == tuple(range(64))
    assert proof.programs == 4 * 64
    assert "all 64 ranks" in str(proof)


GROUPS = {
    "replicas on nodes of their own": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replicas side by side": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "ranks out of order": ((3, 0, 6, 5), (7, 1, 2, 4)),
    "uneven on its nodes": ((0, 1, 4), (2, 3, 5)),
    "one rank each": ((0,), (5,)),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_shard_groups_of_any_kind_prove_and_run(groups: tuple[tuple[int, ...], ...]) -> None:
    parameters = (Parameter("a", (7, 6), 1), Parameter("b", (5,)), Parameter("c", (13, 4), 0), Parameter("d", (3,)))
    spec = ModelSpec((Unit("u", parameters, Mesh(groups)),))
    compiled = compile_spec(spec, Topology(2, 4), PlanOptions(chunk_bytes=256, bundle_bytes=16))
    proof = verify(compiled)
    assert proof.ranks == tuple(sorted(rank for group in groups for rank in group))
    run(compiled, spec.units[0], 1)


def test_units_on_different_meshes_prove() -> None:
    dense, experts = Mesh((tuple(range(8)),)), Mesh(((0, 2, 4, 6), (1, 3, 5, 7)))
    units = []
    for block in range(3):
        units.append(Unit(f"b{block}", (Parameter(f"b{block}.w", (16, 8)),), dense, lives_with=block))
        units.append(Unit(f"b{block}.experts", (Parameter(f"b{block}.e", (9, 8)),), experts, lives_with=block))
    compiled = compile_spec(ModelSpec(tuple(units)), Topology(2, 4), PlanOptions(slots=1))
    assert len(compiled.arena.slots) == 2
    assert verify(compiled).ranks == tuple(range(8))


def test_some_ranks_prove_alone() -> None:
    compiled = compile_spec(model("gpt-oss-20b", 12), Topology(3, 4), PlanOptions(slots=2))
    assert verify(compiled, ranks=[5]).ranks == (5,)
    assert verify(compiled, ranks=[7, 2], collectives=["reduce_scatter"]).collectives == ("reduce_scatter",)
    with pytest.raises(InputError, match="rank 12 is outside 3 nodes"):
        verify(compiled, ranks=[12])
    with pytest.raises(InputError, match="no collective 'broadcast'"):
        verify(compiled, collectives=["broadcast"])


def test_cheap_form_says_what_it_looked_at() -> None:
    small = verify(compile_spec(model("Llama-3.1-8B", 4), Topology(1, 4)), full=False)
    assert not small.full
    assert small.ranks == ()
    assert "one rank's all-gather" in str(small)
    large = verify(compile_spec(model("Llama-3.1-8B", 64), Topology(8, 8)), full=False)
    assert "no program" in str(large)
    assert large.arena_bytes > 0


def test_proof_is_plain_data() -> None:
    proof = verify(compile_spec(model("Llama-3.1-8B", 2), Topology(1, 2)))
    assert isinstance(proof, Proof)
    with pytest.raises(AttributeError):
        proof.steps = 0  # type: ignore[misc]
    assert proof.steps > 0
    assert proof.seconds > 0
    assert any("fixed order" in claim for claim in proof.claims)
