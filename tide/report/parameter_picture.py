"""A picture of one parameter: its storage as a strip, its owners in colours, and each shard's runs in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.scatter import descriptor_table, locate
from tide.compiler.shard import shard
from tide.errors import InputError
from tide.report.svg import FAINT, INK, PALETTE, PAPER, SHADE, Canvas, Svg, text_width
from tide.report.units import show_bytes, show_name

_LEFT, _WIDTH = 12, 1000
#: Owners and runs beyond these numbers are left out, the last ones aside.
_OWNERS, _RUNS = 8, 3
_GAP = 26  # pixels of a gap that stands for what is left out


class _Piece(NamedTuple):
    """A run of one owner in the strip, or a gap (owner below 0) for what is left out."""

    owner: int
    run: int
    weight: float


def _shown(count: int, limit: int) -> list[int | None]:
    """The first numbers below ``count`` and the last, with None where some are left out."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def parameter_svg(compiled: Compiled, unit: str | None, parameter: str, rank: int | None = None) -> Svg:
    """Picture of a parameter's shards and where their runs lie in storage.

    Runs are drawn to scale; where owners or runs are many, some are left out and a gap says so.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str or None
        Unit name; None looks the parameter up.
    parameter : str
        Parameter name or alias.
    rank : int, optional
        World rank into whose storage; by default the first of the first shard group.
    """
    home, member = locate(compiled, parameter)
    if unit is not None and home.name != unit:
        raise InputError(f"{parameter}: belongs to unit {show_name(home.name)!r}, not to {show_name(unit)!r}")
    rank = home.mesh.groups[0][0] if rank is None else rank
    group, _ = compiled.group(home.name, rank)
    index = home.parameters.index(member)
    table, width = shard(member, len(group)), itemsize(member.dtype)
    rows = descriptor_table(compiled, home.name, member.name, rank)
    by_owner = {group.index(int(row["source_rank"])): row for row in rows}

    canvas = Canvas(_WIDTH + 2 * _LEFT, f"Shards and storage of {member.name}")
    canvas.text(_LEFT, 22, member.name, size=15, weight="bold")
    way = "one run" if table.outer == 1 else f"{table.outer:,} runs, {show_bytes(table.pitch * width)} apart,"
    canvas.text(
        _LEFT,
        40,
        f"shape {member.shape}, Shard({member.dim}) over {len(group)} ranks; "
        f"{member.shard_dtype} shard, {member.dtype} storage of {show_bytes(member.nbytes)}; {way} a shard",
        size=11,
        fill=FAINT,
    )
    owners, runs = _shown(len(group), _OWNERS), _shown(table.outer, _RUNS)
    boxes = _draw_shards(canvas, 70, owners, runs, by_owner, group)
    _draw_storage(canvas, 190, owners, runs, by_owner, boxes, width)
    slot = compiled.arena.slot_of[home.name]
    layout = compiled.layouts[home.name]
    where = (
        f"storage of rank {rank}: {layout.offsets[index]:,} bytes into slot {slot}, "
        f"{compiled.arena.slots[slot].offset + layout.offsets[index]:,} into the arena"
    )
    if layout.bundled(index):
        where += "; travels in the unit's bundle and is placed on arrival"
    canvas.text(_LEFT, 262, where, size=11, fill=FAINT)
    if table.outer > 1 or len(group) > _OWNERS:
        note = "gaps: " + " and ".join(
            text
            for text, there in (
                (f"{len(group) - _OWNERS + 1} more ranks", len(group) > _OWNERS),
                (f"{table.outer - _RUNS + 1:,} more runs", table.outer > _RUNS),
            )
            if there
        )
        if note != "gaps: ":
            canvas.text(_LEFT, 280, f"{note} left out", size=11, fill=FAINT)
    return canvas.render()


def _color(owner: int) -> str:
    return PALETTE[owner % len(PALETTE)]


