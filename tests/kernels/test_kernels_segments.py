"""The division of blocks into segments and tiles, by carrying it out in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide.errors import InputError
from tide.kernels import segments
from tide.kernels.segments import Block, Division, Table, make_table, reciprocal


def divide(value: int, multiplier: int, shift: int) -> int:
    """The kernels' division: the upper word of a 32-bit product, shifted."""
    assert 0 <= 2 * value < 1 << 32
    assert 0 <= multiplier < 1 << 32
    return (2 * value * multiplier >> 32) >> shift


def elements(table: Table, division: Division) -> list[tuple[int, ...]]:
    """Addresses of all operands for each element, as the programs come by them."""
    sizes, width = division.sizes, division.segment_words
    base = table.programs * segments.PROGRAM_WORDS
    found = []
    for program in range(table.programs):
        for kind, name in enumerate(segments.KINDS):
            at = program * segments.PROGRAM_WORDS + 3 * kind
            segment, tile, end = table.words[at : at + 3]
            while tile < end:
                record = [int(word) for word in table.words[base + segment * width :][:width]]
                begin, stop, vectors, per_run, multiplier, shift = record[:6]
                assert begin <= tile < stop
                if division.whole and name == "flat":
                    assert vectors * division.vector == (stop - begin) * division.wide
                units = sizes if name == "narrow" else (16,) * len(sizes)
                addresses = [word * unit for word, unit in zip(record[6::2], units, strict=True)]
                pitches = [word * unit for word, unit in zip(record[7::2], units, strict=True)]
                lanes = 1 if name == "narrow" else division.vector
                step = division.tile_vectors(kind)
                for vector in range((tile - begin) * step, min((tile - begin + 1) * step, vectors)):
                    row = 0 if name == "flat" else divide(vector, multiplier, shift)
                    column = vector * lanes if name == "flat" else (vector - row * per_run) * lanes
                    places = [
                        address + row * pitch + column * size
                        for address, pitch, size in zip(addresses, pitches, sizes, strict=True)
                    ]
                    if name != "narrow":
                        assert all(place % 16 == 0 for place in places)
                    found += [
                        tuple(place + lane * size for place, size in zip(places, sizes, strict=True))
                        for lane in range(lanes)
                    ]
                tile += 1
                if tile == stop:
                    segment += 1
    return found


