"""Sums and moves of a reduce-scatter as columns, with what the unit's parameters say about them."""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

import numpy as np

from tide.compiler.columns import COPY, DTYPE, GRAD, OUT, PLACE, PUT, RAW, RUNNING, SIZES, SPREAD, WIRE, Bools
from tide.compiler.dtypes import itemsize
from tide.compiler.shard import Int64
from tide.compiler.verify.packing import unpacked
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables


class ReduceColumns:
    """Columns by sum of a step: the same payload may stand in several steps.

    Parameters
    ----------
    scene : Scene
        Unit and team.
    tables : Tables
        Loaded programs.
    positions : ndarray of bool, shape (positions,)
        Whose steps to take.
    staged : tuple of int
        First byte and end of the area of packed gradients.
    copies : bool
        Whether to take pushes, too.

    Attributes
    ----------
    moves : Access
        Pushes, those of packed gradients taken apart, and puts.
    casts : Access
        Packing.
    rows : int
        Number of sums.
    row_step, me : ndarray of int64
        Step and position of each sum; its other columns are those of :class:`Sums`.
    src, src_of, ordinal
        Sources of all sums, the sum of each, and its place there.
    outer, pitch, numel, grad_dtype, out_dtype, grad_size : ndarray
        By parameter.
    run_length, first : ndarray of int64, shape (parameters, positions)
        Elements of a run of each owner's shard, and of the parameter before it.
    grid, seat : ndarray of int64
        Positions by (node, local), and (node, local) by position.
    """

    def __init__(
        self, scene: Scene, tables: Tables, positions: Bools, staged: tuple[int, int], copies: bool = True
    ) -> None:
        self.scene, self.tables = scene, tables
        parameters = scene.parameters
        self.trainable = [i for i, p in enumerate(parameters) if p.trainable]
        shards = [scene.table(i) for i in range(len(parameters))]
        self.outer = np.array([t.outer for t in shards], dtype=np.int64)
        self.pitch = np.array([t.pitch for t in shards], dtype=np.int64)
        self.numel = np.array([p.numel for p in parameters], dtype=np.int64)
        self.run_length = np.stack([t.run for t in shards])
        self.first = np.stack([t.offset for t in shards])
        self.grad_dtype = np.array([DTYPE.get(p.grad_dtype or "", RAW) for p in parameters], dtype=np.int64)
        self.out_dtype = np.array([DTYPE[p.out_dtype] for p in parameters], dtype=np.int64)
        self.grad_size = np.array([itemsize(p.grad_dtype) if p.grad_dtype else 1 for p in parameters])
        self.grid = np.array(scene.context.team.grid, dtype=np.int64)
        self.seat = np.zeros((scene.size, 2), dtype=np.int64)
        self.seat[self.grid.ravel()] = np.indices(self.grid.shape).reshape(2, -1).T
        self.moves = tables.access(*((COPY, PUT) if copies else (PUT,)), positions=positions)
        if copies:
            self.moves = unpacked(scene, tables, self.moves, positions, staged)
        self.casts = tables.access(PLACE, positions=positions)
        self.row_step, sums = tables.summed(positions)
        self.rows = len(self.row_step)
        self.dst, self.base, self.based = sums.dst, sums.base, sums.based
        self.runs, self.count = sums.runs, sums.count
        self.src_dtype, self.dst_dtype = sums.src_dtype, sums.dst_dtype
        self.me = tables.position(self.row_step)
        self.src = sums.srcs
        sources = np.diff(sums.first)
        self.src_of = np.repeat(np.arange(self.rows), sources)
        self.ordinal = np.arange(len(self.src_of)) - sums.first[self.src_of]

    @cached_property
    def node_sum(self) -> Bools:
        """Whether a sum adds the gradients of the node (rather than a partial sum from another node)."""
        far = np.isin(self.src.buffer, (WIRE, SPREAD))
        return np.asarray(np.bincount(self.src_of, weights=far, minlength=self.rows) == 0)

    @cached_property
    def own(self) -> Int64:
        """For each node sum, its source in the rank's own gradient; -1 where there is none."""
        own = np.full(self.rows, -1, dtype=np.int64)
        from_grad = np.flatnonzero(self.src.buffer == GRAD)
        own[self.src_of[from_grad]] = from_grad
        return own

    # Messages ------------------------------------------------------------------------------------

    def grad_span(self, row: int) -> tuple[int, int]:
        """Bytes of the gradient that a node sum reads."""
        own = int(self.own[row])
        start, size = int(self.src.offset[own]), int(SIZES[self.src_dtype[row]])
        extent = (int(self.runs[row]) - 1) * int(self.src.pitch[own]) + int(self.count[row]) * size
        return start, start + extent

    def fail_sum(self, row: int, problem: str) -> NoReturn:
        """Raises, naming the sum ``row``."""
        dst, own = self.dst, int(self.own[row])
        if own >= 0:
            parameter, span = int(self.src.index[own]), self.grad_span(row)
        else:
            parameter = int(dst.index[row]) if dst.buffer[row] in (OUT, RUNNING) else -1
            start = int(dst.offset[row])
            extent = int((self.runs[row] - 1) * dst.pitch[row] + self.count[row] * SIZES[self.dst_dtype[row]])
            span = (start, start + extent)
        self.scene.fail(
            problem,
            position=int(self.me[row]),
            parameter=parameter,
            span=span,
            step=self.tables.describe(int(self.row_step[row])),
        )
