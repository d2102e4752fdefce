"""Ring positions of the receive, partial and wire areas: who writes, who reads, and in which order.

A *cell* is one ring position (of one sender, in the receive area), or, where every piece has a place of its own,
one such place. In one collective its accesses must alternate, written then read, each ordered after the one before.
That makes every read see one write, the same in all interleavings, so contents can be followed from write to read
by plain joins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tide.compiler.columns import BUFFERS, PARTIAL, RECEIVE, SPREAD, WIRE, Bools, Regions
from tide.compiler.schedule.areas import Areas
from tide.compiler.shard import Int64
from tide.compiler.verify.order import Order
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables


@dataclass(frozen=True, eq=False, slots=True)
class RingAccess:
    """Accesses to ring areas, one row a region; ``row`` is the caller's."""

    step: Int64
    memory: Int64
    region: Regions
    runs: Int64
    length: Int64
    row: Int64


class Rings:
    """Cells of one buffer on the subjects.

    Parameters
    ----------
    scene : Scene
        For messages.
    areas : Areas
        Where the areas lie, and how large their positions are.
    tables, order : Tables, Order
        Steps and their order.
    buffer : int
        ``RECEIVE``, ``PARTIAL``, ``WIRE`` or ``SPREAD``.
    writes, reads : RingAccess
        All accesses to this buffer on the subjects.
    """

    def __init__(
        self,
        scene: Scene,
        areas: Areas,
        tables: Tables,
        order: Order,
        buffer: int,
        writes: RingAccess,
        reads: RingAccess,
    ) -> None:
        self.scene, self.tables, self.order, self.buffer = scene, tables, order, buffer
        self.in_slot, self.writes, self.reads = areas.in_slot, writes, reads
        spread = scene.context.receive
        self.cell_size, cells, base = {
            RECEIVE: (areas.piece, areas.depth * areas.peers, areas.receive),
            PARTIAL: (areas.chunk, areas.depth, areas.partial),
            WIRE: (areas.chunk, areas.depth, areas.wire),
            SPREAD: (spread.spread_chunk, spread.spread_places, 0),
        }[buffer]
        #: Where each cell of a rank begins; in a ring they follow each other.
        self.starts = base + np.arange(cells, dtype=np.int64) * self.cell_size
        self.placed = not areas.ring and buffer not in (WIRE, SPREAD)
        if self.placed:
            self.starts = np.unique(writes.region.offset)
            self.cell_size = int(_extent(writes).max(initial=0))
        self.cells = len(self.starts)

    def match(self) -> Int64:
        """Proves the order within a collective; returns for each read the (index of the) write that it sees."""
        write_cell, read_cell = self._cells(self.writes, "writes"), self._cells(self.reads, "reads")
        write_epoch, read_epoch = self._alternate(write_cell, read_cell)
        # One key for (cell, epoch, offset within the cell); offsets of one epoch are distinct or it is a fault.
        epochs = int(max(write_epoch.max(initial=0), read_epoch.max(initial=0))) + 1
        scale = self.cell_size + 1

        def key(cell: Int64, epoch: Int64, offset: Int64) -> Int64:
            within = offset - self.starts[cell % max(self.cells, 1)] if len(cell) else offset
            return (cell * epochs + epoch) * scale + within

        w, r = self.writes, self.reads
        write_key = key(write_cell, write_epoch, w.region.offset)
        read_key = key(read_cell, read_epoch, r.region.offset)
        by_key = np.argsort(write_key, kind="stable")
        write_key = write_key[by_key]
        end = write_key + _extent(w)[by_key]
        clash = np.flatnonzero(write_key[1:] < end[:-1]) if len(end) else by_key
        if len(clash):
            self._fail(w, int(by_key[clash[0] + 1]), "written twice before it is read")
        at = np.minimum(np.searchsorted(write_key, read_key), max(len(write_key) - 1, 0))
        found = by_key[at] if len(by_key) else at
        if len(r.step) and not len(w.step):
            self._fail(r, 0, "read, but nothing writes it")
        same = (write_key[at] == read_key) if len(by_key) else np.zeros(0, dtype=bool)
        same &= (w.runs[found] == r.runs) & (w.length[found] == r.length)
        same &= (r.runs == 1) | (w.region.pitch[found] == r.region.pitch)
        if len(bad := np.flatnonzero(~same)):
            row = int(bad[0])
            self._fail(r, row, "reads other bytes than those that were written there last")
        times = np.bincount(found, minlength=len(w.step))
        if len(bad := np.flatnonzero(times != 1)):
            row = int(bad[0])
            self._fail(w, row, "never read" if times[row] == 0 else f"read {times[row]} times")
        return found

    def _cells(self, access: RingAccess, verb: str) -> Int64:
        """Cell of each access, numbered over all ranks; accesses stay within one cell."""
        offset, extent = access.region.offset, _extent(access)
        cell = np.searchsorted(self.starts, offset, side="right") - 1
        start = self.starts[np.maximum(cell, 0)] if self.cells else offset
        wrong = (cell < 0) | (access.runs < 1) | (access.length < 1)
        wrong |= offset + extent > start + self.cell_size
        wrong |= (access.runs > 1) & (access.region.pitch < access.length)
        if len(bad := np.flatnonzero(wrong)):
            area = "nothing is written there" if self.placed else f"the area has {self.cells} positions"
            self._fail(access, int(bad[0]), f"{verb} out of bounds: {area} of {self.cell_size} bytes")
        if self.placed:
            self._check_places(access, offset != start)
        return access.memory * max(self.cells, 1) + cell

    def _check_places(self, access: RingAccess, between: Bools) -> None:
        """Places do not overlap, and are read and written as wholes."""
        if len(bad := np.flatnonzero(between)):
            self._fail(access, int(bad[0]), "reads other bytes than those that were written there last")
        order = np.lexsort((access.region.offset, access.memory))
        offset, memory = access.region.offset[order], access.memory[order]
        end = offset + _extent(access)[order]
        overlaps = (memory[1:] == memory[:-1]) & (offset[1:] != offset[:-1]) & (offset[1:] < end[:-1])
        if len(bad := np.flatnonzero(overlaps)):
            self._fail(access, int(order[bad[0] + 1]), "overlaps the place of another piece")

    def _alternate(self, write_cell: Int64, read_cell: Int64) -> tuple[Int64, Int64]:
        """Checks that writes and reads of a cell take turns in order; returns the epoch of each access."""
        steps = self.tables.steps
        write_event, write_of = np.unique(write_cell * steps + self.writes.step, return_inverse=True)
        read_event, read_of = np.unique(read_cell * steps + self.reads.step, return_inverse=True)
        event = np.concatenate((write_event, read_event))
        is_read = np.arange(len(event)) >= len(write_event)
        cell, step = np.divmod(event, steps)
        order = np.lexsort((step, self.order.level[step], cell))
        cell, step, is_read = cell[order], step[order], is_read[order]
        head = np.concatenate(([True], cell[1:] != cell[:-1])) if len(cell) else np.zeros(0, dtype=bool)
        previous_read = np.concatenate(([False], is_read[:-1])) if len(cell) else head
        memory = cell // max(self.cells, 1)
        if len(bad := np.flatnonzero(is_read & head)):
            self._fail_event(int(step[bad[0]]), int(cell[bad[0]]), "reads it before anything is written there")
        unread = ~is_read & ~head & ~previous_read
        if len(bad := np.flatnonzero(unread)):
            at = int(bad[0])
            self._fail_event(
                int(step[at]),
                int(cell[at]),
                f"overwrites it before what {self.tables.describe(int(step[at - 1]))} put there is read",
            )
        # Each access after the one before it; reads side by side after the write of their epoch, and the
        # next write after each of them.
        epoch = np.cumsum(~is_read, dtype=np.int64)
        last_write = np.maximum.accumulate(np.where(~is_read, np.arange(len(step)), 0)) if len(step) else epoch
        read = np.flatnonzero(is_read)
        self._ordered(step[last_write[read]], step[read], memory[read], cell[read], "read")
        next_write = np.full(int(epoch.max(initial=0)) + 2, -1, dtype=np.int64)
        writes = np.flatnonzero(~is_read & ~head)
        next_write[epoch[writes] - 1] = writes
        then = next_write[epoch[read]]
        read, then = read[then >= 0], then[then >= 0]
        self._ordered(step[read], step[then], memory[read], cell[read], "overwritten")
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return epoch[back[: len(write_event)]][write_of], epoch[back[len(write_event) :]][read_of]

    def _ordered(self, first: Int64, second: Int64, memory: Int64, cell: Int64, verb: str) -> None:
        holds = self.order.steps_before(first, second, memory)
        if len(bad := np.flatnonzero(~holds)):
            at = int(bad[0])
            done = "written" if verb == "read" else "read"
            self._fail_event(
                int(second[at]),
                int(cell[at]),
                f"{verb} before it is certain to be {done}: nothing orders it after "
                f"{self.tables.describe(int(first[at]))}",
            )

    # Between collectives -------------------------------------------------------------------------

    def check_across(self) -> None:
        """Proves that the next collective on these areas, whatever its unit, does not disturb this one.

        Its queues follow those of this one by name, and nothing else holds it back. So: all local
        accesses of one side are in one queue; that queue has seen the other side's last access by its end
        (partial area), or the writers know that it has begun (areas that peers write to). In a slot, that the
        queue has begun says that the slot was vacated, and that its last reduce-scatter has ended.
        """
        tables, order = self.tables, self.order
        if self.buffer == PARTIAL and self.in_slot:
            return  # whatever uses the slot next waits until all streams of this collective have ended
        if self.buffer == PARTIAL:
            queue = tables.queue[self.writes.step].astype(np.int64)
            self._one_queue(self.writes, "written")
            rows = np.unique(self.reads.memory * tables.steps + self.reads.step, return_index=True)[1]
            writer = np.full(self.scene.size, -1, dtype=np.int64)
            writer[self.writes.memory] = queue
            step, memory = self.reads.step[rows], self.reads.memory[rows]
            holds = order.before(step, writer[memory], tables.queue_stop[writer[memory]], memory)
            if len(bad := np.flatnonzero(~holds)):
                self._fail(
                    self.reads,
                    int(rows[bad[0]]),
                    "may still be read when the next collective writes there: the writing stream ends without waiting",
                )
            return
        self._one_queue(self.reads, "read")
        reader = np.full(self.scene.size, -1, dtype=np.int64)
        reader[self.reads.memory] = tables.queue[self.reads.step]
        key = np.unique(self.writes.memory * tables.steps + self.writes.step, return_index=True)[1]
        # The first write of each queue into each rank's area: knowledge only grows along a queue.
        queue = tables.queue[self.writes.step[key]].astype(np.int64)
        pair = self.writes.memory[key] * len(tables.queue_start) + queue
        first = key[np.unique(pair, return_index=True)[1]]
        step, memory = self.writes.step[first], self.writes.memory[first]
        holds = order.before(tables.queue_start[reader[memory]], tables.queue[step].astype(np.int64), step, memory)
        if len(bad := np.flatnonzero(~holds)):
            self._fail(
                self.writes,
                int(first[bad[0]]),
                "may be written while the previous collective still reads there: nothing says that it has been left",
            )

    def _one_queue(self, access: RingAccess, verb: str) -> None:
        """All accesses on one rank are in one queue."""
        queue = self.tables.queue[access.step].astype(np.int64)
        found = np.full(self.scene.size, -1, dtype=np.int64)
        found[access.memory] = queue
        if len(bad := np.flatnonzero(found[access.memory] != queue)):
            self._fail(access, int(bad[0]), f"{verb} by two streams")

    def stream_names(self) -> set[str]:
        """Streams that touch the area from its own rank; they must be the same in all collectives."""
        access = self.writes if self.buffer == PARTIAL else self.reads
        queues = np.unique(self.tables.queue[access.step])
        return {self.tables.streams[int(self.tables.queue_stream[q])] for q in queues}

    # Messages ------------------------------------------------------------------------------------

    def refuse(self, access: RingAccess, wrong: Bools, problem: str) -> None:
        """Raises for the first access that is wrong, if there is one."""
        if len(bad := np.flatnonzero(wrong)):
            self._fail(access, int(bad[0]), problem)

    def _fail(self, access: RingAccess, row: int, problem: str) -> None:
        region = access.region
        start, extent = int(region.offset[row]), int(_extent(access)[row])
        self.scene.fail(
            f"{BUFFERS[self.buffer].value} area: {problem}",
            position=int(access.memory[row]),
            parameter=self._parameter(int(access.step[row])),
            span=(start, start + extent),
            step=self.tables.describe(int(access.step[row])),
        )

    def _fail_event(self, step: int, cell: int, problem: str) -> None:
        memory, at = divmod(cell, max(self.cells, 1))
        self.scene.fail(
            f"{BUFFERS[self.buffer].value} area, position {at}: {problem}",
            position=memory,
            parameter=self._parameter(step),
            span=(int(self.starts[at]), int(self.starts[at]) + self.cell_size),
            step=self.tables.describe(step),
        )

    def _parameter(self, step: int) -> int | None:
        """A parameter whose gradient the step carries."""
        return self.tables.gradient_of(step)


def _extent(access: RingAccess) -> Int64:
    """Bytes from the first to the last of each access."""
    return (access.runs - 1) * np.where(access.runs > 1, access.region.pitch, 0) + access.length


def only(access: RingAccess, keep: Bools) -> RingAccess:
    """Rows where ``keep`` is true."""
    return RingAccess(
        access.step[keep],
        access.memory[keep],
        access.region[keep],
        access.runs[keep],
        access.length[keep],
        access.row[keep],
    )
