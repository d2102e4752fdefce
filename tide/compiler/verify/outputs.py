"""Proof of the outputs of a reduce-scatter: every node's sum is added once, in order, where it belongs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tide.compiler.columns import BUFFERS, DTYPE, OUT, PARTIAL, RUNNING, SIZES, Bools
from tide.compiler.shard import Int64
from tide.compiler.verify.grid import Cover, rects
from tide.compiler.verify.order import Order
from tide.compiler.verify.reduce_columns import ReduceColumns

_FLOAT32 = DTYPE["float32"]


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """What each put carries: the sum of a node over elements of a gradient. ``node`` is -1 where it is not known."""

    node: Int64
    index: Int64
    offset: Int64
    pitch: Int64
    runs: Int64
    count: Int64

    @classmethod
    def empty(cls, count: int) -> Pieces:
        """Nothing known of ``count`` moves."""
        return cls(*(np.full(count, -1, dtype=np.int64) for _ in range(6)))

    def __getitem__(self, rows: Int64) -> Pieces:
        return Pieces(*(column[rows] for column in self.columns()))

    def columns(self) -> tuple[Int64, ...]:
        """All columns."""
        return self.node, self.index, self.offset, self.pitch, self.runs, self.count

    def note(self, rows: Int64, columns: ReduceColumns, sums: Int64) -> None:
        """Notes that moves ``rows`` carry ``sums`` (-1: none was matched)."""
        rows, sums = rows[sums >= 0], sums[sums >= 0]
        made = Pieces.of(columns, sums)
        for column, values in zip(self.columns(), made.columns(), strict=True):
            column[rows] = values

    @classmethod
    def of(cls, columns: ReduceColumns, sums: Int64) -> Pieces:
        """What node sums hold, told by the rank's own gradient in them."""
        own = columns.own[sums]
        return cls(
            columns.seat[columns.me[sums], 0],
            columns.src.index[own],
            columns.src.offset[own],
            columns.src.pitch[own],
            columns.runs[sums],
            columns.count[sums],
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Folds:
    """Additions to an owner's output, sorted so that those to one segment stand together, in their order.

    ``row`` is that of the sum, ``piece`` what it adds; ``at`` is the element of the shard.
    """

    row: Int64
    piece: Pieces
    owner: Int64
    index: Int64
    at: Int64


class OutputProof:
    """Proof of the outputs.

    Parameters
    ----------
    columns : ReduceColumns
        Sums and moves.
    order : Order
        Of the steps.
    owners : ndarray of bool, shape (positions,)
        Positions whose output is proved.
    arrived : ndarray of int64
        For each source of a sum, the put that it reads from the wire area, or -1.
    pieces : Pieces
        What the puts carry.
    weight : ndarray of int64, optional
        Nodes whose sums each sum adds, in the fixed order from that of ``arrived`` on; one by default.
    """

    def __init__(
        self,
        columns: ReduceColumns,
        order: Order,
        owners: Bools,
        arrived: Int64,
        pieces: Pieces,
        weight: Int64 | None = None,
    ) -> None:
        self.c, self.scene, self.tables = columns, columns.scene, columns.tables
        self.order, self.owners, self.arrived, self.pieces = order, owners, arrived, pieces
        self.weight = np.ones(columns.rows, dtype=np.int64) if weight is None else weight

    def run(self) -> None:
        """Every element of the output gets every node's sum once, in order, and is final once."""
        folds = self._folds()
        self._check_place(folds)
        nodes = len(self.c.grid)
        head = self._heads(folds)
        starts = np.flatnonzero(head)
        sizes = np.diff(np.append(starts, len(head)))
        added = self.weight[folds.row]
        before = np.cumsum(added) - added
        place = before - np.repeat(before[starts], sizes)  # nodes whose sums have been added
        last = np.append(head[1:], True) if len(head) else head
        seat = self.c.seat[folds.owner, 0]
        due = (seat - place) % nodes
        if len(bad := np.flatnonzero((folds.piece.node != due) | (place >= nodes))):
            at = int(bad[0])
            self._fail_fold(
                folds,
                at,
                f"adds the sum of node {folds.piece.node[at]} "
                + (
                    f"where that of node {due[at]} is due; the order is fixed" if place[at] < nodes else "a second time"
                ),
            )
        if len(bad := np.flatnonzero(last & (place + added != nodes))):
            at = int(bad[0])
            missing = (int(seat[at]) - int(place[at]) - int(added[at])) % nodes
            self._fail_fold(folds, at, f"is the last sum here, and the sum of node {missing} is missing")
        self._check_chain(folds, head, last)
        self._check_cover(folds, starts)

    def _folds(self) -> _Folds:
        """All sums into the output or the running sum of an owner."""
        kept = np.isin(self.c.dst.buffer, (OUT, RUNNING))
        if len(bad := np.flatnonzero(~kept & (self.c.dst.buffer != PARTIAL))):
            self.c.fail_sum(int(bad[0]), f"writes into {BUFFERS[int(self.c.dst.buffer[bad[0]])].value}")
        rows = np.flatnonzero(kept & self.owners[self.c.me])
        counts = np.bincount(self.c.src_of, minlength=self.c.rows)
        own = self.c.node_sum[rows]
        if len(bad := np.flatnonzero(~own & (counts[rows] != 1))):
            self.c.fail_sum(int(rows[bad[0]]), "adds more than one partial sum at a time")
        own_piece = Pieces.of(self.c, rows)  # nonsense for sums from other nodes, which have no own gradient
        move = self.arrived[np.searchsorted(self.c.src_of, rows)]
        put_piece = self.pieces[np.where(own, 0, move)] if len(self.pieces.node) else own_piece
        piece = Pieces(*(np.where(own, *pair) for pair in zip(own_piece.columns(), put_piece.columns(), strict=True)))
        if len(bad := np.flatnonzero(piece.node < 0)):
            self.c.fail_sum(int(rows[bad[0]]), "adds what no node sum was put into")
        index = self.c.dst.index[rows]
        known = np.isin(index, self.c.trainable)
        if len(bad := np.flatnonzero(~known)):
            self.c.fail_sum(int(rows[bad[0]]), "writes the output of a parameter that has none")
        size = SIZES[self.c.dst_dtype[rows]]
        at, odd = np.divmod(self.c.dst.offset[rows], size)
        if len(bad := np.flatnonzero(odd != 0)):
            self.c.fail_sum(int(rows[bad[0]]), "writes at an offset within an element")
        owner = self.c.me[rows]
        order = np.lexsort((self.c.row_step[rows], self.order.level[self.c.row_step[rows]], at, index, owner))
        return _Folds(rows[order], piece[order], owner[order], index[order], at[order])

    def _heads(self, folds: _Folds) -> Bools:
        same = np.ones(len(folds.row), dtype=bool)
        for column in (folds.owner, folds.index, folds.at):
            same[1:] &= column[1:] == column[:-1]
        same[:1] = False
        return ~same

    def _check_place(self, folds: _Folds) -> None:
        """What is added belongs where it is added: gradient element ↔ element of the owner's shard."""
        row, piece, index, owner = folds.row, folds.piece, folds.index, folds.owner
        run, count, runs = self.c.run_length[index, owner], self.c.count[row], self.c.runs[row]
        size = SIZES[self.c.dst_dtype[row]]
        shard_row, column = np.divmod(folds.at, np.maximum(run, 1))
        end = folds.at + (runs - 1) * run + count
        numel = run * self.c.outer[index]
        if len(bad := np.flatnonzero((run == 0) | (end > numel) | (folds.at < 0))):
            at = int(bad[0])
            self._fail_fold(folds, at, f"writes out of bounds: the shard has {numel[at]} elements")
        wrong = (column + count > run) | ((runs > 1) & (self.c.dst.pitch[row] != run * size))
        if len(bad := np.flatnonzero(wrong)):
            self._fail_fold(folds, int(bad[0]), "does not follow the runs of the shard")
        want = (shard_row * self.c.pitch[index] + self.c.first[index, owner] + column) * self.c.grad_size[index]
        wrong = (piece.index != index) | (piece.offset != want)
        wrong |= (runs != piece.runs) | (count != piece.count)
        wrong |= (runs > 1) & (piece.pitch != self.c.pitch[index] * self.c.grad_size[index])
        if len(bad := np.flatnonzero(wrong)):
            at = int(bad[0])
            found, start = int(piece.index[at]), int(piece.offset[at])
            extent = int((piece.runs[at] - 1) * piece.pitch[at] + piece.count[at] * self.c.grad_size[found])
            self._fail_fold(
                folds,
                at,
                f"receives the sum of bytes [{start}, {start + extent}) of the gradient of "
                f"{self.scene.parameters[found].name}, where those from byte {want[at]} on belong",
            )

    def _check_chain(self, folds: _Folds, head: Bools, last: Bools) -> None:
        """Running sum, element types, the final step, and the order in time of the sums of each segment."""
        row, index = folds.row, folds.index
        out = self.c.dst.buffer[row] == OUT
        exact = self.c.out_dtype[index] == _FLOAT32
        wrong = np.where(last, ~out, out != exact)
        wrong |= self.c.dst_dtype[row] != np.where(last, self.c.out_dtype[index], _FLOAT32)
        if len(bad := np.flatnonzero(wrong)):
            self._fail_fold(
                folds, int(bad[0]), "goes into the wrong one of running sum and output, or in the wrong type"
            )
        final = self.tables.count[self.c.row_step[row]] == 1
        if len(bad := np.flatnonzero(final != last)):
            problem = (
                "is final before all sums are in: scale and divisor would apply twice"
                if final[bad[0]]
                else ("is the last sum, but not final: scale and divisor are not applied")
            )
            self._fail_fold(folds, int(bad[0]), problem)
        inner = ~self.c.node_sum[row]
        wire = self.scene.context.options.wire_dtype
        if len(bad := np.flatnonzero(inner & (self.c.src_dtype[row] != DTYPE[wire]))):
            self._fail_fold(folds, int(bad[0]), f"reads a partial sum in another type than {wire}")
        if len(bad := np.flatnonzero(self.c.based[row] == head)):
            problem = (
                "adds to a running sum that nothing has begun"
                if head[bad[0]]
                else ("drops the running sum: it has no base")
            )
            self._fail_fold(folds, int(bad[0]), problem)
        next_ = np.flatnonzero(~head)
        base, previous = self.c.base[row[next_]], row[next_ - 1]
        wrong = (base.buffer != self.c.dst.buffer[previous]) | (base.index != index[next_])
        wrong |= base.offset != self.c.dst.offset[previous]
        many = self.c.runs[row[next_]] > 1
        wrong |= many & (base.pitch != self.c.dst.pitch[previous])
        wrong |= (self.c.runs[row[next_]] != self.c.runs[previous]) | (
            self.c.count[row[next_]] != self.c.count[previous]
        )
        if len(bad := np.flatnonzero(wrong)):
            self._fail_fold(folds, int(next_[bad[0]]), "adds to another place than the sum before it wrote")
        first, second = self.c.row_step[previous], self.c.row_step[row[next_]]
        holds = self.order.steps_before(first, second)
        if len(bad := np.flatnonzero(~holds)):
            at = int(next_[bad[0]])
            self._fail_fold(
                folds, at, f"is not ordered after {self.tables.describe(int(first[bad[0]]))}, whose sum it continues"
            )

    def _check_cover(self, folds: _Folds, starts: Int64) -> None:
        """The segments of an owner are its shards, each element once."""
        owners = np.flatnonzero(self.owners)
        number = np.full(self.scene.size, 0, dtype=np.int64)
        number[owners] = np.arange(len(owners))
        kinds = len(self.scene.parameters)
        width = self.c.run_length[:, owners].T.copy()  # (owner, parameter)
        height = np.where(width > 0, self.c.outer[None, :], 0)
        height[:, [i for i in range(kinds) if i not in self.c.trainable]] = 0
        row, index, owner = folds.row[starts], folds.index[starts], folds.owner[starts]
        sheet = number[owner] * kinds + index
        run = self.c.run_length[index, owner]
        covered = rects(sheet, run, folds.at[starts], run, self.c.runs[row], self.c.count[row], starts)
        fault = Cover(covered, height.ravel(), np.maximum(width, 1).ravel()).fault()
        if fault is None:
            return
        position, parameter = int(owners[fault.sheet // kinds]), fault.sheet % kinds
        size = int(SIZES[self.c.out_dtype[parameter]])
        span = (fault.start * size, fault.stop * size)
        if fault.gap:
            self.scene.fail(
                "no sum reaches these bytes of the output", position=position, parameter=parameter, span=span
            )
        steps = " and ".join(self.tables.describe(int(self.c.row_step[folds.row[tag]])) for tag in fault.tags)
        self.scene.fail(
            f"these bytes of the output are summed twice, by {steps}", position=position, parameter=parameter, span=span
        )

    def _fail_fold(self, folds: _Folds, at: int, problem: str) -> None:
        row = int(folds.row[at])
        start = int(self.c.dst.offset[row])
        extent = int((self.c.runs[row] - 1) * self.c.dst.pitch[row] + self.c.count[row] * SIZES[self.c.dst_dtype[row]])
        self.scene.fail(
            problem,
            position=int(folds.owner[at]),
            parameter=int(folds.index[at]),
            span=(start, start + extent),
            step=self.tables.describe(int(self.c.row_step[row])),
        )
