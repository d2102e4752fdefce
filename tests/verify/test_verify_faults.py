"""Planted faults are found, and the message says where."""

from __future__ import annotations

import re

import pytest
from faults import FAULTS, Fault, NoPlaceError
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_executor import Execution, WrongError
from verify_mutations import mutate
from verify_strategies import plans

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology


def plan(
    nodes: int, local: int, chunk: int, route: str, wide: str = "float32", reuse: bool = False, small: int = 0
) -> Compiled:
    """Two units with direct, strided and bundled parameters, enough chunks to go round all rings.

    With ``reuse``, gradients are received in slots: by ring where one is ``wide``, else each in its own place.
    ``small`` more parameters are enough for their gradients to travel packed.
    """
    mesh = Mesh((tuple(range(nodes * local)),))

    def unit(name: str) -> Unit:
        rows = (
            Parameter(f"{name}.wide", (10 * nodes * local + 3, 24)),
            Parameter(f"{name}.strided", (6, 12 * nodes * local, 2), 1, out_dtype="bfloat16"),
            Parameter(f"{name}.bias", (3 * nodes * local,), grad_dtype=wide),
            Parameter(f"{name}.norm", (5,)),
        )
        few = tuple(Parameter(f"{name}.small{i}", (16 * nodes * local,)) for i in range(small))
        return Unit(name, rows + few, mesh)

    options = PlanOptions(
        slots=1,
        bundle_bytes=64,
        min_run_bytes=0,
        min_put_run_bytes=0,
        chunk_bytes=chunk,
        route=route,
        piece_bytes=512,
        slot_reuse=reuse,
        wire_dtype="bfloat16" if reuse and wide == "float32" else "float32",
    )
    return compile_spec(ModelSpec((unit("first"), unit("second"))), Topology(nodes, local), options)


PLANS = (
    plan(1, 3, 256, "pull"),
    plan(1, 3, 256, "push"),
    plan(2, 2, 1024, "push"),
    plan(2, 2, 1024, "pull"),
    plan(3, 2, 256, "push"),
    plan(1, 3, 256, "push", "bfloat16", reuse=True),
    plan(3, 3, 256, "push", "bfloat16", reuse=True),
    plan(2, 2, 256, "push", "float32", reuse=True),
    plan(1, 3, 512, "push", "bfloat16", reuse=True, small=6),
    plan(1, 2, 512, "push", "bfloat16", small=9),
)

#: Where the message of a fault need not name a parameter: nothing but signals is concerned.
SIGNALS = ("dropped-wait", "dropped-signal", "cycle", "early-fold", "early-release", "early-mark")


def found(fault: Fault, compiled: Compiled, seed: int) -> tuple[str, str]:
    """What was planted, and what the proof says."""
    damaged, what = fault(compiled, seed)
    with pytest.raises(PlanError) as error:
        verify(damaged, collectives=(fault.collective,))
    return what, str(error.value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found_and_named(fault: Fault) -> None:
    planted = 0
    for compiled in PLANS:
        for seed in range(2):
            try:
                what, message = found(fault, compiled, seed)
            except NoPlaceError:
                continue
            planted += 1
            assert re.search(r"of unit '(first|second)'", message), (what, message)
            assert re.search(r"rank \d", message), (what, message)
            if not fault.name.endswith(SIGNALS):
                assert re.search(r"parameter (first|second)\.(wide|strided|bias|norm|small\d)\b", message), (
                    what,
                    message,
                )
                assert re.search(r"bytes \[\d+, \d+\)", message), (what, message)
    assert planted


@given(plans(), st.integers(0, 10**6))
@settings(max_examples=15)
def test_faults_are_found_in_random_plans(compiled: Compiled, seed: int) -> None:
    for fault in FAULTS:
        try:
            damaged, what = fault(compiled, seed)
        except NoPlaceError:
            continue
        try:
            verify(damaged, collectives=(fault.collective,))
        except PlanError:
            continue
        pytest.fail(f"not found: {what}")


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.shows == "always"], ids=lambda fault: fault.name)
def test_faults_that_show_always_show(fault: Fault) -> None:
    for compiled in PLANS:
        try:
            damaged, what = fault(compiled, 1)
        except NoPlaceError:
            continue
        ((unit, _, _), _) = next(iter(damaged.overrides.items()))
        try:
            Execution(damaged, unit, fault.collective, 0, 2, 1).run()
        except WrongError:
            continue
        pytest.fail(f"did not show: {what}")


@given(plans(largest=8, most=3), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_whatever_passes_runs_right(compiled: Compiled, rng: object) -> None:
    """Arbitrary changes: the proof may refuse what would run, but never the other way round."""
    import random

    assert isinstance(rng, random.Random)
    for _ in range(6):
        unit = rng.choice(compiled.spec.units)
        collective = rng.choice(("all_gather", "reduce_scatter"))
        if collective == "reduce_scatter" and not any(p.trainable for p in unit.parameters):
            continue
        changed, what = mutate(compiled, unit.name, collective, rng)
        try:
            verify(changed, collectives=(collective,))
        except PlanError:
            continue
        for seed in range(3):
            try:
                Execution(changed, unit.name, collective, unit.mesh.groups[0][0], 2, seed).run()
            except WrongError as error:
                pytest.fail(f"passed, but runs wrong ({error}): {what}")


def test_damage_to_one_of_several_equal_units_is_found() -> None:
    """Units that share their programs are proved once; one with a program of its own is proved itself."""
    compiled = PLANS[2]
    fault = next(f for f in FAULTS if f.name == "ag-missing-transfer")
    for seed in range(8):
        damaged, _ = fault(compiled, seed)
        ((unit, _, _),) = damaged.overrides
        with pytest.raises(PlanError, match=f"of unit '{unit}'"):
            verify(damaged)


def test_a_rank_proved_alone_finds_damage_near_it() -> None:
    compiled = PLANS[2]
    fault = next(f for f in FAULTS if f.name == "rs-sum-order")
    damaged, _ = fault(compiled, 0)
    ((_, _, rank),) = damaged.overrides
    with pytest.raises(PlanError, match="order of sums is fixed"):
        verify(damaged, ranks=[rank])
