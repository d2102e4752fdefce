"""Launching a kernel over a table: the table's copy on the device, and a launch that costs little host time.

Triton's ordinary launch inspects every argument each time. Here a variant is compiled once per device, the
compiled kernel's launcher is kept, and a launch passes it the table's address.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tide.kernels.build import Variant
from tide.kernels.segments import Block, Division, Int64s, make_table

#: What callers may name a stream by: torch's object, a CUDA handle, or None for the current one.
Stream = torch.cuda.Stream | int | None

#: Triton's names of the element types that the kernels compute with.
ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

#: Short names, for variants and messages.
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_TYPES = {"fp32": 1.0, "*i64": torch.int64}

_compiled: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut; the results do not depend on it.

    Parameters
    ----------
    ctas
        Programs of a launch at most. They share the tiles in equal parts.
    block
        Elements of a tile of vectors.
    narrow
        Elements of a tile that is handled element by element.
    warps
        Warps of a program.
    stages
        Tiles in flight in a program, counting the one that is worked on: 1 loads into registers, more copy
        ahead into shared memory. 0 takes as many as fit `shared`.
    shared
        Bytes of shared memory of a program at most, for ``stages=0``.
    bulk
        Load flat segments by bulk copies (:mod:`tide.kernels.bulk`). `block` is then a power of two, and at least
        1024.
    """

    ctas: int = 32
    block: int = 4096
    narrow: int = 1024
    warps: int = 8
    stages: int = 0
    shared: int = 128 << 10
    bulk: bool = False

    def stages_for(self, bytes_per_element: int) -> int:
        """Stages of a loop that loads so many bytes for each element."""
        if self.stages:
            return self.stages
        return max(1, min(8, 1 + self.shared // (self.block * bytes_per_element)))


def interpreted(kernel: Any) -> bool:
    """Whether a kernel was defined under Triton's interpreter, and so works on CPU memory."""
    return not isinstance(kernel, JITFunction)


def prepare(variant: Variant, device: torch.device) -> Any:
    """The compiled variant on a device, compiled at the first call; None under the interpreter."""
    if interpreted(variant.kernel):
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    found = _compiled.get((variant.name, index))
    if found is None:
        with torch.cuda.device(index):
            found = variant.kernel.warmup(
                *(_TYPES[kind] for _, kind in variant.signature),
                grid=(1,),
                num_warps=variant.warps,
                enable_fp_fusion=False,
                **dict(variant.constants),
            )
        _compiled[variant.name, index] = found
    return found


def scratch_size(compiled: Any, programs: int) -> int:
    """Bytes that a launch of a kernel needs for tensor descriptors, in memory on 128 bytes."""
    return programs * getattr(compiled.metadata, "global_scratch_size", 0)


def with_scratch(launcher: Callable[..., None], scratch: torch.Tensor | None) -> Callable[..., None]:
    """Triton's launcher, given this memory when it asks for scratch memory, whatever allocator the caller has set."""
    if scratch is None:
        return launcher
    context = contextvars.copy_context()
    context.run(triton.set_allocator, lambda size, alignment, stream: scratch)
    return functools.partial(context.run, launcher)


def default_device(kernel: Any, device: torch.device | str | None) -> torch.device:
    """The device that a table goes to: the current CUDA device, or the CPU under the interpreter."""
    if device is not None:
        return torch.device(device)
    if interpreted(kernel):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def stream_handle(stream: Stream, device: torch.device) -> int:
    """The CUDA handle of a stream."""
    if stream is None:
        stream = torch.cuda.current_stream(device)
    return stream if isinstance(stream, int) else stream.cuda_stream


class TableLaunch:
    """One kernel over one table, launched any number of times.

    A table is used on one stream at a time: launches and :meth:`move` are ordered by it, and another stream has
    to wait for it first. Keep the object until its last launch has run.

    Parameters
    ----------
    blocks
        What the launch covers.
    division
        Tile sizes and number of programs.
    device
        A CUDA device, or the CPU under Triton's interpreter.
    """

    def __init__(self, blocks: Sequence[Block], division: Division, device: torch.device) -> None:
        self._blocks = list(blocks)
        self._division = division
        self._device = device
        self._starts: dict[str, Callable[..., None]] = {}
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self._table = make_table(self._blocks, division)
        self._words = self._upload()

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        return self._device

    @property
    def programs(self) -> int:
        """Programs (CTAs) of a launch; 0 if there is nothing to do."""
        return self._table.programs if any(self._table.tiles) else 0

    @property
    def addresses(self) -> Int64s:
        """A copy of the blocks' addresses, (blocks × operands) int64; the destination is operand 0."""
        return self._table.addresses.copy()

    def warmup(self, variant: Variant) -> None:
        """Compile and load a variant, so that the first launch costs no more than the others."""
        if self.programs and variant.name not in self._starts:
            self._starts[variant.name] = self._start(variant)

    def launch(self, variant: Variant, stream: Stream, *scalars: float) -> None:
        """Run a variant of the kernel over the table.

        Parameters
        ----------
        variant
            The kernel; its first argument is the table.
        stream
            Where to run; the device of the table must be the current one.
        scalars
            The kernel's further run-time arguments.
        """
        start = self._starts.get(variant.name)
        if start is None:
            self.warmup(variant)
            start = self._starts.get(variant.name)
        if start is not None:
            start(stream, *scalars)

    def move(self, addresses: Int64s, stream: Stream) -> None:
        """Use other addresses from the next launch on this stream.

        Costs one small copy to the device. If an address changes its place relative to 16 bytes, the table is
        made anew, which waits for the stream. Not for use under CUDA graph capture.

        Parameters
        ----------
        addresses
            int64, (blocks × operands).
        stream
            The stream of the launches.
        """
        if np.array_equal(addresses, self._table.addresses):
            return
        table = self._table.moved(addresses)
        if table is None:
            self._blocks = [
                replace(block, addresses=tuple(int(address) for address in row))
                for block, row in zip(self._blocks, addresses, strict=True)
            ]
            self._table = make_table(self._blocks, self._division)
            if self._device.type == "cuda":
                _torch_stream(stream, self._device).synchronize()  # a launch may still read the old words
            self._words = self._upload()
            self._starts.clear()
            self._staging.clear()
            return
        self._table = table
        if self._device.type == "cpu":
            self._words.copy_(torch.from_numpy(table.words))
            return
        # Two pinned buffers take turns; the event says when the one of the last but one call is free again.
        if not self._staging:
            self._staging = [
                (torch.empty(self._words.shape, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        buffer, event = self._staging[self._turn]
        self._turn = 1 - self._turn
        event.synchronize()
        buffer.copy_(torch.from_numpy(table.words))
        with torch.cuda.stream(_torch_stream(stream, self._device)):
            self._words.copy_(buffer, non_blocking=True)
            event.record()

    def _upload(self) -> torch.Tensor:
        """The table's words on the device. Waits for the copy, so that any stream may launch afterwards."""
        words = torch.from_numpy(self._table.words.copy()).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return words

    def _start(self, variant: Variant) -> Callable[..., None]:
        """A function of the stream and the scalars that launches with everything else bound."""
        compiled = prepare(variant, self._device)
        words, programs, device = self._words, self._table.programs, self._device
        constants = dict(variant.constants)
        if compiled is None:

            def interpret(stream: Stream, *scalars: float) -> None:
                variant.kernel[(programs,)](words, *scalars, **constants)

            return interpret

        with torch.cuda.device(device):
            size = scratch_size(compiled, programs)
            scratch = torch.empty(size, dtype=torch.uint8, device=device) if size else None
            launcher = with_scratch(compiled[(programs, 1, 1)], scratch)
        address, values = words.data_ptr(), tuple(constants.values())

        def start(stream: Stream, *scalars: float) -> None:
            launcher(address, *scalars, *values, stream=stream_handle(stream, device))

        return start


def _torch_stream(stream: Stream, device: torch.device) -> torch.cuda.Stream:
    """torch's object for a stream."""
    if stream is None:
        return torch.cuda.current_stream(device)
    if isinstance(stream, int):
        return torch.cuda.ExternalStream(stream, device=device)
    return stream
