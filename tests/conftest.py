"""What every test gets: fixed seeds, one thread per process, and skips where a GPU is missing."""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import HealthCheck, settings

# Two workers, each with tests that start several ranks: more threads only get in each other's way.
# Set before torch or NumPy is imported, and inherited by the ranks.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, print_blob=True, suppress_health_check=_SLOW_MACHINE
)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=_SLOW_MACHINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _device_count() -> int:
    """Number of CUDA devices; torch is imported only when a test that needs one was selected."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device and `multi_gpu` tests with fewer than two."""
    needs = [
        (item, 2 if item.get_closest_marker("multi_gpu") else 1)
        for item in items
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")
    ]
    if not needs:
        return
    found = _device_count()
    for item, wanted in needs:
        if found < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {found}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test from the same random state, whatever ran before it in this worker."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
