"""``reuse_forward``: backward takes what forward left in the slots, unless something has changed since."""

from __future__ import annotations

from fsdp_reuse import compare

from ranks import run_ranks


def test_by_default_backward_gathers_every_unit() -> None:
    for wrong, kept in run_ranks(compare, 2, False):
        assert wrong == []
        assert set(kept.values()) == {0}


def test_reuse_notices_every_change_that_leaves_a_trace() -> None:
    for wrong, kept in run_ranks(compare, 2, True):
        assert wrong == []
        # Two units a step; not in the first step, when the whole parameters' version is not known yet.
        assert kept["plain"] == 4
        assert kept["edit_whole"] == kept["load_between"] == 0
