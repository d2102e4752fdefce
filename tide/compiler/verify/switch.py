"""Proof of sums in the switch: which partial sums they add, and that the zeros between them are zeros.

A switch sum reads one region of every rank of the node. What it reads of a *holder* must be a partial sum that was
put there, by the rules of any ring position. What it reads of the others must be a place that no program ever
writes; that no unit's programs do is found out once all units are proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tide.compiler.columns import DTYPE, SIGNAL, SPREAD, SWITCH, Bools, Regions
from tide.compiler.shard import Int64
from tide.compiler.steps import Lane
from tide.compiler.verify.order import Order
from tide.compiler.verify.outputs import Pieces
from tide.compiler.verify.reduce_columns import ReduceColumns
from tide.compiler.verify.rings import RingAccess, Rings, only
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables

_FLOAT32 = DTYPE["float32"]


@dataclass(frozen=True, eq=False, slots=True)
class SwitchSums:
    """What the switch sums add.

    Attributes
    ----------
    arrived : ndarray of int64
        For each source of a sum, the put of the first of the nodes whose sums it adds; -1 where it is no switch sum.
    weight : ndarray of int64
        Nodes whose sums each sum adds.
    written, zeros : set of (int, int)
        Places of the spread area, as (world rank, number), that are written, and that are taken for zeros.
    streams : set of str
        Streams that hand the places out.
    """

    arrived: Int64
    weight: Int64
    written: set[tuple[int, int]]
    zeros: set[tuple[int, int]]
    streams: set[str]


def check_switch_sums(
    scene: Scene, tables: Tables, order: Order, columns: ReduceColumns, owners: Bools, pieces: Pieces, rings: Rings
) -> SwitchSums:
    """Proves the switch sums of some owners.

    Parameters
    ----------
    scene, tables, order : Scene, Tables, Order
        Steps and their order.
    columns : ReduceColumns
        Sums of all loaded positions, and puts.
    owners : ndarray of bool, shape (positions,)
        Positions whose sums are proved. All ranks of their nodes, and those of these ranks' rails, must be loaded.
    pieces : Pieces
        What each put of ``columns`` carries.
    rings : Rings
        The spread area, with :func:`accesses`.
    """
    c, sums = columns, _switch_sums(scene, tables, columns, owners)
    found = rings.match()
    put = rings.writes.row[found]
    row = rings.reads.row // scene.size  # of the sum
    nodes = len(c.grid)
    _check_pieces(scene, columns, pieces, row, put)
    # Nodes that a sum adds, counted back from the owner's: they must follow each other.
    back = (c.seat[c.me[row], 0] - 1 - pieces.node[put]) % nodes
    by_row = np.lexsort((back, row))
    row, back, put = row[by_row], back[by_row], put[by_row]
    head = np.concatenate(([True], row[1:] != row[:-1])) if len(row) else np.zeros(0, dtype=bool)
    if len(bad := np.flatnonzero(~head[1:] & (back[1:] != back[:-1] + 1))):
        at = int(bad[0])
        again = "twice" if back[at] == back[at + 1] else "without those before it"
        node = (int(c.seat[c.me[row[at]], 0]) - 1 - int(back[at + 1])) % nodes
        c.fail_sum(int(row[at]), f"adds the sum of node {node} {again}")
    arrived, weight = np.full(len(c.src_of), -1, dtype=np.int64), np.ones(c.rows, dtype=np.int64)
    source = np.searchsorted(c.src_of, row[head])
    arrived[source] = put[head]
    weight[row[head]] = np.diff(np.append(np.flatnonzero(head), len(row)))
    if len(bad := np.setdiff1d(sums, row)):
        c.fail_sum(int(bad[0]), "adds zeros only: it names no holder of a partial sum")
    _check_across(scene, tables, order, rings)
    return SwitchSums(
        arrived,
        weight,
        _places(scene, rings, rings.writes),
        _places(scene, rings, _reads(scene, tables, columns, sums, holders=False)),
        {tables.streams[int(tables.queue_stream[q])] for q in np.unique(_keepers(tables)[1])},
    )


def accesses(
    scene: Scene, tables: Tables, columns: ReduceColumns, owners: Bools
) -> tuple[RingAccess, RingAccess, Bools]:
    """Puts into the spread areas of the owners' nodes, what the switch sums read of holders, and whose areas it is.

    Rows of reads are ``row of the sum · positions + peer``, those of writes puts of ``columns``.
    """
    c, m = columns, columns.moves
    hosts = np.isin(c.seat[:, 0], np.unique(c.seat[owners, 0]))
    writes = RingAccess(
        m.step, m.target, m.moves.dst, m.moves.runs, m.moves.dst_length, np.arange(len(m.step), dtype=np.int64)
    )
    writes = only(writes, (m.moves.dst.buffer == SPREAD) & hosts[m.target])
    sums = _switch_sums(scene, tables, columns, hosts)
    return writes, _reads(scene, tables, columns, sums, holders=True), hosts


def _switch_sums(scene: Scene, tables: Tables, columns: ReduceColumns, positions: Bools) -> Int64:
    """Rows of the switch sums of some positions; checks what they are."""
    c = columns
    switched = tables.kind[c.row_step] == SWITCH
    spread = np.bincount(c.src_of, weights=c.src.buffer == SPREAD, minlength=c.rows)
    counts = np.bincount(c.src_of, minlength=c.rows)
    if len(bad := np.flatnonzero(~switched & (spread > 0))):
        c.fail_sum(int(bad[0]), "reads a spread area by itself; only the switch sums what lies there")
    if len(bad := np.flatnonzero(switched & ((spread != 1) | (counts != 1)))):
        c.fail_sum(int(bad[0]), "sums something else in the switch than one place of the spread area")
    if len(bad := np.flatnonzero(switched & (c.src_dtype != _FLOAT32))):
        c.fail_sum(int(bad[0]), "sums another type than float32 in the switch, which would round to that type")
    rows = np.flatnonzero(switched & positions[c.me])
    for step in np.unique(c.row_step[rows]).tolist():
        named, row = tables.switch[step], c.grid[c.seat[int(tables.position(np.array([step]))[0]), 0]]
        if named.peers != tuple(row.tolist()):
            scene.fail(
                f"names positions {named.peers}; the switch sums over all ranks of the node, {tuple(row.tolist())}",
                step=tables.describe(step),
            )
        if not set(named.holders) <= set(named.peers):
            scene.fail("names holders that are not of the node", step=tables.describe(step))
    return rows


def _reads(scene: Scene, tables: Tables, columns: ReduceColumns, sums: Int64, holders: bool) -> RingAccess:
    """What switch sums read of the holders, or of the others."""
    c = columns
    pairs = [
        (row, peer)
        for row in sums.tolist()
        for named in (tables.switch[int(c.row_step[row])],)
        for peer in named.peers
        if (peer in named.holders) == holders
    ]
    row, peer = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    region: Regions = c.src[np.searchsorted(c.src_of, row)]
    return RingAccess(c.row_step[row], peer, region, c.runs[row], c.count[row] * 4, row * scene.size + peer)


def _check_pieces(scene: Scene, columns: ReduceColumns, pieces: Pieces, row: Int64, put: Int64) -> None:
    """All that a sum adds are sums of the same elements."""
    order = np.argsort(row, kind="stable")
    first = np.empty_like(put)
    first[order] = put[order][np.searchsorted(row[order], row[order])]
    if len(bad := np.flatnonzero(pieces.node[put] < 0)):
        columns.fail_sum(int(row[bad[0]]), "adds what no node sum was put into")
    one, other = pieces[first], pieces[put]
    same = np.ones(len(put), dtype=bool)
    for a, b in zip(one.columns()[1:], other.columns()[1:], strict=True):
        same &= a == b
    if len(bad := np.flatnonzero(~same)):
        at = int(bad[0])
        columns.fail_sum(
            int(row[at]),
            f"adds sums of different elements: bytes from {one.offset[at]} on of the gradient of "
            f"{scene.parameters[int(one.index[at])].name}, and from {other.offset[at]} on of "
            f"{scene.parameters[int(other.index[at])].name}",
        )


def _keepers(tables: Tables) -> tuple[Int64, Int64]:
    """For each rank that hands out places of its spread area: its position, and the queue that does."""
    steps = np.flatnonzero((tables.kind == SIGNAL) & (tables.lane == Lane.SPREAD_CREDIT))
    queue = np.unique(tables.queue[steps]).astype(np.int64)
    return tables.queue_position[queue], queue


def _check_across(scene: Scene, tables: Tables, order: Order, rings: Rings) -> None:
    """The next collective puts into a place only once this one has read it.

    One queue of each rank hands out its places. It has seen all reads by its end, and whoever writes knows that it
    has begun: as it follows itself from collective to collective, nothing is written too early.
    """
    position, queue = _keepers(tables)
    keeper = np.full(scene.size, -1, dtype=np.int64)
    keeper[position] = queue
    if len(position) != len(np.unique(position)):
        scene.fail("hands out places of its spread area from two streams", position=int(position[0]))
    reads, writes = rings.reads, rings.writes
    kept = keeper[reads.memory]
    holds = (kept >= 0) & order.before(
        reads.step, np.maximum(kept, 0), tables.queue_stop[np.maximum(kept, 0)], reads.memory
    )
    rings.refuse(
        reads, ~holds, "may still be read when the next collective writes there: whoever hands it out does not wait"
    )
    kept = keeper[writes.memory]
    begun = tables.queue_start[np.maximum(kept, 0)]
    queue = tables.queue[writes.step].astype(np.int64)
    holds = (kept >= 0) & order.before(begun, queue, writes.step, writes.memory)
    rings.refuse(
        writes,
        ~holds,
        "may be written while the previous collective still reads there: nothing says that it has been left",
    )


def _places(scene: Scene, rings: Rings, access: RingAccess) -> set[tuple[int, int]]:
    """World rank and number of each place."""
    size = max(rings.cell_size, 1)
    pairs = np.unique(np.stack([access.memory, access.region.offset // size], axis=1), axis=0)
    return {(scene.ranks[memory], place) for memory, place in pairs.tolist()}
