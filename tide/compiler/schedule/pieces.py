"""A rank's shard, cut into the pieces that leave one by one while the next is being placed."""

from __future__ import annotations

from typing import NamedTuple

from tide.compiler.dtypes import itemsize
from tide.compiler.schedule.unit import SPLIT_ALIGNMENT, UnitContext, own_casts
from tide.compiler.steps import Buffer, Cast, Region, Transfer

#: Each piece is this many times the one before: few pieces, and little to place before the first push.
GROWTH = 3


class Piece(NamedTuple):
    """A part of a rank's shard: how it is placed, and what of storage is then pushed."""

    casts: tuple[Cast, ...]
    transfers: tuple[Transfer, ...]


def own_pieces(context: UnitContext, position: int) -> list[Piece]:
    """Cuts a rank's shard into pieces of growing size; the bundled parameters go with the first."""
    bundle = context.layout.bundle
    pieces: list[Piece] = []
    casts: list[Cast] = []
    transfers: list[Transfer] = []
    limit = context.options.piece_bytes
    room = limit
    queue = []
    for cast in own_casts(context, position):
        if context.layout.bundled(cast.src.index):
            casts.append(cast)
        else:
            queue.append(cast)
    if bundle is not None and (length := int(bundle.length[position])):
        region = Region(Buffer.STORAGE, 0, bundle.offset + int(bundle.base[position]))
        transfers.append(Transfer(region, region, 1, length))
    queue.reverse()
    while queue:
        cast = queue.pop()
        size = itemsize(cast.dst_dtype)
        head, rest = _cut(cast, room // size)
        if head is not None:
            casts.append(head)
            transfers.append(Transfer(head.dst, head.dst, head.runs, head.count * size))
            room -= head.runs * head.count * size
        if rest is not None:
            queue.append(rest)
            if casts:
                pieces.append(Piece(tuple(casts), tuple(transfers)))
            casts, transfers, limit = [], [], limit * GROWTH
            room = limit
    if casts:
        pieces.append(Piece(tuple(casts), tuple(transfers)))
    return pieces


def _cut(cast: Cast, room: int) -> tuple[Cast | None, Cast | None]:
    """A head of at most ``room`` elements, and the rest; cut inside a run only if there is only one."""
    if cast.runs * cast.count <= room:
        return cast, None
    take = room // cast.count if cast.runs > 1 else room - room % SPLIT_ALIGNMENT
    if take == 0:
        return None, cast

    def moved(region: Region, dtype: str) -> Region:
        step = region.pitch if cast.runs > 1 else itemsize(dtype)
        return region._replace(offset=region.offset + take * step)

    src, dst = moved(cast.src, cast.src_dtype), moved(cast.dst, cast.dst_dtype)
    if cast.runs > 1:
        return cast._replace(runs=take), cast._replace(src=src, dst=dst, runs=cast.runs - take)
    return cast._replace(count=take), cast._replace(src=src, dst=dst, count=cast.count - take)
