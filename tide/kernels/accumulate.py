"""Accumulate: sum k pieces in fp32 in a fixed order, scale, and store, for many segments in one launch.

:class:`AccumulateTable` is made once from :class:`SumItem` s and launched any number of times;
:func:`accumulate` does both. What is computed, to the bit, is in :mod:`tide.kernels.reference`.

A reduce-scatter wants the sum done by few programs in a short time, so each has to draw as much bandwidth as a
multiprocessor can: the loop over tiles copies the pieces of several tiles ahead into shared memory
(``Tuning.stages``), 16 bytes at a time, while it sums the oldest.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from tide.errors import InputError
from tide.kernels.build import Variant
from tide.kernels.bulk import sum_whole_tiles
from tide.kernels.launch import ELEMENTS, NAMES, Stream, TableLaunch, Tuning, default_device
from tide.kernels.segments import VECTOR_BYTES, Block, Division
from tide.kernels.tiles import (
    FLAT,
    NARROW,
    STRIDED,
    factors,
    finish,
    operand_pitch,
    operand_pointer,
    program_range,
    segment_header,
    segment_record,
    tile_offsets,
    tile_rows,
    tile_vectors,
)

#: Up to so many pieces, their loop is unrolled and tiles are loaded ahead; beyond, pieces are.
UNROLLED = tl.constexpr(16)


@triton.jit
def _few_pieces(
    table,
    scale,
    divisor,
    PIECES: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
):
    """This program's tiles of one kind, for up to `UNROLLED` pieces."""
    segment, tile, end = program_range(table, KIND)
    while tile < end:
        record = segment_record(table, segment, 1 + PIECES + BASE)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, DST, KIND)
        dst_pitch = operand_pitch(record, 0, DST, KIND)
        # The addresses stay in registers: the loop over tiles then loads nothing but payload.
        pieces = ()
        pitches = ()
        for piece in tl.static_range(PIECES):
            pieces += (operand_pointer(record, 1 + piece, SRC, KIND),)  # type: ignore[assignment]
            pitches += (operand_pitch(record, 1 + piece, SRC, KIND),)  # type: ignore[assignment]
        if BASE:
            base = operand_pointer(record, 1 + PIECES, tl.float32, KIND)
            base_pitch = operand_pitch(record, 1 + PIECES, tl.float32, KIND)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin, 1, num_stages=STAGES):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, WIDTH, KIND)
            mask = (vectors < total_vectors)[:, None]
            source = pieces[0] + tile_offsets(row, column, pitches[0], WIDTH)  # type: ignore[misc]
            total = tl.load(source, mask=mask, eviction_policy="evict_first").to(tl.float32)
            for piece in tl.static_range(1, PIECES):
                source = pieces[piece] + tile_offsets(row, column, pitches[piece], WIDTH)
                total += tl.load(source, mask=mask, eviction_policy="evict_first").to(tl.float32)
            if BASE:
                total = tl.load(base + tile_offsets(row, column, base_pitch, WIDTH), mask=mask) + total
            total = finish(total, scale, divisor, FACTORS)
            tl.store(dst + tile_offsets(row, column, dst_pitch, WIDTH), total.to(DST), mask=mask)
        tile = stop
        segment += 1


