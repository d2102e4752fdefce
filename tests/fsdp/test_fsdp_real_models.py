"""Real models with random weights, trained under stock and attached; see `fsdp_parity` for what is compared."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from fsdp_real_models import LIBRARIES, WORLDS, run_models

from ranks import run_ranks

MISSING = [library for library in LIBRARIES if find_spec(library) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: the dev extra installs them")
@pytest.mark.parametrize("world", WORLDS[:1])  # on four: python tests/fsdp/fsdp_real_models.py 4
def test_real_models(world: int) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TIDE_TIMEOUT": "20"}
    failures = run_ranks(run_models, world, timeout=240, env=offline)[0]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
