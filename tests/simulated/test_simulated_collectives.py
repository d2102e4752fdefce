"""Both collectives, bit by bit, for all kinds of parameters, meshes and topologies."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_models import BY_ROUTE, block, blocks, plans, world

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import ROUTES, PlanOptions
from tide.compiler.shapes import MODELS, scaled
from tide.errors import InputError
from tide.topology import Team, Topology
from tide.torch_types import to_torch
from tide.transport.simulated import (
    FAMILIES,
    Simulation,
    error_bound,
    explore,
    reference_reduce_scatter,
    training_sequence,
)

PROPERTY = settings(max_examples=80)


@PROPERTY
@given(plans(), st.sampled_from(FAMILIES), st.integers(0, 2**20), st.sampled_from(("normal", "special")))
def test_training_steps_are_exact_for_all_kinds_of_models(
    compiled: Compiled, family: str, seed: int, payload: str
) -> None:
    """Prefetched gathers, slots in turn and reduce-scatters; each use and each result is checked inside."""
    sequence = training_sequence(compiled, prefetch=seed % 3)
    explore(compiled, sequence, (seed,), family, payload=payload)


def _chunks(whole: torch.Tensor, dim: int, owners: int) -> list[torch.Tensor]:
    """FSDP2's cut: ``torch.chunk``, and empty shards for the ranks that are left over."""
    pieces = [piece.contiguous() for piece in torch.chunk(whole, owners, dim)]
    return pieces + [whole.narrow(dim, 0, 0).contiguous()] * (owners - len(pieces))


def _grad_dtype(unit: Unit, index: int) -> torch.dtype:
    return to_torch(unit.parameters[index].grad_dtype or "frozen")


@settings(max_examples=40)
@given(plans(), st.integers(0, 2**20), st.data())
def test_given_tensors_come_back_whole_and_reduced(compiled: Compiled, seed: int, data: st.DataObject) -> None:
    """The results themselves, against expectations made here."""
    unit = data.draw(st.sampled_from(compiled.spec.units))
    torch.manual_seed(seed)
    simulation = Simulation(compiled, seed)
    shards: dict[int, dict[int, torch.Tensor]] = {}
    wholes: dict[int, dict[str, torch.Tensor]] = {}
    for group in unit.mesh.groups:
        for index, p in enumerate(unit.parameters):
            master = torch.randn(p.shape).to(to_torch(p.shard_dtype))
            pieces = _chunks(master, p.dim, len(group))
            for rank, piece in zip(group, pieces, strict=True):
                shards.setdefault(rank, {})[index] = piece
                wholes.setdefault(rank, {})[p.name] = master.to(to_torch(p.dtype))
    gathered = simulation.all_gather(unit.name, shards)
    assert gathered.keys() == shards.keys()
    for rank, expected in wholes.items():
        for name, whole in expected.items():
            assert torch.equal(gathered[rank][name], whole), (rank, name)

    trainable = [index for index, p in enumerate(unit.parameters) if p.trainable]
    subset = data.draw(st.lists(st.sampled_from(trainable), unique=True)) if trainable else []
    grads = {
        rank: {
            i: torch.randn(unit.parameters[i].shape).to(to_torch(unit.parameters[i].grad_dtype or "")) for i in subset
        }
        for rank in shards
    }
    scale, divisor = data.draw(st.sampled_from(((1.0, 1.0), (0.5, 3.0), (1.0, float(unit.mesh.size)))))
    reduced = simulation.reduce_scatter(unit.name, grads, scale, divisor)
    for group in unit.mesh.groups:
        team = compiled.context(unit.name, group[0]).team
        for i in subset:
            parameter, column = unit.parameters[i], [grads[rank][i] for rank in group]
            wire, by_switch = compiled.options.wire_dtype, unit.name in compiled.spread
            expected_shards = reference_reduce_scatter(column, parameter, team, scale, divisor, wire, by_switch)
            exact, bound = error_bound(column, parameter, scale, divisor, wire)
            near = _chunks(torch.from_numpy(exact), parameter.dim, len(group))
            room = _chunks(torch.from_numpy(bound), parameter.dim, len(group))
            for position, rank in enumerate(group):
                found = reduced[rank][i]
                assert found.dtype == to_torch(parameter.out_dtype)
                assert torch.equal(found, expected_shards[position]), (rank, parameter.name)
                assert bool(((found.double() - near[position]).abs() <= room[position]).all())