@triton.jit
def _many_pieces(
    table,
    scale,
    divisor,
    PIECES: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
):
    """This program's tiles of one kind, for any number of pieces: a loop over them, in order."""
    segment, tile, end = program_range(table, KIND)
    while tile < end:
        record = segment_record(table, segment, 1 + PIECES + BASE)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, DST, KIND)
        dst_pitch = operand_pitch(record, 0, DST, KIND)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, WIDTH, KIND)
            mask = (vectors < total_vectors)[:, None]
            source = operand_pointer(record, 1, SRC, KIND)
            source += tile_offsets(row, column, operand_pitch(record, 1, SRC, KIND), WIDTH)
            total = tl.load(source, mask=mask, eviction_policy="evict_first").to(tl.float32)
            for piece in tl.range(1, PIECES, 1, num_stages=STAGES):
                source = operand_pointer(record, 1 + piece, SRC, KIND)
                source += tile_offsets(row, column, operand_pitch(record, 1 + piece, SRC, KIND), WIDTH)
                total += tl.load(source, mask=mask, eviction_policy="evict_first").to(tl.float32)
            if BASE:
                base = operand_pointer(record, 1 + PIECES, tl.float32, KIND)
                base_pitch = operand_pitch(record, 1 + PIECES, tl.float32, KIND)
                total = tl.load(base + tile_offsets(row, column, base_pitch, WIDTH), mask=mask) + total
            total = finish(total, scale, divisor, FACTORS)
            tl.store(dst + tile_offsets(row, column, dst_pitch, WIDTH), total.to(DST), mask=mask)
        tile = stop
        segment += 1


@triton.jit
def accumulate_kernel(
    table,
    scale,
    divisor,
    PIECES: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BULK: tl.constexpr,
):
    """Sum the segments of a table; operand 0 is the destination, then the pieces, then the base if any."""
    by_kind: tl.constexpr = _few_pieces if PIECES <= UNROLLED else _many_pieces
    wide: tl.constexpr = BLOCK // WIDTH
    if BULK:
        sum_whole_tiles(table, scale, divisor, PIECES, SRC, DST, BASE, FACTORS, BLOCK, STAGES)
    else:
        by_kind(table, scale, divisor, PIECES, SRC, DST, BASE, FACTORS, WIDTH, wide, STAGES, FLAT)
    by_kind(table, scale, divisor, PIECES, SRC, DST, BASE, FACTORS, WIDTH, wide, STAGES, STRIDED)
    by_kind(table, scale, divisor, PIECES, SRC, DST, BASE, FACTORS, 1, NARROW_BLOCK, 1, NARROW)


@dataclass(frozen=True, slots=True)
class SumItem:
    """A segment to sum: ``dst = (base + (src[0] + src[1] + …)) * scale / divisor``.

    Parameters
    ----------
    src_ptrs
        Device addresses of the pieces, in the order of summation.
    base_ptr
        Device address of an fp32 summand, or 0.
    dst_ptr
        Device address of the result; may be that of the base or of an fp32 piece with the same pitch.
    runs, count
        Number of runs, elements of a run; either may be 0.
    src_pitches
        Elements between the starts of two runs, one per piece.
    base_pitch, dst_pitch
        The same for base and result. The result's runs must not overlap.
    src_dtype, dst_dtype
        float32, bfloat16 or float16; all pieces have one type.
    """

    src_ptrs: tuple[int, ...]
    base_ptr: int
    dst_ptr: int
    runs: int
    count: int
    src_pitches: tuple[int, ...]
    base_pitch: int
    dst_pitch: int
    src_dtype: torch.dtype = torch.bfloat16
    dst_dtype: torch.dtype = torch.float32


