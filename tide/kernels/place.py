"""Place: cast blocks and scatter them to addresses, many in one launch.

:class:`PlaceTable` is made once from :class:`PlaceItem` s and launched any number of times; :func:`place` does
both. Items of one pair of element types travel in one launch.

Between different types, the value is converted as ``Tensor.copy_`` converts it: to nearest, ties to even, with
NaN staying NaN (its payload may change) and a value out of range becoming infinite. Between equal types, of any
kind, the bits are copied.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tide.errors import InputError
from tide.kernels.build import Variant
from tide.kernels.bulk import place_whole_tiles
from tide.kernels.launch import ELEMENTS, NAMES, Stream, TableLaunch, Tuning, default_device
from tide.kernels.segments import VECTOR_BYTES, Block, Division
from tide.kernels.tiles import (
    FLAT,
    NARROW,
    STEP_WORDS,
    STRIDED,
    operand_pitch,
    operand_pointer,
    program_range,
    segment_header,
    segment_record,
    tile_offsets,
    tile_rows,
    tile_vectors,
)

#: Types that bits are copied as, by element size. Integers, so that no NaN is touched.
_RAW = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _place_kind(
    table,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Carry out this program's tiles of one kind."""
    segment, tile, end = program_range(table, KIND)
    while tile < end:
        record = segment_record(table, segment, 2)
        begin, stop, total, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, DST, KIND)
        dst_pitch = operand_pitch(record, 0, DST, KIND)
        src = operand_pointer(record, 1, SRC, KIND)
        src_pitch = operand_pitch(record, 1, SRC, KIND)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin, 1, num_stages=STAGES):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, WIDTH, KIND)
            mask = (vectors < total)[:, None]
            source = src + tile_offsets(row, column, src_pitch, WIDTH)
            value = tl.load(source, mask=mask, eviction_policy="evict_first")
            tl.store(dst + tile_offsets(row, column, dst_pitch, WIDTH), value.to(DST), mask=mask)
        tile = stop
        segment += 1


