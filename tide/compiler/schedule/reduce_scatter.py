"""Reduce-scatter: every rank's gradients into float32 shards at their owners (TIDE-RS).

A rank's output is the sequence of its shards, cut into chunks. Phase 1 works inside the node: each
rank pushes its piece of a chunk into the receive area of the chunk's *reducer*, which sums the pieces
in rank order. On one node the reducer is the owner. Across nodes the reducer is the rank of this node
on the owner's rail; it puts the float32 partial sum to the owner (phase 2), who folds the partial sums
in, node by node, and adds its own node's last::

    stream rs.push   CREDIT? push ─▶ PUSHED!            … for every chunk of every reducer of the node
    stream rs.sum    CREDIT! PUSHED? sum ─▶ SUMMED!     … own node's chunks last, onto the running sum
    stream rs.wire   SUMMED? WIRE_CREDIT? put ─▶ SENT!
    stream rs.fold   WIRE_CREDIT! PARTIAL? running += partial ─▶ FOLDED!

In round ``j`` node ``n`` reduces for node ``n + 1 + j``, so every rail link carries one partial sum at a
time and nobody is sent to by two. Areas are rings of ``receive_depth`` positions, handed out by credits: their
size does not depend on the number of nodes. The order of every sum is fixed by the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.options import MIB, PlanOptions
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.shard import shard
from tide.compiler.steps import (
    Accumulate,
    Buffer,
    Copy,
    Lane,
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

#: Elements to which segments of a chunk are aligned, so that 16-byte accesses stay aligned.
CHUNK_ALIGNMENT = 64


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


def chunk_elements(unit: Unit, options: PlanOptions) -> int:
    """Elements of a chunk of this unit's reduce-scatter; 0 if no gradient is reduced.

    Few chunks keep the host's work small, many let the sum overlap the copies: by default about five, of
    4 to 256 MiB, the last ones smaller.
    """
    trainable = [p for p in unit.parameters if p.grad_dtype is not None]
    if not trainable:
        return 0
    width = max(itemsize(p.grad_dtype) for p in trainable if p.grad_dtype is not None)
    output = sum(_aligned(int(shard(p, unit.mesh.size).numel.max())) for p in trainable)
    if options.chunk_bytes is not None:
        wanted = options.chunk_bytes // width
    else:
        wanted = min(max(output * 28 // 100, 4 * MIB // width), 256 * MIB // width)
    return max(_aligned(min(wanted, output)), CHUNK_ALIGNMENT)


def _aligned(elements: int) -> int:
    return -(-elements // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT


def _limits(elements: int, capacity: int) -> tuple[int, ...]:
    """Elements of each chunk of an output: equal ones, then a half and a quarter of the capacity.

    Smaller towards the end, so that little is left to sum when the last push has ended.
    """
    if elements <= capacity or capacity < 4 * CHUNK_ALIGNMENT:
        return (capacity,) * max(-(-elements // capacity), 1)
    tail = _aligned(capacity // 2), _aligned(capacity // 4)
    rest = elements - sum(tail)
    count = -(-rest // capacity)
    return (*(min(_aligned(-(-rest // count)), capacity),) * count, *tail)


@lru_cache(maxsize=4096)
def _chunks_of(shape: tuple[tuple[int, int, int], ...], capacity: int) -> tuple[tuple[Segment, ...], ...]:
    """Cuts an owner's output, given as ``(parameter index, runs, elements per run)`` each, into chunks."""
    chunks: list[tuple[Segment, ...]] = []
    chunk: list[Segment] = []
    limits = _limits(sum(_aligned(runs * count) for _, runs, count in shape), capacity)
    limit = room = limits[0]

    def flush() -> None:
        nonlocal chunk, room, limit
        if chunk:
            chunks.append(tuple(chunk))
        # Whole runs may need more chunks than were foreseen; those that come late are full ones again.
        limit = room = limits[len(chunks)] if len(chunks) < len(limits) else capacity
        chunk = []

    def add(index: int, first: int, runs: int, start: int, count: int) -> None:
        nonlocal room
        chunk.append(Segment(index, first, runs, start, count, limit - room))
        room -= min(_aligned(runs * count), room)

    for index, runs, count in shape:
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