class Form(NamedTuple):
    """What the items of one launch have in common."""

    pieces: int
    src: torch.dtype
    dst: torch.dtype
    base: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Element sizes of the operands: destination, pieces, base."""
        return (self.dst.itemsize,) + (self.src.itemsize,) * self.pieces + (4,) * self.base


@functools.cache
def variant_of(form: Form, mode: int, tuning: Tuning) -> Variant:
    """The variant for a form of sum and a treatment of it (:func:`~tide.kernels.tiles.factors`)."""
    unrolled = form.pieces <= UNROLLED.value
    loaded = form.src.itemsize * (form.pieces if unrolled else 1) + 4 * (form.base and unrolled)
    stages = tuning.stages_for(loaded)
    bulk = int(tuning.bulk and unrolled)
    constants = (
        ("PIECES", form.pieces),
        ("SRC", ELEMENTS[form.src]),
        ("DST", ELEMENTS[form.dst]),
        ("BASE", int(form.base)),
        ("FACTORS", mode),
        ("WIDTH", VECTOR_BYTES // min(form.sizes)),
        ("BLOCK", tuning.block),
        ("NARROW_BLOCK", tuning.narrow),
        ("STAGES", stages),
        ("BULK", bulk),
    )
    name = (
        f"accumulate_{form.pieces}x{NAMES[form.src]}_{NAMES[form.dst]}{'_base' * form.base}_f{mode}"
        f"_b{tuning.block}_n{tuning.narrow}_w{tuning.warps}_s{stages}_t{bulk}"
    )
    signature = (("table", "*i64"), ("scale", "fp32"), ("divisor", "fp32"))
    return Variant(name, accumulate_kernel, signature, constants, tuning.warps)


def division_of(form: Form, tuning: Tuning) -> Division:
    """How segments of a form of sum are cut for the variant of that tuning."""
    whole = tuning.bulk and form.pieces <= UNROLLED.value
    return Division(form.sizes, tuning.block, tuning.narrow, tuning.ctas, whole)


def variants(tuning: Tuning | None = None) -> Iterator[Variant]:
    """The sums of a reduce-scatter: bf16 gradients and fp32 partials into fp32, by number of pieces."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for pieces in (1, 2, 4, 8, 16, 32):
        yield variant_of(Form(pieces, bf16, fp32, False), 1, tuning or default_tuning(pieces))
    for form, mode in (
        (Form(2, bf16, fp32, False), 0),
        (Form(2, bf16, fp32, False), 2),
        (Form(2, bf16, fp32, True), 1),
        (Form(8, bf16, fp32, True), 2),
        (Form(2, fp32, fp32, False), 1),
        (Form(8, fp32, fp32, False), 1),
        (Form(2, fp16, fp32, False), 1),
        (Form(2, bf16, bf16, False), 1),
        (Form(2, fp16, fp16, False), 1),
        (Form(2, fp32, bf16, True), 1),
    ):
        yield variant_of(form, mode, tuning or default_tuning(form.pieces))


#: Up to so many pieces, bulk copies are faster; with more, what they save no longer counts beside the loads.
BULK_PIECES = 4


def default_tuning(pieces: int, ctas: int = 32) -> Tuning:
    """How sums of so many pieces are cut, on so many programs."""
    if pieces <= BULK_PIECES:
        return Tuning(ctas, block=8192, shared=192 << 10, bulk=True)
    # Many pieces make a tile large in bytes: smaller tiles, so that two stages fit.
    return Tuning(ctas, block=4096 if pieces <= 8 else 2048, shared=192 << 10)


