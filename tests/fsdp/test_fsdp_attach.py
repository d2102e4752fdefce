"""Attach and detach: what they leave alone, what they refuse, what they say."""

from __future__ import annotations

from pathlib import Path

import fsdp_jobs as jobs
import pytest

from ranks import run_ranks
from tide.fsdp.introspect import torch_version

#: torch 2.11 cannot point a storage at other memory.
MOVABLE = torch_version() >= (2, 12)


def test_no_operator_copies_payload() -> None:
    """No copy-in, copy-out, chunk-cat or cat, and no collective of the process group."""
    stock = run_ranks(jobs.count_operators, 2, False)[0]
    assert {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::cat"} <= set(stock)
    assert run_ranks(jobs.count_operators, 2, True) == [{}, {}]


def test_objects_stay_the_same() -> None:
    run_ranks(jobs.identity, 2, MOVABLE)


def test_checkpoints_load_under_either(tmp_path: Path) -> None:
    run_ranks(jobs.checkpoints, 2, str(tmp_path))


@pytest.mark.slow
def test_nothing_leaks_in_200_steps() -> None:
    for found in run_ranks(jobs.leaks, 2, 200, timeout=200):
        first, last = found[1], found[-1]
        for what in ("descriptors", "threads", "mappings"):
            assert last[what] <= first[what], f"{what}: {found}"
        assert last["tensors"] <= first["tensors"] + 4, f"{found}"
        assert last["KiB"] <= first["KiB"] + 2048, f"{found}"


@pytest.mark.skipif(not MOVABLE, reason="torch 2.11 cannot withhold memory")
def test_using_resharded_parameters_is_an_error_as_with_stock() -> None:
    for stock, attached in run_ranks(jobs.stale_use, 2):
        assert stock == attached
        assert "storage of size 0" in attached


def test_debug_poisons_vacated_slots() -> None:
    for with_debug, without in run_ranks(jobs.poisoned, 2):
        assert with_debug > 0
        assert without == 0


@pytest.mark.skipif(not MOVABLE, reason="torch 2.11 cannot move what a graph holds")
def test_attach_and_detach_between_forward_and_backward() -> None:
    run_ranks(jobs.between, 2)


@pytest.mark.skipif(MOVABLE, reason="from torch 2.12 on it works")
def test_attach_and_detach_between_forward_and_backward_is_refused() -> None:
    for told in run_ranks(jobs.refused_between, 2)[0]:
        assert "attach and detach between steps" in told


def test_accumulated_gradients_survive_attach_and_detach() -> None:
    run_ranks(jobs.accumulated, 2)


@pytest.mark.skipif(torch_version() < (2, 13), reason="reset_iter_state came with torch 2.13")
def test_step_that_was_interrupted() -> None:
    run_ranks(jobs.interrupted, 2)


def test_detach_in_a_step_that_failed() -> None:
    run_ranks(jobs.failed, 2)


def test_detach_in_a_hook_of_backward_is_refused() -> None:
    assert all("while backward() runs" in told for told in run_ranks(jobs.detached_in_backward, 2))


def test_gradients_that_are_not_on_all_ranks_are_an_error() -> None:
    (_, there, apart), (none, _, equal) = run_ranks(jobs.other_gradients, 2, env={"TIDE_TIMEOUT": "1"})
    assert "unit 'layers.1': the gradients of rank 1 are others than before (there is none of layers.1.one)" in none
    assert "unit 'layers.1': the gradients of rank 0 are others than before (there is one of layers.1.one)" in there
    for told in (apart, equal):
        assert "gradient of layers.1.one: torch.float32 on rank 0; absent on rank 1" in told
        assert "gradient of layers.1.two: absent on rank 0; torch.float32 on rank 1" in told


def test_a_block_that_one_rank_alone_has_frozen_is_an_error() -> None:
    waits, frozen = run_ranks(jobs.frozen_alone, 2, env={"TIDE_TIMEOUT": "1"})
    assert "exchange their configurations of the model within 1 s: rank 0 did not come" in frozen
    assert "rank 1" in waits


def test_detach_after_a_rank_was_killed() -> None:
    assert "rank 1" in run_ranks(jobs.killed, 2, may_die=(1,))[0]


def test_transport_of_the_users_own() -> None:
    one, other = run_ranks(jobs.own_transport, 2)
    assert one == other


def test_refusals_say_what_is_wrong_and_what_to_do() -> None:
    told = run_ranks(jobs.refused, 2)[0]
    assert "call fully_shard first" in told["plain"]
    assert "slots must be a whole number of at least 1, got 0" in told["slots"]
    assert "no transport 'pigeon'" in told["transport"]
    assert "float64 is not supported" in told["strict"]
    assert "strict=True" in told["strict"]
    assert "call tide.detach(model) first" in told["twice"]
    assert "'layers.2' is needed while unit 'layers.0' is whole in the same slot 1" in told["slot"]
    assert "slots=3" in told["slot"]
    assert "attach between steps" in told["busy"]
    assert "foreach_all_gather takes ('params', 'group')" in told["version"]
    assert "Nothing was changed" in told["version"]


def test_groups_that_run_stock_say_why() -> None:
    reports = run_ranks(jobs.fallbacks, 2)[0]
    assert "layers.1: stock FSDP2, since: has an all-gather of its own (Mine)" in reports["custom"]
    (line,) = (line for line in reports["custom"].splitlines() if "layers.2:" in line)
    assert "layers.2: slot 2, 6 parameters; gathered" in line
    assert line.endswith("reduced 2; gradients by the user's MyReduce")
    assert "layers.0: slot 1" in reports["custom"]
    assert "layers.1: stock FSDP2, since: weight is a Quantized with an all-gather extension" in reports["extension"]
    assert "3 of 4 groups on TIDE" in reports["extension"]
    assert "0 of 4 groups on TIDE" in reports["double"]
    assert reports["stock"] == reports["tide"]


def test_one_rank_runs_stock() -> None:
    (report,) = run_ranks(jobs.alone, 1)
    assert "sharded over one rank only" in report


def test_smaller_mesh_with_other_dims_runs_stock() -> None:
    report = run_ranks(jobs.dim_one, 4)[0]
    assert "reshard_after_forward is a number of ranks and a parameter is not sharded on dim 0" in report


def test_binds_anew_when_the_model_is_configured_differently() -> None:
    run_ranks(jobs.rebinding, 2)
