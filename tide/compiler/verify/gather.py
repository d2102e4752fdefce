"""Proof of an all-gather: cover, content, bounds, and the order of reads and writes.

Within one collective every byte of storage is written once, so it is enough that each read comes after
the write of what it reads. Between two collectives on one slot, three things keep a write of the second
after the reads of the first: a rank begins the second after it has ended the first (the event at which
the slot was vacated); a peer that has read from a rank says so by a signal that the rank consumes in the
next collective; and nobody writes into a rank's storage before it has begun.
"""

from __future__ import annotations

import numpy as np

from tide.compiler.columns import COPY, MULTICAST, PLACE, PUT, RAW, SHARD, STORAGE, Bools, Regions
from tide.compiler.shard import Int64
from tide.compiler.verify.grid import Cover, Fault, Rects, rects
from tide.compiler.verify.order import Order
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.storage import StorageMap, remainder, sheets
from tide.compiler.verify.tables import Tables

#: Ranks whose storage is checked at a time; bounds the memory of the proof.
_BLOCK = 64


def check_routes(scene: Scene, tables: Tables) -> None:
    """Copies and multicasts stay on the node, puts leave it."""
    node = np.zeros(scene.size, dtype=np.int64)
    for number, row in enumerate(scene.context.team.grid):
        node[list(row)] = number
    steps = tables.of_kind(COPY, PUT)
    me, peer = tables.position(steps), tables.peer[steps].astype(np.int64)
    for step, peers in tables.multicast.items():
        many = np.array(peers, dtype=np.int64)
        if len(many) != len(set(peers)) or (many < 0).any() or (many >= scene.size).any():
            scene.fail(f"names positions {peers} of {scene.size}", step=tables.describe(step))
        steps = np.append(steps, np.full(len(many), step))
        me, peer = tables.position(steps), np.append(peer, many)
    wrong = np.flatnonzero(((node[me] == node[peer]) == (tables.kind[steps] == PUT)) | (me == peer))
    if len(wrong):
        step = int(steps[wrong[0]])
        scene.fail(
            "copies reach ranks of the own node only, puts those of other nodes only", step=tables.describe(step)
        )


def check_multicasts(scene: Scene, tables: Tables) -> None:
    """A multicast reaches every rank of the node, its sender too: it names all the others and moves nothing.

    What the sender writes into its own memory then is what is there; so its own storage counts as written by
    the step that put it there, and by that alone.
    """
    if not tables.multicast:
        return
    if not scene.context.fills_nodes:
        scene.fail("is written by multicast, which reaches ranks of the node that are not of the group")
    grid = scene.context.team.grid
    for step, peers in tables.multicast.items():
        me = int(tables.position(np.array([step]))[0])
        row = set(grid[scene.context.team.seat(me)[0]])
        if missing := row - {me} - set(peers):
            scene.fail(
                f"leaves out {', '.join(scene.name(p) for p in sorted(missing))}; a multicast writes to every rank "
                "of the node",
                step=tables.describe(step),
            )
    access = tables.access(MULTICAST)
    src, dst = access.moves.src, access.moves.dst
    wrong = (src.buffer != dst.buffer) | (src.offset != dst.offset)
    wrong |= (access.moves.runs > 1) & (src.pitch != dst.pitch)
    if len(bad := np.flatnonzero(wrong)):
        scene.fail(
            "moves bytes to another place by multicast, which also writes them into the sender's own storage",
            step=tables.describe(int(access.step[bad[0]])),
        )


