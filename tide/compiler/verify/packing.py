"""Packed gradients of a reduce-scatter, followed back to where they come from.

A ``Place`` packs small gradients in a rank's own memory, and a push carries several at once. What such a push
delivers is what the casts put where it reads; so it is taken apart into one move a cast, from the gradient itself,
and the rest of the proof need not know. The parts have to be all of the push: the casts tile what it reads.
"""

from __future__ import annotations

import numpy as np

from tide.compiler.columns import BUFFERS, GRAD, PLACE, STAGED, Bools, Moves, Regions, ranges
from tide.compiler.shard import Int64
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Access, Tables


def unpacked(scene: Scene, tables: Tables, access: Access, positions: Bools | None, area: tuple[int, int]) -> Access:
    """Moves in which pushes of packed gradients are taken apart.

    Parameters
    ----------
    scene : Scene
        For messages.
    tables : Tables
        Loaded programs.
    access : Access
        Pushes and puts of some positions.
    positions : ndarray of bool, shape (positions,), or None
        Those positions.
    area : tuple of int
        First byte and end of the area of packed gradients.

    Raises
    ------
    PlanError
        If casts do something else than pack gradients, or a push reads what no cast has put there before.
    """
    casts = tables.access(PLACE, positions=positions)
    _check_casts(scene, tables, casts, area)
    staged = access.moves.src.buffer == STAGED
    if not staged.any():
        return access
    scale = area[1] + 1
    key = casts.source * scale + casts.moves.dst.offset
    order = np.argsort(key, kind="stable")
    key = key[order]
    start = access.source * scale + access.moves.src.offset
    length = access.moves.runs * access.moves.src_length
    first = np.where(staged, np.searchsorted(key, start), 0)
    stop = np.where(staged, np.searchsorted(key, start + length), 1)
    part, of = ranges(first, stop)  # rows that carry no packed gradients are one part, of no cast
    row = order[part] if len(order) else part
    split = staged[of]
    cast = np.where(split, row, 0)
    size = casts.moves.runs * casts.moves.dst_length
    delivered = np.bincount(of[split], weights=size[cast[split]], minlength=len(staged))
    begins = np.zeros(len(staged), dtype=bool)
    same = casts.moves.dst.offset[cast[split]] == access.moves.src.offset[of[split]]
    begins[of[split][same]] = True
    wrong = staged & ((delivered != length) | ~begins | (access.moves.runs != 1))
    early = np.zeros(len(staged), dtype=bool)
    before = (casts.step[cast[split]] < access.step[of[split]]) & (
        tables.queue[casts.step[cast[split]]] == tables.queue[access.step[of[split]]]
    )
    early[of[split][~before]] = True
    for fault, problem in (
        (wrong, "pushes other bytes than those that were packed there"),
        (early, "pushes packed gradients that its stream has not packed before"),
    ):
        if len(bad := np.flatnonzero(fault)):
            at = int(bad[0])
            begin = int(access.moves.src.offset[at])
            scene.fail(
                problem,
                position=int(access.source[at]),
                parameter=_parameter(casts, access, at),
                span=(begin, begin + int(length[at])),
                step=tables.describe(int(access.step[at])),
            )
    if not split.any():
        return access
    m, c = access.moves[of], casts.moves[cast]
    along = np.where(split, c.dst.offset - m.src.offset, 0)
    runs = np.where(split, c.runs, m.runs)
    pitch = np.where(split, np.where(c.runs > 1, c.dst_length, 0), m.dst.pitch)
    src = Regions(
        *(np.where(split, ours, theirs) for ours, theirs in zip(_columns(c.src), _columns(m.src), strict=True))
    )
    dst = Regions(m.dst.buffer, m.dst.index, m.dst.offset + along, pitch)
    moves = Moves(
        src,
        dst,
        runs,
        np.where(split, c.src_length, m.src_length),
        np.where(split, c.dst_length, m.dst_length),
        m.src_dtype,
        m.dst_dtype,
    )
    return Access(access.step[of], access.source[of], access.target[of], moves)


def _columns(region: Regions) -> tuple[Int64, ...]:
    return region.buffer, region.index, region.offset, region.pitch


def _parameter(casts: Access, access: Access, at: int) -> int | None:
    """A parameter whose gradient is packed on the rank of a push."""
    mine = np.flatnonzero(casts.source == access.source[at])
    near = mine[np.argsort(np.abs(casts.moves.dst.offset[mine] - access.moves.src.offset[at]), kind="stable")]
    return int(casts.moves.src.index[near[0]]) if len(near) else None


def _check_casts(scene: Scene, tables: Tables, casts: Access, area: tuple[int, int]) -> None:
    """Casts pack gradients as they are, each in its own place within the area."""
    m = casts.moves
    size = m.runs * m.dst_length
    order = np.lexsort((m.dst.offset, casts.source))
    end = (m.dst.offset + size)[order]
    overlaps = np.zeros(len(order), dtype=bool)
    same = casts.source[order][1:] == casts.source[order][:-1]
    overlaps[order[1:]] = same & (m.dst.offset[order][1:] < end[:-1])
    for wrong, problem in (
        (
            (m.src.buffer != GRAD) | (m.dst.buffer != STAGED),
            "does not pack gradients; a Place is for nothing else here",
        ),
        ((m.src_dtype != m.dst_dtype) | (m.runs < 1) | (m.dst_length < 1), "does not pack gradients as they are"),
        ((m.runs > 1) & (m.dst.pitch != m.dst_length), "packs gradients with room between their runs"),
        ((m.dst.offset < area[0]) | (m.dst.offset + size > area[1]), "packs gradients out of bounds"),
        (overlaps, "packs gradients over others"),
    ):
        if len(bad := np.flatnonzero(wrong)):
            at = int(bad[0])
            start = int(m.dst.offset[at])
            scene.fail(
                f"{problem}; it casts {BUFFERS[int(m.src.buffer[at])].value} to {BUFFERS[int(m.dst.buffer[at])].value}",
                position=int(casts.source[at]),
                parameter=int(m.src.index[at]),
                span=(start, start + int(size[at])),
                step=tables.describe(int(casts.step[at])),
            )
