"""Sets of bytes as rectangles: exact cover and overlap, vectorised over many sheets at once.

A *sheet* is one area of one rank's memory, seen as a grid of ``width`` bytes a row. Strided runs whose
pitch is the width are one rectangle, whatever their number, so the cost depends on the number of
transfers and not on that of runs::

    ┌──────────┬────┬─────┐
    │ rank 0   │    │     │   runs of one rank, pitch = width
    │  own     │ 1  │  2  │
    └──────────┴────┴─────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tide.compiler.columns import ranges
from tide.compiler.shard import Int64


@dataclass(frozen=True, eq=False, slots=True)
class Rects:
    """Rectangles ``top <= row < bottom``, ``left <= column < right`` on sheets; ``tag`` is the caller's."""

    sheet: Int64
    top: Int64
    bottom: Int64
    left: Int64
    right: Int64
    tag: Int64

    def __getitem__(self, rows: Any) -> Rects:
        return Rects(*(column[rows] for column in self._columns()))

    def _columns(self) -> tuple[Int64, ...]:
        return self.sheet, self.top, self.bottom, self.left, self.right, self.tag

    def __len__(self) -> int:
        return len(self.sheet)

    @classmethod
    def joined(cls, *parts: Rects) -> Rects:
        """All rectangles of all parts."""
        return cls(*(np.concatenate(columns) for columns in zip(*(p._columns() for p in parts), strict=True)))


def rects(sheet: Int64, width: Int64, offset: Int64, pitch: Int64, runs: Int64, length: Int64, tag: Int64) -> Rects:
    """Rectangles of runs; all arrays have one entry a region, offsets count from the sheet's start.

    Runs that do not fit the grid are taken one by one.
    """
    contiguous = (runs == 1) | (pitch == length)
    length, runs = np.where(contiguous, length * runs, length), np.where(contiguous, 1, runs)
    column = offset % width
    block = (runs > 1) & (pitch == width) & (column + length <= width)
    wild = np.flatnonzero((runs > 1) & ~block)
    if len(wild):
        each, of = ranges(np.zeros(len(wild), dtype=np.int64), runs[wild])
        of = wild[of]
        plain = np.flatnonzero(runs == 1)
        return Rects.joined(
            rects(*(a[block] for a in (sheet, width, offset, pitch, runs, length, tag))),
            rects(*(a[plain] for a in (sheet, width, offset, pitch, runs, length, tag))),
            rects(sheet[of], width[of], offset[of] + each * pitch[of], pitch[of], 0 * each + 1, length[of], tag[of]),
        )
    row, end = offset // width, offset + length
    last = (end - 1) // width
    inside = block | (last == row)
    parts = [
        Rects(
            sheet[inside],
            row[inside],
            row[inside] + np.where(block, runs, 1)[inside],
            column[inside],
            (column + length)[inside],
            tag[inside],
        )
    ]
    if not inside.all():  # one run over several rows: the end of one, whole ones, the start of another
        sheet, width, row, column, last, end, tag = (a[~inside] for a in (sheet, width, row, column, last, end, tag))
        head, tail = column > 0, end % width > 0
        parts.append(Rects(sheet, row, row + 1, column, width, tag)[head])
        top, bottom = row + head, last + 1 - tail
        parts.append(Rects(sheet, top, bottom, 0 * width, width, tag)[bottom > top])
        parts.append(Rects(sheet, last, last + 1, 0 * width, end % width, tag)[tail])
    return Rects.joined(*parts)


@dataclass(frozen=True, slots=True)
class Fault:
    """First place where a cover is not exact: a gap, or bytes that two rectangles hold.

    ``start`` and ``stop`` are bytes of one row of the sheet; ``tags`` those of the rectangles that meet.
    """

    sheet: int
    start: int
    stop: int
    tags: tuple[int, ...]

    @property
    def gap(self) -> bool:
        """Whether bytes are missing."""
        return not self.tags


class Cover:
    """Rectangles that should cover every sheet exactly once.

    Parameters
    ----------
    covered : Rects
        The rectangles.
    height, width : ndarray of int64, shape (sheets,)
        Of every sheet; sheets of no bytes have height 0.
    """

    def __init__(self, covered: Rects, height: Int64, width: Int64) -> None:
        self._rects, self._height, self._width = covered, height, width
        # Slabs: rows of a sheet between two edges of its rectangles.
        self._span = int(max(height.max(initial=0), covered.bottom.max(initial=0))) + 1
        sheets = np.arange(len(height))
        edges = np.concatenate(
            (
                covered.sheet * self._span + covered.top,
                covered.sheet * self._span + covered.bottom,
                sheets * self._span,
                sheets * self._span + height,
            )
        )
        self._edges = np.unique(edges)
        first = np.searchsorted(self._edges, covered.sheet * self._span + covered.top)
        stop = np.searchsorted(self._edges, covered.sheet * self._span + covered.bottom)
        slab, of = ranges(first, stop)
        self._reach = int(max(width.max(initial=0), covered.right.max(initial=0))) + 1
        order = np.argsort(slab * self._reach + covered.left[of], kind="stable")
        self._slab, self._of = slab[order], of[order]
        self._left, self._right = covered.left[self._of], covered.right[self._of]

    def fault(self) -> Fault | None:
        """The first fault, or None if the cover is exact."""
        edges, span = self._edges, self._span
        sheet = edges // span
        # Slabs that must be covered: all edges but the last of each sheet.
        wanted = np.flatnonzero(edges < sheet * span + self._height[sheet])
        present = np.zeros(len(edges), dtype=bool)
        present[self._slab] = True
        if len(missing := wanted[~present[wanted]]):
            slab = int(missing[0])
            at, width = int(edges[slab] % span), int(self._width[sheet[slab]])
            stop = int(edges[slab + 1] % span)
            return Fault(int(sheet[slab]), at * width, stop * width, ())
        if not len(self._slab):
            return None
        slabs, left, right = self._slab, self._left, self._right
        head = np.concatenate(([True], slabs[1:] != slabs[:-1]))
        before = np.where(head, 0, np.concatenate(([0], right[:-1])))
        tail = np.concatenate((head[1:], [True]))
        widths = self._width[sheet[slabs]]
        wrong = np.flatnonzero((left != before) | (tail & (right != widths)))
        if not len(wrong):
            return None
        row = int(wrong[0])
        at, edge, wide = int(sheet[slabs[row]]), int(edges[slabs[row]] % span), int(widths[row])
        base, start, stop, end = edge * wide, int(left[row]), int(right[row]), int(before[row])
        tags = self._rects.tag[self._of]
        if start > end:
            return Fault(at, base + end, base + start, ())
        if start < end:
            return Fault(at, base + start, base + min(stop, end), (int(tags[row - 1]), int(tags[row])))
        if stop < wide:
            return Fault(at, base + stop, base + wide, ())
        return Fault(at, base + wide, base + stop, (int(tags[row]), int(tags[row])))

    def meets(self, others: Rects) -> tuple[Int64, Int64]:
        """Pairs (row of ``others``, row of the cover) that share bytes; the cover must be exact."""
        first = np.searchsorted(self._edges, others.sheet * self._span + others.top, side="right") - 1
        stop = np.searchsorted(self._edges, others.sheet * self._span + others.bottom)
        slab, of = ranges(first, stop)
        right_key, left_key = self._slab * self._reach + self._right, self._slab * self._reach + self._left
        low = np.searchsorted(right_key, slab * self._reach + others.left[of], side="right")
        high = np.searchsorted(left_key, slab * self._reach + others.right[of])
        entry, pair = ranges(low, high)
        return of[pair], self._of[entry]