def test_reference_adds_in_the_documented_order() -> None:
    """Node-local sums in rank order; the own node's, then from the node before downward."""
    parameter = Parameter("w", (9,), grad_dtype="float32")
    team = Team(((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    big = 2.0**24
    # Swallowed ones show the order: 2**24 + 1 rounds back to 2**24 in float32.
    values = [(big, 1.0, 1.0), (0.0, 0.0, 1.0), (-big, 0.0, 0.0)]
    grads = [torch.full((9,), value) for row in values for value in row]
    shards = reference_reduce_scatter(grads, parameter, team)

    def add(*terms: float) -> float:
        total = np.float32(terms[0])
        for term in terms[1:]:
            total = np.float32(total + np.float32(term))
        return float(total)

    a, b, c = (add(*row) for row in values)
    assert a == big, "the first node's ones must be swallowed, one by one"
    expected = [add(a, c, b)] * 3 + [add(b, a, c)] * 3 + [add(c, b, a)] * 3
    assert [float(shard) for shard in shards] == expected
    assert set(expected) == {0.0, 1.0}, "the values must tell the orders of nodes apart"
    exact, bound = error_bound(grads, parameter)
    assert (np.abs(exact - np.array(expected)) <= bound).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_public_models_at_reduced_width(name: str, route: str) -> None:
    """Every public model with its true pattern of uneven shards, on one node and across nodes."""
    for topology, options in (
        (Topology(1, 8), PlanOptions(slots=2, bundle_bytes=64, min_run_bytes=8, min_put_run_bytes=8, piece_bytes=512)),
        (
            Topology(2, 2),
            PlanOptions(
                slots=2, bundle_bytes=64, min_run_bytes=8, min_put_run_bytes=8, piece_bytes=512, chunk_bytes=2048
            ),
        ),
        (Topology(3, 3), PlanOptions(slots=1)),
    ):
        ranks = topology.world_size
        compiled = compile_spec(_model(name, ranks), topology, replace(options, route=route))
        seed = random.Random(f"{name} {ranks} {route}").randrange(1000)
        explore(compiled, training_sequence(compiled), (seed,), FAMILIES[seed % len(FAMILIES)])


def _model(name: str, ranks: int) -> ModelSpec:
    """One block of each kind, and the root that stays whole."""
    mesh = world(ranks)
    units: dict[str, list[Parameter]] = {"root": []}
    for parameter, shape in scaled(name, 512, worlds=(ranks,), blocks=1).items():
        parts = parameter.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        unit = "root" if number is None else ".".join(parts[: number + 1])
        units.setdefault(unit, []).append(Parameter(parameter, shape))
    return ModelSpec(tuple(Unit(unit, tuple(members), mesh, unit == "root") for unit, members in units.items()), name)


@pytest.mark.parametrize("route", ROUTES)
def test_frozen_parameters_and_a_subset_of_gradients(route: str) -> None:
    topology = Topology(2, 2)
    unit = Unit(
        "layers.0",
        (
            Parameter("a", (9, 3)),
            Parameter("frozen", (6, 2), grad_dtype=None),
            Parameter("b", (4, 8), 1, out_dtype="bfloat16"),
        ),
        world(4),
    )
    compiled = compile_spec(ModelSpec((unit,), "partly frozen"), topology, BY_ROUTE[route])
    sequence = [
        *(("all_gather", "layers.0"), ("use", "layers.0"), ("release", "layers.0")),
        *(("reduce_scatter", "layers.0"), ("reduce_scatter", "layers.0", (2,)), ("reduce_scatter", "layers.0", (0,))),
    ]
    explore(compiled, sequence, range(5), FAMILIES)
    with pytest.raises(InputError, match="frozen is frozen"):
        Simulation(compiled).run([("reduce_scatter", "layers.0", (1,))])


def _on(meshes: Mapping[str, Mesh], topology: Topology, route: str, together: bool = False) -> Compiled:
    units = []
    for number in range(2):
        for name, mesh in meshes.items():
            units.append(block(f"layers.{number}.{name}", mesh, lives_with=number if together else -1))
    return compile_spec(ModelSpec(tuple(units), "meshes"), topology, BY_ROUTE[route])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("topology", "meshes"),
    [
        pytest.param(Topology(2, 2), {"hsdp": Mesh(((0, 1), (2, 3)))}, id="HSDP, a replica on each node"),
        pytest.param(Topology(2, 2), {"hsdp": Mesh(((0, 2), (1, 3)))}, id="HSDP, replicas across nodes"),
        pytest.param(Topology(1, 4), {"tp": Mesh(((0, 2), (1, 3)))}, id="a shard group for each TP rank"),
        pytest.param(
            Topology(2, 2), {"dense": Mesh(((0, 1, 2, 3),)), "experts": Mesh(((0, 1), (2, 3)))}, id="two meshes"
        ),
        pytest.param(Topology(2, 3), {"uneven": Mesh(((0, 1, 2, 3),))}, id="a group uneven among its nodes"),
        pytest.param(Topology(2, 2), {"order": Mesh(((3, 0, 2, 1),))}, id="shards not in order of ranks"),
    ],
)
def test_meshes(topology: Topology, meshes: dict[str, Mesh], route: str) -> None:
    compiled = _on(meshes, topology, route, together=len(meshes) > 1)
    sequence = training_sequence(compiled)
    explore(compiled, sequence, range(2), FAMILIES)


@pytest.mark.parametrize("route", ROUTES)
def test_special_values_travel(route: str) -> None:
    """NaN, Inf, zeros of both signs and denormals, through casts and sums."""
    compiled = blocks(Topology(2, 2), 2, BY_ROUTE[route])
    explore(compiled, training_sequence(compiled), range(3), FAMILIES, payload="special")
    with pytest.raises(InputError, match="no payload 'odd'"):
        Simulation(compiled, payload="odd").run([("all_gather", "layers.0")])
