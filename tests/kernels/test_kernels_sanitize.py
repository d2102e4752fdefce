"""Few and small launches of every code path, for compute-sanitizer: see benchmarks/sanitize.sh."""

from __future__ import annotations

import pytest
import torch
from kernels_support import Backend, Shape, check_accumulate, check_place, compiled

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

#: Aligned and in one run, with an odd end; strided; and where no vector fits.
SHAPES = {
    "flat": Shape(1, 9001, (0, 0), (0, 0)),
    "strided": Shape(5, 2048, (16, 16), (0, 0)),
    "narrow": Shape(3, 700, (1, 2, 3), (0, 1, 2)),
}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return compiled()


def small(backend: Backend, stages: int) -> object:
    """Several tiles of each block, on a few CTAs."""
    return backend.launch.Tuning(ctas=3, block=1024, narrow=256, warps=4, stages=stages)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_place_under_the_sanitizer(backend, shape, stages):
    blocks = [(SHAPES[shape], torch.float32, torch.bfloat16), (SHAPES[shape], torch.bfloat16, torch.bfloat16)]
    check_place(backend, blocks, small(backend, stages))


@pytest.mark.parametrize("bulk", [False, True])
def test_place_steps_under_the_sanitizer(backend, bulk):
    tuning = backend.launch.Tuning(ctas=3, block=1024, narrow=256, warps=4, bulk=bulk)
    blocks = [(shape, torch.float32, torch.bfloat16) for shape in SHAPES.values()]
    check_place(backend, blocks, tuning, chain=(1, 2))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_accumulate_under_the_sanitizer(backend, shape, stages):
    blocks = [(SHAPES[shape], pieces, torch.bfloat16, torch.float32, pieces == 2) for pieces in (2, 3)]
    check_accumulate(backend, blocks, small(backend, stages), divisor=2.0)


def test_accumulate_in_place_under_the_sanitizer(backend):
    blocks = [(SHAPES["flat"], 2, torch.bfloat16, torch.float32, True)]
    check_accumulate(backend, blocks, small(backend, 3), in_place=True)