def owner_chunks(context: UnitContext, owner: int, subset: Sequence[int]) -> tuple[tuple[Segment, ...], ...]:
    """Chunks of the output of ``owner`` for the parameters in ``subset``."""
    key = ("chunks", owner, tuple(subset))
    if key not in context.memo:
        shape = []
        for index in subset:
            table = context.table(index)
            count = int(table.run[owner])
            if table.outer and count:
                shape.append((index, table.outer, count))
        context.memo[key] = _chunks_of(tuple(shape), _capacity(context))
    found: tuple[tuple[Segment, ...], ...] = context.memo[key]
    return found


def _capacity(context: UnitContext) -> int:
    """Elements of a chunk: the unit's own, as far as they fit the areas.

    The areas were laid out for the gradient types of the plan; gradients of a wider type fill a piece sooner.
    """
    if "capacity" in context.memo:
        return int(context.memo["capacity"])
    capacity = context.memo["capacity"] = _fitting(context)
    return capacity


def _fitting(context: UnitContext) -> int:
    width = max((itemsize(p.grad_dtype) for p in context.unit.parameters if p.grad_dtype is not None), default=0)
    if not width:  # nothing to reduce: a program without steps
        return CHUNK_ALIGNMENT
    fits = context.receive.piece // width
    if context.receive.chunk:
        fits = min(fits, context.receive.chunk // 4)
    elements = chunk_elements(context.unit, context.options)
    if elements <= fits:
        return elements
    return fits - fits % CHUNK_ALIGNMENT if fits > CHUNK_ALIGNMENT else max(fits, 1)


def reduce_scatter_program(context: UnitContext, position: int, subset: Sequence[int] | None = None) -> Program:
    """Program of one position.

    Parameters
    ----------
    context : UnitContext
        Unit, team and receive areas.
    position : int
        Whose program.
    subset : sequence of int, optional
        Parameters that have a gradient this time; all trainable ones by default. Every rank must
        name the same.
    """
    if subset is None:
        subset = [i for i, p in enumerate(context.unit.parameters) if p.trainable]
    return _Builder(context, position, tuple(subset)).build()


class _Builder:
    """Writes the four streams of one position.

    Most of what they hold is the same on other positions too: pieces and sums lie at the same places on every
    node. It is made once and kept in the memo.
    """

    def __init__(self, context: UnitContext, position: int, subset: tuple[int, ...]) -> None:
        self.context, self.position, self.subset = context, position, subset
        self.team, self.areas, self.depth = context.team, context.receive, context.receive.depth
        self.node, self.local = self.team.seat(position)
        self.width = max((itemsize(p.grad_dtype) for p in context.unit.parameters if p.grad_dtype), default=0)
        self.row = self.team.grid[self.node]
        self.peers = [self.row[(self.local + j) % self.team.per_node] for j in range(1, self.team.per_node)]
        # Rounds: nodes n+1, n+2, …, and the own node last.
        self.rounds = [(self.node + 1 + j) % self.team.nodes for j in range(self.team.nodes)]
        self.memo: dict[Any, Any] = context.memo.setdefault(("reduce_scatter", subset), {})

    def build(self) -> Program:
        streams = [
            Stream("rs.push", tuple(self.push())),
            Stream("rs.sum", tuple(self.sum())),
        ]
        if self.team.nodes > 1:
            streams += [Stream("rs.wire", tuple(self.wire())), Stream("rs.fold", tuple(self.fold()))]
        return Program("reduce_scatter", self.position, tuple(streams), release=("rs.push", "rs.sum"))

    def work(self, local: int) -> list[tuple[int, int, tuple[Segment, ...]]]:
        """Chunks that the reducer with this local rank sums, in order: (owner, chunk, segments)."""
        return [item for node in self.rounds for item in self.numbered(self.team.grid[node][local])]

    def numbered(self, owner: int) -> list[tuple[int, int, tuple[Segment, ...]]]:
        """The owner's chunks as (owner, chunk, segments)."""
        found: list[tuple[int, int, tuple[Segment, ...]]] | None = self.memo.get(owner)
        if found is None:
            chunks = owner_chunks(self.context, owner, self.subset)
            found = self.memo[owner] = [(owner, number, chunk) for number, chunk in enumerate(chunks)]
        return found

    def incoming(self) -> list[tuple[int, int, tuple[Segment, ...]]]:
        """Partial sums that come from other nodes, in order: (source, chunk, segments)."""
        chunks = owner_chunks(self.context, self.position, self.subset)
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

    def piece(self, segment: Segment, ring: int, source: int, reducer: int) -> Region:
        """Where the piece of ``source`` lies in the receive area of ``reducer`` (both of this node)."""
        ranks = [rank for rank in self.row if rank != reducer]
        size = itemsize(self.dtype(segment))
        # Places are spaced by the unit's widest gradient: a narrow segment may lie behind a wide one.
        start = (ring * self.areas.peers + ranks.index(source)) * self.areas.piece + segment.at * self.width
        return Region(Buffer.RECEIVE, 0, start, segment.count * size if segment.runs > 1 else 0)

    def ring(self, buffer: Buffer, segment: Segment, ring: int) -> Region:
        """Where a partial sum lies in the partial or wire area."""
        start = ring * self.areas.chunk + segment.at * 4
        return Region(buffer, 0, start, segment.count * 4 if segment.runs > 1 else 0)

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
        """Pushes this rank's pieces to the reducers of its node, all reducers in turn."""
        steps: list[Step] = []
        queues = []
        for peer in self.peers:
            local = self.team.seat(peer)[1]
            memo = self.memo.setdefault(("push", self.local, local), {})
            queues.append((peer, memo, self.work(local), Wait(peer, Lane.CREDIT), Signal(peer, Lane.PUSHED)))
        for turn in range(max((len(queue) for _, _, queue, _, _ in queues), default=0)):
            ring = turn % self.depth
            for peer, memo, queue, credit, pushed in queues:
                if turn >= len(queue):
                    continue
                owner, number, chunk = queue[turn]
                transfers = memo.get((owner, number, ring))
                if transfers is None:
                    transfers = memo[owner, number, ring] = self.pieces(chunk, owner, ring, peer)
                steps += (credit, Copy(peer, False, transfers), pushed)
        return steps

    def pieces(self, chunk: tuple[Segment, ...], owner: int, ring: int, reducer: int) -> tuple[Transfer, ...]:
        """A chunk's pieces, from the gradient to a reducer of this node."""
        return tuple(
            Transfer(
                self.grad(segment, owner),
                self.piece(segment, ring, self.position, reducer),
                segment.runs,
                segment.count * itemsize(self.dtype(segment)),
            )
            for segment in chunk
        )

    def sum(self) -> list[Step]:
        """Sums the node's pieces, rank by rank, and hands the ring positions out again."""
        steps: list[Step] = []
        work = self.work(self.local)
        crossing = sum(1 for owner, _, _ in work if owner != self.position)
        if work:
            steps += [Signal(peer, Lane.CREDIT, min(self.depth, len(work))) for peer in self.peers]
        pushed = [Wait(peer, Lane.PUSHED) for peer in self.peers]
        free = [Signal(peer, Lane.CREDIT) for peer in self.peers]
        sent, folded = Wait(self.position, Lane.SENT), Wait(self.position, Lane.FOLDED)
        summed = Signal(self.position, Lane.SUMMED)
        memo = self.memo.setdefault(("sum", self.local), {})
        for turn, (owner, number, chunk) in enumerate(work):
            steps += pushed
            last = owner == self.position
            if not last and turn >= self.depth:
                steps.append(sent)
            if last and self.team.nodes > 1:
                steps.append(folded)
            key = (owner, number, turn % self.depth, last)
            step = memo.get(key)
            if step is None:
                sums = tuple(self.node_sum(segment, owner, turn, last) for segment in chunk)
                step = memo[key] = Accumulate(sums, final=last)
            steps.append(step)
            if not last:
                steps.append(summed)
            if turn + self.depth < len(work):
                steps += free
        # SENT signals that nobody consumed yet belong to the last ring positions.
        if left := min(self.depth, crossing):
            steps.append(Wait(self.position, Lane.SENT, left))
        return steps

    def node_sum(self, segment: Segment, owner: int, turn: int, last: bool) -> Sum:
        """The node's sum of one segment, in rank order; the own node's goes onto the running sum."""
        srcs = tuple(
            self.grad(segment, owner)
            if source == self.position
            else self.piece(segment, turn % self.depth, source, self.position)
            for source in self.row
        )
        if not last:
            dst, dst_dtype = self.ring(Buffer.PARTIAL, segment, turn % self.depth), "float32"
        else:
            dst, dst_dtype = self.out(segment), self.context.unit.parameters[segment.index].out_dtype
        base = self.running(segment) if last and self.team.nodes > 1 else None
        return Sum(srcs, self.dtype(segment), base, dst, dst_dtype, segment.runs, segment.count)

    def wire(self) -> list[Step]:
        """Puts the partial sums to their owners' wire areas."""
        steps: list[Step] = []
        summed, sent = Wait(self.position, Lane.SUMMED), Signal(self.position, Lane.SENT)
        for turn, (owner, number, chunk) in enumerate(self.work(self.local)):
            if owner == self.position:
                continue
            # The owner fills its ring in the order of its own `incoming`; its position there:
            mine, theirs = turn % self.depth, self.sender_turn(owner, number) % self.depth
            key = ("put", owner, number, mine, theirs)
            transfers = self.memo.get(key)
            if transfers is None:
                transfers = self.memo[key] = tuple(
                    Transfer(
                        self.ring(Buffer.PARTIAL, segment, mine),
                        self.ring(Buffer.WIRE, segment, theirs),
                        segment.runs,
                        segment.count * 4,
                    )
                    for segment in chunk
                )
            steps += (summed, Wait(owner, Lane.WIRE_CREDIT), Put(owner, transfers, Lane.PARTIAL), sent)
        return steps

    def sender_turn(self, owner: int, number: int) -> int:
        """Place of this node's chunk ``number`` in the order in which ``owner`` receives."""
        node, _ = self.team.seat(owner)
        earlier = (node - 1 - self.node) % self.team.nodes  # nodes whose partial sums come first
        return earlier * len(owner_chunks(self.context, owner, self.subset)) + number

    def fold(self) -> list[Step]:
        """Adds partial sums of other nodes to the running sum, in the order of the rounds."""
        incoming = self.incoming()
        steps: list[Step] = [Signal(source, Lane.WIRE_CREDIT) for source, _, _ in incoming[: self.depth]]
        chunks = len(owner_chunks(self.context, self.position, self.subset))
        made: dict[tuple[int, int, bool], Accumulate] = {}
        for turn, (source, number, chunk) in enumerate(incoming):
            steps.append(Wait(source, Lane.PARTIAL))
            first, last = turn < chunks, turn >= len(incoming) - chunks
            key = (number, turn % self.depth, first)
            step = made.get(key)
            if step is None:
                sums = tuple(self.fold_sum(segment, turn, first) for segment in chunk)
                step = made[key] = Accumulate(sums, final=False)
            steps.append(step)
            if turn + self.depth < len(incoming):
                steps.append(Signal(incoming[turn + self.depth][0], Lane.WIRE_CREDIT))
            if last:
                steps.append(Signal(self.position, Lane.FOLDED))
        return steps

    def fold_sum(self, segment: Segment, turn: int, first: bool) -> Sum:
        """Adds one segment of a partial sum to the running sum, or begins it."""
        running = self.running(segment)
        src = self.ring(Buffer.WIRE, segment, turn % self.depth)
        base = None if first else running
        return Sum((src,), "float32", base, running, "float32", segment.runs, segment.count)