class AccumulateTable:
    """Segments to sum, ready to be launched again and again.

    Items with the same number of pieces, types and presence of a base travel in one launch. Used on one stream
    at a time; keep it until its last launch has run.

    Parameters
    ----------
    items
        What to sum. Destinations must not overlap each other, nor any operand of another item.
    device
        Default: the current CUDA device.
    tuning
        Number of programs and sizes of tiles.

    Raises
    ------
    InputError
        For an item without a piece, a type that is not summed, or an extent, address or pitch that makes no
        sense.
    """

    def __init__(
        self,
        items: Sequence[SumItem],
        *,
        device: torch.device | str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        sum_on = default_device(accumulate_kernel, device)
        groups: dict[Form, list[int]] = {}
        for index, item in enumerate(items):
            for dtype in (item.src_dtype, item.dst_dtype):
                if dtype not in ELEMENTS:
                    known = ", ".join(map(str, ELEMENTS))
                    raise InputError(f"item {index}: cannot sum {dtype}; only {known}")
            if not item.src_ptrs:
                raise InputError(f"item {index}: no piece to sum")
            form = Form(len(item.src_ptrs), item.src_dtype, item.dst_dtype, item.base_ptr != 0)
            groups.setdefault(form, []).append(index)
        self._items = len(items)
        self._groups: list[tuple[Form, Tuning, list[int], TableLaunch]] = []
        for form, members in groups.items():
            chosen = tuning or default_tuning(form.pieces)
            division = division_of(form, chosen)
            blocks = [_block(member, items[member]) for member in members]
            self._groups.append((form, chosen, members, TableLaunch(blocks, division, sum_on)))

    @property
    def launches(self) -> int:
        """Kernel launches of one :meth:`launch`."""
        return sum(launch.programs > 0 for *_, launch in self._groups)

    @property
    def programs(self) -> tuple[int, ...]:
        """Programs (CTAs) of each launch."""
        return tuple(launch.programs for *_, launch in self._groups if launch.programs)

    def warmup(self, scale: float = 1.0, divisor: float = 1.0) -> None:
        """Compile and load all that a launch with such factors needs."""
        mode, _, _ = factors(scale, divisor)
        for form, tuning, _, launch in self._groups:
            launch.warmup(variant_of(form, mode, tuning))

    def launch(self, scale: float = 1.0, divisor: float = 1.0, stream: Stream = None) -> None:
        """Sum every segment. The table's device must be the current one.

        Parameters
        ----------
        scale, divisor
            Applied to the fp32 sum, in this order; taken as fp32.
        stream
            Where to run; default: the current stream.
        """
        mode, scale, divisor = factors(scale, divisor)
        for form, tuning, _, launch in self._groups:
            launch.launch(variant_of(form, mode, tuning), stream, scale, divisor)

    def move(
        self,
        src_ptrs: Sequence[tuple[int, ...]] | None = None,
        dst_ptrs: Sequence[int] | None = None,
        base_ptrs: Sequence[int] | None = None,
        stream: Stream = None,
    ) -> None:
        """Use other addresses from the next launch on: one small copy to the device for each launch.

        Parameters
        ----------
        src_ptrs, dst_ptrs, base_ptrs
            For every item, as in :class:`SumItem`; None leaves them. An item keeps its number of pieces, and
            has a base if and only if it had one.
        stream
            The stream of the launches; default: the current one.
        """
        for name, values in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("base_ptrs", base_ptrs)):
            if values is not None and len(values) != self._items:
                raise InputError(f"{name}: {self._items} entries expected, got {len(values)}")
        for form, _, members, launch in self._groups:
            addresses = launch.addresses
            if dst_ptrs is not None:
                addresses[:, 0] = [dst_ptrs[member] for member in members]
            if src_ptrs is not None:
                rows = [src_ptrs[member] for member in members]
                if any(len(row) != form.pieces for row in rows):
                    raise InputError(f"src_ptrs: {form.pieces} pieces expected for each of the items {members}")
                addresses[:, 1 : 1 + form.pieces] = np.array(rows, np.int64)
            if base_ptrs is not None:
                bases = np.array([base_ptrs[member] for member in members], np.int64)
                if form.base:
                    addresses[:, -1] = bases
                if np.any((bases != 0) != form.base):
                    raise InputError(f"base_ptrs: the items {members} must keep a base, or stay without one")
            launch.move(addresses, stream)


def _block(index: int, item: SumItem) -> Block:
    addresses = (item.dst_ptr, *item.src_ptrs)
    pitches = (item.dst_pitch, *item.src_pitches)
    if item.base_ptr:
        addresses, pitches = (*addresses, item.base_ptr), (*pitches, item.base_pitch)
    return Block(item.runs, item.count, addresses, pitches, index)


def accumulate(
    items: Sequence[SumItem],
    scale: float = 1.0,
    divisor: float = 1.0,
    stream: Stream = None,
    tuning: Tuning | None = None,
) -> AccumulateTable:
    """Sum segments once.

    Parameters
    ----------
    items, tuning
        As for :class:`AccumulateTable`.
    scale, divisor, stream
        As for :meth:`AccumulateTable.launch`.

    Returns
    -------
    AccumulateTable
        Keep it until the launch has run.
    """
    table = AccumulateTable(items, tuning=tuning)
    table.launch(scale, divisor, stream)
    return table
