"""Every planted fault is found, and the error says where."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from faults import FAULTS, Fault, NoPlaceError
from simulated_faults import PLANTERS, Planter, Spot, delayed, guards_data, missing_credit, spots
from simulated_models import BY_ROUTE, REUSE, block, first_error, world

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import ModelSpec
from tide.compiler.options import ROUTES
from tide.compiler.steps import Lane, Signal, Wait
from tide.errors import PlanError
from tide.topology import Topology
from tide.transport.simulated import Operation, explore


@cache
def _model(topology: Topology, route: str, chunk_bytes: int = 256) -> Compiled:
    """A root that stays whole, and two units that share one slot; pushed in three pieces."""
    mesh, long, narrow = world(topology.world_size), route == "push", route == "slot"
    units = (
        block("root", mesh, 5, stays_whole=True),
        block("layers.0", mesh, 5, long=long, narrow=narrow),
        block("layers.1", mesh, 5, long=long, narrow=narrow),
    )
    options = REUSE if route == "slot" else BY_ROUTE[route]
    return compile_spec(ModelSpec(units, "faults"), topology, replace(options, slots=1, chunk_bytes=chunk_bytes))


def _sequence() -> list[Operation]:
    """Each collective of each unit runs twice, so that what is left over from the first time counts too."""
    again: list[Operation] = [("all_gather", "root"), ("use", "root"), ("release", "root")]
    sequence: list[Operation] = [*again, ("all_gather", "root")]
    for unit in ("layers.0", "layers.1") * 2:
        sequence += [("all_gather", unit), ("use", unit), ("release", unit), ("reduce_scatter", unit)]
    sequence += [("use", "root"), ("release", "root"), ("reduce_scatter", "root")]
    sequence += [*again, ("reduce_scatter", "root")]
    return sequence


def _found(compiled: Compiled, seeds: int = 25) -> str | None:
    return first_error(compiled, _sequence(), seeds)


@pytest.mark.parametrize("route", [*ROUTES, "slot"])
def test_the_undamaged_plan_is_clean(route: str) -> None:
    for topology in (Topology(2, 2), Topology(1, 3), Topology(3, 1)):
        assert _found(_model(topology, route), 4) is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("planter", PLANTERS, ids=lambda planter: planter.__name__)
def test_planted_faults_are_found(planter: Planter, route: str) -> None:
    for topology in (Topology(2, 2), Topology(1, 2)):
        sound = _model(topology, route)
        for seed in range(3):
            damaged, what = planter(sound, seed)
            assert _found(damaged) is not None, f"seed {seed} on {topology}: not found: {what}"


#: Faults in what only one of the routes does, or only one of the places where gradients are received.
ONE_ROUTE = {
    "ag-early-end": "push",
    "ag-early-piece": "push",
    "ag-early-store": "push",
    "ag-early-pull": "pull",
    "ag-early-leave": "pull",
    "ag-early-free": "pull",
    "rs-early-slot": "slot",
    "rs-early-push": "push",
    "rs-early-mark": "push",
    "rs-swapped-ring": "push",
}

#: A reduce-scatter is the same by either route; it differs where the slot receives the gradients.
ROUTED_FAULTS = [
    pytest.param(fault, route, id=f"{fault.name}-{route}")
    for fault in FAULTS
    for route in (ROUTES if fault.collective == "all_gather" else ("push", "slot"))
    if ONE_ROUTE.get(fault.name, route) == route
]


@pytest.mark.parametrize(("fault", "route"), ROUTED_FAULTS)
def test_faults_that_the_proof_finds_are_found(fault: Fault, route: str) -> None:
    """The same damage that fails the proof shows when the plan runs."""
    found, missed = 0, []
    # Places are swapped within a step, so one chunk has to hold pieces of several parameters.
    chunk_bytes = 1024 if fault.name == "rs-swapped-places" else 256
    for topology in (Topology(2, 2), Topology(1, 3)):
        for seed in range(2):
            try:
                damaged, what = fault(_model(topology, route, chunk_bytes), seed)
            except NoPlaceError:
                continue
            # What every run shows needs few of them; races need many.
            if _found(damaged, 3 if fault.shows == "always" else 25) is not None:
                found += 1
            else:
                missed.append(f"seed {seed} on {topology}: {what}")
    assert found or missed, "nowhere to plant it"
    # Two terms, exact sums and rounded outputs hide the order, and now and then a small term.
    if fault.name in ("rs-sum-order", "rs-lost-piece"):
        missed = [] if found else missed
    assert not missed


@pytest.mark.parametrize("route", ROUTES)
def test_late_waits_are_found_as_races(route: str) -> None:
    """Counts still match when a wait is only late: nothing but the bytes shows it."""
    sound = _model(Topology(2, 2), route)
    places = [
        spot
        for spot in spots(sound, guards_data)
        if spot.unit == "layers.0" and spot.rank == 3 and _lane(sound, spot) not in (Lane.CREDIT, Lane.WIRE_CREDIT)
    ]
    lanes = {_lane(sound, spot) for spot in places}
    routed = {"push": {Lane.SHARDED}, "pull": {Lane.DONE, Lane.GATHERED}}[route]
    assert {
        Lane.READY,
        Lane.FREE,
        Lane.ARRIVED,
        Lane.PLACED,
        Lane.PUSHED,
        Lane.SUMMED,
        Lane.PARTIAL,
        Lane.BEGUN,
    } | routed <= lanes
    tried = set()
    for spot in places:
        lane = _lane(sound, spot)
        if (lane, spot.collective, spot.stream) in tried:
            continue
        tried.add((lane, spot.collective, spot.stream))
        error = _found(delayed(sound, spot), 40)
        assert error is not None, f"{spot}: late wait for {lane} not found"
        assert "bytes" in error, error


def _lane(compiled: Compiled, spot: Spot) -> Lane:
    step = spot.steps(compiled)[spot.index]
    assert isinstance(step, Wait)
    return step.lane


@pytest.mark.parametrize("route", ROUTES)
def test_a_deadlock_names_who_waits_for_whom(route: str) -> None:
    sound = _model(Topology(1, 2), route)
    for seed in range(20):
        damaged, _ = missing_credit(sound, seed)
        error = _found(damaged, 1)
        assert error is not None
        if "deadlock" in error:
            break
    assert "unit 'layers." in error or "unit 'root'" in error, error
    assert "waits for 1 × " in error, error
    assert "from rank" in error, error
    assert "has 0" in error, error


@pytest.mark.parametrize("route", ROUTES)
def test_leftover_signals_are_named(route: str) -> None:
    """A signal that nobody waits for is an error even where no race shows."""
    sound = _model(Topology(1, 2), route)
    gathers = (spot for spot in spots(sound, lambda steps, index: True) if spot.unit == "layers.0")
    # At the end of the stream that has said READY already.
    spot = next(spot for spot in gathers if spot.program(sound).streams[spot.stream].name == "ag.node")
    damaged = spot.edited(sound, [*spot.steps(sound), Signal(1, Lane.READY)])
    with pytest.raises(
        PlanError, match=r"do not match waits.*rank 1 has 1 of rank 0 on lane READY of unit 'layers\.0'"
    ) as caught:
        explore(damaged, _sequence()[:6], [0], "reverse")
    assert str(caught.value).endswith("[seed family reverse, seed 0]")
