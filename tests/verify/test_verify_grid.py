"""Covers by rectangles against a brute-force count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tide.compiler.verify.grid import Cover, Rects, rects


@st.composite
def regions(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int, int]]]:
    """Rows, width, and runs (offset, pitch, runs, length) that fit in the sheet."""
    height, width = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    size, found = height * width, []
    for _ in range(draw(st.integers(0, 7))):
        offset = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, min(size - offset, 2 * width)))
        pitch = draw(st.sampled_from((width, length, length + 1, 2 * width)))
        most = 1 + (size - offset - length) // pitch if pitch >= length else 1
        found.append((offset, pitch, draw(st.integers(1, max(most, 1))), length))
    return height, width, found


def spread(rows: list[tuple[int, int, int, int]], size: int) -> np.ndarray:
    """How often each byte is covered."""
    count = np.zeros(size, dtype=int)
    for offset, pitch, runs, length in rows:
        for run in range(runs):
            count[offset + run * pitch : offset + run * pitch + length] += 1
    return count


def made(rows: list[tuple[int, int, int, int]], width: int, sheet: int = 0) -> Rects:
    offset, pitch, runs, length = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    one = np.ones(len(rows), dtype=np.int64)
    return rects(one * sheet, one * width, offset, pitch, runs, length, np.arange(len(rows)))


@given(regions())
def test_rectangles_are_the_runs(case: tuple[int, int, list[tuple[int, int, int, int]]]) -> None:
    height, width, rows = case
    count = np.zeros((height, width), dtype=int)
    found = made(rows, width)
    for i in range(len(found)):
        count[found.top[i] : found.bottom[i], found.left[i] : found.right[i]] += 1
    assert np.array_equal(count.ravel(), spread(rows, height * width))


@given(regions(), st.booleans())
def test_faults_are_where_the_count_is_not_one(
    case: tuple[int, int, list[tuple[int, int, int, int]]], complete: bool
) -> None:
    height, width, rows = case
    if complete:  # bytes that are still free, one by one: covers become exact more often
        rows = [row for i, row in enumerate(rows) if spread(rows[: i + 1], height * width).max() <= 1][:1]
        rows += [(int(at), 1, 1, 1) for at in np.flatnonzero(spread(rows, height * width) == 0)]
    count = spread(rows, height * width)
    fault = Cover(made(rows, width), np.array([height]), np.array([width])).fault()
    assert (fault is None) == bool((count == 1).all())
    if fault is not None:
        shown = count[fault.start : fault.stop]
        assert len(shown)
        assert (shown == 0).all() if fault.gap else (shown > 1).all()


@given(regions(), regions())
def test_meeting_rectangles_share_bytes(
    first: tuple[int, int, list[tuple[int, int, int, int]]], second: tuple[int, int, list[tuple[int, int, int, int]]]
) -> None:
    height, width, _ = first
    size = height * width
    rows = [(int(at), 1, 1, 1) for at in range(0, size - 1)] + [(size - 1, 1, 1, 1)]
    cover = made(rows, width)
    others = [row for row in second[2] if row[0] + (row[2] - 1) * row[1] + row[3] <= size]
    found = made(others, width)
    which, entry = Cover(cover, np.array([height]), np.array([width])).meets(found)
    pairs = {(int(found.tag[i]), int(cover.tag[j])) for i, j in zip(which, entry, strict=True)}
    want = {(i, byte) for i, row in enumerate(others) for byte in np.flatnonzero(spread([row], size))}
    assert pairs == want
