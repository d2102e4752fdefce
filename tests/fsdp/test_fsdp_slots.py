"""FSDP2 training with gradients that arrive in vacated slots; see `fsdp_parity` for what is compared."""

from __future__ import annotations

import pytest
from fsdp_parity import run_cases

from ranks import run_ranks

#: What moves slots about, holds them, or changes the gradients.
NAMES = (
    "float32 debug",
    "bf16, reduced in float32",
    "reshard off",
    "accumulate without sync, bf16",
    "accumulate with sync",
    "accumulate, kept whole",
    "explicit prefetch",
    "HSDP, bf16",
    "two nodes",
    "odd shapes",
    "frozen parameters, mixed",
    "frozen in turn",
    "checkpoint inside",
    "checkpoint over three blocks",
)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_parity_through_slots(world: int) -> None:
    failures = run_ranks(run_cases, world, NAMES, 0, 1, True, timeout=240, env={"TIDE_TIMEOUT": "20"})[0]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