def _draw_shards(
    canvas: Canvas,
    y: float,
    owners: list[int | None],
    runs: list[int | None],
    by_owner: dict[int, np.void],
    group: tuple[int, ...],
) -> dict[tuple[int, int], float]:
    """Boxes of the shards, divided into their runs; the middle of each run's lower edge."""
    cell = (_WIDTH - 10 * (len(owners) - 1)) / len(owners)
    at: dict[tuple[int, int], float] = {}
    largest = max((int(row["run_bytes"]) for row in by_owner.values()), default=1)
    for number, owner in enumerate(owners):
        x = _LEFT + number * (cell + 10)
        if owner is None:
            canvas.text(x + cell / 2, y + 35, "…", size=20, anchor="middle", fill=FAINT)
            continue
        row = by_owner.get(owner)
        if row is None:
            canvas.text(x, y, f"rank {group[owner]}", size=12)
            canvas.rect(x, y + 8, cell, 40, PAPER, stroke=FAINT, dash="4 3", label="empty")
            continue
        nbytes = int(row["source_run_bytes"]) * int(row["runs"])
        name = f"rank {group[owner]}: {show_bytes(nbytes)}"
        if text_width(name, 12) > cell:
            name = f"rank {group[owner]}" if text_width(f"rank {group[owner]}", 12) < cell else str(group[owner])
        canvas.text(x, y, name, size=12)
        width = max(cell * int(row["run_bytes"]) / largest, 4)
        gaps = sum(1 for run in runs if run is None)
        share = (width - 10 * gaps) / (len(runs) - gaps)
        left = x
        for run in runs:
            if run is None:
                canvas.text(left + 5, y + 32, "…", size=12, anchor="middle", fill=FAINT)
                left += 10
                continue
            start = int(row["shard_offset"]) + run * int(row["source_pitch"])
            tip = f"rank {group[owner]}, run {run}: {int(row['source_run_bytes']):,} bytes at {start:,} of the shard"
            text = f"run {run}" if len(runs) > 1 else ""
            canvas.rect(left, y + 8, share, 40, _color(owner), tip=tip, stroke=PAPER, label=text, size=10)
            at[owner, run] = left + share / 2
            left += share
    return at


def _draw_storage(
    canvas: Canvas,
    y: float,
    owners: list[int | None],
    runs: list[int | None],
    by_owner: dict[int, np.void],
    boxes: dict[tuple[int, int], float],
    width: int,
) -> None:
    """The strip, and the arrows into it."""
    pieces: list[_Piece] = []
    for run in runs:
        if run is None:
            pieces.append(_Piece(-1, 0, 0))
            continue
        for owner in owners:
            if owner is None:
                pieces.append(_Piece(-1, 0, 0))
            elif owner in by_owner:
                pieces.append(_Piece(owner, run, float(by_owner[owner]["run_bytes"])))
    gaps = sum(1 for piece in pieces if piece.owner < 0)
    total = sum(piece.weight for piece in pieces) or 1.0
    scale = (_WIDTH - gaps * _GAP) / total
    x = float(_LEFT)
    labelled = -1e9
    for piece in pieces:
        if piece.owner < 0:
            canvas.rect(x, y, _GAP, 40, SHADE)
            canvas.text(x + _GAP / 2, y + 25, "…", size=14, anchor="middle", fill=FAINT)
            x += _GAP
            continue
        row, length = by_owner[piece.owner], piece.weight * scale
        start = int(row["slot_offset"]) - int(_base(by_owner)) + piece.run * int(row["destination_pitch"])
        source = int(row["source_rank"])
        tip = f"rank {source}, run {piece.run}: {int(row['run_bytes']):,} bytes at {start:,} of storage"
        name = f"rank {source}"
        short = name if text_width(name, 11) < length - 4 else str(source)
        canvas.rect(x, y, length, 40, _color(piece.owner), tip=tip, stroke=PAPER, label=short)
        if (piece.owner, piece.run) in boxes:
            canvas.arrow(boxes[piece.owner, piece.run], y - 72, x + length / 2, y, INK, 1.1)
        offset = f"{start:,}"
        if x > labelled + 8:
            canvas.line(x, y + 40, x, y + 45, FAINT)
            canvas.text(x, y + 55, offset, size=9, fill=FAINT)
            labelled = x + text_width(offset, 9)
        x += length
    canvas.rect(_LEFT, y, x - _LEFT, 40, "none", stroke=INK)


def _base(by_owner: dict[int, np.void]) -> int:
    return min(int(row["slot_offset"]) for row in by_owner.values())
