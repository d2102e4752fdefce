"""The launch path without a GPU: what Triton is asked to compile, and what its launcher would be given."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton
from kernels_support import compiled, interpreted
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tide.kernels.accumulate import AccumulateTable, Form, SumItem, accumulate_kernel, variant_of
from tide.kernels.build import Variant
from tide.kernels.launch import TableLaunch, Tuning, prepare
from tide.kernels.place import PlaceItem, PlaceTable, place_kernel


class Driver:
    """Answers what Triton asks before it launches, for an sm_90 device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0  # asked for when a kernel is compiled, and not used


@pytest.fixture
def launched(monkeypatch):
    """Arguments of each launch, in the order of Triton's launcher: grid, stream, function, …, arguments."""
    from tide.kernels import launch

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    calls: list[tuple] = []

    def load(variant: Variant, device: torch.device):
        found = prepare(variant, device)
        if found.module is None:
            found.module = object()  # loaded, as far as the launcher can see
            found._run = lambda *arguments: calls.append(arguments)
        return found

    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "prepare", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(TableLaunch, "_upload", lambda self: torch.from_numpy(self._table.words))
    yield calls
    for kernel in (place_kernel, accumulate_kernel):
        kernel.device_caches.clear()


def compile_for(variant: Variant):
    """Triton's compiled kernel, for sm_90."""
    types = {**dict(variant.signature), **dict.fromkeys(dict(variant.constants), "constexpr")}
    source = ASTSource(variant.kernel, types, dict(variant.constants))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": variant.warps})


def test_accumulate_launch(launched):
    item = SumItem((64, 1 << 20), 0, 1 << 21, 1, 100_000, (0, 0), 0, 0)
    table = AccumulateTable([item], device="cuda:0", tuning=Tuning(ctas=5, stages=3))
    table.launch(scale=0.25, divisor=3.0, stream=77)
    (
        (
            x,
            y,
            z,
            stream,
            *_,
            address,
            scale,
            divisor,
            pieces,
            src,
            dst,
            base,
            factors,
            width,
            block,
            narrow,
            stages,
            bulk,
        ),
    ) = launched
    assert (x, y, z, stream) == (5, 1, 1, 77)
    assert address == table._groups[0][-1]._words.data_ptr()
    assert (scale, divisor) == (0.25, 3.0)
    assert (pieces, src.name, dst.name, base, factors) == (2, "bf16", "fp32", 0, 2)
    assert (width, block, narrow, stages, bulk) == (8, 4096, 1024, 3, 0)
    table.launch(scale=0.5, stream=78)
    table.launch(divisor=2.0, stream=79)
    assert [call[3] for call in launched] == [77, 78, 79]
    # The same kernel with the scale only, for both: the division by 2 became a multiplication.
    assert [call[-12:-10] for call in launched[1:]] == [(0.5, 1.0)] * 2
    assert launched[1][-6] == launched[2][-6] == 1


def test_place_launch(launched):
    items = [PlaceItem(64, 1 << 20, 1, 5000, 0, 0, torch.float32, dst) for dst in (torch.bfloat16, torch.float32)]
    table = PlaceTable(items, device="cuda:0", tuning=Tuning(ctas=8))
    table.launch(stream=5)
    assert table.launches == len(launched) == 2
    assert [call[:4] for call in launched] == [(programs, 1, 1, 5) for programs in table.programs]
    assert [call[-7].name for call in launched] == ["fp32", "int32"]


def test_what_is_compiled_at_run_time_is_what_is_compiled_ahead(launched):
    """Same types, constants, alignment and options, so the same PTX."""
    from tide.kernels import accumulate, launch, place

    tuning = Tuning(block=1024, warps=4, stages=2)
    for module in (place, accumulate):
        variant = next(iter(module.variants(tuning)))
        found = launch.prepare(variant, torch.device("cuda", 0))
        assert found.asm["ptx"] == variant.compile().ptx


def test_scratch_memory_is_given_to_the_launch_alone():
    from triton.runtime import _allocation

    from tide.kernels.launch import scratch_size, with_scratch

    form = Form(2, torch.bfloat16, torch.float32, False)
    tunings = [Tuning(block=1024, warps=4, bulk=bulk) for bulk in (False, True)]
    built = [compile_for(variant_of(form, 1, tuning)) for tuning in tunings]
    assert [scratch_size(found, 5) for found in built] == [0, 5 * 2 * 128]
    assert all(found.metadata.global_scratch_align in (1, 128) for found in built)

    def launcher(*arguments: int) -> tuple:
        return arguments, _allocation._allocator.get()(256, 128, None)

    before, scratch = _allocation._allocator.get(), torch.empty(256, dtype=torch.uint8)
    assert with_scratch(launcher, scratch)(1, 2) == ((1, 2), scratch)
    assert _allocation._allocator.get() is before
    assert with_scratch(launcher, None) is launcher


def test_stages_fit_shared_memory():
    tuning = Tuning(block=4096, shared=128 << 10)
    assert [tuning.stages_for(size) for size in (2, 4, 16, 32, 64)] == [8, 8, 3, 2, 1]
    assert Tuning(stages=5).stages_for(1000) == 5


def test_default_device():
    from tide.kernels.launch import default_device

    assert default_device(place_kernel, "cpu") == torch.device("cpu")
    kernels = interpreted()
    assert kernels.launch.default_device(kernels.place.place_kernel, None) == torch.device("cpu")


@pytest.mark.gpu
def test_default_device_of_a_compiled_kernel():
    from tide.kernels.launch import default_device

    assert default_device(place_kernel, None) == compiled().device


def test_package_loads_triton_only_when_needed():
    """The references serve the host transport, on machines without Triton too."""
    import subprocess
    import sys

    program = (
        "import sys, tide.kernels as kernels; assert 'triton' not in sys.modules; "
        "kernels.accumulate_reference; kernels.PlaceTable; assert 'triton' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    import tide.kernels

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tide.kernels.nothing
    for name in tide.kernels.__all__:
        assert getattr(tide.kernels, name) is not None
