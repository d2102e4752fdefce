"""Argument arrays for the copy engine: every copy of a program, as the driver reads them.

Contiguous runs go through ``cuMemcpyBatchAsync``, all those of a step in one call; strided runs of a step are one
``cuMemcpy2DAsync`` each, unless they are few and long enough to be cheaper as contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide.compiler.steps import Transfer
from tide.transport.cuda.bases import Bases, Int64s
from tide.transport.cuda.driver import COPY_2D_WORDS, MEMORY_UNIFIED

#: Strided runs at least this long go one by one: at a microsecond each they cost nothing beside their transfer.
LONG_RUN = 1 << 20

# Words of CUDA_MEMCPY2D.
_SRC_TYPE, _SRC, _SRC_PITCH, _DST_TYPE, _DST, _DST_PITCH, _WIDTH, _HEIGHT = 2, 4, 6, 9, 11, 13, 14, 15


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Where the copies of one step lie in the arrays: ``[first, last)`` of each kind."""

    first: int
    last: int
    first_2d: int
    last_2d: int


@dataclass(frozen=True, slots=True)
class _Row:
    dst: tuple[int, int]
    src: tuple[int, int]
    shape: tuple[int, int, int, int]  # bytes, runs, destination pitch, source pitch


class CopyArrays:
    """All copies of one program.

    Attributes
    ----------
    destinations, sources, sizes : ndarray of int64
        Arguments of the batches.
    pitched : ndarray of int64, shape (n, 16)
        Descriptors of the 2-D copies.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._pitched: list[_Row] = []

    def add(self, bases: Bases, transfers: Sequence[Transfer], peer: int, pull: bool) -> CopyStep:
        """Appends the copies of a step.

        Parameters
        ----------
        bases : Bases
            Numbers of the buffers.
        transfers : sequence of Transfer
            The step's.
        peer : int
            World rank of the other side.
        pull : bool
            Whether the peer is the source.
        """
        first, first_2d = len(self._rows), len(self._pitched)
        for transfer in transfers:
            src = bases.locate(transfer.src, peer if pull else None)
            dst = bases.locate(transfer.dst, None if pull else peer)
            dense = transfer.src.pitch == transfer.dst.pitch == transfer.length
            if transfer.runs == 1 or dense:
                shape = (transfer.length * transfer.runs, 1, 0, 0)
                self._rows.append(_Row((dst.base, dst.offset), (src.base, src.offset), shape))
            elif transfer.length >= LONG_RUN:
                for run in range(transfer.runs):
                    self._rows.append(
                        _Row(
                            (dst.base, dst.offset + run * dst.pitch),
                            (src.base, src.offset + run * src.pitch),
                            (transfer.length, 1, 0, 0),
                        )
                    )
            else:
                shape = (transfer.length, transfer.runs, dst.pitch, src.pitch)
                self._pitched.append(_Row((dst.base, dst.offset), (src.base, src.offset), shape))
        return CopyStep(first, len(self._rows), first_2d, len(self._pitched))

    def finish(self) -> None:
        """Makes the arrays, once all steps are in; no step may be added later."""

        def columns(rows: list[_Row]) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
            dst = np.array([row.dst for row in rows], np.int64).reshape(-1, 2)
            src = np.array([row.src for row in rows], np.int64).reshape(-1, 2)
            return dst[:, 0], dst[:, 1], src[:, 0], src[:, 1], np.array([r.shape for r in rows], np.int64)

        self._dst_base, self._dst_offset, self._src_base, self._src_offset, shapes = columns(self._rows)
        self.destinations, self.sources = np.zeros_like(self._dst_offset), np.zeros_like(self._src_offset)
        self.sizes = np.ascontiguousarray(shapes.reshape(-1, 4)[:, 0])
        self._dst2, self._dst2_offset, self._src2, self._src2_offset, shapes = columns(self._pitched)
        shapes = shapes.reshape(-1, 4)
        self.pitched = np.zeros((len(shapes), COPY_2D_WORDS), np.int64)
        self.pitched[:, [_SRC_TYPE, _DST_TYPE]] = MEMORY_UNIFIED
        self.pitched[:, [_WIDTH, _HEIGHT, _DST_PITCH, _SRC_PITCH]] = shapes

    def rebase(self, addresses: Int64s) -> None:
        """Completes all arguments for these addresses of the bases."""
        np.add(addresses[self._dst_base], self._dst_offset, out=self.destinations)
        np.add(addresses[self._src_base], self._src_offset, out=self.sources)
        if len(self.pitched):
            self.pitched[:, _DST] = addresses[self._dst2] + self._dst2_offset
            self.pitched[:, _SRC] = addresses[self._src2] + self._src2_offset

    def widest_pitch(self) -> int:
        """Largest pitch of a 2-D copy; a device has a limit."""
        return int(self.pitched[:, [_DST_PITCH, _SRC_PITCH]].max(initial=0))

    def count(self) -> tuple[int, int]:
        """Contiguous copies and 2-D copies."""
        return len(self._rows), len(self._pitched)
