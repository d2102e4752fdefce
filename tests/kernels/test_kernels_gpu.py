"""The compiled kernels on a GPU: the checks of the interpreter, at full size too, and how fast they are."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import Backend, Shape, check_accumulate, check_place, compiled
from test_kernels_interpreted import FLOATS, PAIRS, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return compiled()


def tunings(backend: Backend) -> list:
    """One that makes many tiles of little, the default, and one without copies ahead."""
    make = backend.launch.Tuning
    plain = [make(ctas=3, block=256, narrow=64, warps=1, stages=3), make(), make(block=8192, warps=16, stages=1)]
    return [*plain, make(block=2048, bulk=True)]


@settings(max_examples=60)
@given(
    blocks=st.lists(st.tuples(shapes(2), st.sampled_from(PAIRS)), min_size=1, max_size=6),
    choice=st.integers(0, 2),
    seed=st.integers(0, 2**20),
    move=st.booleans(),
)
def test_place(backend, blocks, choice, seed, move):
    flat = [(shape, src, dst) for shape, (src, dst) in blocks]
    check_place(backend, flat, tunings(backend)[choice], seed, move)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("choice", range(4))
def test_place_every_pair_of_types(backend, src, dst, choice):
    blocks = [
        (Shape(1, 300_001, (0, 0), (3, 3)), src, dst),
        (Shape(70, 4096, (16, 32), (0, 0)), src, dst),
        (Shape(5, 1900, (1, 0), (1, 2)), src, dst),
    ]
    check_place(backend, blocks, tunings(backend)[choice])


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize("lengths", [(3, 1, 2), (1, 2, 3)])
def test_place_steps_in_one_launch(backend, src, dst, choice, lengths):
    shapes = [
        Shape(1, 300_001, (0, 0), (3, 3)),
        Shape(70, 4096, (16, 32), (0, 0)),
        Shape(5, 1900, (1, 0), (1, 2)),
        Shape(1, 3, (0, 0), (1, 2)),
        Shape(1, 1 << 20, (0, 0), (0, 0)),
        Shape(1, 0, (0, 0), (0, 0)),
    ]
    check_place(backend, [(shape, src, dst) for shape in shapes], tunings(backend)[choice], chain=lengths)


@settings(max_examples=60)
@given(
    blocks=st.lists(
        st.tuples(shapes(4), st.integers(1, 4), st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    factors=st.sampled_from([(1.0, 1.0), (1.0, 2.0), (1.0 / 3.0, 1.0), (1.0, 3.0), (0.5, 7.0)]),
    seed=st.integers(0, 2**20),
    special=st.booleans(),
)
def test_accumulate(backend, blocks, factors, seed, special):
    check_accumulate(backend, blocks, tunings(backend)[0], *factors, seed, special)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8, 16, 17, 33])
@pytest.mark.parametrize("base", [False, True])
def test_accumulate_number_of_pieces(backend, pieces, base):
    blocks = [
        (Shape(1, 200_003, (0,), (1,)), pieces, torch.bfloat16, torch.float32, base),
        (Shape(30, 4096, (16,), (0,)), pieces, torch.bfloat16, torch.float32, base),
        (Shape(3, 1700, (1, 2, 3), (0, 1, 2)), pieces, torch.bfloat16, torch.float32, base),
    ]
    for tuning in tunings(backend)[1:]:
        check_accumulate(backend, blocks, tuning, divisor=3.0)


def test_accumulate_into_its_base(backend):
    blocks = [(Shape(1, 300_000, (0,), (1,)), 2, torch.bfloat16, torch.float32, True)]
    check_accumulate(backend, blocks, None, scale=0.5, in_place=True)


@pytest.mark.parametrize("gap", [8, 1], ids=["strided", "narrow"])
def test_offsets_beyond_two_gibibytes(backend, gap):
    pitch = (1 << 30) + gap
    memory = torch.zeros(2 * pitch + 4096, dtype=torch.bfloat16, device=backend.device)
    runs = memory.as_strided((3, 2000), (pitch, 1))
    runs.copy_(torch.randn(3, 2000))
    placed = torch.zeros(3, 2000, device=backend.device)
    start = memory.data_ptr()
    item = backend.place.PlaceItem(start, placed.data_ptr(), 3, 2000, pitch, 2000, torch.bfloat16, torch.float32)
    backend.place.place([item])
    summed = torch.zeros_like(placed)
    backend.accumulate.accumulate(
        [backend.accumulate.SumItem((start, start), 0, summed.data_ptr(), 3, 2000, (pitch, pitch), 0, 2000)]
    )
    assert torch.equal(placed, runs.float())
    assert torch.equal(summed, 2 * runs.float())


def test_moves_on_a_side_stream(backend):
    """Each launch sees the addresses that were current when it was issued, however far ahead the host runs."""
    stream = torch.cuda.Stream()
    pool = torch.randn(64, 1 << 20, device=backend.device)
    out = torch.empty(64, 1 << 20, dtype=torch.bfloat16, device=backend.device)
    item = backend.place.PlaceItem(
        pool[0].data_ptr(), out[0].data_ptr(), 1, 1 << 20, 0, 0, torch.float32, torch.bfloat16
    )
    table = backend.place.PlaceTable([item])
    stream.wait_stream(torch.cuda.current_stream())
    for row in range(64):
        table.move([pool[row].data_ptr()], [out[row].data_ptr()], stream=stream)
        table.launch(stream.cuda_stream if row % 2 else stream)
    torch.cuda.synchronize()
    assert torch.equal(out, pool.bfloat16())


def test_launch_in_a_cuda_graph(backend):
    source = torch.randn(1 << 20, device=backend.device)
    out = torch.zeros(1 << 20, dtype=torch.bfloat16, device=backend.device)
    item = backend.place.PlaceItem(source.data_ptr(), out.data_ptr(), 1, 1 << 20, 0, 0, torch.float32, torch.bfloat16)
    table = backend.place.PlaceTable([item])
    table.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.launch()
    for _ in range(3):
        source.normal_()
        graph.replay()
        assert torch.equal(out, source.bfloat16())


def test_host_time_of_a_launch(backend, capsys):
    """At most 30 µs each; the best of some rounds, as other processes may get in between."""
    source, out = (torch.zeros(4096, device=backend.device) for _ in range(2))
    half = torch.zeros(4096, dtype=torch.bfloat16, device=backend.device)
    place = backend.place.PlaceTable(
        [backend.place.PlaceItem(source.data_ptr(), half.data_ptr(), 1, 4096, 0, 0, torch.float32, torch.bfloat16)]
    )
    total = backend.accumulate.AccumulateTable(
        [backend.accumulate.SumItem((half.data_ptr(),) * 2, 0, out.data_ptr(), 1, 4096, (0, 0), 0, 0)]
    )
    stream = torch.cuda.current_stream().cuda_stream
    for name, launch in (
        ("place", lambda: place.launch(stream)),
        ("accumulate", lambda: total.launch(1.0, 2.0, stream)),
    ):
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                launch()
            best = min(best, (time.perf_counter() - start) / 100)
        with capsys.disabled():
            print(f"\n{name}: {best * 1e6:.1f} µs of host time a launch")
        assert best < 30e-6


def test_bandwidth(backend, capsys):
    """Prints; the sweep is in benchmarks/kernels.py."""
    count = 32 << 20
    pieces = [torch.randn(count, device=backend.device).bfloat16() for _ in range(2)]
    out = torch.empty(count, device=backend.device)
    item = backend.accumulate.SumItem(
        tuple(piece.data_ptr() for piece in pieces), 0, out.data_ptr(), 1, count, (0, 0), 0, 0
    )
    for ctas in (16, 32, 132):
        table = backend.accumulate.AccumulateTable([item], tuning=backend.launch.Tuning(ctas=ctas))
        table.launch(divisor=2.0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            table.launch(divisor=2.0)
        end.record()
        torch.cuda.synchronize()
        rate = 10 * 8 * count / start.elapsed_time(end) / 1e6
        with capsys.disabled():
            print(f"\naccumulate, 2 pieces, {ctas} CTAs: {rate:.0f} GB/s")
    assert torch.equal(out, (pieces[0].float() + pieces[1].float()) / 2)
