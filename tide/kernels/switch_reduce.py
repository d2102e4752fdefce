"""Switch reduce: the fp32 sum over a node's ranks, made inside the NVSwitch.

A multicast address stands for the same offset in every rank's memory. ``multimem.ld_reduce`` reads it: the switch
fetches the word from each rank and returns the sum, so a rank receives one word instead of one from every rank.
Only fp32 partials are summed this way: of bf16 operands the switch returns a bf16 sum, which is of no use for an
fp32 shard. What the switch returns is added to a running sum, if there is one, scaled, and stored.

It has never run on hardware here: it is compiled for sm_90, its instructions are checked, and its addressing is
tested against a stand-in. The order in which the switch sums is its own, so results may differ from
:func:`~tide.kernels.reference.switch_reduce_reference` in the last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tide.errors import CapabilityError, InputError
from tide.kernels.build import Variant
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
from tide.multicast import require

# $0…$3 are the sums, $4 the multicast address, $5 whether to read at all: a masked lane's address may lie outside
# of the multicast range. `relaxed.sys` sees what a peer wrote before the barrier that precedes the launch.
_LOAD_4 = tl.constexpr(
    """
    {
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        mov.f32 $0, 0f00000000;
        mov.f32 $1, 0f00000000;
        mov.f32 $2, 0f00000000;
        mov.f32 $3, 0f00000000;
        @p multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
    }
    """
)
_LOAD_1 = tl.constexpr(
    """
    {
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        mov.f32 $0, 0f00000000;
        @p multimem.ld_reduce.relaxed.sys.global.add.f32 $0, [$1];
    }
    """
)


@triton.jit
def _vectors(
    table,
    scale,
    divisor,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    KIND: tl.constexpr,
):
    """This program's tiles of a wide kind: an instruction reads four elements, a vector has one or two fours."""
    segment, tile, end = program_range(table, KIND)
    while tile < end:
        record = segment_record(table, segment, 2 + BASE)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, DST, KIND)
        dst_pitch = operand_pitch(record, 0, DST, KIND)
        src = operand_pointer(record, 1, tl.float32, KIND)
        src_pitch = operand_pitch(record, 1, tl.float32, KIND)
        if BASE:
            base = operand_pointer(record, 2, tl.float32, KIND)
            base_pitch = operand_pitch(record, 2, tl.float32, KIND)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, WIDTH, KIND)
            valid = vectors < total_vectors
            fours = (row * src_pitch + column)[:, None] + tl.arange(0, WIDTH // 4)[None, :] * 4
            wanted = tl.broadcast_to(valid[:, None], (VECTORS, WIDTH // 4)).to(tl.int32)
            address = tl.reshape((src + fours).to(tl.int64), (VECTORS * (WIDTH // 4),))
            a, b, c, d = tl.inline_asm_elementwise(
                _LOAD_4,
                "=f,=f,=f,=f,l,r",
                [address, tl.reshape(wanted, (VECTORS * (WIDTH // 4),))],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            # [fours, 2, 2] in the order a, b, c, d of memory
            total = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (VECTORS, WIDTH))
            mask = valid[:, None]
            if BASE:
                total = tl.load(base + tile_offsets(row, column, base_pitch, WIDTH), mask=mask) + total
            total = finish(total, scale, divisor, FACTORS)
            tl.store(dst + tile_offsets(row, column, dst_pitch, WIDTH), total.to(DST), mask=mask)
        tile = stop
        segment += 1


@triton.jit
def _elements(
    table, scale, divisor, DST: tl.constexpr, BASE: tl.constexpr, FACTORS: tl.constexpr, VECTORS: tl.constexpr
):
    """This program's narrow tiles: one element a lane."""
    segment, tile, end = program_range(table, NARROW)
    while tile < end:
        record = segment_record(table, segment, 2 + BASE)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, DST, NARROW)
        dst_pitch = operand_pitch(record, 0, DST, NARROW)
        src = operand_pointer(record, 1, tl.float32, NARROW)
        src_pitch = operand_pitch(record, 1, tl.float32, NARROW)
        if BASE:
            base = operand_pointer(record, 2, tl.float32, NARROW)
            base_pitch = operand_pitch(record, 2, tl.float32, NARROW)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, 1, NARROW)
            valid = vectors < total_vectors
            address = (src + (row * src_pitch + column)).to(tl.int64)
            total = tl.inline_asm_elementwise(
                _LOAD_1,
                "=f,l,r",
                [address, valid.to(tl.int32)],
                dtype=tl.float32,
                is_pure=False,
                pack=1,
            )
            if BASE:
                total = tl.load(base + (row * base_pitch + column), mask=valid) + total
            total = finish(total, scale, divisor, FACTORS)
            tl.store(dst + (row * dst_pitch + column), total.to(DST), mask=valid)
        tile = stop
        segment += 1


@triton.jit
def switch_reduce_kernel(
    table,
    scale,
    divisor,
    DST: tl.constexpr,
    BASE: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW_BLOCK: tl.constexpr,
):
    """Sum the segments of a table; operand 0 is the destination, 1 a multicast address, 2 the running sum, if any."""
    _vectors(table, scale, divisor, DST, BASE, FACTORS, WIDTH, BLOCK // WIDTH, FLAT)
    _vectors(table, scale, divisor, DST, BASE, FACTORS, WIDTH, BLOCK // WIDTH, STRIDED)
    _elements(table, scale, divisor, DST, BASE, FACTORS, NARROW_BLOCK)


@dataclass(frozen=True, slots=True)
class SwitchItem:
    """A block of fp32 partials that the switch sums over all ranks of the multicast group.

    Parameters
    ----------
    multicast_ptr
        Multicast address of the partials.
    dst_ptr
        Device address of the result.
    runs, count
        Number of runs, elements of a run; either may be 0.
    src_pitch, dst_pitch
        Elements between the starts of two runs.
    base_ptr, base_pitch
        Device address of an fp32 running sum to add to, which may be the destination; 0 for none.
    src_dtype, dst_dtype
        Only float32 is summed; the result may be rounded to a narrower type.
    """

    multicast_ptr: int
    dst_ptr: int
    runs: int
    count: int
    src_pitch: int
    dst_pitch: int
    base_ptr: int = 0
    base_pitch: int = 0
    src_dtype: torch.dtype = torch.float32
    dst_dtype: torch.dtype = torch.float32


class Form(NamedTuple):
    """What the items of one launch have in common."""

    dst: torch.dtype
    base: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Element sizes of the operands: destination, partials, base."""
        return (self.dst.itemsize, 4) + (4,) * self.base


DEFAULT = Tuning(stages=1)


def require_float32(dtype: torch.dtype, what: str) -> None:
    """Refuses partials of another type: the switch would round their sum to that type.

    Raises
    ------
    InputError
        Naming ``what``.
    """
    if dtype != torch.float32:
        raise InputError(f"{what}: the switch sums float32; it would return a sum of {dtype} rounded to {dtype}")


def variant_of(form: Form, mode: int, tuning: Tuning) -> Variant:
    """The variant for a form of sum and a treatment of it (:func:`~tide.kernels.tiles.factors`)."""
    name = (
        f"switch_reduce_fp32_{NAMES[form.dst]}{'_base' * form.base}_f{mode}"
        f"_b{tuning.block}_n{tuning.narrow}_w{tuning.warps}"
    )
    constants = (
        ("DST", ELEMENTS[form.dst]),
        ("BASE", int(form.base)),
        ("FACTORS", mode),
        ("WIDTH", VECTOR_BYTES // min(form.sizes)),
        ("BLOCK", tuning.block),
        ("NARROW_BLOCK", tuning.narrow),
    )
    signature = (("table", "*i64"), ("scale", "fp32"), ("divisor", "fp32"))
    return Variant(name, switch_reduce_kernel, signature, constants, tuning.warps)


def variants(tuning: Tuning | None = None) -> Iterator[Variant]:
    """Sums alone and onto a running sum, in each way to treat them."""
    tuning = tuning or DEFAULT
    for mode in range(3):
        yield variant_of(Form(torch.float32, True), mode, tuning)
    yield variant_of(Form(torch.float32, False), 1, tuning)
    yield variant_of(Form(torch.bfloat16, True), 2, tuning)
    yield variant_of(Form(torch.float16, True), 1, tuning)


class SwitchReduceTable:
    """Blocks that the switch sums, ready to be launched again and again.

    Between the ranks' last write of the partials and the launch there has to be a barrier.

    Parameters
    ----------
    items
        What to sum. Items of one type of result, with or without a base, travel in one launch.
    device
        Default: the current CUDA device.
    tuning
        Number of programs and sizes of tiles.

    Raises
    ------
    CapabilityError
        If the environment turns multicast off.
    InputError
        For partials that are not float32, or an extent, address or pitch that makes no sense.
    """

    def __init__(
        self,
        items: Sequence[SwitchItem],
        *,
        device: torch.device | str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        require("switch reduction")
        self._tuning = tuning or DEFAULT
        self._device = default_device(switch_reduce_kernel, device)
        groups: dict[Form, list[Block]] = {}
        for index, item in enumerate(items):
            require_float32(item.src_dtype, f"item {index}")
            form = Form(item.dst_dtype, item.base_ptr != 0)
            addresses: tuple[int, ...] = (item.dst_ptr, item.multicast_ptr)
            pitches: tuple[int, ...] = (item.dst_pitch, item.src_pitch)
            if form.base:
                addresses, pitches = (*addresses, item.base_ptr), (*pitches, item.base_pitch)
            groups.setdefault(form, []).append(Block(item.runs, item.count, addresses, pitches, index))
        self._launches = [
            (form, TableLaunch(blocks, division(form, self._tuning), self._device)) for form, blocks in groups.items()
        ]

    def launch(self, scale: float = 1.0, divisor: float = 1.0, stream: Stream = None) -> None:
        """Sum every block; the factors as in :meth:`tide.kernels.accumulate.AccumulateTable.launch`.

        Raises
        ------
        CapabilityError
            If the environment turns multicast off, or the device is older than sm_90.
        """
        require("switch reduction")
        device = self._device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            raise CapabilityError(
                f"switch reduction needs compute capability 9.0, {torch.cuda.get_device_name(device)} has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use the accumulate route"
            )
        mode, scale, divisor = factors(scale, divisor)
        for form, launch in self._launches:
            launch.launch(variant_of(form, mode, self._tuning), stream, scale, divisor)


def division(form: Form, tuning: Tuning) -> Division:
    """How the blocks of a form are cut."""
    return Division(form.sizes, tuning.block, tuning.narrow, tuning.ctas)


def switch_reduce(
    items: Sequence[SwitchItem],
    scale: float = 1.0,
    divisor: float = 1.0,
    stream: Stream = None,
    tuning: Tuning | None = None,
) -> SwitchReduceTable:
    """Sum blocks once; keep the returned table until the launch has run."""
    table = SwitchReduceTable(items, tuning=tuning)
    table.launch(scale, divisor, stream)
    return table