def expected(blocks: list[Block], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [
        tuple(
            address + (run * pitch + column) * size
            for address, pitch, size in zip(block.addresses, block.pitches, sizes, strict=True)
        )
        for block in blocks
        for run in range(block.runs)
        for column in range(block.count)
    ]


@st.composite
def tables(draw) -> tuple[list[Block], Division]:
    sizes = draw(st.sampled_from([(2, 4), (4, 2, 2), (4, 4), (1, 1), (8, 8), (4, 2, 2, 4)]))
    blocks = []
    for index in range(draw(st.integers(0, 5))):
        runs, count = draw(st.integers(0, 6)), draw(st.integers(0, 150))
        common = draw(st.integers(0, 9))
        offsets = draw(st.just((common,) * len(sizes)) | st.tuples(*[st.integers(0, 9)] * len(sizes)))
        gaps = draw(st.sampled_from([0, 16]).map(lambda gap: (gap,) * len(sizes)))
        gaps = draw(st.just(gaps) | st.tuples(*[st.integers(0, 20)] * len(sizes)))
        addresses = tuple(
            (1 << 20) * (1 + index + 8 * operand) + offset * size
            for operand, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
        )
        blocks.append(Block(runs, count, addresses, tuple(count + gap for gap in gaps), index))
    wide = draw(st.sampled_from([16, 64, 128]))
    return blocks, Division(sizes, wide, draw(st.sampled_from([8, 32])), draw(st.integers(1, 9)), draw(st.booleans()))


@settings(max_examples=150)
@given(tables(), st.sampled_from([1 << 30, 64, 160]))
def test_every_element_once(drawn, limit):
    blocks, division = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MAX_SEGMENT", limit)
        table = make_table(blocks, division)
    assert sorted(elements(table, division)) == sorted(expected(blocks, division.sizes))
    assert 1 <= table.programs <= division.programs
    records = table.words[: table.programs * 9].reshape(table.programs, 3, 3)
    shares = records[:, :, 2] - records[:, :, 1]
    assert np.array_equal(shares.sum(axis=0), table.tiles)
    assert np.all(shares.max(axis=0) - shares.min(axis=0) <= 1)


@settings(max_examples=100)
@given(tables(), st.integers(-8, 8), st.sampled_from([16, 8]))
def test_moved_equals_made_anew(drawn, steps, step):
    blocks, division = drawn
    table = make_table(blocks, division)
    addresses = table.addresses + steps * step
    moved = table.moved(addresses)
    if not len(blocks):
        return
    if steps * step % 16:
        assert moved is None
        return
    anew = [
        Block(block.runs, block.count, tuple(map(int, row)), block.pitches, block.item)
        for block, row in zip(blocks, addresses, strict=True)
    ]
    assert moved is not None
    assert np.array_equal(moved.words, make_table(anew, division).words)
    assert np.array_equal(moved.addresses, addresses)
    with pytest.raises(InputError, match="addresses of shape"):
        table.moved(addresses[:-1])


@given(st.integers(1, 1 << 31), st.lists(st.integers(0, (1 << 31) - 1), max_size=20))
def test_reciprocal_divides(divisor, values):
    multiplier, shift = reciprocal(divisor)
    edges = [0, divisor - 1, divisor, divisor + 1, (1 << 31) - 1, (1 << 31) - 1 - ((1 << 31) - 1) % divisor]
    for value in [*values, *edges]:
        if value < 1 << 31:
            assert divide(value, multiplier, shift) == value // divisor


def test_reciprocal_of_small_and_special_divisors():
    powers = [1 << place for place in range(32)]
    for divisor in sorted({*range(1, 300), *powers, *(power - 1 for power in powers[1:])}):
        multiplier, shift = reciprocal(divisor)
        for value in (0, 1, divisor - 1, divisor, 2 * divisor - 1, 2 * divisor, (1 << 31) - 1):
            if value < 1 << 31:
                assert divide(value, multiplier, shift) == value // divisor


def test_kinds():
    """Contiguous and aligned, strided and aligned, and what is left: each goes the fastest way it can."""
    division = Division((4, 2), 64, 16, 64)
    aligned, odd = (1 << 20, 1 << 21), (1 << 20, (1 << 21) + 2)

    def tiles(runs: int, count: int, addresses: tuple[int, ...], *pitches: int) -> tuple[int, ...]:
        return make_table([Block(runs, count, addresses, pitches, 0)], division).tiles

    assert tiles(1, 640, aligned, 0, 0) == (10, 0, 0)
    assert tiles(10, 64, aligned, 64, 64) == (10, 0, 0), "adjacent runs are one"
    assert tiles(10, 64, aligned, 72, 80) == (0, 10, 0)
    assert tiles(1, 643, aligned, 0, 0) == (10, 0, 1), "a tail of three elements"
    assert tiles(1, 640, odd, 0, 0) == (0, 0, 40), "no element is on 16 bytes in both"
    for head in range(1, 8):
        places = (aligned[0] + 4 * (8 - head), aligned[1] + 2 * (8 - head))
        assert tiles(1, 640 + head, places, 0, 0) == (10, 0, 1), "a head of one to seven elements"
    assert tiles(10, 64, aligned, 72, 81) == (0, 0, 40), "a pitch that is no multiple of 16 bytes"


def test_whole_tiles():
    """Of a contiguous block, what fills no tile is not flat."""
    blocks = [Block(1, 10 + 3 * 64 + 40, (1 << 20, 1 << 21), (0, 0), 0), Block(1, 63, (1 << 22, 1 << 23), (0, 0), 1)]
    assert make_table(blocks, Division((4, 2), 64, 16, 1)).tiles == (5, 0, 2)
    # 3 tiles of the first block; the rest of both that are vectors; the rest that are not
    assert make_table(blocks, Division((4, 2), 64, 16, 1, whole=True)).tiles == (3, 2, 2)


def test_few_tiles_make_few_programs():
    division = Division((4, 4), 64, 16, 132)
    block = Block(1, 640, (1 << 20, 1 << 21), (0, 0), 0)
    assert make_table([block], division).programs == 10
    assert make_table([], division).programs == 1


def test_large_blocks_cost_little_to_divide():
    """40 GiB in one run, without a look at each element."""
    division = Division((4, 2), 4096, 1024, 32)
    count = 10 << 30
    table = make_table([Block(1, count, (1 << 40, 1 << 41), (0, 0), 0)], division)
    assert table.tiles == (count // 4096, 0, 0)
    assert len(table.words) == 32 * 9 + 10 * division.segment_words
