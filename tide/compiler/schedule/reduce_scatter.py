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

from collections.abc import Iterator
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple, TypeAlias

from tide.compiler.dtypes import itemsize
from tide.compiler.schedule.areas import areas_of
from tide.compiler.schedule.chunks import Segment, extent, packed_elements
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import (
    Accumulate,
    Buffer,
    Cast,
    Copy,
    Lane,
    Place,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Stream,
    Sum,
    Transfer,
    Wait,
)


class Turn(NamedTuple):
    """A chunk that a reducer sums, and where its pieces and its partial sum lie.

    ``pieces`` is the offset of the first rank's piece, each of ``piece`` bytes; ``partial`` that of the sum.
    """

    owner: int
    number: int
    chunk: tuple[Segment, ...]
    pieces: int
    piece: int
    partial: int


#: A chunk to sum: owner, number, segments.
Item: TypeAlias = tuple[int, int, tuple[Segment, ...]]


class Destination(NamedTuple):
    """Where a partial sum is put: whose memory, which place, and the signals that allow and carry the put."""

    peer: int
    buffer: Buffer
    start: int
    credit: Lane
    carried: Lane


class Builder:
    """Writes the four streams of one position.

    Much of what they hold is the same on other positions too. It is made once and kept in the memo.
    """

    def __init__(self, context: UnitContext, position: int, subset: tuple[int, ...]) -> None:
        self.context, self.position, self.subset = context, position, subset
        self.team, self.areas = context.team, areas_of(context, subset)
        self.depth, self.wire_dtype = self.areas.depth, context.options.wire_dtype
        self.node, self.local = self.team.seat(position)
        self.row = self.team.grid[self.node]
        self.peers = [self.row[(self.local + j) % self.team.per_node] for j in range(1, self.team.per_node)]
        self.crosses = self.team.nodes > 1
        self.staged: dict[tuple[int, int], int] = {}  # by owner and chunk
        self.memo: dict[Any, Any] = context.memo.setdefault(("reduce_scatter", subset), {})

    def build(self) -> Program:
        streams = [Stream("rs.push", tuple(self.push())), self.sum()]
        if self.crosses:
            streams += [Stream("rs.wire", tuple(self.wire())), Stream("rs.fold", tuple(self.fold()))]
        release = ("rs.push", "rs.sum")
        return Program("reduce_scatter", self.position, tuple(streams), release, self.areas.in_slot)

    # Work --------------------------------------------------------------------------------------

    def chunks(self, owner: int) -> tuple[tuple[Segment, ...], ...]:
        """Chunks of the owner's output."""
        key = ("chunks", owner)
        if key not in self.memo:
            self.memo[key] = self.areas.chunks(self.context.unit, owner, self.subset)
        found: tuple[tuple[Segment, ...], ...] = self.memo[key]
        return found

    def work(self, local: int) -> list[Turn]:
        """Chunks that the reducer of this node with this local rank sums, in order."""
        key = ("work", self.node, local)
        if key not in self.memo:
            self.memo[key] = list(self.turns(local))
        found: list[Turn] = self.memo[key]
        return found

    def order(self, local: int) -> list[Item]:
        """Round 0 and the own output by turns, then the other rounds."""
        rail = [row[local] for row in self.team.grid]
        own = rail[self.node]
        rounds = [rail[(self.node + 1 + j) % self.team.nodes] for j in range(self.team.nodes - 1)]
        numbered = {owner: [(owner, k, chunk) for k, chunk in enumerate(self.chunks(owner))] for owner in rail}
        head = zip_longest(*(numbered[owner] for owner in (*rounds[:1], own)))
        order = [item for pair in head for item in pair if item is not None]
        return order + [item for owner in rounds[1:] for item in numbered[owner]]

    def turns(self, local: int) -> Iterator[Turn]:
        """The work of a reducer of this node, each chunk with its place."""
        areas, own = self.areas, self.row[local]
        pieces, partial, crossing = areas.receive, areas.partial, 0
        for number, (owner, which, chunk) in enumerate(self.order(local)):
            size = extent(chunk)
            if areas.ring:
                pieces = areas.receive + number % areas.depth * areas.peers * areas.piece
                partial = areas.partial + crossing % areas.depth * areas.chunk
                yield Turn(owner, which, chunk, pieces, areas.piece, partial)
            else:
                yield Turn(owner, which, chunk, pieces, size * areas.width, partial)
                pieces += areas.peers * size * areas.width
                partial += size * areas.wire_width if owner != own else 0
            crossing += owner != own

    def incoming(self) -> list[tuple[int, int, tuple[Segment, ...]]]:
        """Partial sums that come from other nodes, in order: (source, chunk, segments)."""
        chunks = self.chunks(self.position)
        sources = [(self.node - 1 - j) % self.team.nodes for j in range(self.team.nodes - 1)]
        return [
            (self.team.grid[node][self.local], number, chunk) for node in sources for number, chunk in enumerate(chunks)
        ]

    # Regions -----------------------------------------------------------------------------------

    def grad(self, segment: Segment, owner: int) -> Region:
        """Where the segment lies in the whole gradient."""
        table = self.context.table(segment.index)
        size = itemsize(self.dtype(segment))
        element = int(table.offset[owner]) + segment.first * table.pitch + segment.start
        return Region(Buffer.GRAD, segment.index, element * size, table.pitch * size if segment.runs > 1 else 0)

    def piece(self, segment: Segment, turn: Turn, source: int, reducer: int) -> Region:
        """Where the piece of ``source`` lies in the receive area of ``reducer`` (both of this node)."""
        ranks = [rank for rank in self.row if rank != reducer]
        size = itemsize(self.dtype(segment))
        # Places are spaced by the unit's widest gradient: a narrow segment may lie behind a wide one.
        start = turn.pieces + ranks.index(source) * turn.piece + segment.at * self.areas.width
        return Region(Buffer.RECEIVE, 0, start, segment.count * size if segment.runs > 1 else 0)

    def partial(self, segment: Segment, buffer: Buffer, start: int) -> Region:
        """Where a segment of a partial sum that begins at ``start`` lies in the partial or wire area."""
        size = self.areas.wire_width
        return Region(buffer, 0, start + segment.at * size, segment.count * size if segment.runs > 1 else 0)

    def arrival(self, turn: int) -> int:
        """Where the partial sum that arrives in this turn begins in the wire area."""
        return self.areas.wire + turn % self.depth * self.areas.chunk

    def out(self, segment: Segment, buffer: Buffer = Buffer.OUT) -> Region:
        """Where the segment lies in the reduced shard, or in its float32 running sum."""
        size = itemsize(self.context.unit.parameters[segment.index].out_dtype) if buffer is Buffer.OUT else 4
        count = int(self.context.table(segment.index).run[self.position])
        start = (segment.first * count + segment.start) * size
        return Region(buffer, segment.index, start, count * size if segment.runs > 1 else 0)

    def running(self, segment: Segment) -> Region:
        """The running sum: the output itself where that is float32."""
        exact = self.context.unit.parameters[segment.index].out_dtype == "float32"
        return self.out(segment, Buffer.OUT if exact else Buffer.RUNNING)

    def dtype(self, segment: Segment) -> str:
        """Element type of the segment's gradient."""
        dtype = self.context.unit.parameters[segment.index].grad_dtype
        assert dtype is not None, "a frozen parameter has no gradient to reduce"
        return dtype

    # Streams -----------------------------------------------------------------------------------

    def push(self) -> list[Step]:
        """Pushes this rank's pieces to the reducers of its node, a chunk of each at a time.

        First all credits of such a wave, then all copies, then all signals: a transport may carry out each of the
        three in one call, however many peers there are. Nobody is kept waiting, as a sum needs the pieces of all.
        """
        steps: list[Step] = []
        if casts := self.casts():
            steps.append(Place(casts))
        works = []
        for peer in self.peers:
            local = self.team.seat(peer)[1]
            works.append((peer, self.memo.setdefault(("push", self.local, local), {}), self.work(local)))
        for number in range(max((len(work) for _, _, work in works), default=0)):
            wave = [(peer, self.pushed(memo, work[number], peer)) for peer, memo, work in works if number < len(work)]
            if self.areas.ring or number == 0:
                steps += [Wait(peer, Lane.CREDIT) for peer, _ in wave]
            steps += [Copy(peer, False, transfers) for peer, transfers in wave]
            steps += [Signal(peer, Lane.PUSHED) for peer, _ in wave]
        return steps

    def pushed(self, memo: dict[Any, Any], turn: Turn, peer: int) -> tuple[Transfer, ...]:
        """Transfers of this rank's pieces of a chunk to its reducer, made once for all positions at this place."""
        staged = self.staged.get((turn.owner, turn.number), -1)
        key = (turn.owner, turn.number, turn.pieces, staged)
        if key not in memo:
            memo[key] = self.pieces(turn, peer, staged)
        found: tuple[Transfer, ...] = memo[key]
        return found

    def casts(self) -> tuple[Cast, ...]:
        """Packs this rank's small gradients, reducer by reducer, and notes where those of each chunk begin."""
        casts: list[Cast] = []
        width, cursor = self.areas.width, self.areas.staged
        for peer in self.peers if self.areas.bundled else ():
            for turn in self.work(self.team.seat(peer)[1]):
                packed = self.packed(turn)
                if not packed:
                    continue
                self.staged[turn.owner, turn.number] = start = cursor
                for segment in packed:
                    pitch = segment.count * width if segment.runs > 1 else 0
                    dst = Region(Buffer.STAGED, 0, start + (segment.at - packed[0].at) * width, pitch)
                    dtype = self.dtype(segment)
                    casts.append(Cast(self.grad(segment, turn.owner), dst, segment.runs, segment.count, dtype, dtype))
                    cursor = start + (segment.at - packed[0].at + packed_elements(segment.runs * segment.count)) * width
        return tuple(casts)

    def packed(self, turn: Turn) -> list[Segment]:
        """Segments of a chunk that travel packed: where the chunk begins with several."""
        found = list(takewhile(lambda segment: segment.index in self.areas.bundled, turn.chunk))
        return found if len(found) > 1 else []

    def pieces(self, turn: Turn, reducer: int, staged: int) -> tuple[Transfer, ...]:
        """A chunk's pieces, from the gradient, or from where they are packed, to a reducer of this node."""
        transfers: list[Transfer] = []
        packed = self.packed(turn) if staged >= 0 else []
        for segment in packed:
            place = self.piece(segment, turn, self.position, reducer)._replace(pitch=0)
            length = segment.runs * segment.count * self.areas.width
            last = transfers[-1] if transfers else None
            if last is not None and last.dst.offset + last.length == place.offset:
                transfers[-1] = last._replace(length=last.length + length)
                continue
            src = Region(Buffer.STAGED, 0, staged + (segment.at - packed[0].at) * self.areas.width)
            transfers.append(Transfer(src, place, 1, length))
        for segment in turn.chunk[len(packed) :]:
            src, dst = self.grad(segment, turn.owner), self.piece(segment, turn, self.position, reducer)
            transfers.append(Transfer(src, dst, segment.runs, segment.count * itemsize(self.dtype(segment))))
        return tuple(transfers)

    def sum(self) -> Stream:
        """Sums the node's pieces, rank by rank; in a ring, hands the positions out again."""
        steps: list[Step] = []
        work, ring = self.work(self.local), self.areas.ring
        if work:
            steps += [Signal(peer, Lane.CREDIT, min(self.depth, len(work)) if ring else 1) for peer in self.peers]
        pushed = [Wait(peer, Lane.PUSHED) for peer in self.peers]
        free = [Signal(peer, Lane.CREDIT) for peer in self.peers]
        sent, begun = Wait(self.position, Lane.SENT), Signal(self.position, Lane.BEGUN)
        summed = Signal(self.position, Lane.SUMMED)
        memo = self.memo.setdefault(("sum", self.local), {})
        crossing = 0
        for number, turn in enumerate(work):
            steps += pushed
            own = turn.owner == self.position
            if ring and not own:
                crossing += 1
                if crossing > self.depth:
                    steps.append(sent)
            key = (turn.owner, turn.number, turn.pieces, turn.partial, own)
            step = memo.get(key)
            if step is None:
                sums = tuple(self.node_sum(segment, turn) for segment in turn.chunk)
                step = memo[key] = Accumulate(sums, final=own and not self.crosses)
            steps.append(step)
            if self.crosses:
                steps.append(begun if own else summed)
            if ring and number + self.depth < len(work):
                steps += free
        if not crossing or self.areas.in_slot:  # whatever uses the slot next waits for all streams' ends
            return Stream("rs.sum", tuple(steps))
        # The next collective writes where these partial sums lie; gradients need not wait for them.
        released = len(steps)
        steps.append(Wait(self.position, Lane.SENT, min(self.depth, crossing)))
        return Stream("rs.sum", tuple(steps), released)

    def node_sum(self, segment: Segment, turn: Turn) -> Sum:
        """The node's sum of one segment, in rank order: a partial sum, or the beginning of the running sum."""
        srcs = tuple(
            self.grad(segment, turn.owner)
            if source == self.position
            else self.piece(segment, turn, source, self.position)
            for source in self.row
        )
        if turn.owner != self.position:
            dst, dtype = self.partial(segment, Buffer.PARTIAL, turn.partial), self.wire_dtype
        elif self.crosses:
            dst, dtype = self.running(segment), "float32"
        else:
            dst, dtype = self.out(segment), self.context.unit.parameters[segment.index].out_dtype
        return Sum(srcs, self.dtype(segment), None, dst, dtype, segment.runs, segment.count)

    def wire(self) -> list[Step]:
        """Puts the partial sums to where they are summed further."""
        steps: list[Step] = []
        summed, sent = Wait(self.position, Lane.SUMMED), Signal(self.position, Lane.SENT)
        work = [turn for turn in self.work(self.local) if turn.owner != self.position]
        waited = len(work) - (self.depth if self.areas.in_slot else 0) if self.areas.ring else 0
        for number, turn in enumerate(work):
            peer, buffer, there, credit, carried = self.destination(turn)
            key = ("put", turn.owner, turn.number, turn.partial, there)
            transfers = self.memo.get(key)
            if transfers is None:
                transfers = self.memo[key] = tuple(
                    Transfer(
                        self.partial(segment, Buffer.PARTIAL, turn.partial),
                        self.partial(segment, buffer, there),
                        segment.runs,
                        segment.count * self.areas.wire_width,
                    )
                    for segment in turn.chunk
                )
            steps += (summed, Wait(peer, credit), Put(peer, transfers, carried))
            if number < waited:
                steps.append(sent)
        return steps

    def destination(self, turn: Turn) -> Destination:
        """The owner's wire area, a ring that is filled in the order of the owner's `incoming`."""
        start = self.arrival(self.sender_turn(turn))
        return Destination(turn.owner, Buffer.WIRE, start, Lane.WIRE_CREDIT, Lane.PARTIAL)

    def sender_turn(self, turn: Turn) -> int:
        """Place of this node's chunk in the order in which its owner receives."""
        node, _ = self.team.seat(turn.owner)
        earlier = (node - 1 - self.node) % self.team.nodes  # nodes whose partial sums come first
        return earlier * len(self.chunks(turn.owner)) + turn.number

    def fold(self) -> list[Step]:
        """Adds partial sums of other nodes to the running sum, in the order of the rounds; the last are final."""
        incoming = self.incoming()
        steps: list[Step] = [Signal(source, Lane.WIRE_CREDIT) for source, _, _ in incoming[: self.depth]]
        chunks = len(self.chunks(self.position))
        begun = Wait(self.position, Lane.BEGUN)
        made: dict[tuple[int, int, bool], Accumulate] = {}
        for turn, (source, number, chunk) in enumerate(incoming):
            if turn < chunks:
                steps.append(begun)
            steps.append(Wait(source, Lane.PARTIAL))
            last = turn >= len(incoming) - chunks
            key = (number, turn % self.depth, last)
            step = made.get(key)
            if step is None:
                sums = tuple(self.fold_sum(segment, self.arrival(turn), last) for segment in chunk)
                step = made[key] = Accumulate(sums, final=last)
            steps.append(step)
            if turn + self.depth < len(incoming):
                steps.append(Signal(incoming[turn + self.depth][0], Lane.WIRE_CREDIT))
        return steps

    def fold_sum(self, segment: Segment, start: int, last: bool) -> Sum:
        """Adds one segment of a partial sum to the running sum; the last addition makes the output."""
        running, out = self.running(segment), self.context.unit.parameters[segment.index].out_dtype
        src = self.partial(segment, Buffer.WIRE, start)
        dst, dtype = (self.out(segment), out) if last else (running, "float32")
        return Sum((src,), self.wire_dtype, running, dst, dtype, segment.runs, segment.count)
