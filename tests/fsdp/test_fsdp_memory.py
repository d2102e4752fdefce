"""The stated memory against that of real steps on CPU ranks, in which every tensor is counted."""

from __future__ import annotations

import pytest
from fsdp_memory import changing_subsets, same_plans, stated_and_measured

from ranks import run_ranks
from tide.compiler.compile import SUBSETS


@pytest.mark.parametrize("kind", ["blocks", "nested", "head apart", "prefetch"])
def test_peaks_are_as_stated(kind: str) -> None:
    for rank, found in enumerate(run_ranks(stated_and_measured, 2, kind)):
        for column, (stated, measured) in found.items():
            assert stated == pytest.approx(measured, rel=0.02), f"{column} on rank {rank}: {found}"


def test_a_plan_that_is_compiled_is_the_one_that_is_attached() -> None:
    assert run_ranks(same_plans, 2) == [{}, {}]


def test_programs_of_changing_subsets_are_bounded() -> None:
    for noted in run_ranks(changing_subsets, 2, 250):
        first, last = noted[1], noted[-1]
        assert last["programs"] == SUBSETS, noted
        assert last["prepared"] <= last["most"], noted
        assert last["bindings"] == 1, noted
        assert last["tensors"] <= first["tensors"] + 4, noted
