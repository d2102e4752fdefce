"""``early_reduce``: gradients that come first are reduced while backward computes the rest."""

from __future__ import annotations

import fsdp_early as jobs
import pytest
from fsdp_parity import run_cases

from ranks import run_ranks
from tide.fsdp import early
from tide.fsdp.introspect import torch_version

MIB = 2**20


@pytest.mark.parametrize(
    ("order", "mib", "found"),
    [
        ((8, 7, 6, 5, 4, 3, 2, 1, 0), (0, 8, 1, 1, 8, 0, 28, 28, 28), (8, 7, 6)),  # Llama's block: down, gate, up
        ((1, 0), (50, 50), (1,)),  # embedding and head
        ((0, 1), (10, 90), (0,)),
        ((0, 1), (1, 90), ()),  # too little
        ((0,), (90,), ()),
        ((2, 0, 1), (20, 10, 50), (2, 0)),
        ((), (), ()),
    ],
)
def test_the_early_part_is_what_comes_first(order, mib, found):
    assert early.choose(order, [size * MIB for size in mib]) == found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parts"), [(2, 3), (4, 3)])
def test_parity_with_early_parts(world: int, parts: int) -> None:
    """Three steps of every third case: the first learns, the others reduce early. All: fsdp_parity.py N --early."""
    failures = run_ranks(run_cases, world, (), 0, parts, False, True, timeout=240, env={"TIDE_TIMEOUT": "20"})[0]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


def test_slots_that_receive_have_no_early_parts() -> None:
    for said in run_ranks(jobs.refused, 2):
        assert "early_reduce=True and PlanOptions(slot_reuse=True)" in said
        assert "leave one of the two out" in said


@pytest.mark.skipif(torch_version() < (2, 13), reason="reset_iter_state came with torch 2.13")
def test_early_parts_are_dropped_where_they_do_not_fit() -> None:
    run_ranks(jobs.scenarios, 2, timeout=120)


def test_ranks_that_learn_different_orders_reduce_as_before() -> None:
    (told, other) = run_ranks(jobs.orders, 2)
    assert other == []
    assert "unit 'layers.0' has no early part, since the ranks' gradients come in different orders" in told


def test_ranks_that_part_after_that_are_told_apart() -> None:
    for said in run_ranks(jobs.one_rank_alone, 2, env={"TIDE_TIMEOUT": "3"}):
        assert "layers.0" in said
