"""Signals between devices: counters as flag words in the arena.

Each (lane, source rank) has a word in the arena of the rank that waits; the source stores the number of signals
that it has given so far. Numbers are held modulo 2**14 and stored in the upper bits of a 32-bit word: the
driver's wait compares such words cyclically, so a counter may wrap around as long as signals and waits are less
than 2**13 apart (credits keep them within a few). That makes a table of all values small enough to exist once on
every device, and a signal becomes one copy of four bytes from the table to the peer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tide.compiler.place import ArenaLayout
from tide.compiler.steps import INITIAL_CREDIT, Lane
from tide.errors import TransportError

#: Counters are kept modulo this many.
VALUES = 1 << 14
#: Distance of two successive values in a 32-bit word.
STRIDE = (1 << 32) // VALUES
MASK = (1 << 32) - 1


def encode(count: int) -> int:
    """Word that says "``count`` signals so far"."""
    return (count * STRIDE) & MASK


def value_table() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Word of every counter value, in order."""
    return (np.arange(VALUES, dtype=np.uint64) * STRIDE).astype(np.uint32)


def reached(word: int, awaited: int) -> bool:
    """Whether a word satisfies a wait for ``awaited``: the driver's cyclic comparison."""
    return ((word - awaited) & MASK) < 1 << 31


class Words:
    """This rank's counters and the places of its words.

    Parameters
    ----------
    arena : ArenaLayout
        Says where each word lies.
    rank : int
        This rank.

    Attributes
    ----------
    sent, consumed : list of int
        Signals given to, and taken from, each (lane, rank), by :meth:`index`.
    """

    def __init__(self, arena: ArenaLayout, rank: int) -> None:
        self.arena, self.rank = arena, rank
        self.sent = [0] * (arena.lanes * arena.world_size)
        self.consumed = [0] * (arena.lanes * arena.world_size)

    def index(self, slot: int, lane: Lane, other: int) -> int:
        """Place of a counter in the lists."""
        return self.arena.lane(slot, lane) * self.arena.world_size + other

    def incoming(self, slot: int, lane: Lane, source: int) -> int:
        """Arena offset of the word that ``source`` writes here."""
        return self.arena.signal_word(slot, lane, source)

    def outgoing(self, slot: int, lane: Lane) -> int:
        """Arena offset, at a peer, of the word that this rank writes there."""
        return self.arena.signal_word(slot, lane, self.rank)

    @staticmethod
    def credit(lane: Lane) -> int:
        """Signals of a lane that count as given before the first."""
        return INITIAL_CREDIT.get(lane, 0)

    def satisfied(self, indices: Iterable[int]) -> dict[int, int]:
        """Word that satisfies every wait issued so far, for each of the counters.

        Used to set streams free after a failure. Credits are left out: a larger value than needed does no harm.
        """
        return {index: encode(self.consumed[index]) for index in indices}


def check_distance(count: int, what: str) -> None:
    """Refuses a step that adds or takes more signals than the words can tell apart."""
    if not 0 < count < VALUES // 4:
        raise TransportError(f"{what}: {count} signals in one step; flag words can count up to {VALUES // 4 - 1}")
