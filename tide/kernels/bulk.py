"""Flat segments of whole tiles, moved by bulk copies: device functions for accumulate and place.

The plain loops are bound by a multiprocessor's load/store unit: every 16 bytes pass through it on the way from
global to shared memory, again into registers, and twice more where loads and stores want different numbers of
elements in a thread. A bulk copy of a tile, made with a tensor descriptor, bypasses that unit, and a tile in
shared memory can be read in whatever layout the stores want. Stores stay plain ones, written through: bulk stores
were slower, as a program waits for each before it fills the buffer again (measured on an H200).

A tile is a box of rows of 128 bytes: what a descriptor's swizzle covers, so that no such layout meets bank
conflicts. There is no mask: :class:`~tide.kernels.segments.Division` gives these loops whole tiles only. Each
program makes the descriptors itself, from the addresses in the table, anew for each segment; they lie in scratch
memory that the launch has to provide.
"""

import triton
import triton.language as tl

from tide.kernels.tiles import FLAT, finish, operand_pointer, program_range, segment_header, segment_record

#: Bytes of a row of a box.
ROW_BYTES = tl.constexpr(128)


@triton.jit
def _rows(record, INDEX: tl.constexpr, ELEMENT: tl.constexpr, tiles, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Descriptor of an operand as rows, a tile of them at a time."""
    pointer = operand_pointer(record, INDEX, ELEMENT, FLAT)
    return tl.make_tensor_descriptor(pointer, [tiles * ROWS, ROW], [ROW, 1], [ROWS, ROW])


@triton.jit
def _widened(values, PAIRS: tl.constexpr):
    """A tile as fp32 addends: itself, or its elements with even and with odd numbers where bf16 came in pairs.

    One instruction for each element: the bits of bf16 are the upper half of those of fp32.
    """
    if PAIRS:
        return (values << 16).to(tl.float32, bitcast=True), (values & -65536).to(tl.float32, bitcast=True)
    widened = values.to(tl.float32)
    return widened, widened


@triton.jit
def sum_whole_tiles(
    table,
    scale,
    divisor,
    PIECES: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles of flat segments, for a sum of few pieces."""
    pairs: tl.constexpr = tl.bfloat16 == SRC
    element: tl.constexpr = tl.int32 if pairs else SRC
    row: tl.constexpr = ROW_BYTES // (element.primitive_bitwidth // 8)
    rows: tl.constexpr = BLOCK // (2 * row) if pairs else BLOCK // row
    wide: tl.constexpr = BLOCK // rows
    inside = (tl.arange(0, rows) * wide)[:, None] + tl.arange(0, wide)[None, :]
    segment, tile, end = program_range(table, FLAT)
    while tile < end:
        record = segment_record(table, segment, 1 + PIECES + BASE)
        begin, stop, _, _, _, _ = segment_header(record)
        tiles = stop - begin
        dst = operand_pointer(record, 0, DST, FLAT)
        pieces = ()
        for piece in tl.static_range(PIECES):
            pieces += (_rows(record, 1 + piece, element, tiles, rows, row),)  # type: ignore[assignment]
        if BASE:
            base = _rows(record, 1 + PIECES, tl.float32, tiles, rows, wide)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin, 1, num_stages=STAGES):
            even, odd = _widened(pieces[0].load([index * rows, 0]), pairs)  # type: ignore[misc]
            for piece in tl.static_range(1, PIECES):
                left, right = _widened(pieces[piece].load([index * rows, 0]), pairs)
                even += left
                odd += right
            total = tl.reshape(tl.join(even, odd), (rows, wide)) if pairs else even
            if BASE:
                total = base.load([index * rows, 0]) + total
            total = finish(total, scale, divisor, FACTORS).to(DST)
            tl.store(dst + index * tl.full((), BLOCK, tl.int64) + inside, total, cache_modifier=".wt")
        tile = stop
        segment += 1


@triton.jit
def place_whole_tiles(
    table,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles of flat segments, for a cast or a copy."""
    row: tl.constexpr = ROW_BYTES // (SRC.primitive_bitwidth // 8)
    rows: tl.constexpr = BLOCK // row
    inside = (tl.arange(0, rows) * row)[:, None] + tl.arange(0, row)[None, :]
    segment, tile, end = program_range(table, FLAT)
    while tile < end:
        record = segment_record(table, segment, 2)
        begin, stop, _, _, _, _ = segment_header(record)
        dst = operand_pointer(record, 0, DST, FLAT)
        src = _rows(record, 1, SRC, stop - begin, rows, row)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin, 1, num_stages=STAGES):
            value = src.load([index * rows, 0]).to(DST)
            tl.store(dst + index * tl.full((), BLOCK, tl.int64) + inside, value, cache_modifier=".wt")
        tile = stop
        segment += 1
