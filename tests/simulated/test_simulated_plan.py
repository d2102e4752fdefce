"""The simulator as a plan's user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from simulated_models import BY_ROUTE

import tide
from tide.compiler.options import ROUTES
from tide.errors import InputError, PlanError
from tide.topology import Topology
from tide.transport.simulated import chrome_trace, training_sequence

MODEL = {f"layers.{number}.{name}": shape for number in range(3) for name, shape in {"w": (7, 12), "b": (5,)}.items()}


def _plan(route: str) -> tide.Plan:
    return tide.compile_plan(MODEL, topology=Topology(2, 2), options=BY_ROUTE[route], rank=0)


@pytest.mark.parametrize("route", ROUTES)
def test_a_plan_simulates_a_training_step(route: str) -> None:
    plan = _plan(route)
    assert len(plan.units) == 3
    result = plan.simulate()
    assert result.operations > 0
    assert result.wholes == {}, "a training step ends with all units released"
    assert set(result.shards) == {(unit.name, rank) for unit in plan.units for rank in range(4)}
    assert result.trace == ()
    again = plan.simulate(training_sequence(plan.compiled))
    for key, shards in result.shards.items():
        for index, shard in shards.items():
            assert torch.equal(shard, again.shards[key][index])


def test_a_plan_simulates_a_given_sequence() -> None:
    plan = _plan("push")
    unit = plan.units[1]
    sequence = [("all_gather", unit.name), ("use", unit.name)]

    def order(seed: int, family: str) -> list[tuple[int, str, int]]:
        result = plan.simulate(sequence, seed=seed, family=family, trace=True)
        assert set(result.wholes) == {(unit.name, rank) for rank in range(4)}
        assert not result.shards
        assert json.dumps(chrome_trace(result.trace))
        return [(event.rank, event.stream, event.end) for event in result.trace]

    assert order(1, "burst") == order(1, "burst")
    assert order(1, "burst") != order(2, "burst")
    assert order(1, "burst") != order(1, "uniform")


def test_settings_reach_the_simulation() -> None:
    plan = _plan("push")
    assert plan.simulate(pieces=4).operations > plan.simulate(pieces=1).operations
    plan.simulate(payload="special")
    with pytest.raises(InputError, match="no payload 'odd'"):
        plan.simulate(payload="odd")
    with pytest.raises(InputError, match="no seed family 'odd'"):
        plan.simulate(family="odd")


def test_a_damaged_plan_does_not_simulate() -> None:
    plan = _plan("push")
    compiled = plan.compiled
    for rank in range(4):
        program = compiled.program(plan.units[0].name, "all_gather", rank)
        streams = tuple(stream for stream in program.streams if stream.name != "ag.wire")
        compiled = compiled.with_program(
            plan.units[0].name, rank, type(program)("all_gather", program.position, streams)
        )
    with pytest.raises(PlanError, match="deadlock"):
        tide.Plan(compiled, 0).simulate()


def test_importing_the_plan_does_not_import_the_simulator() -> None:
    code = "import sys, tide; assert not [m for m in sys.modules if m.split('.')[0] == 'torch' or 'simulated' in m]"
    subprocess.run([sys.executable, "-c", code], check=True)
