"""Models on a part of the world: pipelines, and whatever else does not hold one model everywhere."""

from __future__ import annotations

import fsdp_scope as jobs
import pytest

from ranks import run_ranks
from tide.fsdp.introspect import torch_version

SHORT = {"TIDE_TIMEOUT": "2"}


@pytest.mark.slow
@pytest.mark.skipif(torch_version() < (2, 12), reason="torch 2.11 cannot move what a graph holds, as 1F1B asks")
@pytest.mark.parametrize("part", range(2))
def test_pipelines_train_as_with_stock(part: int) -> None:
    found = run_ranks(jobs.pipelines, 4, tuple(jobs.SCHEDULES)[part::2], timeout=120, env={"TIDE_TIMEOUT": "20"})
    for rank, reports in enumerate(found):
        stage = "ranks 2–3 of 4" if rank > 1 else "ranks 0–1 of 4"
        for texts in reports.values():
            for text in texts:
                head = text.splitlines()[0]
                assert stage in head, text
                assert head.split(": ")[1][0] == head.split(" of ")[1][0], text  # all groups on TIDE
                assert text.count("reduced") == int(head.split(" of ")[1][0]), text


def test_replicas_and_experts_on_a_part() -> None:
    found = run_ranks(jobs.replicas_and_experts, 6, timeout=120, env={"TIDE_TIMEOUT": "20"})
    assert found[:2] == [[], []]
    assert all("ranks 2–5 of 6" in report for reports in found[2:] for report in reports)


def test_two_ranks_on_two_nodes() -> None:
    found = run_ranks(jobs.two_nodes, 8, timeout=90, env={"LOCAL_WORLD_SIZE": "4"})
    assert found == [""] * 3 + ["2 nodes × 1 GPUs"] * 2 + [""] * 3


def test_collectives_of_a_plan_on_a_part() -> None:
    found = run_ranks(jobs.plan_on_a_part, 4, 1, 3)
    assert "rank 0; ranks 1, 3 of 4" in found[1]
    assert "rank 1; ranks 1, 3 of 4" in found[3]


def test_models_on_overlapping_ranks() -> None:
    found = run_ranks(jobs.overlapping, 3, env={"TIDE_TIMEOUT": "20"})
    assert [len(heads) for heads in found] == [2, 3, 2]
    assert "ranks 0–1 of 3" in found[1][0]
    assert "ranks 1–2 of 3" in found[1][1]
    assert "ranks" not in found[1][2]


def test_stage_of_one_rank() -> None:
    for report in run_ranks(jobs.alone_on_a_part, 2):
        assert "sharded over one rank only" in report


def test_rank_of_a_stage_dies() -> None:
    found = run_ranks(jobs.killed_in_a_stage, 4, may_die=(3,))
    assert "rank 3 (process" in found[2]
    assert "from rank 3" in found[2]
    assert found[:2] == ["", ""]


@pytest.mark.skipif(torch_version() < (2, 13), reason="reset_iter_state came with torch 2.13")
def test_rank_dies_in_the_middle_of_a_schedule() -> None:
    found = run_ranks(jobs.killed_in_a_pipeline, 4, may_die=(3,), env={"TIDE_TIMEOUT": "10"})
    assert found[:2] == ["None", "None"]  # what they wait for is torch's
    assert "rank 3 (process" in found[2]


def test_different_models_in_a_stage_are_refused() -> None:
    found = run_ranks(jobs.other_models, 4)
    for told in found[2:]:
        assert "units: 3 on rank 2; 4 on rank 3" in told


def test_models_attached_in_different_orders_do_not_train() -> None:
    """Nothing tells them apart: each rank waits for a peer that is in the other model."""
    first, second, _ = run_ranks(jobs.crossed, 3, env=SHORT)
    assert "for FREE from rank 1 (0 of 1 signals here)" in first
    assert "for FREE from rank 0 (0 of 1 signals here)" in second


def test_ranks_that_differ_are_refused() -> None:
    first, second, *_ = run_ranks(jobs.other_ranks, 4, env=SHORT)
    assert "ranks 0–2 could not make a process group within 2 s: ranks 1–2 did not come" in first
    assert "rank 1 has last wanted one of ranks 0–1" in first
    assert "rank 0 has last wanted one of ranks 0–2" in second
