"""Plans that are made to fit a memory limit, and those that cannot."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import tide
from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions, with_prefetch
from tide.compiler.read import Policy, read
from tide.compiler.shapes import scaled
from tide.errors import InputError, MemoryLimitError, TideError
from tide.report import memory
from tide.report.fit import fit
from tide.report.units import show_bytes
from tide.topology import Topology

TWO = Topology(2, 4)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    listing = scaled("Llama-3.1-70B", 16, blocks=6)
    return replace(read(listing, topology=TWO, policy=Policy()), source="small Llama")


def plan(spec: ModelSpec, limit: int | None = None, **options: object) -> tide.Plan:
    return tide.compile_plan(
        spec,
        topology=TWO,
        rank=0,
        options=PlanOptions(**options),
        memory_limit=limit,  # type: ignore[arg-type]
    )


def need(made: tide.Plan) -> int:
    return memory(made.compiled, 0).tide


def test_what_fits_is_left_as_it_is(spec: ModelSpec) -> None:
    made = plan(spec, slots=3)
    same = plan(spec, need(made), slots=3)
    assert same.digest == made.digest
    assert same.remarks == ()
    assert "to fit" not in repr(same)


def test_every_limit_is_kept_and_the_smallest_is_named(spec: ModelSpec) -> None:
    start = plan(spec, slots=3)
    with pytest.raises(
        MemoryLimitError, match=r"small Llama: needs .* a rank at least \(memory_limit=\d+, with "
    ) as told:
        plan(spec, 1, slots=3)
    assert isinstance(told.value, TideError)
    least = int(re.search(r"memory_limit=(\d+)", str(told.value))[1])  # type: ignore[index]
    with pytest.raises(MemoryLimitError):
        plan(spec, least - 1, slots=3)
    for part in range(5):
        limit = least + (need(start) - least) * part // 5
        made = plan(spec, limit, slots=3)
        assert need(made) <= limit
        made.verify(ranks=[0])
        assert made.remarks
        assert f"for a limit of {show_bytes(limit)}" in made.remarks[-1]
        assert made.remarks[0] in repr(made)
        assert made.remarks[0] in str(made.report()).replace("\n  ", " ")
        assert made.report().to_dict()["remarks"] == list(made.remarks)


_AHEAD = {1: "1 module is", 2: "2 modules are", 3: "3 modules are"}


def test_the_cheapest_that_fits_is_taken(spec: ModelSpec) -> None:
    """A little less is had from one slot of three, or from the receive area: no gather has to be exposed for it."""
    start = plan(spec, slots=3)
    made = plan(spec, need(start) - 1, slots=3)
    assert made.options.slots in (2, 3)
    one = plan(spec, need(plan(spec, slots=1, receive_depth=1, chunk_bytes=1 << 20)), slots=3)
    assert one.options.slots == 1
    assert one.remarks[0] == "slots: 3 → 1, nothing is gathered ahead, not 2"
    assert "predicted to hide" in one.remarks[-1]
    two = plan(spec, need(plan(spec, slots=2)), slots=5)
    assert two.remarks[0] == f"slots: 5 → {two.options.slots}, {_AHEAD[two.options.prefetch]} gathered ahead, not 4"


def test_slots_of_its_own_are_shared_before_anything_else(spec: ModelSpec) -> None:
    made = plan(spec, need(plan(spec, slots=4)))
    assert made.options.slots in (2, 3, 4)
    assert made.remarks[0].startswith(f"slots: None → {made.options.slots}, units share slots")


def test_the_rank_with_most_counts() -> None:
    """Ranks 2 and 3 hold an additional unit."""
    every, half = Mesh(((0, 1, 2, 3),)), Mesh(((2, 3),))
    units = (Unit("a", (Parameter("a.w", (512, 512)),), every), Unit("b", (Parameter("b.w", (2048, 512)),), half))
    spec = ModelSpec(units, "unequal")
    with pytest.raises(MemoryLimitError) as told:
        fit(spec, Topology(1, 4), PlanOptions(slots=2), 1)
    least = int(re.search(r"memory_limit=(\d+)", str(told.value))[1])  # type: ignore[index]
    fitted = fit(spec, Topology(1, 4), PlanOptions(slots=2), least)
    assert memory(fitted.compiled, 0).tide < memory(fitted.compiled, 2).tide == least


@pytest.mark.parametrize(("depth", "room"), [(2, "2 pieces"), (1, "one piece")])
def test_receive_depth_is_given_up_position_by_position(depth: int, room: str) -> None:
    unit = Unit("u", (Parameter("w", (2048, 2048)),), Mesh(((0, 1, 2, 3),)))
    options = PlanOptions(slots=1, route="pull", chunk_bytes=1 << 18, receive_depth=3)
    spec, topology = ModelSpec((unit,), "one unit"), Topology(1, 4)
    needed = memory(compile_spec(spec, topology, replace(options, receive_depth=depth)), 0).tide
    remarks = fit(spec, topology, options, needed).remarks
    assert remarks[0] == f"receive_depth: 3 → {depth}, there is room for {room} of each peer"


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1GiB"])
def test_odd_limits(spec: ModelSpec, limit: object) -> None:
    with pytest.raises(InputError, match="memory_limit must be a whole number of bytes"):
        plan(spec, limit)  # type: ignore[arg-type]


def test_prefetch_is_another_way_to_say_slots(spec: ModelSpec) -> None:
    made = tide.compile_plan(spec, topology=TWO, rank=0, prefetch=2)
    assert made.digest == plan(spec, slots=3).digest
    assert (made.options.prefetch, PlanOptions().prefetch) == (2, None)
    assert with_prefetch(PlanOptions(slots=3), 2).slots == 3
    with pytest.raises(InputError, match="prefetch=2 takes 3 slots, but slots is 2"):
        with_prefetch(PlanOptions(slots=2), 2)
    for odd in (-1, True, 1.0):
        with pytest.raises(InputError, match="prefetch must be a whole number of at least 0"):
            with_prefetch(PlanOptions(), odd)  # type: ignore[arg-type]
