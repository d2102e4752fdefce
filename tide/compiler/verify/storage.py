"""What belongs where in a unit's storage, and whether casts bring it there.

The *content* of a byte is (parameter, element). Storage holds every parameter whole, and in the bundle
the small ones' shards; a rank's shard is dense. A move is right if source and destination have the same
content, byte by byte. Since every byte is written exactly once and read only afterwards, that makes all
storage right by induction: the only moves from a shard are its owner's.
"""

from __future__ import annotations

import numpy as np

from tide.compiler.columns import DTYPE, RAW, SHARD, SIZES, STORAGE, Bools, Regions, ranges
from tide.compiler.dtypes import itemsize
from tide.compiler.shard import Int64
from tide.compiler.verify.grid import Rects, rects
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Access, Tables

#: Marks alignment bytes of a bundle segment, which belong to no parameter.
PAD = -2


class StorageMap:
    """Content of a unit's storage and of its shards.

    Attributes
    ----------
    start, size : ndarray of int64, shape (A,)
        Areas of storage in order of offset: one a parameter, and the bundle. Parameters without
        elements have none.
    parameter : ndarray of int64, shape (A,)
        Index of the parameter, -1 for the bundle.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        layout, parameters = scene.context.layout, scene.parameters
        tables = [scene.table(index) for index in range(len(parameters))]
        self.item = np.array([itemsize(p.dtype) for p in parameters], dtype=np.int64)
        self.shard_item = np.array([itemsize(p.shard_dtype) for p in parameters], dtype=np.int64)
        self.dtype = np.array([DTYPE[p.dtype] for p in parameters], dtype=np.int64)
        self.shard_dtype = np.array([DTYPE[p.shard_dtype] for p in parameters], dtype=np.int64)
        self.offset = np.array(layout.offsets, dtype=np.int64)
        self.numel = np.array([p.numel for p in parameters], dtype=np.int64)
        self.outer = np.array([t.outer for t in tables], dtype=np.int64)
        self.pitch = np.array([t.pitch for t in tables], dtype=np.int64)
        self.run = np.stack([t.run for t in tables])  # (parameter, owner), elements
        self.first = np.stack([t.offset for t in tables])
        rows = [(int(self.offset[i]), p.nbytes, i) for i, p in enumerate(parameters) if p.nbytes]
        bundle = layout.bundle
        if bundle is not None:
            rows.append((bundle.offset, int(bundle.length.sum()), -1))
        rows.sort()
        areas = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self.start, self.size, self.parameter = areas[:, 0].copy(), areas[:, 1].copy(), areas[:, 2].copy()
        self.area_of = np.full(len(parameters) + 1, -1, dtype=np.int64)
        self.area_of[self.parameter] = np.arange(len(areas))  # the bundle's is the last entry, -1
        self._members(scene)

    def _members(self, scene: Scene) -> None:
        """Shards in the bundle, by offset; and how far equal ones go on at an equal distance."""
        bundle, owners = scene.context.layout.bundle, np.arange(scene.size)
        parts: list[tuple[Int64, ...]] = []
        for row, index in enumerate(bundle.members if bundle is not None else ()):
            assert bundle is not None
            some = np.flatnonzero(self.run[index])
            start = bundle.offset + bundle.base[some] + bundle.at[row, some]
            length = self.run[index, some] * self.outer[index] * self.item[index]
            whole = self.offset[index] + self.first[index, some] * self.item[index]
            parts.append((start, length, 0 * some + index, owners[some], whole, _progression(start, length, whole)))
        columns = [np.concatenate(c) for c in zip(*parts, strict=True)] if parts else [np.zeros(0, np.int64)] * 6
        order = np.argsort(columns[0], kind="stable")
        self.member_start, self.member_length, self.member, self.owner = (c[order] for c in columns[:4])
        self._whole, self._equal = columns[4][order], columns[5][order]
        # Place of the next owner's shard of the same parameter, for pitches.
        by_member = np.lexsort((self.owner, self.member))
        self._next = np.zeros(len(order), dtype=np.int64)
        self._next[by_member] = np.append(by_member[1:], by_member[:1]) if len(order) else by_member

    def locate(self, region: Regions, runs: Int64, length: Int64) -> Int64:
        """Area that holds all of each region, or -1."""
        area = np.searchsorted(self.start, region.offset, side="right") - 1
        extent = (runs - 1) * np.where(runs > 1, region.pitch, 0) + length
        inside = (area >= 0) & (region.offset + extent <= self.start[area] + self.size[area])
        return np.where(inside, area, -1)

    def name_span(self, area: int, start: int, stop: int) -> tuple[int, tuple[int, int]]:
        """Parameter, and bytes within it (within its shard for the bundle), of bytes of an area."""
        parameter = int(self.parameter[area])
        if parameter >= 0:
            return parameter, (start, stop)
        row = max(int(np.searchsorted(self.member_start, self.start[area] + start, side="right")) - 1, 0)
        base = int(self.member_start[row] - self.start[area])
        return int(self.member[row]), (start - base, stop - base)

    def pads(self, positions: Int64) -> tuple[Int64, Int64, Int64]:
        """Alignment bytes of the bundle segments of ``positions``: row of ``positions``, start, length."""
        bundle = self.scene.context.layout.bundle
        assert bundle is not None
        base, length = bundle.base[positions], bundle.length[positions]
        members = np.asarray(bundle.members)
        used = (self.run[members] * (self.outer * self.item)[members][:, None])[:, positions]
        ends = bundle.at[:, positions] + used
        nexts = np.concatenate((bundle.at[1:, positions], length[None, :]))
        row, which = np.nonzero(nexts > ends)
        return which.astype(np.int64), base[which] + ends[row, which], (nexts - ends)[row, which]

    # Content -------------------------------------------------------------------------------------

    def check_content(self, tables: Tables, access: Access, src_area: Int64, dst_area: Int64) -> None:
        """Raises unless every move brings each byte of storage what belongs there."""
        m = access.moves
        same = (m.src.buffer == STORAGE) & (m.src.offset == m.dst.offset) & (m.src_dtype == m.dst_dtype)
        same &= (m.runs == 1) | (m.src.pitch == m.dst.pitch)
        rest = np.flatnonzero(~same)
        if not len(rest):
            return
        rows = Access(access.step[rest], access.source[rest], access.target[rest], m[rest])
        src_area, dst_area = src_area[rest], dst_area[rest]
        self._check_types(tables, rows, src_area, dst_area)
        plain = self._plain_places(rows, dst_area) | self._plain_scatters(rows, src_area, dst_area)
        self._check_slowly(tables, rows, np.flatnonzero(~plain), src_area, dst_area)

    def _check_types(self, tables: Tables, rows: Access, src_area: Int64, dst_area: Int64) -> None:
        m = rows.moves
        from_shard = m.src.buffer == SHARD
        target = self.parameter[dst_area]
        known = np.where(from_shard, m.src.index, np.where(target >= 0, target, self.parameter[src_area]))
        want_src = np.where(from_shard, self.shard_dtype[known], self.dtype[known])
        wrong = (m.src_dtype != RAW) & ((m.src_dtype != want_src) | (m.dst_dtype != self.dtype[known]))
        wrong &= known >= 0
        wrong |= from_shard & (m.src_dtype == RAW)
        if len(bad := np.flatnonzero(wrong)):
            row = int(bad[0])
            self.scene.fail(
                "converts between other types than those of the shard and of the storage",
                parameter=int(known[row]),
                span=self._span(rows, row, dst_area)[1],
                step=tables.describe(int(rows.step[row])),
            )

    def _plain_places(self, rows: Access, dst_area: Int64) -> Bools:
        """Rows that cast runs of a rank's shard, or a part of one, to their place in storage or bundle."""
        m, index, me = rows.moves, rows.moves.src.index, rows.source
        ok: Bools = m.src.buffer == SHARD
        index = np.where(ok, index, 0)
        run, size, src_size = self.run[index, me], self.item[index], self.shard_item[index]
        element, odd = np.divmod(m.src.offset, src_size)
        row, column = np.divmod(element, np.maximum(run, 1))
        many = m.runs > 1
        ok &= (odd == 0) & (run > 0) & (column * src_size + m.src_length <= run * src_size)
        ok &= ~many | ((m.src.pitch == run * src_size) & (row + m.runs <= self.outer[index]))
        whole = self.offset[index] + (row * self.pitch[index] + self.first[index, me] + column) * size
        direct = (self.parameter[dst_area] == index) & (m.dst.offset == whole)
        direct &= ~many | (m.dst.pitch == self.pitch[index] * size)
        member, _ = self._member_at(m.dst.offset)
        bundled = self.parameter[dst_area] == -1
        if len(self.member):
            bundled &= (self.member[member] == index) & (self.owner[member] == me)
            bundled &= m.dst.offset == self.member_start[member] + element * size
        bundled &= ~many | (m.dst.pitch == run * size)
        ok &= direct | bundled
        return ok

    def _plain_scatters(self, rows: Access, src_area: Int64, dst_area: Int64) -> Bools:
        """Rows that scatter whole shards of consecutive owners from the bundle into storage."""
        m = rows.moves
        row, starts = self._member_at(m.src.offset)
        ok: Bools = (m.src.buffer == STORAGE) & starts & (self.parameter[src_area] == -1)
        if not ok.any():
            return ok
        index = self.member[row]
        ok &= (self.parameter[dst_area] == index) & (m.dst.offset == self._whole[row])
        many = self.outer[index] > 1
        strided = (m.runs == self.outer[index]) & (m.src.pitch == m.src_length)
        strided &= (m.dst.pitch == self.pitch[index] * self.item[index]) & (
            m.src_length * m.runs == self.member_length[row]
        )
        following = self._next[row]
        spaced = (m.src_length == self.member_length[row]) & (m.runs <= self._equal[row])
        spaced &= (m.runs == 1) | (
            (m.src.pitch == self.member_start[following] - self.member_start[row])
            & (m.dst.pitch == self._whole[following] - self._whole[row])
        )
        ok &= np.where(many, strided, spaced)
        return ok

    def _member_at(self, offset: Int64) -> tuple[Int64, Bools]:
        """Bundled shard that holds each offset, and whether it starts there."""
        if not len(self.member_start):
            return np.zeros(len(offset), dtype=np.int64), np.zeros(len(offset), dtype=bool)
        row = np.maximum(np.searchsorted(self.member_start, offset, side="right") - 1, 0)
        return row, self.member_start[row] == offset

    def _check_slowly(self, tables: Tables, rows: Access, which: Int64, src_area: Int64, dst_area: Int64) -> None:
        """Compares piece by piece: a piece ends where a shard, a row or a parameter ends on either side."""
        if not len(which):
            return
        m = rows.moves
        run, of = ranges(0 * which, m.runs[which])
        of = which[of]
        src, dst = m.src.offset[of] + run * m.src.pitch[of], m.dst.offset[of] + run * m.dst.pitch[of]
        src_size = np.where(m.src_dtype[of] == RAW, 1, SIZES[m.src_dtype[of]])
        dst_size = np.where(m.dst_dtype[of] == RAW, 1, SIZES[m.dst_dtype[of]])
        left = m.src_length[of] // src_size  # elements, or bytes of a transfer
        while len(of):
            have, have_at, have_room = self._content(m.src[of], rows.source[of], src_area[of], src, src_size)
            want, want_at, want_room = self._content(m.dst[of], rows.target[of], dst_area[of], dst, dst_size)
            bad = np.flatnonzero((have != want) | (have_at != want_at) | (want < 0))
            if len(bad):
                self._report_content(
                    tables, rows, int(of[bad[0]]), int(bad[0]), dst_area, dst, dst_size, (have, have_at)
                )
            step = np.minimum(np.minimum(have_room, want_room), left)
            left, src, dst = left - step, src + step * src_size, dst + step * dst_size
            more = left > 0
            of, src, dst, left, src_size, dst_size = (a[more] for a in (of, src, dst, left, src_size, dst_size))

    def _content(
        self, region: Regions, position: Int64, area: Int64, at: Int64, size: Int64
    ) -> tuple[Int64, Int64, Int64]:
        """Parameter and byte of it (in storage types) at address ``at``, and elements to the next border."""
        from_shard = region.buffer == SHARD
        parameter = np.where(from_shard, region.index, self.parameter[area])
        owner, base = position.copy(), np.where(from_shard, 0, self.start[area])
        dense, pad = from_shard.copy(), np.zeros(len(at), dtype=bool)
        room_to_member = np.zeros(len(at), dtype=np.int64)
        if len(self.member):
            row, _ = self._member_at(at)
            bundled = ~from_shard & (parameter == -1)
            pad = bundled & (at >= self.member_start[row] + self.member_length[row])
            following = np.append(self.member_start, self.start[-1] + self.size[-1])[row + 1]
            room_to_member = np.maximum(following - at, 1)
            parameter = np.where(bundled, self.member[row], parameter)
            owner, base = np.where(bundled, self.owner[row], owner), np.where(bundled, self.member_start[row], base)
            dense |= bundled
        # A transfer moves bytes: its elements are bytes, and so are those of the parameter then.
        item = np.where(from_shard, self.shard_item[parameter], self.item[parameter])
        unit = item // np.minimum(size, item)  # bytes of a transfer in an element, else 1
        element, odd = np.divmod(at - base, np.minimum(size, item))
        run = self.run[parameter, owner] * unit
        row_of, column = np.divmod(element, np.maximum(run, 1))
        where = np.where(
            dense,
            row_of * self.pitch[parameter] * unit + self.first[parameter, owner] * unit + column,
            element,
        )
        room = np.where(dense, run - column, self.numel[parameter] * unit - element)
        parameter = np.where(pad, PAD, np.where(odd != 0, -3, parameter))
        to_bytes = np.where(unit > 1, 1, self.item[np.maximum(parameter, 0)])
        return parameter, where * to_bytes, np.maximum(np.where(pad, room_to_member, room), 1)

    def _span(self, rows: Access, row: int, dst_area: Int64) -> tuple[int, tuple[int, int]]:
        area, m = int(dst_area[row]), rows.moves
        at = int(m.dst.offset[row] - self.start[area])
        extent = (int(m.runs[row]) - 1) * int(m.dst.pitch[row]) + int(m.dst_length[row])
        return self.name_span(area, at, at + extent)

    def _report_content(
        self,
        tables: Tables,
        rows: Access,
        row: int,
        piece: int,
        dst_area: Int64,
        dst: Int64,
        dst_size: Int64,
        have: tuple[Int64, Int64],
    ) -> None:
        area, m = int(dst_area[row]), rows.moves
        at = int(dst[piece] - self.start[area])
        parameter, span = self.name_span(area, at, at + int(m.dst_length[row]))
        found = int(have[0][piece])
        source = (
            f"byte {int(have[1][piece])} of parameter {self.scene.parameters[found].name}"
            if found >= 0
            else "bytes of no parameter"
        )
        self.scene.fail(
            f"receives {source}, which belongs elsewhere",
            position=int(rows.target[row]),
            parameter=parameter,
            span=span,
            step=tables.describe(int(rows.step[row])),
        )


