"""Programs as NumPy tables: a row for each step, each transfer or cast, each sum and each of its sources.

Steps are numbered through all loaded programs, queue by queue, so that the order of two numbers of one
queue is the order in which their steps run. A *queue* is one stream of one position. Payloads (the
transfers, casts or sums of a step) are stored once however many steps carry the same object; those of streams
that come as columns are made anew when they are asked for, so that only some positions' are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tide.compiler.columns import (
    ACCUMULATE,
    BUFFERS,
    COPY,
    DTYPE,
    GRAD,
    KIND_NAMES,
    KINDS,
    MULTICAST,
    PARTIAL,
    PLACE,
    PUT,
    RAW,
    RECEIVE,
    SIGNAL,
    SIZES,
    SPREAD,
    STAGED,
    STEP_TYPES,
    STORAGE,
    SWITCH,
    WAIT,
    WIRE,
    Bools,
    Moves,
    Payloads,
    ProgramRows,
    Regions,
    Rows,
    Sums,
    fields,
    of_kinds,
    ranges,
)
from tide.compiler.shard import Int64
from tide.compiler.steps import (
    Buffer,
    Lane,
    Multicast,
    Program,
    Region,
    Step,
    SwitchReduce,
)
from tide.compiler.verify.scene import Scene

#: Types of the columns of steps, with that of the payload.
_ROW = (*STEP_TYPES, np.int32)
#: Kinds of steps that sum; the others with a payload move.
_SUMMING = (ACCUMULATE, SWITCH)


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """Moves of steps: ``moves[i]`` goes from memory of position ``source[i]`` to that of ``target[i]``."""

    step: Int64
    source: Int64
    target: Int64
    moves: Moves


class Store:
    """Payloads of steps that are Python objects; each distinct one is stored once."""

    def __init__(self) -> None:
        self._kept: list[object] = []  # payloads are told apart by identity, so they must stay alive
        self._number: dict[int, int] = {}
        self._transfers: list[Any] = []
        self._sums: list[Any] = []
        self._bounds: list[tuple[int, int]] = []

    def number(self, payload: Sequence[Any], sums: bool = False) -> int:
        """Number of a payload, which is stored if it is new."""
        found = self._number.get(id(payload))
        if found is None:
            found = self._number[id(payload)] = len(self._kept)
            self._kept.append(payload)
            rows = self._sums if sums else self._transfers
            self._bounds.append((len(rows), len(rows) + len(payload)))
            rows.extend(payload)
        return found

    def bounds(self) -> Int64:
        """First row and end of each payload among the moves, or among the sums."""
        return np.array(self._bounds, dtype=np.int64).reshape(-1, 2)

    def moves(self) -> Moves:
        """Columns of all transfers and casts."""
        rows = self._transfers
        raw = np.array([len(row) == 4 for row in rows], dtype=bool)  # Transfer has 4 fields, Cast has 6
        src_dtype = np.array([RAW if len(r) == 4 else DTYPE[r[4]] for r in rows], dtype=np.int64)
        dst_dtype = np.array([RAW if len(r) == 4 else DTYPE[r[5]] for r in rows], dtype=np.int64)
        extent = np.array([r[3] for r in rows], dtype=np.int64)
        return Moves(
            Regions.of([r[0] for r in rows]),
            Regions.of([r[1] for r in rows]),
            np.array([r[2] for r in rows], dtype=np.int64),
            np.where(raw, extent, extent * SIZES[src_dtype]),
            np.where(raw, extent, extent * SIZES[dst_dtype]),
            src_dtype,
            dst_dtype,
        )

    def sums(self) -> Sums:
        """Columns of all sums."""
        rows = self._sums
        none = Region(Buffer.SHARD, -1, 0)
        counts = np.array([len(r.srcs) for r in rows], dtype=np.int64)
        return Sums(
            Regions.of([r.dst for r in rows]),
            Regions.of([r.base or none for r in rows]),
            Regions.of([src for r in rows for src in r.srcs]),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
            np.array([r.base is not None for r in rows], dtype=bool),
            np.array([r.runs for r in rows], dtype=np.int64),
            np.array([r.count for r in rows], dtype=np.int64),
            np.array([DTYPE[r.src_dtype] for r in rows], dtype=np.int64),
            np.array([DTYPE[r.dst_dtype] for r in rows], dtype=np.int64),
        )


class Tables:
    """Steps of the loaded programs.

    Parameters
    ----------
    scene : Scene
        What is being proved.
    programs : iterable of Program or ProgramRows
        Programs of some or all positions, in ascending order of position.

    Attributes
    ----------
    queue_position, queue_stream, queue_start, queue_stop : ndarray of int64, shape (Q,)
        Position, stream (index into ``streams``), first step and end of each queue.
    queue_released : ndarray of int64, shape (Q,)
        Step before which each queue is said to have read all its gradients.
    in_slot : bool or None
        Whether the areas of the reduce-scatter are the slot; None where no program is loaded.
    queue_of : ndarray of int64, shape (positions, streams)
        Queue of a position's stream, or -1.
    loaded : ndarray of bool, shape (positions,)
        Positions whose program is loaded.
    queue, kind, peer, lane, count, payload : ndarray, shape (S,)
        Queue and fields of each step; ``payload`` is -1 where none is stored. ``count`` is 1 for a put
        (which signals once), and 1 for an ``Accumulate`` that is final.
    """

    def __init__(self, scene: Scene, programs: Iterable[Program | ProgramRows]) -> None:
        self.scene = scene
        self.streams: list[str] = []
        self.release: dict[int, tuple[str, ...]] = {}
        self.in_slot: bool | None = None
        self._payloads = Store()
        self.multicast: dict[int, tuple[int, ...]] = {}
        self.switch: dict[int, SwitchReduce] = {}
        self.loaded = np.zeros(scene.size, dtype=bool)
        queues: list[tuple[int, int, int]] = []
        released: list[int] = []
        columns: list[tuple[npt.NDArray[Any], ...]] = []
        self._made: dict[int, Payloads] = {}  # by queue
        self.steps = 0
        for program in programs:
            if program.collective != scene.collective:
                scene.fail(f"runs a program for {program.collective}", position=program.position)
            self.loaded[program.position] = True
            self.release[program.position] = program.release
            if self.in_slot not in (None, program.in_slot):
                scene.fail("does not receive where the others do: in the slot, or beside it", position=program.position)
            self.in_slot = program.in_slot
            names = [stream.name for stream in program.streams]
            if len(set(names)) != len(names):
                scene.fail(f"two streams of one name among {names}", position=program.position)
            for stream in program.streams:
                if stream.name not in self.streams:
                    self.streams.append(stream.name)
                if isinstance(stream, Rows):
                    self._made[len(queues)] = stream.payloads
                    none = np.broadcast_to(np.int32(-1), stream.columns.kind.shape)
                    columns.append((*stream.columns, none))
                else:
                    columns.append(self._rows(stream.steps))
                length = len(columns[-1][0])
                queues.append((program.position, self.streams.index(stream.name), length))
                released.append(length if stream.released is None else stream.released)
                self.steps += length
        shape = np.array(queues, dtype=np.int64).reshape(-1, 3)
        self.queue_position, self.queue_stream = shape[:, 0].copy(), shape[:, 1].copy()
        self.queue_stop = np.cumsum(shape[:, 2])
        self.queue_start = self.queue_stop - shape[:, 2]
        self.queue_released = self.queue_start + np.array(released, dtype=np.int64)
        self.queue_of = np.full((scene.size, max(len(self.streams), 1)), -1, dtype=np.int64)
        self.queue_of[self.queue_position, self.queue_stream] = np.arange(len(shape))
        self.queue = np.repeat(np.arange(len(shape), dtype=np.int32), shape[:, 2])
        parts = list(zip(*columns, strict=True)) or [(np.zeros(0, dtype),) for dtype in _ROW]
        del columns
        self.payload, self.count, self.lane, self.peer, self.kind = (np.concatenate(parts.pop()) for _ in _ROW)
        self._check_peers()
        self._bounds = self._payloads.bounds()
        self._moves = self._payloads.moves()
        self._sums = self._payloads.sums()
        stored = self.payload >= 0
        self._check_moves(self._moves, stored & ~self.is_kind(*_SUMMING))
        self._check_sums(self._sums, stored & self.is_kind(*_SUMMING))

    def _rows(self, steps: Sequence[Step]) -> tuple[npt.NDArray[Any], ...]:
        """Columns of the steps of a stream; streams repeat their signals and waits, each is looked at once."""
        keys = list(map(id, steps))
        distinct = dict(zip(keys, steps, strict=True))
        rows = np.array(list(map(self._row, distinct.values())), dtype=np.int32).reshape(-1, len(_ROW))
        number = dict(zip(distinct, range(len(distinct)), strict=True))
        if any(type(step) in (Multicast, SwitchReduce) for step in distinct.values()):
            for at, step in enumerate(steps):
                if isinstance(step, Multicast):
                    self.multicast[self.steps + at] = step.peers
                elif isinstance(step, SwitchReduce):
                    self.switch[self.steps + at] = step
        at_row = np.fromiter(map(number.__getitem__, keys), dtype=np.int64, count=len(keys))
        return tuple(rows[:, i].astype(dtype)[at_row] for i, dtype in enumerate(_ROW))

    def _row(self, step: Any) -> tuple[int, int, int, int, int]:
        if type(step) not in KINDS:
            self.scene.fail(f"no proof covers steps of type {type(step).__name__}")
        row = fields(step)
        if row[0] in (WAIT, SIGNAL):
            return *row, -1
        if row[0] in _SUMMING:
            return *row, self._payloads.number(step.sums, sums=True)
        return *row, self._payloads.number(step.casts if row[0] == PLACE else step.transfers)

    def _check_peers(self) -> None:
        named = self.is_kind(WAIT, SIGNAL, COPY, PUT)
        wrong = np.flatnonzero(named & ((self.peer < 0) | (self.peer >= self.scene.size)))
        if len(wrong):
            step = int(wrong[0])
            self.scene.fail(f"names position {self.peer[step]} of {self.scene.size}", step=self.describe(step))
        wrong = np.flatnonzero(self.is_kind(WAIT, SIGNAL) & (self.count < 1))
        if len(wrong):
            step = int(wrong[0])
            self.scene.fail(f"counts {self.count[step]} signals", step=self.describe(step))

    def _check_moves(self, moves: Moves, of: Bools | Int64) -> None:
        self._check_regions(of, (moves.src, moves.dst), None)

    def _check_sums(self, sums: Sums, of: Bools | Int64) -> None:
        based, sources = np.flatnonzero(sums.based), np.repeat(np.arange(len(sums.runs)), np.diff(sums.first))
        self._check_regions(of, (sums.dst,), None)
        self._check_regions(of, (sums.base[based],), based)
        self._check_regions(of, (sums.srcs,), sources)

    def _check_regions(self, of: Bools | Int64, regions: tuple[Regions, ...], rows: Int64 | None) -> None:
        """Memory of the arena has no index; the rest is of a parameter.

        ``rows`` are those of the payloads, and ``of`` the step of each; of stored ones, which steps may carry them.
        """
        for region in regions:
            in_arena = np.isin(region.buffer, (STORAGE, RECEIVE, PARTIAL, WIRE, SPREAD, STAGED))
            limit = np.where(in_arena, 1, len(self.scene.parameters))
            bad = np.flatnonzero((region.index < 0) | (region.index >= limit))
            if not len(bad):
                continue
            at = int(bad[0] if rows is None else rows[bad[0]])
            if of.dtype == bool:
                bounds = self._bounds[np.maximum(self.payload, 0)]
                step = int(np.flatnonzero(of & (bounds[:, 0] <= at) & (at < bounds[:, 1]))[0])
            else:
                step = int(of[at])
            name = BUFFERS[int(region.buffer[bad[0]])].value
            self.scene.fail(f"names {name} [{region.index[bad[0]]}], which there is not", step=self.describe(step))

    def position(self, steps: npt.NDArray[np.integer[Any]]) -> Int64:
        """Whose steps they are."""
        found: Int64 = self.queue_position[self.queue[steps]]
        return found

    def is_kind(self, *kinds: int) -> Bools:
        """Whether each step is of one of the given kinds."""
        return of_kinds(self.kind, kinds)

    def of_kind(self, *kinds: int) -> Int64:
        """Numbers of all steps of the given kinds."""
        return np.flatnonzero(self.is_kind(*kinds)).astype(np.int64)

    def of_kind_at(self, positions: Bools | None, *kinds: int) -> Int64:
        """Steps of the given kinds, only those of some positions if ``positions`` is given."""
        if positions is None:
            return self.of_kind(*kinds)
        queues = np.flatnonzero(positions[self.queue_position])
        steps, _ = ranges(self.queue_start[queues], self.queue_stop[queues])
        found: Int64 = steps[of_kinds(self.kind[steps], kinds)]
        return found

    def access(self, *kinds: int, positions: Bools | None = None) -> Access:
        """All moves of the steps of the given kinds, in their order; a multicast gives one row for each destination."""
        steps = self.of_kind_at(positions, *kinds)
        steps = steps[self.payload[steps] >= 0]
        bounds = self._bounds[self.payload[steps]]
        rows, of = ranges(bounds[:, 0], bounds[:, 1])
        step, moves = steps[of], self._moves[rows]
        if made := self._from_columns(positions, kinds):
            step, moves = _in_order([(step, moves), *made], Moves)
            self._check_moves(moves, step)
        me, peer, kind = self.position(step), self.peer[step].astype(np.int64), self.kind[step]
        pulls, pushes = (kind == COPY) & (self.count[step] == 1), (kind == COPY) & (self.count[step] == 0)
        source = np.where(pulls, peer, me)
        target = np.where(pushes | (kind == PUT), peer, me)
        if len(many := np.flatnonzero(kind == MULTICAST)):
            peers = [self.multicast[int(step[row])] for row in many]
            counts = np.ones(len(step), dtype=np.int64)
            counts[many] = [len(group) for group in peers]
            spread = np.repeat(np.arange(len(step)), counts)
            step, source, target, moves = step[spread], source[spread], target[spread], moves[spread]
            target[np.isin(spread, many)] = [peer for group in peers for peer in group]
        return Access(step, source, target, moves)

    def summed(self, positions: Bools | None = None) -> tuple[Int64, Sums]:
        """Step and columns of each sum of each ``Accumulate`` and ``SwitchReduce``, in their order."""
        steps = self.of_kind_at(positions, *_SUMMING)
        steps = steps[self.payload[steps] >= 0]
        bounds = self._bounds[self.payload[steps]]
        rows, of = ranges(bounds[:, 0], bounds[:, 1])
        step, sums = steps[of], self._sums[rows]
        if made := self._from_columns(positions, _SUMMING):
            step, sums = _in_order([(step, sums), *made], Sums)
            self._check_sums(sums, step)
        return step, sums

    def _from_columns(self, positions: Bools | None, kinds: tuple[int, ...]) -> list[tuple[Int64, Any]]:
        """Step of each row, and rows, of all that streams which came as columns move or sum."""
        found = []
        for queue, payloads in self._made.items():
            if positions is None or positions[self.queue_position[queue]]:
                for kind in kinds:
                    if kind in payloads:
                        found.append(self._made_rows(queue, kind))
        return found

    def _made_rows(self, queue: int, kind: int) -> tuple[Int64, Any]:
        sizes, rows = self._made[queue][kind]()
        start, stop = self.queue_start[queue], self.queue_stop[queue]
        return np.repeat(start + np.flatnonzero(self.kind[start:stop] == kind), sizes), rows

    def _payload(self, step: int) -> Any:
        """Moves or sums of one step."""
        kind, payload, queue = int(self.kind[step]), int(self.payload[step]), int(self.queue[step])
        if payload >= 0:
            rows: Any = self._sums if kind in _SUMMING else self._moves
            return rows[np.arange(*self._bounds[payload])]
        if kind not in self._made.get(queue, ()):
            return Moves.none()
        steps, rows = self._made_rows(queue, kind)
        return rows[np.flatnonzero(steps == step)]

    def gradient_of(self, step: int) -> int | None:
        """Parameter whose gradient (the first one that) a step of a reduce-scatter carries, if that shows."""
        kind, rows = int(self.kind[step]), self._payload(step)
        if not len(rows.runs):
            return None
        if kind == COPY:
            return int(rows.src.index[0])
        if kind == ACCUMULATE:
            of_first = rows.srcs[: rows.first[1]]
            own = np.flatnonzero(of_first.buffer == GRAD)
            return int(of_first.index[own[0]] if len(own) else rows.dst.index[0])
        if kind == SWITCH:
            return int(rows.dst.index[0])
        if kind == PUT:  # the n-th put of a rank carries its n-th partial sum
            me = self.queue_position[self.queue[step]]
            mine = np.flatnonzero(self.queue_position[self.queue] == me)
            turn = int(np.count_nonzero(self.kind[mine[mine < step]] == PUT))
            alone = np.zeros(self.scene.size, dtype=bool)
            alone[me] = True
            steps, sums = self.summed(alone)
            heads = np.flatnonzero((self.kind[steps] == ACCUMULATE) & (np.diff(steps, prepend=-1) != 0))
            heads = heads[sums.dst.buffer[heads] == PARTIAL]
            return self.gradient_of(int(steps[heads[turn]])) if turn < len(heads) else None
        return None

    def describe(self, step: int) -> str:
        """Names a step: rank, stream, place in the stream and kind."""
        queue = int(self.queue[step])
        stream = self.streams[int(self.queue_stream[queue])]
        text = f"{self.scene.name(int(self.queue_position[queue]))} stream {stream} step {self.index(step)}"
        kind, peer = int(self.kind[step]), self.scene.name(int(self.peer[step]))
        detail = {
            WAIT: f" for {lane_name(self.lane[step])} of {peer}",
            SIGNAL: f" {lane_name(self.lane[step])} to {peer}",
            PUT: f" to {peer}",
            COPY: f" {'from' if self.count[step] else 'to'} {peer}",
        }.get(kind, "")
        return f"{text} ({KIND_NAMES[kind]}{detail})"

    def index(self, step: int) -> int:
        """Place of a step in its stream."""
        return int(step - self.queue_start[self.queue[step]])


def _in_order(parts: list[tuple[Int64, Any]], columns: Any) -> tuple[Int64, Any]:
    """Rows of all parts in the order of their steps."""
    step = np.concatenate([at for at, _ in parts])
    rows = columns.joined([part for _, part in parts])
    if (step[1:] >= step[:-1]).all():
        return step, rows
    order = np.argsort(step, kind="stable")
    return step[order], rows[order]


def lane_name(lane: Any) -> str:
    """Name of a lane, or its number where it has none."""
    try:
        return Lane(int(lane)).name
    except ValueError:
        return f"lane {int(lane)}"
