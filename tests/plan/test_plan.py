"""The plan that a user holds: compiled, saved, loaded, refused, and run between ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from plan_jobs import Model, different_types, refusals, whole_model

import tide
from ranks import run_ranks
from tide.compiler.read import Policy
from tide.compiler.shapes import model_parameters
from tide.errors import CapabilityError, InputError
from tide.topology import Links

FOUR = tide.Topology(nodes=1, gpus_per_node=4)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_whole_model_between_ranks(world: int) -> None:
    assert run_ranks(whole_model, world, ((None, "push"), (2, "push"), (1, "pull"))) == [[]] * world


def test_refusals_name_the_thing_and_the_remedy() -> None:
    for messages in run_ranks(refusals, 2):
        assert "no gradient for head.bias of unit ''" in messages["missing"]
        assert "pass zeros" in messages["missing"]
        assert "head.bias has shape (12,), but the parameter has (11,)" in messages["shape"]
        assert "no parameter 'tail'" in messages["unknown"]
        assert "head.bias" in messages["dtype"]
        assert "float64" in messages["dtype"]
        assert "no unit 'layers.9'" in messages["unit"]
        assert "SlotError: unit 'layers.1' needs slot" in messages["slot"]
        assert "'layers.0' still holds" in messages["slot"]
        assert "no shard for layers.1" in messages["shards"]
        for what, told in (
            ("transposed", "shape (24, "),
            ("whole", "shape (37, 24), but this rank's shard of (37, 24) has (1"),
            ("none", "must be a dense tensor, got NoneType"),
            ("sparse", "must be a dense tensor, got torch.sparse_coo"),
            ("distributed", "shape (37, 24), but this rank's shard"),
        ):
            assert f"all_gather: shard of layers.1.up.weight {'' if 'must' in told else 'has '}{told}" in messages[what]
        assert "divide by 0.0" in messages["divisor"]
        assert "close() it before opening it" in messages["open"]


def test_ranks_with_gradients_of_different_types_get_an_error_each() -> None:
    for before in (torch.float32, torch.bfloat16):
        for message in run_ranks(different_types, 2, before):
            assert message.startswith("PeerError")


def test_plan_is_immutable_and_says_what_it_is() -> None:
    plan = tide.compile_plan(Model(), topology=FOUR, rank=2)
    assert "4 units" in repr(plan)
    assert "\n" not in repr(plan)
    assert "<table" in plan._repr_html_()
    with pytest.raises(AttributeError, match="immutable"):
        plan.rank = 3  # type: ignore[misc]


def test_json_round_trip(tmp_path: Path) -> None:
    plan = tide.compile_plan(Model(), topology=FOUR, rank=1, options=tide.PlanOptions(slots=2))
    plan.to_json(tmp_path / "plan.json")
    again = tide.load_plan(tmp_path / "plan.json")
    assert (again.digest, again.rank, again.spec, again.options) == (plan.digest, 1, plan.spec, plan.options)
    assert again.program("layers.1") == plan.program("layers.1")
    assert tide.load_plan(plan.to_json(), rank=3).rank == 3


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    text = tide.compile_plan(Model(), topology=FOUR).to_json()
    data = json.loads(text)
    for damage, message in (
        ("{", "not JSON"),
        ('{"a":' * 100_000, "damaged"),
        ('{"tide_plan":' + "1" * 10_000 + "}", "damaged"),
        ('{"a": 1}', "no 'tide_plan' field"),
        (json.dumps({**data, "tide_plan": 99}), "of plan format 99"),
        (json.dumps({**data, "digest": "0" * 64}), "it was edited"),
        (json.dumps({k: v for k, v in data.items() if k != "spec"}), "damaged"),
    ):
        with pytest.raises(InputError, match=message):
            tide.load_plan(damage)
    for path in (tmp_path / "none.json", "x" * 5000, tmp_path):
        with pytest.raises(InputError, match="no file to read"):
            tide.load_plan(path)
    with pytest.raises(InputError, match="rank 4 is outside"):
        tide.load_plan(text, rank=4)


def test_running_without_shards_or_process_group() -> None:
    plan = tide.compile_plan({"w": ((8, 4), "float32")}, topology=tide.Topology(1, 2), rank=0)
    with pytest.raises(tide.TideError, match="init_process_group"):
        plan.all_gather(shards={"w": torch.zeros(4, 4)})
    alone = tide.compile_plan({"w": ((8, 4), "float32")}, topology=tide.Topology(1, 1), rank=0)
    with pytest.raises(InputError, match="pass shards="):
        alone.all_gather()
    plain = tide.compile_plan(Model(), topology=tide.Topology(1, 1))
    with pytest.raises(CapabilityError, match="call fully_shard"):
        plain.all_gather()
    plain.close()
    with alone:
        assert torch.equal(
            alone.all_gather(shards={"w": torch.arange(32.0).view(8, 4)})["w"].flatten(), torch.arange(32.0)
        )


def test_rank_and_topology_must_fit() -> None:
    with pytest.raises(InputError, match="rank 4 is outside 1 nodes × 4 GPUs"):
        tide.compile_plan(Model(), topology=FOUR, rank=4)
    with pytest.raises(InputError, match="topology"):
        tide.compile_plan(Model())


def test_llama_405b_for_one_rank_of_1024_compiles_in_two_seconds() -> None:
    listing = {name: (shape, "bfloat16") for name, shape in model_parameters("Llama-3.1-405B").items()}
    began = time.process_time()
    plan = tide.compile_plan(listing, topology=tide.Topology(128, 8), rank=517, options=tide.PlanOptions(slots=2))
    for unit in plan.units[:2]:
        for collective in ("all_gather", "reduce_scatter"):
            assert len(plan.program(unit.name, collective))
    assert time.process_time() - began < 2.0


def test_odd_arguments_are_refused_by_name() -> None:
    one = tide.Topology(1, 2)
    for call, message in (
        (lambda: tide.compile_plan({"w": ((1 << 62,), "float32")}, topology=one), "w: shape .* more than 16 TiB"),
        (lambda: tide.compile_plan({"w": ((1 << 32, 1 << 32), "float32")}, topology=one), "w: shape"),
        (lambda: tide.compile_plan({"w": ((0, 10**30), "float32")}, topology=one), "w: shape .* more than 16 TiB"),
        (lambda: tide.PlanOptions(alignment=1 << 62), "alignment must be at most 1073741824"),
        (lambda: tide.PlanOptions(receive_depth=1 << 40), "receive_depth must be at most 65536"),
        (lambda: tide.Topology(1, 2, virtual="no"), "virtual must be True or False"),  # type: ignore[arg-type]
        (lambda: tide.Topology.discover(2, {"LOCAL_WORLD_SIZE": "two"}), "LOCAL_WORLD_SIZE must be a whole number"),
        (lambda: tide.Topology(10**8, 4), "more than 1,048,576 ranks"),
        (lambda: tide.Topology(1, 2, links=None), "links must be Links"),  # type: ignore[arg-type]
        (lambda: tide.compile_plan({5: (4, 4), "5": (3,)}, topology=one), "names must be strings, got 5"),
        (lambda: tide.compile_plan({"w": (4,)}, topology=one, rank="0"), "rank '0' is outside"),  # type: ignore[arg-type]
        (lambda: tide.compile_plan({"w": (4,)}, topology=one, rank=True), "rank True is outside"),
        (lambda: tide.compile_plan({"w": (4,)}, topology=one, options={"slots": 2}), "expected tide.PlanOptions"),  # type: ignore[arg-type]
        (lambda: tide.load_plan(None), "got NoneType"),  # type: ignore[arg-type]
        (lambda: tide.compile_plan({"w": (4,)}, topology=one).verify(ranks=[]), "no ranks to prove"),
        (lambda: Policy("int8"), "Policy.param_dtype: int8 is no floating-point type"),
        (lambda: Links(network=0), "Links: network must be a number above 0"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_units_without_gradients_or_elements_are_planned_and_simulated() -> None:
    listing = {"a.0.n": ((6,), "int64"), "a.1.z": ((3, 0), "int64"), "a.2.w": ((4, 4), "float32")}
    plan = tide.compile_plan(listing, topology=tide.Topology(1, 3))
    plan.verify()
    assert len(plan.program("a.0", "reduce_scatter")) == 0
    plan.simulate(seed=1)
