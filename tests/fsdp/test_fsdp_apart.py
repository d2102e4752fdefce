"""Ranks that run different blocks: an error that names them, in time, and a model that can be trained on."""

from __future__ import annotations

import fsdp_apart as jobs

from ranks import run_ranks


def test_blocks_that_one_rank_alone_skips() -> None:
    """One, two and three of equal shape, and three in backward only: no gradient is of another block's."""
    first, second = run_ranks(jobs.skipped, 2, env={"TIDE_TIMEOUT": "4"})
    for told, mine in ((first, (2, 3, 3)), (second, (1, 1, 0))):
        for (message, seconds), block in zip(told[:3], mine, strict=True):
            assert f"unit 'layers.{block}', all_gather" in message
            assert seconds < 12
    assert "the gradients of rank 0 are others than before (there is none of embed.weight)" in first[3][0]
    assert "rank 0" in second[3][0]


def test_attach_compares_its_options() -> None:
    for told in run_ranks(jobs.options_that_differ, 2):
        assert "different options of attach" in told
        assert "reuse_forward: False on rank 0; True on rank 1" in told