@triton.jit
def place_kernel(
    table,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BULK: tl.constexpr,
):
    """Cast and scatter this program's share of a table; operand 0 is the destination, operand 1 the source."""
    if BULK:
        place_whole_tiles(table, SRC, DST, BLOCK, STAGES)
    else:
        _place_kind(table, SRC, DST, WIDTH, BLOCK // WIDTH, STAGES, FLAT)
    _place_kind(table, SRC, DST, WIDTH, BLOCK // WIDTH, STAGES, STRIDED)
    _place_kind(table, SRC, DST, 1, NARROW_BLOCK, 1, NARROW)


@triton.jit
def place_chain_kernel(
    chain,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BULK: tl.constexpr,
):
    """Cast and scatter the tables of several steps in order, and count the steps that this program has done.

    Others read a step's data once all programs have counted it: copy engines too, hence the scope. What a bulk copy
    loads has been used, and so has arrived, before the stores that the barrier waits for.
    """
    steps = tl.load(chain).to(tl.int32)
    step = 0
    while step < steps:
        record = chain + 1 + step * STEP_WORDS
        place_kernel(chain + tl.load(record), SRC, DST, WIDTH, BLOCK, NARROW_BLOCK, STAGES, BULK)
        counter = tl.load(record + 1)
        if counter != 0:
            tl.debug_barrier()
            tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
        step += 1


@dataclass(frozen=True, slots=True)
class PlaceItem:
    """A block to cast and place.

    Parameters
    ----------
    src_ptr, dst_ptr
        Device addresses, on the element size.
    runs, count
        Number of runs, elements of a run; either may be 0.
    src_pitch, dst_pitch
        Elements between the starts of two runs. Destination runs must not overlap.
    src_dtype, dst_dtype
        float32, bfloat16 or float16, or any one type for both.
    """

    src_ptr: int
    dst_ptr: int
    runs: int
    count: int
    src_pitch: int
    dst_pitch: int
    src_dtype: torch.dtype
    dst_dtype: torch.dtype


@functools.cache
def variant_of(
    src: torch.dtype, dst: torch.dtype, tuning: Tuning, chain: bool = False
) -> tuple[Variant, tuple[int, int]]:
    """The variant for a pair of types, for one table or a chain, and the element sizes that it takes (dst, src)."""
    if src == dst:
        raw = _RAW[min(src.itemsize, 8)]
        types, sizes, name = (raw, raw), (min(src.itemsize, 8),) * 2, f"copy{min(src.itemsize, 8) * 8}"
    else:
        types, sizes = (ELEMENTS[src], ELEMENTS[dst]), (dst.itemsize, src.itemsize)
        name = f"{NAMES[src]}_{NAMES[dst]}"
    stages = tuning.stages_for(sizes[1])
    constants = (
        ("SRC", types[0]),
        ("DST", types[1]),
        ("WIDTH", VECTOR_BYTES // min(sizes)),
        ("BLOCK", tuning.block),
        ("NARROW_BLOCK", tuning.narrow),
        ("STAGES", stages),
        ("BULK", int(tuning.bulk)),
    )
    name = f"{name}_b{tuning.block}_n{tuning.narrow}_w{tuning.warps}_s{stages}_t{int(tuning.bulk)}"
    if chain:
        return Variant(f"place_chain_{name}", place_chain_kernel, (("chain", "*i64"),), constants, tuning.warps), sizes
    return Variant(f"place_{name}", place_kernel, (("table", "*i64"),), constants, tuning.warps), sizes


def division_of(sizes: tuple[int, int], tuning: Tuning) -> Division:
    """How blocks with these element sizes (dst, src) are cut for the variants of a tuning."""
    return Division(sizes, tuning.block, tuning.narrow, tuning.ctas, tuning.bulk)


def variants(tuning: Tuning | None = None) -> Iterator[Variant]:
    """Every pair of types that is cast, and the copies of each element size; chains of the usual pair only."""
    tuning = tuning or DEFAULT
    for src in ELEMENTS:
        for dst in ELEMENTS:
            if src != dst:
                yield variant_of(src, dst, tuning)[0]
    for same in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        yield variant_of(same, same, tuning)[0]
    yield variant_of(torch.float32, torch.bfloat16, tuning, chain=True)[0]


#: Used where a caller gives no tuning: on an H200 103 GB/s a program on flat segments, without bulk copies 59.
DEFAULT = Tuning(block=8192, shared=192 << 10, bulk=True)


class PlaceTable:
    """Blocks to cast and place, ready to be launched again and again.

    Used on one stream at a time; keep it until its last launch has run.

    Parameters
    ----------
    items
        What to place. Destinations must not overlap each other or any source.
    device
        Default: the current CUDA device.
    tuning
        Number of programs and sizes of tiles.

    Raises
    ------
    InputError
        For a type that cannot be cast, or an extent, address or pitch that makes no sense.
    """

    def __init__(
        self,
        items: Sequence[PlaceItem],
        *,
        device: torch.device | str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        tuning = tuning or DEFAULT
        place_on = default_device(place_kernel, device)
        groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for index, item in enumerate(items):
            pair = (item.src_dtype, item.dst_dtype)
            if item.src_dtype != item.dst_dtype and not (pair[0] in ELEMENTS and pair[1] in ELEMENTS):
                known = ", ".join(str(dtype) for dtype in ELEMENTS)
                raise InputError(f"item {index}: no cast from {pair[0]} to {pair[1]}; only among {known}")
            groups.setdefault(pair, []).append(index)
        self._items = len(items)
        self._groups: list[tuple[Variant, list[int], TableLaunch]] = []
        for (src, dst), members in groups.items():
            variant, sizes = variant_of(src, dst, tuning)
            parts = dst.itemsize // sizes[0]  # a 16-byte element is copied as two of 8 bytes
            blocks = [_block(member, items[member], parts) for member in members]
            division = division_of(sizes, tuning)
            self._groups.append((variant, members, TableLaunch(blocks, division, place_on)))

    @property
    def launches(self) -> int:
        """Kernel launches of one :meth:`launch`."""
        return sum(launch.programs > 0 for _, _, launch in self._groups)

    @property
    def programs(self) -> tuple[int, ...]:
        """Programs (CTAs) of each launch."""
        return tuple(launch.programs for _, _, launch in self._groups if launch.programs)

    def warmup(self) -> None:
        """Compile and load all that a launch needs."""
        for variant, _, launch in self._groups:
            launch.warmup(variant)

    def launch(self, stream: Stream = None) -> None:
        """Place every block. The table's device must be the current one.

        Parameters
        ----------
        stream
            Where to run; default: the current stream.
        """
        for variant, _, launch in self._groups:
            launch.launch(variant, stream)

    def move(
        self,
        src_ptrs: Sequence[int] | None = None,
        dst_ptrs: Sequence[int] | None = None,
        stream: Stream = None,
    ) -> None:
        """Use other addresses from the next launch on: one small copy to the device for each pair of types.

        Parameters
        ----------
        src_ptrs, dst_ptrs
            An address for every item; None leaves them.
        stream
            The stream of the launches; default: the current one.
        """
        for name, values in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs)):
            if values is not None and len(values) != self._items:
                raise InputError(f"{name}: {self._items} addresses expected, got {len(values)}")
        for _, members, launch in self._groups:
            addresses = launch.addresses
            for operand, values in enumerate((dst_ptrs, src_ptrs)):
                if values is not None:
                    addresses[:, operand] = np.array([values[member] for member in members], np.int64)
            launch.move(addresses, stream)


def _block(index: int, item: PlaceItem, parts: int) -> Block:
    return Block(
        item.runs,
        item.count * parts,
        (item.dst_ptr, item.src_ptr),
        (item.dst_pitch * parts, item.src_pitch * parts),
        index,
    )


def place(items: Sequence[PlaceItem], stream: Stream = None, tuning: Tuning | None = None) -> PlaceTable:
    """Cast and place blocks once.

    Parameters
    ----------
    items, tuning
        As for :class:`PlaceTable`.
    stream
        Where to run; default: the current stream.

    Returns
    -------
    PlaceTable
        Keep it until the launch has run.
    """
    table = PlaceTable(items, tuning=tuning)
    table.launch(stream)
    return table
