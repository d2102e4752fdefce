"""What each rank is doing, told to its peers: ranks that issue different collectives find out.

Signals count for each unit, so none of another unit answers a wait; but a rank that waits in vain learns that at its
deadline only, and gradients of other parameters of the unit would be answers. So a rank stamps each collective into
its peers' headers before its first step, numbered by how many it has had with that peer, and looks at theirs when it
is through, or has waited for a while: the same number must have the same stamp.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from tide.compiler.steps import Program
from tide.transport.base import Binding
from tide.transport.host.memory import HEADER_BYTES, STAMPS, Segment

#: Collectives of a pair that are remembered; no rank is further ahead of one that it waits for.
DEPTH = 4
#: Ranks for which a header has room. With more on one machine, nothing is compared.
MOST = (HEADER_BYTES - STAMPS) // (8 * DEPTH)


class Stamps:
    """Stamps of this rank's collectives and of its peers'.

    Parameters
    ----------
    segments : sequence of Segment
        Shared memory of every rank.
    rank : int
        This rank.
    fence : callable
        Full fence.
    """

    def __init__(self, segments: Sequence[Segment], rank: int, fence: Callable[[], None]) -> None:
        self._rank, self._fence = rank, fence
        usable = segments if len(segments) <= MOST else ()
        self._words = [segment.header(STAMPS, HEADER_BYTES) for segment in usable]
        self._numbers = [0] * len(segments)
        self._current: list[tuple[int, int, int]] = []  # peer, place and stamp of the collective under way

    def begin(self, program: Program, binding: Binding) -> None:
        """Tells the peers what this rank is about to do."""
        self._current = []
        if not self._words:
            return
        tensors = sorted(
            (buffer.value, index, str(tensor.dtype)) for (buffer, index), tensor in binding.tensors.items()
        )
        content = zlib.crc32(repr((binding.unit, program.collective, program.in_slot, tensors)).encode())
        for peer in binding.ranks:
            if peer != self._rank:
                self._numbers[peer] = number = self._numbers[peer] + 1
                place, stamp = number % DEPTH, number << 32 & 0xFFFFFFFF00000000 | content
                self._words[peer][self._rank * DEPTH + place] = stamp
                self._current.append((peer, place, stamp))
        self._fence()

    def other(self) -> int | None:
        """A peer that is in another collective than this rank; None if none is known to be."""
        for peer, place, stamp in self._current:
            theirs = self._words[self._rank][peer * DEPTH + place]
            if theirs != stamp and theirs >> 32 == stamp >> 32:  # else it has not come to it yet, or is far ahead
                return peer
        return None

    def release(self) -> None:
        """Lets go of the memory."""
        self._words, self._current = [], []
