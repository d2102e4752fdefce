"""Shared by the kernel tests: where kernels run, memory with guards around it, and the checks themselves.

The checks run twice: in Triton's interpreter on CPU memory, and, in the tests marked ``gpu``, compiled.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

import tide.kernels
from tide.kernels.reference import accumulate_reference, place_reference

_MODULES = ("segments", "build", "launch", "tiles", "bulk", "place", "accumulate", "switch_reduce")

#: Integers of the same size, to look at bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Backend:
    """The kernel modules, and the device that they work on."""

    device: torch.device
    segments: ModuleType
    launch: ModuleType
    place: ModuleType
    accumulate: ModuleType
    switch_reduce: ModuleType

    def finish(self) -> None:
        """Wait for all launches."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@functools.cache
def interpreted() -> Backend:
    """The kernels under Triton's interpreter.

    Whether ``triton.jit`` interprets is decided where a kernel is defined. So the modules are loaded a second
    time with the interpreter on, and kept out of ``sys.modules``: the same process can also compile them.
    """
    _repair_interpreter()
    saved = {name: sys.modules.pop(f"tide.kernels.{name}", None) for name in _MODULES}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            loaded = {name: importlib.import_module(f"tide.kernels.{name}") for name in _MODULES}
    finally:
        for name, module in saved.items():
            sys.modules.pop(f"tide.kernels.{name}", None)
            vars(tide.kernels).pop(name, None)
            if module is not None:
                sys.modules[f"tide.kernels.{name}"] = module
                setattr(tide.kernels, name, module)
    names = ("segments", "launch", "place", "accumulate", "switch_reduce")
    return Backend(torch.device("cpu"), *(loaded[name] for name in names))


def compiled() -> Backend:
    """The kernels on the current GPU."""
    names = ("segments", "launch", "place", "accumulate", "switch_reduce")
    modules = (importlib.import_module(f"tide.kernels.{name}") for name in names)
    return Backend(torch.device("cuda", torch.cuda.current_device()), *modules)


def _repair_interpreter() -> None:
    """Make the interpreter convert between fp32 and bf16 as the hardware does, and iterate as 3.7 does.

    Triton 3.6 and 3.7 cut fp32 off to bf16, or add half a unit without a carry into the exponent, and lose
    subnormal numbers on the way back. Triton 3.6 cannot make an index of a one-element array of NumPy 2.
    """
    tl = triton.language
    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
            return values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float32:
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch_lang_tensor


