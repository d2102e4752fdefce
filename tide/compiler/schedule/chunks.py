"""Chunks of a reduce-scatter: an owner's output cut into what is pushed and summed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Parameter, Unit
from tide.compiler.options import MIB, PlanOptions
from tide.compiler.shard import shard

#: Elements to which segments of a chunk are aligned, so that 16-byte accesses stay aligned.
CHUNK_ALIGNMENT = 64
#: The same for segments of gradients that travel packed, which are too small for more to matter.
PACKED_ALIGNMENT = 8
#: Where there is no ring, each chunk is a part of the one before it, down to so many bytes, in so many chunks.
SMALLEST, MOST = 4 * MIB, 4


class Segment(NamedTuple):
    """A part of one owner's shard of one parameter: ``runs`` pieces of ``count`` elements.

    ``first`` is the first run, ``start`` the element within each run, ``at`` the element offset of the
    segment within its chunk.
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    first: int
    runs: int
    start: int
    count: int  # type: ignore[assignment]
    at: int


def aligned(elements: int) -> int:
    """Elements of a segment's place."""
    return -(-elements // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def packed_elements(elements: int) -> int:
    """Elements of the place of a segment that travels packed."""
    return -(-elements // PACKED_ALIGNMENT) * PACKED_ALIGNMENT


def extent(chunk: tuple[Segment, ...]) -> int:
    """Elements of a chunk's place."""
    return max(segment.at + aligned(segment.runs * segment.count) for segment in chunk)


def widest(parameters: Sequence[Parameter]) -> int:
    """Bytes of an element of the widest gradient; 0 if there is none."""
    return max((itemsize(p.grad_dtype) for p in parameters if p.grad_dtype is not None), default=0)


def chunk_elements(unit: Unit, options: PlanOptions) -> int:
    """Elements of a chunk of this unit's reduce-scatter in a ring; 0 if no gradient is reduced.

    Few chunks keep the host's work small, many let the sum overlap the copies: by default about five, of
    4 to 256 MiB, the last ones smaller.
    """
    trainable = [p for p in unit.parameters if p.grad_dtype is not None]
    if not trainable:
        return 0
    width = widest(trainable)
    output = sum(aligned(int(shard(p, unit.mesh.size).numel.max())) for p in trainable)
    if options.chunk_bytes is not None:
        wanted = options.chunk_bytes // width
    else:
        wanted = min(max(output * 28 // 100, 4 * MIB // width), 256 * MIB // width)
    return max(aligned(min(wanted, output)), CHUNK_ALIGNMENT)


def ring_limits(elements: int, capacity: int) -> tuple[int, ...]:
    """Elements of each chunk of an output: equal ones, then a half and a quarter of the capacity.

    Smaller towards the end, so that little is left to sum when the last push has ended.
    """
    if elements <= capacity or capacity < 4 * CHUNK_ALIGNMENT:
        return (capacity,) * max(-(-elements // capacity), 1)
    tail = aligned(capacity // 2), aligned(capacity // 4)
    rest = elements - sum(tail)
    count = -(-rest // capacity)
    return (*(min(aligned(-(-rest // count)), capacity),) * count, *tail)


def fall_of(per_node: int) -> int:
    """How many times larger a chunk may be than the one after it, where no ring asks for equal ones.

    As often as a chunk's push takes longer than its sum, which then ends before the next chunk is there: a piece
    is pushed by one engine, but ``P`` of them and a float32 are read and written by the sum. By the rates of an
    H200, 0.37 of the push's time with two ranks, 0.19 with four, 0.13 with eight; twice that is allowed for, as few
    CTAs sum. With two or three ranks that leaves nothing to gain. 0 means chunks as in a ring.
    """
    return 3 if per_node >= 8 else 2 if per_node >= 4 else 0


def falling_limits(elements: int, width: int, fall: int) -> tuple[int, ...]:
    """Elements of each chunk, each the ``fall``-th part of the one before: few steps, and little left to sum."""

    def shares(count: int) -> int:
        return int((fall**count - 1) // (fall - 1))

    count = MOST
    while count > 1 and elements * width // shares(count) < SMALLEST:
        count -= 1
    last = elements / shares(count)
    sizes = [aligned(int(last * fall ** (count - 1 - k))) for k in range(1, count)]
    return (max(aligned(elements) - sum(sizes), CHUNK_ALIGNMENT), *sizes)


@lru_cache(maxsize=4096)
def cut(
    shape: tuple[tuple[int, int, int], ...],
    capacity: int,
    width: int = 0,
    fall: int = 0,
    packed: tuple[int, ...] = (),
) -> tuple[tuple[Segment, ...], ...]:
    """Cuts an owner's output, given as ``(parameter index, runs, elements per run)`` each, into chunks.

    With ``fall``, chunks get smaller from the first to the last; ``width`` is the size of the widest element.
    Parameters in ``packed`` stand first, with no room between them where they are even.
    """
    chunks: list[tuple[Segment, ...]] = []
    chunk: list[Segment] = []
    elements = sum(aligned(runs * count) for _, runs, count in shape)
    limits = falling_limits(elements, width, fall) if fall else ring_limits(elements, capacity)
    largest = max(limits) if fall else capacity
    limit = room = limits[0]

    def flush() -> None:
        nonlocal chunk, room, limit
        if chunk:
            chunks.append(tuple(chunk))
        # Whole runs may need more chunks than were foreseen; those that come late are full ones again.
        limit = room = limits[len(chunks)] if len(chunks) < len(limits) else largest
        chunk = []

    def add(index: int, first: int, runs: int, start: int, count: int) -> None:
        nonlocal room
        chunk.append(Segment(index, first, runs, start, count, limit - room))
        elements = runs * count
        room -= min(packed_elements(elements) if index in packed else aligned(elements), room)

    for index, runs, count in shape:
        if index not in packed:
            room -= min((room - limit) % CHUNK_ALIGNMENT, room)
        if count <= limits[-1]:  # whole runs
            run = 0
            while run < runs:
                take = min(runs - run, room // count)
                if take == 0:
                    flush()
                    continue
                add(index, run, take, 0, count)
                run += take
        else:  # parts of one run at a time
            for run in range(runs):
                start = 0
                while start < count:
                    take = min(count - start, room)
                    if take == 0:
                        flush()
                        continue
                    add(index, run, 1, start, take)
                    start += take
    if chunk:
        chunks.append(tuple(chunk))
    return tuple(chunks)


def owner_shape(unit: Unit, owner: int, subset: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Output of ``owner`` for the parameters in ``subset``: index, runs and elements per run of each."""
    shape = []
    for index in subset:
        table = shard(unit.parameters[index], unit.mesh.size)
        count = int(table.run[owner])
        if table.outer and count:
            shape.append((index, table.outer, count))
    return tuple(shape)


def shapes(unit: Unit, subset: Sequence[int]) -> list[tuple[tuple[int, int, int], ...]]:
    """The distinct outputs among all owners."""
    if not subset:
        return []
    runs = np.stack([shard(unit.parameters[index], unit.mesh.size).run for index in subset])
    _, first = np.unique(runs, axis=1, return_index=True)
    return [owner_shape(unit, int(owner), subset) for owner in first]
