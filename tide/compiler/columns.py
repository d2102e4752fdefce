"""Steps as NumPy columns: what a schedule writes for many steps at once, and what the proof reads.

A stream is a row for each step, and for each step that moves or sums, rows of what it moves or sums. The steps that a
rank runs are made from these columns (:meth:`ProgramRows.program`); the proof works on the columns themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tide.compiler.dtypes import ITEMSIZE
from tide.compiler.shard import Int64
from tide.compiler.steps import (
    Accumulate,
    Buffer,
    Cast,
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Stream,
    Sum,
    SwitchReduce,
    Transfer,
    Wait,
)

Bools = npt.NDArray[np.bool_]

PLACE, COPY, PUT, MULTICAST, SIGNAL, WAIT, ACCUMULATE, SWITCH = range(8)
KINDS = {step: kind for kind, step in enumerate((Place, Copy, Put, Multicast, Signal, Wait, Accumulate, SwitchReduce))}
KIND_NAMES = tuple(step.__name__ for step in KINDS)

BUFFERS = tuple(Buffer)
SHARD, STORAGE, GRAD, RECEIVE, PARTIAL, WIRE, SPREAD, RUNNING, OUT, STAGED = range(10)
BUFFER = {id(buffer): code for code, buffer in enumerate(BUFFERS)}  # by identity: hashing an Enum is slow
assert " ".join(b.value for b in BUFFERS) == "shard storage grad receive partial wire spread running out staged"

DTYPES = tuple(ITEMSIZE)
DTYPE = {name: code for code, name in enumerate(DTYPES)}
SIZES = np.array([ITEMSIZE[name] for name in DTYPES], dtype=np.int64)
#: Types of the columns of steps: kind, peer, lane, count. There may be tens of millions of steps.
STEP_TYPES = (np.int8, np.int32, np.int8, np.int32)
#: Dtype code of transfers, which move bytes.
RAW = -1


@dataclass(frozen=True, eq=False, slots=True)
class Regions:
    """Columns of regions: equal runs in one buffer each."""

    buffer: Int64
    index: Int64
    offset: Int64
    pitch: Int64

    def __getitem__(self, rows: Any) -> Regions:
        return Regions(self.buffer[rows], self.index[rows], self.offset[rows], self.pitch[rows])

    def columns(self) -> tuple[Int64, ...]:
        """All columns."""
        return self.buffer, self.index, self.offset, self.pitch

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Regions:
        """Columns of a sequence of regions."""
        buffer = [BUFFER[id(r.buffer)] for r in regions]
        return cls(
            np.array(buffer, dtype=np.int64),
            np.array([r.index for r in regions], dtype=np.int64),
            np.array([r.offset for r in regions], dtype=np.int64),
            np.array([r.pitch for r in regions], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Regions]) -> Regions:
        """The rows of all parts."""
        return cls(*(np.concatenate(column) for column in zip(*(part.columns() for part in parts), strict=True)))

    def made(self) -> Iterator[Region]:
        """The regions themselves."""
        for buffer, *rest in zip(*(column.tolist() for column in self.columns()), strict=True):
            yield Region(BUFFERS[buffer], *rest)


@dataclass(frozen=True, eq=False, slots=True)
class Moves:
    """Transfers and casts: rows of the payload store, or (gathered) one row a step and destination.

    ``src_dtype`` and ``dst_dtype`` are codes into :data:`DTYPES`, or :data:`RAW`; lengths are bytes.
    """

    src: Regions
    dst: Regions
    runs: Int64
    src_length: Int64
    dst_length: Int64
    src_dtype: Int64
    dst_dtype: Int64

    def __getitem__(self, rows: Any) -> Moves:
        return Moves(self.src[rows], self.dst[rows], *(column[rows] for column in self.columns()))

    def columns(self) -> tuple[Int64, ...]:
        """All columns but those of the regions."""
        return self.runs, self.src_length, self.dst_length, self.src_dtype, self.dst_dtype

    @classmethod
    def none(cls) -> Moves:
        """No moves."""
        return cls(Regions.of(()), Regions.of(()), *(np.zeros(0, dtype=np.int64) for _ in range(5)))

    @classmethod
    def joined(cls, parts: Sequence[Moves]) -> Moves:
        """The rows of all parts."""
        if not parts:
            return cls.none()
        return cls(
            Regions.joined([part.src for part in parts]),
            Regions.joined([part.dst for part in parts]),
            *(np.concatenate(column) for column in zip(*(part.columns() for part in parts), strict=True)),
        )

    def made(self) -> Iterator[Transfer | Cast]:
        """The transfers and casts themselves."""
        for src, dst, runs, src_length, dst_length, src_dtype, dst_dtype in zip(
            self.src.made(), self.dst.made(), *(column.tolist() for column in self.columns()), strict=True
        ):
            if src_dtype == RAW:
                yield Transfer(src, dst, runs, dst_length)
            else:
                count = src_length // int(SIZES[src_dtype])
                yield Cast(src, dst, runs, count, DTYPES[src_dtype], DTYPES[dst_dtype])


@dataclass(frozen=True, eq=False, slots=True)
class Sums:
    """Sums: ``based`` tells whether a row has a base; sources of row ``i`` are ``first[i] : first[i + 1]``."""

    dst: Regions
    base: Regions
    srcs: Regions
    first: Int64
    based: Bools
    runs: Int64
    count: Int64
    src_dtype: Int64
    dst_dtype: Int64

    def __getitem__(self, rows: Int64) -> Sums:
        sources, _ = ranges(self.first[rows], self.first[rows + 1])
        counts = self.first[rows + 1] - self.first[rows]
        return Sums(
            self.dst[rows],
            self.base[rows],
            self.srcs[sources],
            np.concatenate(([0], np.cumsum(counts))),
            *(column[rows] for column in self.columns()),
        )

    def columns(self) -> tuple[Any, ...]:
        """Columns with one figure a sum."""
        return self.based, self.runs, self.count, self.src_dtype, self.dst_dtype

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        """The rows of all parts."""
        ends = np.cumsum([0] + [len(part.srcs.index) for part in parts])
        return cls(
            Regions.joined([part.dst for part in parts]),
            Regions.joined([part.base for part in parts]),
            Regions.joined([part.srcs for part in parts]),
            np.concatenate(
                [part.first[:-1] + start for part, start in zip(parts, ends[:-1], strict=True)] + [ends[-1:]]
            ),
            *(np.concatenate(column) for column in zip(*(part.columns() for part in parts), strict=True)),
        )

    def made(self) -> Iterator[Sum]:
        """The sums themselves."""
        srcs, first = tuple(self.srcs.made()), self.first.tolist()
        columns = (column.tolist() for column in self.columns())
        for row, (dst, base, based, runs, count, src_dtype, dst_dtype) in enumerate(
            zip(self.dst.made(), self.base.made(), *columns, strict=True)
        ):
            sources = srcs[first[row] : first[row + 1]]
            yield Sum(sources, DTYPES[src_dtype], base if based else None, dst, DTYPES[dst_dtype], runs, count)


def ranges(starts: Int64, stops: Int64) -> tuple[Int64, Int64]:
    """All integers of the ranges ``starts[i] : stops[i]``, and the ``i`` of each."""
    lengths = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return starts[owner] + within, owner


class Steps(NamedTuple):
    """Columns of steps, with -1 where a step has no such field.

    ``number`` is the count of a signal or wait; 1 for a put (which signals once), for a copy that pulls, and for an
    ``Accumulate`` that is final.
    """

    kind: npt.NDArray[np.int8]
    peer: npt.NDArray[np.int32]
    lane: npt.NDArray[np.int8]
    number: npt.NDArray[np.int32]


def fields(step: Step) -> tuple[int, int, int, int]:
    """The row of one step."""
    kind = KINDS[type(step)]
    if isinstance(step, Wait | Signal):
        return kind, step.peer, step.lane, step.count
    if isinstance(step, Copy):
        return kind, step.peer, -1, step.pull
    if isinstance(step, Put):
        return kind, step.peer, step.lane, 1
    if isinstance(step, Accumulate | SwitchReduce):
        return kind, -1, -1, step.final
    return kind, -1, -1, 0


def of_kinds(kind: npt.NDArray[np.int8], kinds: tuple[int, ...]) -> Bools:
    """Which of many steps are of some kinds: by a look-up, as there may be tens of millions of them."""
    wanted = np.zeros(len(KIND_NAMES), dtype=bool)
    wanted[list(kinds)] = True
    found: Bools = wanted[kind]
    return found


#: What the steps of one kind in a stream move or sum: how many rows each step has, in order, and all their rows.
Moved = tuple[Int64, Moves]
Summed = tuple[Int64, Sums]


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A stream as columns.

    Attributes
    ----------
    name : str
        As of a :class:`Stream`.
    columns : Steps
        Its steps.
    payloads : mapping
        By kind of step, what makes the rows of all that such steps move or sum, when they are asked for.
    released : int or None
        As of a :class:`Stream`.
    """

    name: str
    columns: Steps
    payloads: Payloads
    released: int | None = None

    def stream(self) -> Stream:
        """The stream itself; equal sums, signals and waits are one object."""
        made: dict[Any, Step] = {}
        payloads = {kind: _split(*make()) for kind, make in self.payloads.items()}
        steps: list[Step] = []
        for row in zip(*(column.tolist() for column in self.columns), strict=True):
            kind, peer, lane, count = row
            if kind in (WAIT, SIGNAL):
                step = made.get(row)
                if step is None:
                    step = made[row] = (Wait if kind == WAIT else Signal)(peer, Lane(lane), count)
            elif kind == COPY:
                step = Copy(peer, bool(count), next(payloads[kind]))
            elif kind == PUT:
                step = Put(peer, next(payloads[kind]), Lane(lane))
            elif kind == PLACE:
                step = Place(next(payloads[kind]))
            else:
                step = Accumulate(next(payloads[kind]), bool(count))
                step = made.setdefault(step, step)
            steps.append(step)
        return Stream(self.name, tuple(steps), self.released)


