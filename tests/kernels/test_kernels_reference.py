"""The references: order of summation, rounding, special values, strides and aliases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import assert_same, naive_sum, random_bits

from tide.errors import InputError
from tide.kernels import reference
from tide.kernels.reference import (
    accumulate_reference,
    fold_divisor,
    place_reference,
    switch_reduce_reference,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@settings(max_examples=100)
@given(
    runs=st.integers(0, 6),
    count=st.integers(0, 60),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    pieces=st.integers(1, 6),
    types=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    base=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, 1.0 / 3.0]),
    divisor=st.sampled_from([1.0, 3.0, 8.0, 12.0]),
    chunk=st.sampled_from([7, 64, 1 << 18]),
    seed=st.integers(0, 2**20),
    special=st.booleans(),
)
def test_accumulate(runs, count, gaps, pieces, types, base, scale, divisor, chunk, seed, special):
    src, dst = types
    pitch, out_pitch = count + gaps[0], count + gaps[1]
    rows = max(runs, 1)
    values = [
        random_bits(rows * pitch, src, seed + piece, special).as_strided((runs, count), (pitch, 1))
        for piece in range(pieces)
    ]
    addend = random_bits(runs * count, torch.float32, seed - 1, special).view(runs, count) if base else None
    buffer = torch.full((rows * out_pitch,), 7.0, dtype=dst)
    out = buffer.as_strided((runs, count), (out_pitch, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK", chunk)
        accumulate_reference(values, out, addend, scale, divisor)
    assert_same(out.contiguous(), naive_sum(values, addend, scale, divisor, dst), dst)
    out.fill_(7.0)
    assert bool((buffer == 7.0).all()), "elements between the runs were written"


def test_accumulate_mixed_pieces():
    """Each piece is taken as it is, whatever the type of the others."""
    pieces = [torch.randn(1000).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    out = torch.empty(1000)
    accumulate_reference(pieces, out)
    assert torch.equal(out, (pieces[0].float() + pieces[1]) + pieces[2].float())


def test_accumulate_is_close_to_the_exact_sum():
    """Against fp64: the error of k fp32 additions, whatever the type of the pieces."""
    pieces = [torch.randn(20_000).bfloat16() for _ in range(8)]
    out = torch.empty(20_000)
    accumulate_reference(pieces, out, divisor=8.0)
    exact = sum(piece.double() for piece in pieces) / 8
    bound = sum(piece.double().abs() for piece in pieces) / 8 * 8 * 2.0**-24
    assert bool(((out.double() - exact).abs() <= bound).all())


def test_accumulate_order_of_pieces_matters():
    values = (2.0**24, 1.0, -(2.0**24), 3.0)
    out = torch.empty(1)
    seen = set()
    for order in itertools.permutations(values):
        accumulate_reference([torch.tensor([value]) for value in order], out)
        total = np.float32(order[0])
        for value in order[1:]:
            total = np.float32(total + np.float32(value))
        assert out.item() == total
        seen.add(out.item())
    assert len(seen) > 1


@pytest.mark.parametrize("alias", ["base", "piece 0", "piece 1"])
@pytest.mark.parametrize("chunk", [16, 1 << 18])
def test_accumulate_in_place(alias, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", chunk)
    pieces, base = [torch.randn(300) for _ in range(3)], torch.randn(300)
    expected = naive_sum([piece.clone() for piece in pieces], base.clone(), 0.5, 3.0, torch.float32)
    out = base if alias == "base" else pieces[int(alias[-1])]
    accumulate_reference(pieces, out, base, 0.5, 3.0)
    assert torch.equal(out, expected)


def test_accumulate_special_values():
    inf, nan = float("inf"), float("nan")
    pieces = [
        torch.tensor([inf, inf, 1.0, nan, -inf, 3e38]).bfloat16(),
        torch.tensor([1.0, -inf, inf, 1.0, -inf, 3e38]).bfloat16(),
    ]
    out = torch.empty(6)
    accumulate_reference(pieces, out, divisor=2.0)
    assert out.isnan().tolist() == [False, True, False, True, False, False]
    assert out[[0, 2, 4, 5]].tolist() == [inf, inf, -inf, inf]  # the sum overflows before the division


def test_rounding_is_to_nearest_even():
    step = 2.0**-7  # distance of bf16 numbers from 1 up
    values = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + step / 2 + 2.0**-20, 3.4e38, 2.0**-134])
    out = torch.empty(5, dtype=torch.bfloat16)
    for write in (lambda: accumulate_reference([values], out), lambda: place_reference(values, out)):
        out.zero_()
        write()
        assert out.tolist() == [1.0, 1 + 2 * step, 1 + step, float("inf"), 0.0]
    half = torch.empty(2, dtype=torch.float16)
    accumulate_reference([torch.tensor([65519.0, 65520.0])], half)
    assert half.tolist() == [65504.0, float("inf")]


@pytest.mark.parametrize("divisor", [2.0**place for place in (-20, -1, 0, 1, 3, 20, 100)])
def test_folded_division_by_a_power_of_two(divisor):
    values = random_bits(50_000, torch.float32, 5)
    scale, rest = fold_divisor(1.0, divisor)
    assert rest == 1.0
    assert_same(values * scale, values / torch.tensor(divisor), torch.float32)


def test_folding_leaves_the_rest():
    assert fold_divisor(1.0, 3.0) == (1.0, 3.0)
    assert fold_divisor(0.3, 2.0) == (0.3, 2.0)
    for divisor in (0.0, float("nan")):
        with pytest.raises(InputError, match="divisor"):
            fold_divisor(1.0, divisor)


@given(st.integers(0, 5), st.integers(0, 40), st.integers(0, 3), st.integers(0, 1000))
def test_place(runs, count, gap, seed):
    pitch = count + gap
    src = random_bits(runs * count, torch.float32, seed).view(runs, count)
    buffer = torch.full((max(runs, 1) * pitch,), 7.0, dtype=torch.bfloat16)
    place_reference(src, buffer.as_strided((runs, count), (pitch, 1)))
    expected = torch.full((max(runs, 1) * pitch,), 7.0, dtype=torch.bfloat16)
    for run in range(runs):
        expected[run * pitch : run * pitch + count] = src[run].bfloat16()
    assert_same(buffer, expected, torch.bfloat16)


def test_switch_reduce_sums_in_rank_order():
    partials = [torch.randn(100) for _ in range(5)]
    out = torch.empty(100)
    switch_reduce_reference(partials, out, divisor=5.0)
    assert torch.equal(out, naive_sum(partials, None, 1.0, 5.0, torch.float32))
    with pytest.raises(InputError, match=r"the switch sums float32; .* torch\.bfloat16 rounded"):
        switch_reduce_reference([partials[0].bfloat16()], out)


def test_bad_input_is_named():
    ten, two = torch.zeros(10), torch.zeros(2)
    with pytest.raises(InputError, match="no piece was given"):
        accumulate_reference([], ten)
    with pytest.raises(InputError, match=r"shape \(2,\) for an output of \(10,\)"):
        accumulate_reference([ten, two], ten)
    with pytest.raises(InputError, match=r"cannot accumulate torch\.float64"):
        accumulate_reference([ten.double()], ten)
    with pytest.raises(InputError, match=r"base must be float32, not torch\.bfloat16"):
        accumulate_reference([ten], ten, ten.bfloat16())
    with pytest.raises(InputError, match=r"source of shape \(2,\)"):
        place_reference(two, ten)


def test_large_strided_and_many_dimensions(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK", 50)
    source = torch.randn(6, 7, 40)
    pieces = [source, source.flip(0).transpose(1, 2).contiguous().transpose(1, 2)]
    out = torch.empty(6, 40, 7).transpose(1, 2)
    accumulate_reference(pieces, out)
    assert torch.equal(out, pieces[0] + pieces[1])
