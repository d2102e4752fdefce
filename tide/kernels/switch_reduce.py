"""Switch reduce: the fp32 sum over a node's ranks, made inside the NVSwitch.

A multicast address stands for the same offset in every rank's memory. ``multimem.ld_reduce`` reads it: the switch
fetches the word from each rank and returns the sum, so a rank receives one word instead of one from every rank.
Only fp32 partials are summed this way: with bf16 operands the switch returns bf16.

It has never run on hardware here: it is compiled for sm_90, its instructions are checked, and its addressing is
tested against a stand-in. The order in which the switch sums is its own, so results may differ from
:func:`~tide.kernels.reference.switch_reduce_reference` in the last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tide.errors import CapabilityError
from tide.kernels.build import Variant
from tide.kernels.launch import Stream, TableLaunch, Tuning, default_device
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
    tile_rows,
    tile_vectors,
)
from tide.multicast import require

#: Elements that one vector instruction reads.
WIDTH = VECTOR_BYTES // 4

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
def _vectors(table, scale, divisor, FACTORS: tl.constexpr, VECTORS: tl.constexpr, KIND: tl.constexpr):
    """This program's tiles of a wide kind: four elements a lane."""
    segment, tile, end = program_range(table, KIND)
    while tile < end:
        record = segment_record(table, segment, 2)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, tl.float32, KIND)
        dst_pitch = operand_pitch(record, 0, tl.float32, KIND)
        src = operand_pointer(record, 1, tl.float32, KIND)
        src_pitch = operand_pitch(record, 1, tl.float32, KIND)
        stop = tl.minimum(stop, end)
        for index in tl.range(tile - begin, stop - begin):
            vectors = tile_vectors(index, VECTORS)
            row, column = tile_rows(vectors, per_run, multiplier, shift, 4, KIND)
            valid = vectors < total_vectors
            address = (src + (row * src_pitch + column)).to(tl.int64)
            a, b, c, d = tl.inline_asm_elementwise(
                _LOAD_4,
                "=f,=f,=f,=f,l,r",
                [address, valid.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            # [VECTORS, 2, 2] in the order a, b, c, d of memory
            total = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (VECTORS, 4))
            total = finish(total, scale, divisor, FACTORS)
            target = dst + ((row * dst_pitch + column)[:, None] + tl.arange(0, 4)[None, :])
            tl.store(target, total, mask=valid[:, None])
        tile = stop
        segment += 1


@triton.jit
def _elements(table, scale, divisor, FACTORS: tl.constexpr, VECTORS: tl.constexpr):
    """This program's narrow tiles: one element a lane."""
    segment, tile, end = program_range(table, NARROW)
    while tile < end:
        record = segment_record(table, segment, 2)
        begin, stop, total_vectors, per_run, multiplier, shift = segment_header(record)
        dst = operand_pointer(record, 0, tl.float32, NARROW)
        dst_pitch = operand_pitch(record, 0, tl.float32, NARROW)
        src = operand_pointer(record, 1, tl.float32, NARROW)
        src_pitch = operand_pitch(record, 1, tl.float32, NARROW)
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
            total = finish(total, scale, divisor, FACTORS)
            tl.store(dst + (row * dst_pitch + column), total, mask=valid)
        tile = stop
        segment += 1


@triton.jit
def switch_reduce_kernel(
    table,
    scale,
    divisor,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW_BLOCK: tl.constexpr,
):
    """Sum the segments of a table; operand 0 is the destination, operand 1 a multicast address."""
    _vectors(table, scale, divisor, FACTORS, BLOCK // 4, FLAT)
    _vectors(table, scale, divisor, FACTORS, BLOCK // 4, STRIDED)
    _elements(table, scale, divisor, FACTORS, NARROW_BLOCK)


@dataclass(frozen=True, slots=True)
class SwitchItem:
    """A block of fp32 partials that the switch sums over all ranks of the multicast group.

    Parameters
    ----------
    multicast_ptr
        Multicast address of the partials.
    dst_ptr
        Device address of the fp32 result.
    runs, count
        Number of runs, elements of a run; either may be 0.
    src_pitch, dst_pitch
        Elements between the starts of two runs.
    """

    multicast_ptr: int
    dst_ptr: int
    runs: int
    count: int
    src_pitch: int
    dst_pitch: int


DEFAULT = Tuning(stages=1)


def variant_of(mode: int, tuning: Tuning) -> Variant:
    """The variant for a treatment of the sum (:func:`~tide.kernels.tiles.factors`)."""
    name = f"switch_reduce_fp32_f{mode}_b{tuning.block}_n{tuning.narrow}_w{tuning.warps}"
    constants = (("FACTORS", mode), ("BLOCK", tuning.block), ("NARROW_BLOCK", tuning.narrow))
    signature = (("table", "*i64"), ("scale", "fp32"), ("divisor", "fp32"))
    return Variant(name, switch_reduce_kernel, signature, constants, tuning.warps)


def variants(tuning: Tuning | None = None) -> Iterator[Variant]:
    """One for each way to treat the sum."""
    for mode in range(3):
        yield variant_of(mode, tuning or DEFAULT)


class SwitchReduceTable:
    """Blocks that the switch sums, ready to be launched again and again.

    Between the ranks' last write of the partials and the launch there has to be a barrier.

    Parameters
    ----------
    items
        What to sum.
    device
        Default: the current CUDA device.
    tuning
        Number of programs and sizes of tiles.

    Raises
    ------
    CapabilityError
        If the environment turns multicast off.
    InputError
        For an extent, address or pitch that makes no sense.
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
        blocks = [
            Block(
                item.runs,
                item.count,
                (item.dst_ptr, item.multicast_ptr),
                (item.dst_pitch, item.src_pitch),
                index,
            )
            for index, item in enumerate(items)
        ]
        division = Division((4, 4), self._tuning.block, self._tuning.narrow, self._tuning.ctas)
        self._launch = TableLaunch(blocks, division, default_device(switch_reduce_kernel, device))

    def launch(self, scale: float = 1.0, divisor: float = 1.0, stream: Stream = None) -> None:
        """Sum every block; the factors as in :meth:`tide.kernels.accumulate.AccumulateTable.launch`.

        Raises
        ------
        CapabilityError
            If the environment turns multicast off, or the device is older than sm_90.
        """
        require("switch reduction")
        device = self._launch.device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            raise CapabilityError(
                f"switch reduction needs compute capability 9.0, {torch.cuda.get_device_name(device)} has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use the accumulate route"
            )
        mode, scale, divisor = factors(scale, divisor)
        self._launch.launch(variant_of(mode, self._tuning), stream, scale, divisor)


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