def random_bits(count: int, dtype: torch.dtype, seed: int, special: bool = True) -> torch.Tensor:
    """Values of every kind: all bit patterns, so also NaN, infinities and subnormals; or only moderate ones."""
    generator = torch.Generator().manual_seed(seed)
    if not special:
        return torch.randn(count, generator=generator).to(dtype)
    low, high = (-(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1)
    if dtype.itemsize == 1:
        low, high = 0, 255
    return torch.randint(low, high, (count,), generator=generator, dtype=BITS[dtype.itemsize]).view(dtype)


class Memory:
    """A buffer that regions are cut from at chosen offsets, filled with a pattern where nothing belongs."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.full((size + 256,), 0xA5, dtype=torch.uint8)
        self._device = device
        self._end = 0
        self.tensor = self._bytes  # on the device after `freeze`

    def region(self, runs: int, count: int, pitch: int, dtype: torch.dtype, offset: int) -> tuple[int, ...]:
        """Reserve (runs × count) elements, ``offset`` elements past a 16-byte boundary; first byte and extent."""
        start = -(-self._end // 16) * 16 + offset * dtype.itemsize
        extent = ((max(runs, 1) - 1) * pitch + count) * dtype.itemsize
        self._end = start + extent + 16
        assert self._end <= len(self._bytes)
        return start, runs, count, pitch

    def freeze(self) -> None:
        """Move to the device; the address is then fixed."""
        storage = torch.empty(len(self._bytes) + 16, dtype=torch.uint8, device=self._device)
        shift = -storage.data_ptr() % 16
        self.tensor = storage[shift : shift + len(self._bytes)]
        self.tensor.copy_(self._bytes)

    def view(self, region: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The region as (runs × count)."""
        return view(self.tensor, region, dtype)

    def address(self, region: tuple[int, ...]) -> int:
        """Byte address of a region."""
        return self.tensor.data_ptr() + region[0]


def view(buffer: torch.Tensor, region: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A region of a byte buffer as (runs × count)."""
    start, runs, count, pitch = region
    length = (len(buffer) - start) // dtype.itemsize * dtype.itemsize
    return buffer[start : start + length].view(dtype).as_strided((runs, count), (pitch, 1))


def assert_same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, nan_payloads: bool = False) -> None:
    """Bit equality, but for the payload of NaNs unless it counts."""
    found, expected = found.cpu().view(dtype), expected.cpu().view(dtype)
    equal = found.view(BITS[dtype.itemsize]) == expected.view(BITS[dtype.itemsize])
    if not nan_payloads:
        equal |= found.isnan() & expected.isnan()
    if not bool(equal.all()):
        wrong = (~equal).flatten().nonzero().flatten()
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {equal.numel()} elements differ, first at {first}: "
            f"{found.flatten()[first]} instead of {expected.flatten()[first]}"
        )


@dataclass(frozen=True)
class Shape:
    """A block's extent, and how its operands are laid out."""

    runs: int
    count: int
    gaps: tuple[int, ...]  # elements between runs, per operand
    offsets: tuple[int, ...]  # elements past 16 bytes, per operand


def check_place(
    backend: Backend,
    blocks: list[tuple[Shape, torch.dtype, torch.dtype]],
    tuning: Any,
    seed: int = 0,
    move: bool = False,
    chain: Sequence[int] = (),
) -> Any:
    """Place blocks of random bits, and compare the whole destination, gaps included, with the reference.

    With a chain, they are the blocks of so many steps, as many in each, which one launch carries out.
    """
    extents = [(shape.runs + 1) * (shape.count + max(shape.gaps)) * 8 + 256 for shape, _, _ in blocks]
    sources, targets = (Memory(sum(extents), backend.device) for _ in range(2))
    regions = []
    for shape, src, dst in blocks:
        pitches = [shape.count + gap for gap in shape.gaps]
        regions.append(
            (
                sources.region(shape.runs, shape.count, pitches[0], src, shape.offsets[0]),
                targets.region(shape.runs, shape.count, pitches[1], dst, shape.offsets[1]),
            )
        )
    sources.freeze()
    targets.freeze()
    expected = targets.tensor.cpu().clone()
    items = []
    for number, ((source, target), (shape, src, dst)) in enumerate(zip(regions, blocks, strict=True)):
        values = random_bits(shape.runs * shape.count, src, seed + number).view(shape.runs, shape.count)
        sources.view(source, src).view(BITS[src.itemsize]).copy_(values.view(BITS[src.itemsize]))
        if src == dst:
            raw = BITS[src.itemsize]
            place_reference(values.view(raw), view(expected, target, raw))
        else:
            place_reference(values, view(expected, target, dst))
        items.append(
            backend.place.PlaceItem(
                sources.address(source),
                targets.address(target),
                shape.runs,
                shape.count,
                source[3],
                target[3],
                src,
                dst,
            )
        )
    if chain:
        table = launch_chain(backend, items, chain, tuning)
    elif move:
        # Made for other addresses first: everything one vector, or one element, further back.
        shifts = [16 if number % 2 else blocks[number][1].itemsize for number in range(len(blocks))]
        elsewhere = [
            backend.place.PlaceItem(
                item.src_ptr + shift,
                item.dst_ptr,
                item.runs,
                item.count,
                item.src_pitch,
                item.dst_pitch,
                item.src_dtype,
                item.dst_dtype,
            )
            for item, shift in zip(items, shifts, strict=True)
        ]
        table = backend.place.PlaceTable(elsewhere, device=backend.device, tuning=tuning)
        table.move([item.src_ptr for item in items])
    else:
        table = backend.place.PlaceTable(items, device=backend.device, tuning=tuning)
    if not chain:
        table.launch()
    backend.finish()
    found = targets.tensor.cpu()
    for (_, target), (_, src, dst) in zip(regions, blocks, strict=True):
        assert_same(view(found, target, dst), view(expected, target, dst), dst, nan_payloads=src == dst)
        view(found, target, BITS[dst.itemsize]).zero_()
        view(expected, target, BITS[dst.itemsize]).zero_()
    assert torch.equal(found, expected), "bytes outside of the blocks were written"
    return table


def launch_chain(backend: Backend, items: list[Any], lengths: Sequence[int], tuning: Any) -> Any:
    """Launch a chain twice; every program counts every step but the last, from where its word wraps around."""
    place, device = backend.place, backend.device
    variant, sizes = place.variant_of(items[0].src_dtype, items[0].dst_dtype, tuning, chain=True)
    parts = items[0].dst_dtype.itemsize // sizes[0]
    blocks = iter([place._block(number, item, parts) for number, item in enumerate(items)])
    steps = [list(itertools.islice(blocks, length)) for length in lengths]
    counters = torch.full((len(steps),), -1, dtype=torch.int32, device=device)
    addresses = [counters.data_ptr() + 4 * step for step in range(len(steps) - 1)]
    table = backend.segments.make_chain(steps, place.division_of(sizes, tuning), [*addresses, 0])
    words = torch.from_numpy(table.words).to(device)
    options = {} if device.type == "cpu" else {"num_warps": variant.warps}
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.uint8, device=device))
    for _ in range(2):
        variant.kernel[(table.programs,)](words, **options, **dict(variant.constants))
    backend.finish()
    assert counters.tolist() == [2 * table.programs - 1] * len(addresses) + [-1]
    return table


