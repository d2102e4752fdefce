"""Reduce-scatter: every rank's gradients into float32 shards at their owners (TIDE-RS).

A rank's output is the sequence of its shards, cut into chunks. Phase 1 works inside the node: each
rank pushes its piece of a chunk to the chunk's *reducer*, which sums the pieces in rank order. On one node the
reducer is the owner. Across nodes the reducer is the rank of this node on the owner's rail; its own node's sums
begin the running sums of its own output, the others it puts to their owners (phase 2), who fold them in, node by
node::

    stream rs.push   (pack) CREDIT? push ─▶ PUSHED!             … for every chunk, to all reducers of the node
    stream rs.sum    CREDIT! PUSHED? sum ─▶ SUMMED! or BEGUN!
    stream rs.wire   SUMMED? WIRE_CREDIT? put            (─▶ SENT!)
    stream rs.fold   WIRE_CREDIT! BEGUN? PARTIAL? running += partial

In round ``j`` node ``n`` reduces for node ``n + 1 + j``, so every rail link carries one partial sum at a
time and nobody is sent to by two. Own chunks alternate with those of round 0: the wire starts with the first
sum, and running sums are there before anything arrives. The order of every sum is fixed by the program: the ranks of
a node in order, then own node ``n``, ``n - 1``, ``n - 2``, …; scale and divisor come with the last.

In a vacated slot each piece and each partial sum has its own place (:mod:`~tide.compiler.schedule.areas`): one
CREDIT a peer says that the slot is vacated, phase 1 waits for nothing but the pieces, and gradients are released
before the wire has carried anything. In rings of ``receive_depth`` positions, every position is handed out by a
credit, and a partial sum waits until the one before it in its position was SENT; so the wire paces phase 1, but for
the last ``receive_depth`` chunks. Either way memory does not grow with the number of nodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tide.compiler.columns import (
    ACCUMULATE,
    COPY,
    DTYPE,
    GRAD,
    PARTIAL,
    PLACE,
    PUT,
    RAW,
    RECEIVE,
    SHARD,
    SIGNAL,
    STAGED,
    WAIT,
    WIRE,
    Bools,
    Moved,
    Moves,
    Payloads,
    ProgramRows,
    Regions,
    Rows,
    Summed,
    Sums,
    frames,
    joined,
    ranges,
)
from tide.compiler.schedule.areas import areas_of
from tide.compiler.schedule.outputs import Outputs
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.shard import Int64
from tide.compiler.steps import Lane, Stream


class Turns(NamedTuple):
    """Chunks that a reducer sums, in order, and where their pieces and partial sums lie; an array each.

    ``kind`` is the chunk's in :class:`Outputs`; ``pieces`` is the offset of the first rank's piece, each of ``piece``
    bytes; ``partial`` that of the sum.
    """

    owner: Int64
    number: Int64
    kind: Int64
    pieces: Int64
    piece: Int64
    partial: Int64

    def some(self, rows: Any) -> Turns:
        """Some of them."""
        return Turns(*(column[rows] for column in self))

    @classmethod
    def joined(cls, works: list[Turns]) -> Turns:
        """Those of several reducers, one after the other."""
        nothing = cls(*(np.zeros(0, dtype=np.int64) for _ in cls._fields))
        return cls(*(np.concatenate(column) for column in zip(nothing, *works, strict=True)))


class Destinations(NamedTuple):
    """Where partial sums are put: whose memory, which place, and the signals that allow and carry the puts."""

    peer: Int64
    start: Int64
    buffer: int
    credit: Lane
    carried: Lane


class Builder:
    """Writes the streams of one position as columns.

    Much of what they hold is the same on other positions too. It is made once and kept in the memo.
    """

    def __init__(self, context: UnitContext, position: int, subset: tuple[int, ...]) -> None:
        self.context, self.position, self.subset = context, position, subset
        self.team, self.areas = context.team, areas_of(context, subset)
        self.depth, self.wire_dtype = self.areas.depth, DTYPE[context.options.wire_dtype]
        self.node, self.local = self.team.seat(position)
        self.row = self.team.grid[self.node]
        self.peers = [self.row[(self.local + j) % self.team.per_node] for j in range(1, self.team.per_node)]
        self.crosses = self.team.nodes > 1
        self.memo: dict[Any, Any] = context.memo.setdefault(("reduce_scatter", subset), {})
        if "outputs" not in self.memo:
            self.memo["outputs"] = Outputs(context, self.areas, subset)
        self.outputs: Outputs = self.memo["outputs"]

    def streams(self) -> list[Rows | Stream]:
        """All streams."""
        streams: list[Rows | Stream] = [self.push(), self.sum()]
        return [*streams, self.wire(), self.fold()] if self.crosses else streams

    def rows(self) -> ProgramRows:
        """The program."""
        streams, release = tuple(self.streams()), ("rs.push", "rs.sum")
        return ProgramRows("reduce_scatter", self.position, streams, release, self.areas.in_slot)

    # Work --------------------------------------------------------------------------------------

    def work(self, local: int) -> Turns:
        """Chunks that the reducer of this node with this local rank sums, in order."""
        key = ("work", self.node, local)
        if key not in self.memo:
            self.memo[key] = self.turns(local)
        found: Turns = self.memo[key]
        return found

    def order(self, local: int) -> tuple[Int64, Int64]:
        """Owner and number of each chunk: round 0 and the own output by turns, then the other rounds."""
        rail = np.array([row[local] for row in self.team.grid], dtype=np.int64)
        rounds = np.roll(rail, -(self.node + 1))  # the own output is the last of all
        ahead, own, others = rounds[:-1][:1], rounds[-1:], rounds[1:-1]
        owner, number = self.numbered(np.concatenate((ahead, own)))
        turn = np.lexsort((owner == own[0], number))
        rest, which = self.numbered(others)
        return np.concatenate((owner[turn], rest)), np.concatenate((number[turn], which))

    def numbered(self, owners: Int64) -> tuple[Int64, Int64]:
        """The chunks of some owners, owner by owner."""
        number, of = ranges(np.zeros_like(owners), self.outputs.chunks[owners])
        return owners[of], number

    def turns(self, local: int) -> Turns:
        """The work of a reducer of this node, each chunk with its place."""
        areas = self.areas
        owner, number = self.order(local)
        kind = self.outputs.first_kind[owner] + number
        crosses = owner != self.row[local]
        if areas.ring:
            piece = np.full(len(owner), areas.piece, dtype=np.int64)
            place, crossing = np.arange(len(owner)) % areas.depth, np.cumsum(crosses) - crosses
            pieces = areas.receive + place * areas.peers * areas.piece
            return Turns(owner, number, kind, pieces, piece, areas.partial + crossing % areas.depth * areas.chunk)
        size = self.outputs.extent[kind]
        piece, sums = size * areas.width, np.where(crosses, size * areas.wire_width, 0)
        taken = areas.peers * piece
        pieces = areas.receive + np.cumsum(taken) - taken
        return Turns(owner, number, kind, pieces, piece, areas.partial + np.cumsum(sums) - sums)

    def incoming(self) -> tuple[Int64, Int64]:
        """Partial sums that come from other nodes, in order: source and chunk."""
        rail = np.array([row[self.local] for row in self.team.grid], dtype=np.int64)
        sources = np.roll(rail[::-1], self.node)[:-1]  # node - 1, node - 2, …
        chunks = int(self.outputs.chunks[self.position])
        return np.repeat(sources, chunks), np.tile(np.arange(chunks), len(sources))

    def arrival(self, turn: Int64) -> Int64:
        """Where the partial sums that arrive in these turns begin in the wire area."""
        return self.areas.wire + turn % self.depth * self.areas.chunk

    # Streams -----------------------------------------------------------------------------------

    def push(self) -> Rows:
        """Pushes this rank's pieces to the reducers of its node, a chunk of each at a time.

        First all credits of such a wave, then all copies, then all signals: a transport may carry out each of the
        three in one call, however many peers there are. Nobody is kept waiting, as a sum needs the pieces of all.
        """
        works = [self.work(self.team.seat(peer)[1]) for peer in self.peers]
        lengths = np.array([len(work.owner) for work in works], dtype=np.int64)
        wave = np.arange(lengths.max(initial=0))
        active = wave[:, None] < lengths
        credits = active & (self.areas.ring or wave[:, None] == 0)
        steps = frames(
            np.stack((credits, active, active), axis=1),
            [[WAIT], [COPY], [SIGNAL]],
            self.peers,
            [[Lane.CREDIT], [-1], [Lane.PUSHED]],
            [[1], [0], [1]],
        )
        payloads: Payloads = {COPY: partial(self.pushes, works, active)}
        if any(self.outputs.small_extent[work.kind].any() for work in works):
            steps = joined(frames(np.array([True]), PLACE, -1, -1, 0), steps)
            payloads = {PLACE: partial(self.packing, works), **payloads}
        return Rows("rs.push", steps, payloads)

    def staged(self, work: Turns) -> Int64:
        """Where the small gradients of chunks are packed, one after the other."""
        room = self.outputs.small_extent[work.kind] * self.areas.width
        return self.areas.staged + np.cumsum(room) - room

    def packing(self, works: list[Turns]) -> Moved:
        """Packs this rank's small gradients, reducer by reducer."""
        work, small = Turns.joined(works), self.outputs.small
        row, of = ranges(small.first[work.kind], small.first[work.kind + 1])
        along = small.at[row] - small.at[small.first[work.kind[of]]]
        start = self.staged(work)[of] + along * self.areas.width
        return np.array([len(row)]), self.outputs.packing(row, work.owner[of], start)

    def pushes(self, works: list[Turns], active: Bools) -> Moved:
        """Pushes of all pieces, wave by wave, from the gradients, or from where they are packed."""
        work, pushed = Turns.joined(works), self.outputs.pushed
        staged = self.staged(work)
        # The piece of a rank comes after those of the ranks before it, the reducer left out.
        reducer = np.repeat([self.team.seat(peer)[1] for peer in self.peers], active.sum(axis=0))
        start = work.pieces + (self.local - (self.local > reducer)) * work.piece
        at = np.zeros(active.T.shape, dtype=np.int64)
        at[active.T] = np.arange(len(start))
        turn = at.T[active]  # of each copy, in the order of the copies
        kind = work.kind[turn]
        row, of = ranges(pushed.first[kind], pushed.first[kind + 1])
        turn, small, index = turn[of], pushed.packed[row], pushed.index[row]
        src = pushed.src[row] + np.where(small, staged[turn], self.outputs.grad[index, work.owner[turn]])
        return pushed.first[kind + 1] - pushed.first[kind], _transfers(
            Regions(np.where(small, STAGED, GRAD), index, src, pushed.src_pitch[row]),
            Regions(_full(RECEIVE, row), _full(0, row), start[turn] + pushed.dst[row], pushed.dst_pitch[row]),
            pushed.runs[row],
            pushed.length[row],
        )

    def sum(self) -> Rows:
        """Sums the node's pieces, rank by rank; in a ring, hands the positions out again."""
        work, ring, many = self.work(self.local), self.areas.ring, len(self.peers)
        count, turn = len(work.owner), np.arange(len(work.owner))[:, None]
        own = (work.owner == self.position)[:, None]
        crossing = np.cumsum(~own)[:, None]
        last = int(crossing[-1, 0]) if count else 0
        credit = min(self.depth, count) if ring else 1
        first = frames(
            np.full(many if count else 0, True), SIGNAL, self.peers[: many if count else 0], Lane.CREDIT, credit
        )
        every, again = np.full((count, many), True), np.full((count, many), ring) & (turn + self.depth < count)
        sent, told = ring & ~own & (crossing > self.depth), np.full((count, 1), self.crosses)
        me = [self.position]
        steps = frames(
            np.concatenate((every, sent, np.full((count, 1), True), told, again), axis=1),
            [WAIT] * many + [WAIT, ACCUMULATE, SIGNAL] + [SIGNAL] * many,
            self.peers + me + [-1] + me + self.peers,
            np.concatenate(
                (
                    np.full((count, many), Lane.PUSHED),
                    np.full((count, 1), Lane.SENT),
                    np.full((count, 1), -1),
                    np.where(own, Lane.BEGUN, Lane.SUMMED),
                    np.full((count, many), Lane.CREDIT),
                ),
                axis=1,
            ),
            np.concatenate(
                (
                    np.ones((count, many + 1), dtype=np.int64),
                    own & (not self.crosses),
                    np.ones((count, many + 1), dtype=np.int64),
                ),
                axis=1,
            ),
        )
        columns = joined(first, steps)
        if not last or self.areas.in_slot:  # whatever uses the slot next waits for all streams' ends
            return Rows("rs.sum", columns, {ACCUMULATE: self.node_sums})
        # The next collective writes where these partial sums lie; gradients need not wait for them.
        released = len(columns.kind)
        end = frames(np.array([True]), WAIT, self.position, Lane.SENT, min(self.depth, last))
        return Rows("rs.sum", joined(columns, end), {ACCUMULATE: self.node_sums}, released)

    def node_sums(self) -> Summed:
        """The node's sums of its chunks, in rank order: partial sums, or the beginning of the running sum."""
        work, outputs, areas = self.work(self.local), self.outputs, self.areas
        parts = outputs.parts
        row, of = ranges(parts.first[work.kind], parts.first[work.kind + 1])
        index, turn = parts.index[row], work.some(of)
        size = outputs.grad_size[index]
        srcs = []
        for local, source in enumerate(self.row):
            if source == self.position:
                srcs.append(outputs.gradient(row, turn.owner))
            else:
                # Places are spaced by the unit's widest gradient: a narrow segment may lie behind a wide one.
                start = turn.pieces + (local - (local > self.local)) * turn.piece
                srcs.append(outputs.placed(row, RECEIVE, start, areas.width, size))
        own = turn.owner == self.position
        sent = outputs.placed(row, PARTIAL, turn.partial, areas.wire_width, areas.wire_width)
        kept = outputs.result(row, self.position, np.full(len(row), not self.crosses))
        dst = Regions(
            *(np.where(own, ours, theirs) for ours, theirs in zip(kept.columns(), sent.columns(), strict=True))
        )
        dtype = DTYPE["float32"] if self.crosses else outputs.out_dtype[index]
        sums = Sums(
            dst,
            _nowhere(row),
            Regions(*(np.stack(column, axis=1).ravel() for column in zip(*(s.columns() for s in srcs), strict=True))),
            np.arange(len(row) + 1) * len(srcs),
            np.zeros(len(row), dtype=bool),
            parts.runs[row],
            parts.count[row],
            outputs.grad_dtype[index],
            np.where(own, dtype, self.wire_dtype),
        )
        return parts.first[work.kind + 1] - parts.first[work.kind], sums

    def crossing(self) -> Turns:
        """The turns whose sums other nodes add."""
        work = self.work(self.local)
        return work.some(work.owner != self.position)

    def wire(self) -> Rows:
        """Puts the partial sums to where they are summed further."""
        work = self.crossing()
        count, to = len(work.owner), self.destinations(work)
        waited = count - (self.depth if self.areas.in_slot else 0) if self.areas.ring else 0
        keep = np.full((count, 4), True)
        keep[:, 3] = np.arange(count) < waited
        me, there = np.full(count, self.position), to.peer
        columns = frames(
            keep,
            [WAIT, WAIT, PUT, SIGNAL],
            np.stack((me, there, there, me), axis=1),
            [Lane.SUMMED, to.credit, to.carried, Lane.SENT],
            1,
        )
        return Rows("rs.wire", columns, {PUT: self.puts})

    def puts(self) -> Moved:
        """The partial sums, each from its place to its destination."""
        work, outputs, size = self.crossing(), self.outputs, self.areas.wire_width
        to, parts = self.destinations(work), outputs.parts
        row, of = ranges(parts.first[work.kind], parts.first[work.kind + 1])
        src = outputs.placed(row, PARTIAL, work.partial[of], size, size)
        dst = outputs.placed(row, to.buffer, to.start[of], size, size)
        return parts.first[work.kind + 1] - parts.first[work.kind], _transfers(
            src, dst, parts.runs[row], parts.count[row] * size
        )

    def destinations(self, turns: Turns) -> Destinations:
        """The owner's wire area, a ring that is filled in the order of the owner's `incoming`."""
        nodes = self.outputs.node[turns.owner]
        earlier = (nodes - 1 - self.node) % self.team.nodes  # nodes whose partial sums come first
        start = self.arrival(earlier * self.outputs.chunks[turns.owner] + turns.number)
        return Destinations(turns.owner, start, WIRE, Lane.WIRE_CREDIT, Lane.PARTIAL)

    def fold(self) -> Rows | Stream:
        """Adds partial sums of other nodes to the running sum, in the order of the rounds; the last are final."""
        source, _ = self.incoming()
        count, chunks, turn = len(source), int(self.outputs.chunks[self.position]), np.arange(len(source))
        ahead = source[: self.depth]
        first = frames(np.full(len(ahead), True), SIGNAL, ahead, Lane.WIRE_CREDIT, 1)
        later = turn + self.depth
        keep = np.stack((turn < chunks, turn >= 0, turn >= 0, later < count), axis=1)
        next_ = source[np.minimum(later, count - 1)]
        peer = np.stack((np.full(count, self.position), source, np.full(count, -1), next_), axis=1)
        one = np.ones(count, dtype=np.int64)
        steps = frames(
            keep,
            [WAIT, WAIT, ACCUMULATE, SIGNAL],
            peer,
            [Lane.BEGUN, Lane.PARTIAL, -1, Lane.WIRE_CREDIT],
            np.stack((one, one, turn >= count - chunks, one), axis=1),
        )
        return Rows("rs.fold", joined(first, steps), {ACCUMULATE: self.fold_sums})

    def fold_sums(self) -> Summed:
        """Additions of partial sums to the running sum; the last make the output."""
        outputs, parts = self.outputs, self.outputs.parts
        source, number = self.incoming()
        kind = outputs.first_kind[self.position] + number
        row, of = ranges(parts.first[kind], parts.first[kind + 1])
        start = self.arrival(np.arange(len(source)))[of]
        last = of >= len(source) - int(outputs.chunks[self.position])
        src = outputs.placed(row, WIRE, start, self.areas.wire_width, self.areas.wire_width)
        sums = self.continued(row, src, last, _full(self.wire_dtype, row))
        return parts.first[kind + 1] - parts.first[kind], sums

    def continued(self, row: Int64, src: Regions, last: Bools, dtype: Int64) -> Sums:
        """Sums of one source each that continue the running sum."""
        outputs, parts = self.outputs, self.outputs.parts
        running = outputs.result(row, self.position, np.zeros(len(row), dtype=bool))
        return Sums(
            outputs.result(row, self.position, last),
            running,
            src,
            np.arange(len(row) + 1),
            np.ones(len(row), dtype=bool),
            parts.runs[row],
            parts.count[row],
            dtype,
            np.where(last, outputs.out_dtype[parts.index[row]], DTYPE["float32"]),
        )


def _transfers(src: Regions, dst: Regions, runs: Int64, length: Int64) -> Moves:
    raw = _full(RAW, runs)
    return Moves(src, dst, runs, length, length, raw, raw)


def _full(value: int, like: Int64) -> Int64:
    return np.full(len(like), value, dtype=np.int64)


def _nowhere(like: Int64) -> Regions:
    """The base of sums that have none."""
    return Regions(_full(SHARD, like), _full(-1, like), _full(0, like), _full(0, like))
