"""Everything that FSDP2 offers, trained under stock and attached; see `fsdp_parity` for what is compared."""

from __future__ import annotations

import pytest
from fsdp_parity import run_cases

from ranks import run_ranks

#: Cases in so many processes, so that a world size can share the cores with another.
PARTS = 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_parity(world: int, part: int) -> None:
    failures = run_ranks(run_cases, world, (), part, PARTS, timeout=240, env={"TIDE_TIMEOUT": "20"})[0]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
