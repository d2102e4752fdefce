"""Proof of a reduce-scatter in a vacated slot: pieces, partial sums and arrivals do not get in each other's way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tide.compiler.schedule.areas import Areas
from tide.compiler.shard import Int64
from tide.compiler.verify.rings import RingAccess, Rings
from tide.compiler.verify.scene import Scene


def check_areas(scene: Scene, areas: Areas, in_slot: bool) -> None:
    """Programs use the areas that the layout foresees; in a slot, these are disjoint and fit.

    Parameters
    ----------
    scene : Scene
        For messages, and the size of the slot.
    areas : Areas
        As the unit's layout gives them.
    in_slot : bool
        Whether the programs say that they use the slot.
    """
    if areas.in_slot != in_slot:
        used, foreseen = ("the slot", "the arena's areas") if in_slot else ("the arena's areas", "the slot")
        scene.fail(f"receives in {used}, but is laid out for {foreseen}", position=0)
    if not in_slot:
        return
    if areas.size > scene.context.slot_bytes:
        scene.fail(
            f"needs {areas.size} bytes, but the unit's slot has {scene.context.slot_bytes}",
            position=0,
            span=(0, areas.size),
        )
    spans = [(areas.wire, areas.wire + areas.depth * areas.chunk), (areas.staged, areas.staged + areas.staged_size)]
    if areas.ring:
        spans.append((areas.receive, areas.receive + areas.depth * areas.peers * areas.piece))
        spans.append((areas.partial, areas.partial + areas.depth * areas.chunk))
    spans = sorted(span for span in spans if span[1] > span[0])
    for (_, stop), (start, end) in pairwise(spans):
        if stop > start:
            scene.fail("its areas overlap in the slot", position=0, span=(start, min(stop, end)))
    if spans and (spans[0][0] < 0 or spans[-1][1] > areas.size):
        scene.fail("its areas are out of bounds of the slot", position=0, span=spans[-1])


def check_overlay(scene: Scene, areas: Areas, receive: Rings, partial: Rings) -> None:
    """Places of pieces and partial sums are in the slot, beside the wire area; sums overwrite read pieces only.

    A partial sum may take the places of pieces that have been summed. All reads of pieces and all writes of sums of a
    rank are in one stream, and a sum comes after the reads of every piece that begins before the sum's place ends.

    Parameters
    ----------
    scene : Scene
        For messages, and the size of the slot.
    areas : Areas
        Where the wire area is.
    receive, partial : Rings
        Accesses that have been matched.
    """
    others = (
        ("the wire area", areas.wire, areas.wire + areas.depth * areas.chunk),
        ("packed gradients", areas.staged, areas.staged + areas.staged_size),
    )
    for ring in (receive, partial):
        for access in (ring.writes, ring.reads):
            start, end = _span(access)
            wrong = (start < 0) | (end > scene.context.slot_bytes)
            ring.refuse(access, wrong, f"is out of bounds: the slot has {scene.context.slot_bytes} bytes")
            for name, first, stop in others:
                ring.refuse(access, (start < stop) & (end > first), f"lies where the slot has {name}")
    if not len(partial.writes.step) or not len(receive.reads.step):
        return
    tables = partial.tables
    queue = np.full(scene.size, -1, dtype=np.int64)
    queue[receive.reads.memory] = tables.queue[receive.reads.step]
    at = queue[partial.writes.memory]
    partial.refuse(
        partial.writes, (at >= 0) & (at != tables.queue[partial.writes.step]), "is not written by the stream that sums"
    )
    order = np.lexsort((receive.reads.region.offset, receive.reads.memory))
    memory, start, step = receive.reads.memory[order], receive.reads.region.offset[order], receive.reads.step[order]
    head = np.concatenate(([True], memory[1:] != memory[:-1]))
    group = np.cumsum(head) * (tables.steps + 1)
    latest = np.maximum.accumulate(step + group) - group  # of all reads up to this place, on the same rank
    scale = int(max(start.max(initial=0), _span(partial.writes)[1].max(initial=0))) + 1
    found = np.searchsorted(memory * scale + start, partial.writes.memory * scale + _span(partial.writes)[1]) - 1
    below = (found >= 0) & (memory[np.maximum(found, 0)] == partial.writes.memory)
    early = below & (latest[np.maximum(found, 0)] >= partial.writes.step)
    partial.refuse(partial.writes, early, "overwrites pieces that are still to be summed")


def _span(access: RingAccess) -> tuple[Int64, Int64]:
    """First byte and end of each access."""
    start = access.region.offset
    return start, start + (access.runs - 1) * np.where(access.runs > 1, access.region.pitch, 0) + access.length
