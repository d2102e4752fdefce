"""A thousand interleavings of each seed family, and some of every topology, without a difference."""

from __future__ import annotations

import pytest
from simulated_models import BY_ROUTE, blocks, world

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import ModelSpec, Parameter, Unit
from tide.compiler.options import ROUTES, PlanOptions
from tide.compiler.steps import Place
from tide.errors import InputError
from tide.topology import Topology
from tide.transport.simulated import FAMILIES, Operation, Simulation, explore, training_sequence


def _name(topology: Topology) -> str:
    return f"{topology.nodes}x{topology.gpus_per_node}"


def _prefetched() -> list[Operation]:
    """Two slots for three units: the next one is gathered while one is in use, and a slot changes hands."""
    return [
        ("all_gather", "layers.0"),
        ("all_gather", "layers.1"),
        ("use", "layers.0"),
        ("release", "layers.0"),
        ("all_gather", "layers.2"),
        ("reduce_scatter", "layers.0"),
        ("use", "layers.1"),
        ("release", "layers.1"),
        ("use", "layers.2"),
        ("release", "layers.2"),
        ("reduce_scatter", "layers.2"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_interleavings(family: str) -> None:
    done = [
        explore(blocks(topology, 3, options, 4, long=route == "push"), _prefetched(), range(seeds), family, pieces=2)
        for topology, seeds in ((Topology(2, 2), 200), (Topology(1, 3), 300))
        for route, options in BY_ROUTE.items()
    ]
    assert sum(exploration.interleavings for exploration in done) == 1000


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(1, 3), Topology(3, 1)], ids=_name)
def test_long_shards_are_pushed_in_several_pieces(topology: Topology) -> None:
    """What the interleavings and the faults of the push route stand on."""
    compiled = blocks(topology, 1, BY_ROUTE["push"], 4, long=True)
    for rank in range(topology.world_size):
        stream = compiled.program("layers.0", "all_gather", rank).streams[0]
        assert stream.name == "ag.place"
        assert sum(isinstance(step, Place) for step in stream.steps) >= 3


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "topology", [Topology(*pair) for pair in ((3, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))], ids=_name
)
def test_other_topologies(topology: Topology, route: str) -> None:
    """A training step that fills every ring several times."""
    compiled = blocks(topology, 2, BY_ROUTE[route], long=route == "push")
    sequence = training_sequence(compiled)
    explore(compiled, sequence, range(3), FAMILIES)


def _wide(topology: Topology, route: str) -> Compiled:
    mesh = world(topology.world_size)
    units = tuple(
        Unit(f"layers.{n}", (Parameter(f"{n}.w", (75, 2)), Parameter(f"{n}.v", (2, 70), 1)), mesh) for n in range(2)
    )
    return compile_spec(ModelSpec(units, "wide"), topology, PlanOptions(slots=1, bundle_bytes=0, route=route))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("nodes", "gpus", "seeds"), [(8, 8, 2), (1, 72, 1), (9, 2, 2)])
def test_large_worlds(nodes: int, gpus: int, seeds: int, route: str) -> None:
    """Eight nodes of eight, a domain of 72 ranks, and nodes that are no power of two."""
    compiled = _wide(Topology(nodes, gpus), route)
    sequence: list[Operation] = [
        *(("all_gather", "layers.0"), ("use", "layers.0"), ("release", "layers.0")),
        ("reduce_scatter", "layers.0"),
    ]
    if nodes > 1:
        sequence += [("all_gather", "layers.1"), ("use", "layers.1"), ("release", "layers.1")]
    simulation = Simulation(compiled, pieces=1)
    simulation.build(sequence)
    for family in FAMILIES if nodes > 1 else ("slow_rank",):
        for seed in range(seeds):
            simulation.replay(family, seed)


@pytest.mark.parametrize("route", ROUTES)
def test_seeds_repeat_and_differ(route: str) -> None:
    compiled = blocks(Topology(2, 2), 2, BY_ROUTE[route])
    sequence = training_sequence(compiled)

    def order(family: str, seed: int) -> list[tuple[int, str, int]]:
        result = Simulation(compiled, seed, family, trace=True).run(sequence)
        return [(event.rank, event.stream, event.end) for event in result.trace]

    for family in FAMILIES:
        assert order(family, 1) == order(family, 1)
        assert order(family, 1) != order(family, 2)
    with pytest.raises(InputError, match="no seed family 'odd'; there are uniform, slow_rank"):
        explore(compiled, sequence, [0], "odd")


@pytest.mark.parametrize("route", ROUTES)
def test_one_rank_alone(route: str) -> None:
    """A world of one places its shards and scales its gradients; there is nobody to wait for."""
    compiled = blocks(Topology(1, 1), 2, BY_ROUTE[route], long=True)
    explore(compiled, training_sequence(compiled, steps=2), range(3), FAMILIES)