Payloads = Mapping[int, Callable[[], "Moved | Summed"]]


def _split(sizes: Int64, columns: Moves | Sums) -> Iterator[Any]:
    """What each step moves or sums, in order."""
    rows = columns.made()
    for size in sizes.tolist():
        yield tuple(next(rows) for _ in range(size))


@dataclass(frozen=True, eq=False, slots=True)
class ProgramRows:
    """A program whose streams are columns, or steps already; the other fields are those of :class:`Program`."""

    collective: str
    position: int
    streams: tuple[Rows | Stream, ...]
    release: tuple[str, ...]
    in_slot: bool

    def program(self) -> Program:
        """The program itself."""
        streams = tuple(stream.stream() if isinstance(stream, Rows) else stream for stream in self.streams)
        return Program(self.collective, self.position, streams, self.release, self.in_slot)


def frames(keep: Bools, kind: Any, peer: Any, lane: Any, number: Any) -> Steps:
    """Columns of steps that come in frames of the same form, of which each lacks some.

    Parameters
    ----------
    keep : ndarray of bool
        Which steps there are; they follow each other as in memory.
    kind, peer, lane, number : array_like
        Fields of the steps, in a shape that broadcasts to that of ``keep``.
    """
    return Steps(
        *(
            np.broadcast_to(np.asarray(column, dtype=dtype), keep.shape)[keep]
            for column, dtype in zip((kind, peer, lane, number), STEP_TYPES, strict=True)
        )
    )


def joined(*parts: Steps) -> Steps:
    """Columns of steps that follow each other."""
    return Steps(*(np.concatenate(column) for column in zip(*parts, strict=True)))
