"""Proof of a reduce-scatter: each gradient element reaches its owner once from every rank, in the fixed order.

The path of a piece is followed by joins: gradient → receive area → the node's sum → partial area → wire
or spread area → running sum → output. The fixed order is: within a node, rank by rank as the team's grid lists
them; across nodes, ``n, n - 1, n - 2, …`` for an owner on node ``n``, its own node first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tide.compiler.columns import (
    BUFFERS,
    COPY,
    DTYPE,
    GRAD,
    MULTICAST,
    PARTIAL,
    PUT,
    RECEIVE,
    SIZES,
    SPREAD,
    STAGED,
    WIRE,
    Bools,
    Regions,
)
from tide.compiler.schedule.areas import areas_of
from tide.compiler.shard import Int64
from tide.compiler.verify.gather import check_routes
from tide.compiler.verify.order import Order
from tide.compiler.verify.outputs import OutputProof, Pieces
from tide.compiler.verify.reduce_columns import ReduceColumns
from tide.compiler.verify.rings import RingAccess, Rings, only
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.slot import check_areas, check_overlay
from tide.compiler.verify.switch import SwitchSums, accesses, check_switch_sums
from tide.compiler.verify.tables import Tables

#: Ranks that are proved at a time; bounds the memory of the proof, whose arrays are fastest where caches hold them.
_BLOCK = 32


def _blocks(grid: Int64) -> Iterator[Bools]:
    """Some rows of the grid at a time, as the set of their positions."""
    many = max(_BLOCK // grid.shape[1], 1)
    for first in range(0, len(grid), many):
        block = np.zeros(grid.size, dtype=bool)
        block[grid[first : first + many].ravel()] = True
        yield block


class ReduceProof:
    """Proof of the reduce-scatter of one unit on one team.

    Parameters
    ----------
    scene : Scene
        Unit and team.
    tables : Tables
        Loaded programs.
    order : Order
        Of their steps.
    subjects : ndarray of bool, shape (positions,)
        Positions whose receive and partial areas and sums are proved; the ranks of their nodes must be loaded.
    owners : ndarray of bool, shape (positions,)
        Positions whose output is proved; the ranks of their rails must be loaded.
    """

    def __init__(self, scene: Scene, tables: Tables, order: Order, subjects: Bools, owners: Bools) -> None:
        self.scene, self.tables, self.order = scene, tables, order
        self.subjects, self.owners = subjects, owners
        self.areas = areas_of(scene.context, tuple(i for i, p in enumerate(scene.parameters) if p.trainable))
        #: Stream names that touch each ring area from its own rank, by buffer.
        self.streams: dict[int, set[str]] = {}
        #: What the switch sums add, if there are any.
        self.switch: SwitchSums | None = None

    def run(self) -> int:
        """Proves; returns the bytes of gradients and partial sums that are moved."""
        scene, tables = self.scene, self.tables
        if len(wrong := tables.of_kind(MULTICAST)):
            scene.fail("has no use in a reduce-scatter", step=tables.describe(int(wrong[0])))
        check_routes(scene, tables)
        check_areas(scene, self.areas, bool(tables.in_slot))
        grid = np.array(scene.context.team.grid, dtype=np.int64)
        puts, moved = tables.access(PUT).source, 0
        pieces = Pieces.empty(len(puts))
        for rows in _blocks(grid):
            moved += self._node_phase(rows, puts, pieces)
        # The switch sums over ranks of several rails.
        for lanes in [np.ones(grid.size, dtype=bool)] if tables.switch else _blocks(grid.T):
            moved += self._rail_phase(lanes, puts, pieces)
        return moved

    def _node_phase(self, block: Bools, puts: Int64, pieces: Pieces) -> int:
        """Proves what happens within some nodes, and notes what their puts carry; returns bytes pushed."""
        block = block & self.tables.loaded
        self.c = ReduceColumns(self.scene, self.tables, block, self._staged())
        self._check_use()
        self._check_packing()
        self._check_release()
        receive, pushed = self._ring(RECEIVE, self.subjects & block)
        self._check_node_sums(pushed)
        partial, carried = self._ring(PARTIAL, block)
        for ring in (receive, partial):
            self._finish(ring)
        if self.areas.in_slot and not self.areas.ring:
            check_overlay(self.scene, self.areas, receive, partial)
        here = np.flatnonzero(self.tables.kind[self.c.moves.step] == PUT)
        pieces.note(np.flatnonzero(block[puts]), self.c, carried[here])
        m = self.c.moves
        sent = np.flatnonzero((self.tables.kind[m.step] == COPY) & self.subjects[m.target])
        return int((m.moves.runs[sent] * m.moves.dst_length[sent]).sum())

    def _rail_phase(self, block: Bools, puts: Int64, pieces: Pieces) -> int:
        """Proves what happens on some rails; returns bytes put."""
        self.c = ReduceColumns(self.scene, self.tables, block & self.tables.loaded, self._staged(), copies=False)
        wire, arrived = self._ring(WIRE, self.owners & block)
        self._finish(wire)
        rows = np.flatnonzero((block & self.tables.loaded)[puts])  # the puts of this block, in their order
        weight = None
        if self.tables.switch:
            found = self._switch_phase(pieces[rows])
            arrived, weight = np.where(found.arrived < 0, arrived, found.arrived), found.weight
        OutputProof(self.c, self.order, self.owners & block, arrived, pieces[rows], weight).run()
        m = self.c.moves
        sent = np.flatnonzero(self.owners[m.target])
        return int((m.moves.runs[sent] * m.moves.dst_length[sent]).sum())

    def _staged(self) -> tuple[int, int]:
        """First byte and end of the area of packed gradients."""
        areas = self.areas
        size = areas.staged_size if areas.in_slot else self.scene.context.receive.staged_size
        return areas.staged, areas.staged + size

    def _check_packing(self) -> None:
        """Packing is ordered from one collective to the next: by one stream, the same in all."""
        streams = np.unique(self.tables.queue_stream[self.tables.queue[self.c.casts.step]])
        names = {self.tables.streams[int(number)] for number in streams}
        if names and not self.areas.in_slot:
            self.streams.setdefault(STAGED, set()).update(names)

    def _switch_phase(self, pieces: Pieces) -> SwitchSums:
        """Proves what the switch sums."""
        scene, tables, order = self.scene, self.tables, self.order
        writes, reads, hosts = accesses(scene, tables, self.c, self.owners)
        ring = Rings(scene, self.areas, tables, order, SPREAD, writes, reads)
        self.switch = check_switch_sums(scene, tables, order, self.c, hosts, pieces, ring)
        self.streams.setdefault(SPREAD, set()).update(self.switch.streams)
        return self.switch

    def _finish(self, ring: Rings) -> None:
        ring.check_across()
        if not self.areas.in_slot:
            self.streams.setdefault(ring.buffer, set()).update(ring.stream_names())

    # Use of buffers ------------------------------------------------------------------------------

    def _check_use(self) -> None:
        """Each step reads and writes the buffers it may; gradients are read within their bounds."""
        tables, m = self.tables, self.c.moves.moves
        push = tables.kind[self.c.moves.step] == COPY
        pulls = push & (tables.count[self.c.moves.step] == 1)
        wrong = np.where(
            push,
            pulls | (m.src.buffer != GRAD) | (m.dst.buffer != RECEIVE),
            (m.src.buffer != PARTIAL) | ~np.isin(m.dst.buffer, (WIRE, SPREAD)),
        )
        if len(bad := np.flatnonzero(wrong)):
            row = int(bad[0])
            src, dst = BUFFERS[int(m.src.buffer[row])].value, BUFFERS[int(m.dst.buffer[row])].value
            self.scene.fail(
                f"moves {src} to {dst}; gradients go to receive areas, partial sums to wire and spread areas",
                step=tables.describe(int(self.c.moves.step[row])),
            )
        self._check_gradients(m.src[push], m.runs[push], m.src_length[push], self.c.moves.step[push])
        casts = self.c.casts.moves
        self._check_gradients(casts.src, casts.runs, casts.src_length, self.c.casts.step)
        from_grad = self.c.src.buffer == GRAD
        of = self.c.src_of[from_grad]
        length = self.c.count[of] * SIZES[self.c.src_dtype[of]]
        self._check_gradients(self.c.src[from_grad], self.c.runs[of], length, self.c.row_step[of])
        wrong = (self.c.runs < 1) | (self.c.count < 1) | (np.bincount(self.c.src_of, minlength=self.c.rows) < 1)
        if len(bad := np.flatnonzero(wrong)):
            self.scene.fail("sums nothing", step=tables.describe(int(self.c.row_step[bad[0]])))

    def _check_gradients(self, region: Regions, runs: Int64, length: Int64, step: Int64) -> None:
        known = np.isin(region.index, self.c.trainable)
        index = np.where(known, region.index, 0)
        end = region.offset + (runs - 1) * np.where(runs > 1, region.pitch, 0) + length
        wrong = ~known | (region.offset < 0) | (end > (self.c.numel * self.c.grad_size)[index])
        if len(bad := np.flatnonzero(wrong)):
            row = int(bad[0])
            self.scene.fail(
                "reads out of bounds: the gradient has "
                f"{int((self.c.numel * self.c.grad_size)[index[row]]) if known[row] else 0} bytes",
                parameter=int(region.index[row]),
                span=(int(region.offset[row]), int(end[row])),
                step=self.tables.describe(int(step[row])),
            )

    def _check_release(self) -> None:
        """Gradients are read by streams at whose end they are released, and by no others."""
        tables = self.tables
        reading = np.concatenate(
            (
                self.c.casts.step,
                self.c.moves.step[self.c.moves.moves.src.buffer == GRAD],
                self.c.row_step[self.c.src_of[self.c.src.buffer == GRAD]],
            )
        )
        late = np.flatnonzero(reading >= tables.queue_released[tables.queue[reading]])
        if len(late):
            self.scene.fail(
                "reads gradients that its stream has released before", step=tables.describe(int(reading[late[0]]))
            )
        for queue in np.unique(tables.queue[reading]):
            position, stream = int(tables.queue_position[queue]), tables.streams[int(tables.queue_stream[queue])]
            if stream not in tables.release[position]:
                self.scene.fail(
                    f"stream {stream} reads gradients, but they are released without waiting for it "
                    f"(release: {', '.join(tables.release[position]) or 'nothing'})",
                    position=position,
                )

    # Rings ---------------------------------------------------------------------------------------

    def _ring(self, buffer: int, subjects: Bools) -> tuple[Rings, Int64]:
        """Matches the accesses of one ring area; returns it, and for each read (by its row) the row written.

        Rows of reads are sources of sums (receive, wire) or moves (partial); rows of writes are moves
        (receive, wire) or sums (partial). Rows that are not matched get -1.
        """
        m, step = self.c.moves.moves, self.c.moves.step
        if buffer == PARTIAL:
            some, rows = self.c.dst.buffer == PARTIAL, np.arange(self.c.rows)
            size = self.c.count * SIZES[self.c.dst_dtype]
            writes = RingAccess(self.c.row_step, self.c.me, self.c.dst, self.c.runs, size, rows)
            writes = only(writes, some & subjects[self.c.me])
            reads = RingAccess(step, self.c.moves.source, m.src, m.runs, m.src_length, np.arange(len(step)))
            reads = only(reads, (m.src.buffer == PARTIAL) & subjects[self.c.moves.source])
        else:
            writes = RingAccess(step, self.c.moves.target, m.dst, m.runs, m.dst_length, np.arange(len(step)))
            writes = only(writes, (m.dst.buffer == buffer) & subjects[self.c.moves.target])
            of = self.c.src_of
            size = self.c.count * SIZES[self.c.src_dtype]
            reads = RingAccess(
                self.c.row_step[of], self.c.me[of], self.c.src, self.c.runs[of], size[of], np.arange(len(of))
            )
            reads = only(reads, (self.c.src.buffer == buffer) & subjects[self.c.me[of]])
        ring = Rings(self.scene, self.areas, self.tables, self.order, buffer, writes, reads)
        found = np.full(len(step) if buffer == PARTIAL else len(self.c.src_of), -1, dtype=np.int64)
        found[reads.row] = writes.row[ring.match()] if len(writes.row) or len(reads.row) else reads.row
        return ring, found

    # Node sums -----------------------------------------------------------------------------------

    def _check_node_sums(self, pushed: Int64) -> None:
        """Every node sum adds the same elements of all ranks of the node, in the order of the grid."""
        node = self.c.node_sum
        subject = node & self.subjects[self.c.me]
        if len(bad := np.flatnonzero(node & (self.c.own < 0))):
            row = int(bad[0])
            others = pushed[np.flatnonzero((self.c.src_of == row) & (pushed >= 0))]
            moved = self.c.moves.moves.src
            parameter = int(moved.index[others[0]]) if len(others) else None
            span = (int(moved.offset[others[0]]), int(moved.offset[others[0]]) + 1) if len(others) else None
            self.scene.fail(
                "leaves out the gradient of the rank itself",
                position=int(self.c.me[row]),
                parameter=parameter,
                span=span and (span[0], span[0] + int(self.c.count[row] * SIZES[self.c.src_dtype[row]])),
                step=self.tables.describe(int(self.c.row_step[row])),
            )
        far = np.isin(self.c.src.buffer, (WIRE, SPREAD))
        allowed = np.isin(self.c.src.buffer, (GRAD, RECEIVE)) | far & ~node[self.c.src_of]
        if len(bad := np.flatnonzero(~allowed)):
            self.c.fail_sum(int(self.c.src_of[bad[0]]), f"cannot sum {BUFFERS[int(self.c.src.buffer[bad[0]])].value}")
        of = self.c.src_of
        want = self.c.grid[self.c.seat[self.c.me, 0]]  # (row, local)
        counts = np.bincount(of, minlength=self.c.rows)
        if len(bad := np.flatnonzero(subject & (counts != want.shape[1]))):
            self.c.fail_sum(int(bad[0]), f"sums {counts[bad[0]]} pieces, but the node has {want.shape[1]} ranks")
        rows = np.flatnonzero(subject[of])
        from_grad = self.c.src.buffer[rows] == GRAD
        sent = pushed[rows[~from_grad]]
        origin = self.c.me[of[rows]]
        origin[~from_grad] = self.c.moves.source[sent]
        sums = of[rows]
        rank = want[sums, np.minimum(self.c.ordinal[rows], want.shape[1] - 1)]
        if len(bad := np.flatnonzero(origin != rank)):
            row = int(rows[bad[0]])
            self.c.fail_sum(
                int(of[row]),
                f"adds the piece of {self.scene.name(int(origin[bad[0]]))} where that of "
                f"{self.scene.name(int(rank[bad[0]]))} is due; the order of sums is fixed",
            )
        own = self.c.own[sums]
        moved, first = self.c.moves.moves.src, self.c.src[rows]
        index, offset, pitch = first.index, first.offset, first.pitch
        index[~from_grad], offset[~from_grad], pitch[~from_grad] = (
            column[sent] for column in (moved.index, moved.offset, moved.pitch)
        )
        wrong = (index != self.c.src.index[own]) | (offset != self.c.src.offset[own])
        wrong |= (self.c.runs[sums] > 1) & (pitch != self.c.src.pitch[own])
        if len(bad := np.flatnonzero(wrong)):
            at = int(bad[0])
            row, size = int(sums[at]), int(SIZES[self.c.src_dtype[sums[at]]])
            self.scene.fail(
                f"adds bytes [{offset[at]}, {offset[at] + int(self.c.count[row]) * size}) of the gradient of "
                f"{self.scene.parameters[int(index[at])].name} from {self.scene.name(int(origin[at]))}, "
                "which belong elsewhere",
                position=int(self.c.me[row]),
                parameter=int(self.c.src.index[own[at]]),
                span=self.c.grad_span(row),
                step=self.tables.describe(int(self.c.row_step[row])),
            )
        index = self.c.src.index[np.maximum(self.c.own, 0)] if len(self.c.src_of) else self.c.own
        wrong = node & (self.c.src_dtype != self.c.grad_dtype[index])
        if len(bad := np.flatnonzero(wrong)):
            self.c.fail_sum(int(bad[0]), "sums another type than the gradient's")
        to_partial = self.c.dst.buffer == PARTIAL
        wire = self.scene.context.options.wire_dtype
        wrong = to_partial & (self.c.based | (self.c.dst_dtype != DTYPE[wire]) | ~node)
        if len(bad := np.flatnonzero(wrong)):
            self.c.fail_sum(int(bad[0]), f"is no {wire} sum of the node alone, yet goes into the partial area")
        final = self.tables.count[self.c.row_step] == 1
        if len(bad := np.flatnonzero(to_partial & final)):
            self.c.fail_sum(int(bad[0]), "applies scale and divisor to a partial sum; only the last sum is final")