class GatherProof:
    """Proof of the all-gather of one unit on one team.

    Parameters
    ----------
    scene : Scene
        Unit and team.
    tables : Tables
        Loaded programs.
    order : Order
        Of their steps.
    subjects : ndarray of bool, shape (positions,)
        Positions whose storage is proved. Programs of all that write there must be loaded.
    """

    def __init__(self, scene: Scene, tables: Tables, order: Order, subjects: Bools) -> None:
        self.scene, self.tables, self.order, self.subjects = scene, tables, order, subjects
        self.map = StorageMap(scene)
        self.access = tables.access(PLACE, COPY, PUT, MULTICAST)
        #: Pairs (rank · size + peer) of a peer that may still read when the rank ends, and those that the
        #: rank waits for before it writes again.
        self.readers = np.zeros(0, dtype=np.int64)
        self.awaited = np.zeros(0, dtype=np.int64)

    def run(self) -> int:
        """Proves; returns the bytes that reach the storage of the subjects."""
        scene, tables = self.scene, self.tables
        check_routes(scene, tables)
        check_multicasts(scene, tables)
        self._check_runs()
        src_area, dst_area = self._bounds()
        self.map.check_content(tables, self.access, src_area, dst_area)
        m = self.access.moves
        from_storage = m.src.buffer == STORAGE
        height, width = sheets(
            self.map,
            [
                (src_area[from_storage], m.src[from_storage], m.runs[from_storage], m.src_length[from_storage]),
                (dst_area, m.dst, m.runs, m.dst_length),
            ],
        )
        subjects = np.flatnonzero(self.subjects)
        for first in range(0, len(subjects), _BLOCK):
            block = subjects[first : first + _BLOCK]
            number = np.full(scene.size, -1, dtype=np.int64)
            number[block] = np.arange(len(block))
            self._block(block, number, src_area, dst_area, height, width)
        self._across()
        into = self.subjects[self.access.target]
        return int((m.dst_length * m.runs)[into].sum())

    def _check_runs(self) -> None:
        """Runs are not empty and do not overlap."""
        access, m = self.access, self.access.moves
        wrong = (m.runs < 1) | (m.src_length < 1) | (m.dst_length < 1)
        wrong |= (m.runs > 1) & ((m.src.pitch < m.src_length) | (m.dst.pitch < m.dst_length))
        wrong |= (m.src.offset < 0) | (m.dst.offset < 0)
        if len(bad := np.flatnonzero(wrong)):
            row = int(bad[0])
            parameter, span = self._near(m.dst, row, int(m.dst_length[row]))
            self.scene.fail(
                "has runs that are empty, overlap or lie nowhere",
                position=int(access.target[row]),
                parameter=parameter,
                span=span,
                step=self.tables.describe(int(access.step[row])),
            )

    def _near(self, region: Regions, row: int, length: int) -> tuple[int, tuple[int, int]]:
        """Parameter near which a region lies, and its bytes counted from there, in bounds or not."""
        offset, runs = int(region.offset[row]), max(int(self.access.moves.runs[row]), 1)
        area = max(int(np.searchsorted(self.map.start, offset, side="right")) - 1, 0)
        start = offset - int(self.map.start[area])
        return self.map.name_span(area, start, start + (runs - 1) * int(region.pitch[row]) + length)

    def _bounds(self) -> tuple[Int64, Int64]:
        """Area of each source and destination, all of which must lie within one."""
        scene, tables, access = self.scene, self.tables, self.access
        m, map_ = access.moves, self.map
        place = np.isin(access.step, tables.of_kind(PLACE))
        from_shard = m.src.buffer == SHARD
        wrong = (m.dst.buffer != STORAGE) | ~np.where(
            place, from_shard | (m.src.buffer == STORAGE), m.src.buffer == STORAGE
        )
        wrong |= ~place & (m.src_dtype != RAW)
        if len(bad := np.flatnonzero(wrong)):
            scene.fail(
                "touches memory that an all-gather has no use for", step=tables.describe(int(access.step[bad[0]]))
            )
        held = map_.run[m.src.index, access.source] * map_.outer[m.src.index] * map_.shard_item[m.src.index]
        extent = m.src.offset + (m.runs - 1) * np.where(m.runs > 1, m.src.pitch, 0) + m.src_length
        if len(bad := np.flatnonzero(from_shard & (extent > held))):
            row = int(bad[0])
            scene.fail(
                f"reads beyond its shard, which has {held[row]} bytes",
                position=int(access.source[row]),
                parameter=int(m.src.index[row]),
                span=(int(m.src.offset[row]), int(extent[row])),
                step=tables.describe(int(access.step[row])),
            )
        areas = []
        for region, length, used, verb, side in (
            (m.src, m.src_length, ~from_shard, "reads", access.source),
            (m.dst, m.dst_length, np.ones(len(m.runs), dtype=bool), "writes", access.target),
        ):
            area = map_.locate(region, m.runs, length)
            if len(bad := np.flatnonzero(used & (area < 0))):
                row = int(bad[0])
                end = int(region.offset[row] + (m.runs[row] - 1) * region.pitch[row] + length[row])
                parameter, span = self._near(region, row, int(length[row]))
                scene.fail(
                    f"{verb} out of bounds: bytes [{region.offset[row]}, {end}) of the slot are not of one parameter",
                    position=int(side[row]),
                    parameter=parameter,
                    span=span,
                    step=tables.describe(int(access.step[row])),
                )
            areas.append(area)
        return areas[0], areas[1]

    # One collective ------------------------------------------------------------------------------

    def _block(
        self, block: Int64, number: Int64, src_area: Int64, dst_area: Int64, height: Int64, width: Int64
    ) -> None:
        """Cover of the storage of some ranks, and order of the reads from it."""
        access, m, areas = self.access, self.access.moves, len(height)
        written = np.flatnonzero(number[access.target] >= 0)
        writes = self._rects(
            written, number[access.target[written]], m.dst.offset, m.dst.pitch, m.dst_length, dst_area, width
        )
        sheet_height, sheet_width = np.tile(height, len(block)), np.tile(width, len(block))
        parts = [writes, remainder(self.map, height, width, len(block))]
        if self.scene.context.layout.bundle is not None:
            parts.append(self._pads(block, width, areas))
        cover = Cover(Rects.joined(*parts), sheet_height, sheet_width)
        if (fault := cover.fault()) is not None:
            self._report_cover(fault, block, areas, int(width[fault.sheet % areas]))
        read = np.flatnonzero((number[access.source] >= 0) & (m.src.buffer == STORAGE))
        reads = self._rects(read, number[access.source[read]], m.src.offset, m.src.pitch, m.src_length, src_area, width)
        reader, entry = cover.meets(reads)
        tags = np.concatenate([part.tag for part in parts])[entry]
        reader, tags = reader[tags >= 0], tags[tags >= 0]
        row = reads.tag[reader]
        pair = access.step[tags] * self.tables.steps + access.step[row]
        pair, at = np.unique(pair, return_index=True)
        first, second = np.divmod(pair, self.tables.steps)
        holds = self.order.steps_before(first, second, access.source[row[at]])
        if len(bad := np.flatnonzero(~holds)):
            sample = int(at[bad[0]])
            self._report_stale(int(row[sample]), int(tags[sample]), reads[int(reader[sample])], areas, width)

    def _rects(
        self, rows: Int64, number: Int64, offset: Int64, pitch: Int64, length: Int64, area: Int64, width: Int64
    ) -> Rects:
        at = area[rows]
        return rects(
            number * len(width) + at,
            width[at],
            offset[rows] - self.map.start[at],
            pitch[rows],
            self.access.moves.runs[rows],
            length[rows],
            rows,
        )

    def _pads(self, block: Int64, width: Int64, areas: int) -> Rects:
        """A rank does not write the alignment bytes of its own bundle segment, and nobody needs them."""
        which, start, length = self.map.pads(block)
        area, one = int(self.map.area_of[-1]), np.ones(len(which), dtype=np.int64)
        return rects(which * areas + area, one * width[area], start, 0 * one, one, length, -one)

    def _report_cover(self, fault: Fault, block: Int64, areas: int, width: int) -> None:
        area, position = fault.sheet % areas, int(block[fault.sheet // areas])
        parameter, span = self.map.name_span(area, fault.start, fault.stop)
        in_bundle = " (in its bundle)" if self.map.parameter[area] < 0 else ""
        real = [tag for tag in fault.tags if tag >= 0]
        if fault.gap:
            self.scene.fail(f"no step writes these bytes{in_bundle}", position=position, parameter=parameter, span=span)
        steps = " and ".join(self.tables.describe(int(self.access.step[tag])) for tag in real)
        self.scene.fail(
            f"written more than once{in_bundle}: by {steps}", position=position, parameter=parameter, span=span
        )

    def _report_stale(self, read: int, write: int, rect: Rects, areas: int, width: Int64) -> None:
        access, area = self.access, int(rect.sheet) % areas
        start = int(rect.top) * int(width[area]) + int(rect.left)
        parameter, span = self.map.name_span(area, start, start + int(rect.right) - int(rect.left))
        self.scene.fail(
            "is read before it is certain to be there: nothing orders the read after "
            f"{self.tables.describe(int(access.step[write]))}, which writes it",
            position=int(access.source[read]),
            parameter=parameter,
            span=span,
            step=self.tables.describe(int(access.step[read])),
        )

    # Two collectives -----------------------------------------------------------------------------

    def _across(self) -> None:
        """Writes of the next collective on the slot come after the reads of this one."""
        self._writes_are_awaited()
        self._reads_are_reported()
        self._writes_are_allowed()

    def _closed(self, step: Int64, memory: Int64) -> Bools:
        """Whether a rank knows by the end of its program that a step has finished."""
        tables, holds = self.tables, np.zeros(len(step), dtype=bool)
        for column in range(tables.queue_of.shape[1]):
            queue = tables.queue_of[memory, column]
            some = np.flatnonzero(~holds & (queue >= 0))
            ends = tables.queue_stop[queue[some]]
            holds[some] |= self.order.before(step[some], queue[some], ends, memory[some])
        return holds

    def _writes_are_awaited(self) -> None:
        """What others write into a rank's storage is there when the rank's collective ends."""
        access = self.access
        remote = np.flatnonzero((access.target != self.tables.position(access.step)) & self.subjects[access.target])
        step, row = self._extreme(access.target[remote], access.step[remote], last=True)
        row, memory = remote[row], access.target[remote[row]]
        if len(bad := np.flatnonzero(~self._closed(step, memory))):
            name = self.scene.name(int(memory[bad[0]]))
            self._fail_move(int(row[bad[0]]), f"{name} does not wait for this write before its all-gather ends")

    def _reads_are_reported(self) -> None:
        """A peer's last read ends before the rank's collective does, or before a signal the next one consumes."""
        access, tables, order = self.access, self.tables, self.order
        me = tables.position(access.step)
        remote = np.flatnonzero((access.source != me) & self.subjects[access.source])
        step, row = self._extreme(access.source[remote], access.step[remote], last=True)
        row, memory = remote[row], access.source[remote[row]]
        holds = self._closed(step, memory)
        size = self.scene.size
        awaited = tables.position(order.credit_wait) * size + tables.position(order.credit_signal)
        by_pair = np.argsort(awaited, kind="stable")
        self.awaited, signal = awaited[by_pair], order.credit_signal[by_pair]
        late = np.flatnonzero(~holds)
        self.readers = memory[late] * size + me[row[late]]
        found = np.searchsorted(self.awaited, self.readers)
        known = late[np.append(self.awaited, -1)[found] == self.readers]
        signal = signal[found[np.append(self.awaited, -1)[found] == self.readers]]
        queue = tables.queue[signal].astype(np.int64)
        holds[known] = order.before(step[known], queue, signal + 1, memory[known])
        if len(bad := np.flatnonzero(~holds)):
            at = int(row[bad[0]])
            self._fail_move(
                at,
                f"{self.scene.name(int(memory[bad[0]]))} is not told that this read is over before its storage is "
                "written by the next all-gather of the slot",
            )

    def _writes_are_allowed(self) -> None:
        """Writes come after the rank has begun, and after the waits for those that read before."""
        access, tables, order = self.access, self.tables, self.order
        subject = np.flatnonzero(self.subjects[access.target])
        step, row = self._extreme(access.target[subject], access.step[subject], last=False)
        row, memory = subject[row], access.target[subject[row]]
        begun = order.aware(step, memory)
        if len(bad := np.flatnonzero(~begun)):
            name = self.scene.name(int(memory[bad[0]]))
            self._fail_move(
                int(row[bad[0]]), f"writes into the storage of {name} without its leave ({name} may still use it)"
            )
        waits = order.credit_wait
        by_receiver = np.argsort(tables.position(waits), kind="stable")
        waits = waits[by_receiver]
        receiver = tables.position(waits)
        low, high = np.searchsorted(receiver, memory), np.searchsorted(receiver, memory, side="right")
        count = high - low
        pick = np.repeat(np.arange(len(step)), count)
        wait = waits[np.repeat(low - np.cumsum(count) + count, count) + np.arange(len(pick))]
        holds = order.steps_before(wait, step[pick], memory[pick])
        if len(bad := np.flatnonzero(~holds)):
            at = int(bad[0])
            self._fail_move(
                int(row[pick[at]]),
                f"may overwrite what a peer still reads: it is not ordered after {tables.describe(int(wait[at]))}",
            )

    def _extreme(self, memory: Int64, step: Int64, last: bool) -> tuple[Int64, Int64]:
        """First or last step of each queue that touches each rank's memory, and its row."""
        key = memory * len(self.tables.queue_start) + self.tables.queue[step]
        order = np.lexsort((-step if last else step, key))
        key = key[order]
        head = order[np.concatenate(([True], key[1:] != key[:-1]))] if len(key) else order
        return step[head], head

    def _fail_move(self, row: int, problem: str) -> None:
        access, m = self.access, self.access.moves
        parameter, span = self._near(m.dst, row, int(m.dst_length[row]))
        self.scene.fail(
            problem,
            position=int(access.target[row]),
            parameter=parameter,
            span=span,
            step=self.tables.describe(int(access.step[row])),
        )
