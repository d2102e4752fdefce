"""Chunks of all owners' outputs as columns: few distinct ones, of which every owner has some."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tide.compiler.columns import DTYPE, GRAD, OUT, RAW, RUNNING, SIZES, STAGED, Bools, Moves, Regions
from tide.compiler.schedule.areas import Areas
from tide.compiler.schedule.chunks import Segment, extent, packed_elements
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.shard import Int64


class Parts(NamedTuple):
    """Segments of all kinds of chunks as columns: those of kind ``k`` are ``first[k] : first[k + 1]``."""

    first: Int64
    index: Int64  # type: ignore[assignment]  # shadows tuple.index, which nobody calls
    run: Int64
    runs: Int64
    start: Int64
    count: Int64  # type: ignore[assignment]
    at: Int64

    @classmethod
    def of(cls, chunks: list[list[Segment]]) -> Parts:
        """Columns of the segments of each kind of chunk."""
        first = np.concatenate(([0], np.cumsum([len(chunk) for chunk in chunks]))).astype(np.int64)
        rows = np.array([segment for chunk in chunks for segment in chunk], dtype=np.int64).reshape(-1, 6)
        return cls(first, *(column.copy() for column in rows.T))


@dataclass(frozen=True, eq=False, slots=True)
class Pushed:
    """What is pushed of each kind of chunk: transfers whose places count from those of the chunk.

    Rows of kind ``k`` are ``first[k] : first[k + 1]``. Those that are ``packed`` come from where the chunk's small
    gradients begin; of the others, ``src`` counts from the owner's first element of the gradient.
    """

    first: Int64
    packed: Bools
    index: Int64
    src: Int64
    src_pitch: Int64
    dst: Int64
    dst_pitch: Int64
    runs: Int64
    length: Int64


class Outputs:
    """Outputs of all owners of a reduce-scatter, made once for all positions.

    Parameters
    ----------
    context : UnitContext
        Unit and team.
    areas : Areas
        How outputs are cut, and how places are spaced.
    subset : tuple of int
        Parameters that have a gradient.

    Attributes
    ----------
    first_kind, chunks : ndarray of int64, shape (positions,)
        Kind of an owner's first chunk, those of the others follow; and how many chunks there are.
    node : ndarray of int64, shape (positions,)
        Node of each position.
    extent : ndarray of int64, shape (kinds,)
        Elements of a chunk's place.
    parts : Parts
        Segments of each kind of chunk.
    small : Parts
        Those that travel packed.
    small_extent : ndarray of int64, shape (kinds,)
        Elements of the place of these.
    pushed : Pushed
        Transfers of each kind of chunk.
    grad : ndarray of int64, shape (parameters, positions)
        Byte of each gradient where an owner's part begins.
    """

    def __init__(self, context: UnitContext, areas: Areas, subset: tuple[int, ...]) -> None:
        parameters, size = context.unit.parameters, context.team.size
        self.areas = areas
        self.node = np.zeros(size, dtype=np.int64)
        for number, row in enumerate(context.team.grid):
            self.node[list(row)] = number
        tables = [context.table(index) for index in range(len(parameters))]
        self.pitch = np.array([table.pitch for table in tables], dtype=np.int64)
        self.grad_dtype = np.array([DTYPE[p.grad_dtype] if p.grad_dtype else RAW for p in parameters], dtype=np.int64)
        self.out_dtype = np.array([DTYPE[p.out_dtype] for p in parameters], dtype=np.int64)
        self.grad_size = np.where(self.grad_dtype == RAW, 1, SIZES[self.grad_dtype])
        self.grad = np.stack([table.offset for table in tables]) * self.grad_size[:, None]
        self.run_length = np.stack([table.run for table in tables])
        kinds: list[tuple[Segment, ...]] = []
        self.first_kind, self.chunks = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        if subset:
            _, owners, shape = np.unique(self.run_length[list(subset)], axis=1, return_index=True, return_inverse=True)
            cut = [areas.chunks(context.unit, int(owner), subset) for owner in owners]
            counts = np.array([len(chunks) for chunks in cut], dtype=np.int64)
            self.chunks = counts[shape.ravel()]
            self.first_kind = (np.cumsum(counts) - counts)[shape.ravel()]
            kinds = [chunk for chunks in cut for chunk in chunks]
        self.extent = np.array([extent(chunk) for chunk in kinds], dtype=np.int64)
        self.parts = Parts.of([list(chunk) for chunk in kinds])
        small = [self._packed(chunk) for chunk in kinds]
        self.small = Parts.of(small)
        self.small_extent = np.array(
            [
                chunk[-1].at - chunk[0].at + packed_elements(chunk[-1].runs * chunk[-1].count) if chunk else 0
                for chunk in small
            ],
            dtype=np.int64,
        )
        self.pushed = self._pushed(kinds)

    def _packed(self, chunk: tuple[Segment, ...]) -> list[Segment]:
        """Segments of a chunk that travel packed: where the chunk begins with several."""
        found = list(takewhile(lambda segment: segment.index in self.areas.bundled, chunk))
        return found if len(found) > 1 else []

    def _pushed(self, kinds: list[tuple[Segment, ...]]) -> Pushed:
        """Transfers of each kind of chunk: packed ones as far as they touch, then segment by segment."""
        width, rows, first = self.areas.width, list[tuple[int, ...]](), [0]
        for chunk in kinds:
            packed = self._packed(chunk)
            for number, segment in enumerate(packed):
                place, length = segment.at * width, segment.runs * segment.count * width
                if number and rows[-1][4] + rows[-1][7] == place:
                    rows[-1] = (*rows[-1][:7], rows[-1][7] + length)
                    continue
                rows.append((1, 0, (segment.at - packed[0].at) * width, 0, place, 0, 1, length))
            for segment in chunk[len(packed) :]:
                size, pitch = int(self.grad_size[segment.index]), int(self.pitch[segment.index])
                many = segment.runs > 1
                rows.append(
                    (
                        0,
                        segment.index,
                        (segment.first * pitch + segment.start) * size,
                        pitch * size if many else 0,
                        segment.at * width,
                        segment.count * size if many else 0,
                        segment.runs,
                        segment.count * size,
                    )
                )
            first.append(len(rows))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 8).T
        return Pushed(np.array(first, dtype=np.int64), columns[0] == 1, *(column.copy() for column in columns[1:]))

    # Regions of segments: `row` is that of a part, the other arrays go with it --------------------------

    def gradient(self, row: Int64, owner: Int64, parts: Parts | None = None) -> Regions:
        """Where segments lie in the whole gradients."""
        parts = parts or self.parts
        index = parts.index[row]
        size, pitch = self.grad_size[index], self.pitch[index]
        offset = self.grad[index, owner] + (parts.run[row] * pitch + parts.start[row]) * size
        return Regions(_full(GRAD, row), index, offset, np.where(parts.runs[row] > 1, pitch * size, 0))

    def placed(self, row: Int64, buffer: int, start: Int64, width: int | Int64, pitch: int | Int64) -> Regions:
        """Where segments lie in places that begin at ``start``, spaced by ``width``, of elements of ``pitch`` bytes."""
        parts = self.parts
        between = np.where(parts.runs[row] > 1, parts.count[row] * pitch, 0)
        return Regions(_full(buffer, row), _full(0, row), start + parts.at[row] * width, between)

    def result(self, row: Int64, position: int, final: Bools) -> Regions:
        """Where segments lie in the reduced shard (``final``), or in its running sum: itself where it is float32."""
        parts, index = self.parts, self.parts.index[row]
        out = final | (self.out_dtype[index] == DTYPE["float32"])
        size = np.where(out, SIZES[self.out_dtype[index]], 4)
        count = self.run_length[index, position]
        start = (parts.run[row] * count + parts.start[row]) * size
        pitch = np.where(parts.runs[row] > 1, count * size, 0)
        return Regions(np.where(out, OUT, RUNNING), index, start, pitch)

    def packing(self, row: Int64, owner: Int64, start: Int64) -> Moves:
        """Casts that pack small segments (of ``small``) in places that begin at ``start``."""
        small, width = self.small, self.areas.width
        index, runs, count = small.index[row], small.runs[row], small.count[row]
        dst = Regions(_full(STAGED, row), _full(0, row), start, np.where(runs > 1, count * width, 0))
        dtype = self.grad_dtype[index]
        length = count * self.grad_size[index]
        return Moves(self.gradient(row, owner, small), dst, runs, length, length, dtype, dtype)


def _full(value: int, like: npt.NDArray[np.integer]) -> Int64:
    return np.full(len(like), value, dtype=np.int64)