def _progression(start: Int64, length: Int64, whole: Int64) -> Int64:
    """For each shard, how many from it on are equal and equally spaced, in the bundle and in storage."""
    count = len(start)
    out = np.ones(count, dtype=np.int64)
    step, step_whole = np.diff(start), np.diff(whole)
    for i in range(count - 2, -1, -1):
        if length[i] != length[i + 1]:
            continue
        same = i + 2 < count and step[i] == step[i + 1] and step_whole[i] == step_whole[i + 1]
        out[i] = out[i + 1] + 1 if same and out[i + 1] > 1 else 2
    return out


def sheets(map_: StorageMap, regions: list[tuple[Int64, Regions, Int64, Int64]]) -> tuple[Int64, Int64]:
    """Grid of every area: the pitch of strided runs in it, so that they are rectangles.

    Parameters
    ----------
    map_ : StorageMap
        Areas.
    regions : list of (area, regions, runs, length)
        What is read and written.

    Returns
    -------
    height, width : ndarray of int64, shape (A,)
        Rows and bytes a row; the last row may be shorter (:func:`remainder`).
    """
    width = map_.size.copy()
    index = np.maximum(map_.parameter, 0)
    rows = (map_.parameter >= 0) & (map_.outer[index] > 1)
    width[rows] = (map_.pitch * map_.item)[index[rows]]
    pairs = []
    for area, region, runs, length in regions:
        strided = (runs > 1) & (region.pitch != length) & ~rows[area]
        pairs.append(np.stack((area[strided], region.pitch[strided]), axis=1))
    found, counts = np.unique(np.concatenate(pairs), axis=0, return_counts=True)
    for at in np.argsort(counts, kind="stable"):  # the most frequent pitch last
        if found[at, 1] > 0:
            width[found[at, 0]] = min(int(found[at, 1]), int(map_.size[found[at, 0]]))
    return -(-map_.size // width), width


def remainder(map_: StorageMap, height: Int64, width: Int64, count: int) -> Rects:
    """Rectangles for the bytes of the last rows that are beyond the areas, for ``count`` ranks."""
    areas = np.flatnonzero(height * width > map_.size)
    sheet = (np.arange(count)[:, None] * len(height) + areas[None, :]).ravel()
    area = np.tile(areas, count)
    over = (height * width - map_.size)[area]
    one = np.ones(len(area), dtype=np.int64)
    return rects(sheet, width[area], map_.size[area], 0 * one, one, over, -one)