def naive_sum(
    pieces: list[torch.Tensor], base: torch.Tensor | None, scale: float, divisor: float, dtype: torch.dtype
) -> torch.Tensor:
    """The sum in NumPy, an operation at a time: the specification, independent of the reference."""
    with np.errstate(all="ignore"):
        total = pieces[0].float().numpy().copy()
        for piece in pieces[1:]:
            total = total + piece.float().numpy()
        if base is not None:
            total = base.numpy() + total
        total = total * np.float32(scale)
        total = total / np.float32(divisor)
    return torch.from_numpy(total).to(dtype)


def check_accumulate(
    backend: Backend,
    blocks: list[tuple[Shape, int, torch.dtype, torch.dtype, bool]],
    tuning: Any,
    scale: float = 1.0,
    divisor: float = 1.0,
    seed: int = 0,
    special: bool = False,
    in_place: bool = False,
) -> Any:
    """Sum blocks, and compare the whole destination with the specification and with the reference.

    Each block is a shape (its operands: destination, base, then the pieces, cyclically), the number of pieces,
    the types of pieces and destination, and whether there is a base; ``in_place`` stores into the base.
    """
    room = sum((shape.runs + 1) * (shape.count + max(shape.gaps)) * 4 + 256 for shape, *_ in blocks)
    pieces_of = max(count for _, count, *_ in blocks)
    memory = [Memory(room, backend.device) for _ in range(2 + pieces_of)]
    plan = []
    for shape, count, src, dst, base in blocks:

        def region(operand: int, dtype: torch.dtype, shape: Shape = shape) -> tuple[int, ...]:
            gap, offset = (
                shape.gaps[operand % len(shape.gaps)],
                shape.offsets[operand % len(shape.offsets)],
            )
            return memory[operand].region(shape.runs, shape.count, shape.count + gap, dtype, offset)

        plan.append(
            (
                region(0, dst),
                region(1, torch.float32) if base else None,
                [region(2 + piece, src) for piece in range(count)],
            )
        )
    for buffer in memory:
        buffer.freeze()
    written = memory[1 if in_place else 0]
    items, wanted, references = [], [], []
    for number, ((target, start, sources), (shape, _, src, dst, base)) in enumerate(zip(plan, blocks, strict=True)):
        size = (shape.runs, shape.count)
        values = [
            random_bits(shape.runs * shape.count, src, seed + 97 * number + piece, special).view(size)
            for piece in range(len(sources))
        ]
        for piece, (source, value) in enumerate(zip(sources, values, strict=True)):
            memory[2 + piece].view(source, src).copy_(value)
        addend = None
        if start is not None:
            addend = random_bits(shape.runs * shape.count, torch.float32, seed - 1, special).view(size)
            memory[1].view(start, torch.float32).copy_(addend)
        if in_place:
            assert base
            assert dst == torch.float32
            target = start
        wanted.append((target, dst, naive_sum(values, addend, scale, divisor, dst)))
        reference = torch.empty(size, dtype=dst)
        accumulate_reference(values, reference, addend, scale, divisor)
        references.append(reference)
        items.append(
            backend.accumulate.SumItem(
                tuple(memory[2 + piece].address(source) for piece, source in enumerate(sources)),
                memory[1].address(start) if start is not None else 0,
                written.address(target),
                shape.runs,
                shape.count,
                tuple(source[3] for source in sources),
                start[3] if start is not None else 0,
                target[3],
                src,
                dst,
            )
        )
    before = written.tensor.cpu().clone()
    table = backend.accumulate.AccumulateTable(items, device=backend.device, tuning=tuning)
    table.launch(scale, divisor)
    backend.finish()
    found = written.tensor.cpu()
    for (target, dst, expected), reference in zip(wanted, references, strict=True):
        assert_same(reference, expected, dst)
        assert_same(view(found, target, dst).contiguous(), expected, dst)
        view(found, target, BITS[dst.itemsize]).zero_()
        view(before, target, BITS[dst.itemsize]).zero_()
    assert torch.equal(found, before), "bytes outside of the blocks were written"
    return table
