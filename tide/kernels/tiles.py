"""Device functions that every kernel here shares: records of a table, and offsets within a tile.

The table is that of :mod:`tide.kernels.segments`. A kernel walks over three kinds of segments, with one loop
over segments and one loop over the tiles of a segment for each.
"""

import triton
import triton.language as tl

from tide.kernels.reference import fold_divisor

# Of `tide.kernels.segments`; a kernel can read module constants only as constexpr.
PROGRAM_WORDS = tl.constexpr(9)
HEADER_WORDS = tl.constexpr(6)
STEP_WORDS = tl.constexpr(2)
VECTOR_BYTES = tl.constexpr(16)

FLAT = tl.constexpr(0)
STRIDED = tl.constexpr(1)
NARROW = tl.constexpr(2)


@triton.jit
def program_range(table, KIND: tl.constexpr):
    """First segment, first tile and end tile of this program, for one kind."""
    record = table + tl.program_id(0) * PROGRAM_WORDS + 3 * KIND
    return tl.load(record).to(tl.int32), tl.load(record + 1).to(tl.int32), tl.load(record + 2).to(tl.int32)


@triton.jit
def segment_record(table, segment, OPERANDS: tl.constexpr):
    """Pointer to a segment's record."""
    words: tl.constexpr = HEADER_WORDS + 2 * OPERANDS
    return table + tl.num_programs(0) * PROGRAM_WORDS + segment * words


@triton.jit
def segment_header(record):
    """First tile, end tile, vectors, vectors per run, and multiplier and shift that divide by the latter."""
    return (
        tl.load(record).to(tl.int32),
        tl.load(record + 1).to(tl.int32),
        tl.load(record + 2).to(tl.int32),
        tl.load(record + 3).to(tl.int32),
        tl.load(record + 4).to(tl.uint32),
        tl.load(record + 5).to(tl.uint32),
    )


@triton.jit
def operand_pointer(record, INDEX: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr):
    """Pointer to an operand's first element."""
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    unit: tl.constexpr = size if KIND == NARROW else VECTOR_BYTES
    address = tl.load(record + HEADER_WORDS + 2 * INDEX) * unit
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), unit)


@triton.jit
def operand_pitch(record, INDEX: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr):
    """Elements between two runs of an operand."""
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    unit: tl.constexpr = 1 if KIND == NARROW else VECTOR_BYTES // size
    return tl.load(record + HEADER_WORDS + 2 * INDEX + 1) * unit


@triton.jit
def tile_vectors(tile, VECTORS: tl.constexpr):
    """Numbers of a tile's vectors within the segment, [VECTORS] int32; ``tile`` counts from the segment's."""
    return tile * VECTORS + tl.arange(0, VECTORS)


@triton.jit
def tile_rows(vectors, per_run, multiplier, shift, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Run of each vector and its first element within the run, both [VECTORS] int64.

    A flat segment has one run: its vectors need no division, and the compiler drops the terms with the run.
    """
    if KIND == FLAT:
        return tl.full(vectors.shape, 0, tl.int64), vectors.to(tl.int64) * WIDTH
    row = (tl.umulhi((vectors * 2).to(tl.uint32), multiplier) >> shift).to(tl.int32)
    return row.to(tl.int64), ((vectors - row * per_run) * WIDTH).to(tl.int64)


@triton.jit
def tile_offsets(row, column, pitch, WIDTH: tl.constexpr):
    """Offsets of a tile's elements from an operand's pointer, [VECTORS, WIDTH] int64."""
    return (row * pitch + column)[:, None] + tl.arange(0, WIDTH)[None, :]


# What happens to a sum: nothing, a multiplication, a multiplication and then a division.
PLAIN = tl.constexpr(0)
SCALED = tl.constexpr(1)
DIVIDED = tl.constexpr(2)


@triton.jit
def finish(total, scale, divisor, FACTORS: tl.constexpr):
    """Apply the factors to an fp32 sum."""
    if FACTORS >= SCALED:
        total = total * scale
    if FACTORS == DIVIDED:
        total = tl.div_rn(total, divisor)
    return total


def factors(scale: float, divisor: float) -> tuple[int, float, float]:
    """How a kernel has to treat the sum, and the scale and divisor to pass it."""
    scale, divisor = fold_divisor(scale, divisor)
    if divisor != 1.0:
        return DIVIDED.value, scale, divisor
    return (PLAIN if scale == 1.0 else SCALED).value, scale, divisor
