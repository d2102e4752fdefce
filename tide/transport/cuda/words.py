"""Signals between devices: counters as flag words in the arena.

Each (unit, lane, source rank) has a word in the arena of the rank that waits (:mod:`tide.compiler.signals`); the
source stores the number of signals that it has given so far. Numbers are held modulo 2**14 and stored in the upper
bits of a 32-bit word: the driver's wait compares such words cyclically, so a counter may wrap around as long as
signals and waits are less than 2**13 apart (credits keep them within a few). That makes a table of all values small
enough to exist once on every device, and a signal becomes one copy of four bytes from the table to the peer.

A launch that carries out several steps tells this rank's other streams how far it is by counters of its own
(:class:`Counters`), in which its programs count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tide.compiler.compile import Compiled
from tide.compiler.signals import SIGNAL_BYTES
from tide.compiler.steps import INITIAL_CREDIT, Lane
from tide.errors import TransportError
from tide.topology import Team

#: Counters are kept modulo this many.
VALUES = 1 << 14
#: Words in which programs of a launch count, beside the table of values.
COUNTERS = 1 << 12
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


class Word(NamedTuple):
    """A flag word: the place of its counter on this host, and its offset in the arena of the rank that waits."""

    counter: int
    offset: int


class Words:
    """This rank's counters and the places of its words.

    Parameters
    ----------
    compiled : Compiled
        Says where each word lies.
    rank : int
        This rank.

    Attributes
    ----------
    sent, consumed : list of int
        Signals given through, and taken from, each word that was asked for; see :meth:`outgoing`, :meth:`incoming`.
    """

    def __init__(self, compiled: Compiled, rank: int) -> None:
        self.compiled, self.arena, self.rank = compiled, compiled.arena, rank
        self.sent: list[int] = []
        self.consumed: list[int] = []
        self._outgoing: dict[tuple[int, int], int] = {}  # by rank that waits, and offset there
        self._incoming: dict[int, int] = {}  # by offset here
        self._teams: dict[str, tuple[Team, int, dict[int, int]]] = {}

    def _seats(self, unit: str) -> tuple[Team, int, dict[int, int]]:
        """Team of a unit, this rank's position in it, and that of each rank."""
        if unit not in self._teams:
            group, position = self.compiled.group(unit, self.rank)
            positions = {rank: number for number, rank in enumerate(group)}
            self._teams[unit] = self.compiled.context(unit, self.rank).team, position, positions
        return self._teams[unit]

    def incoming(self, unit: str, lane: Lane, source: int, in_slot: bool = False) -> Word:
        """The word that ``source`` writes here; ``in_slot`` is the program's."""
        team, me, positions = self._seats(unit)
        offset = self.arena.signal_word(unit, team, lane, me, positions[source], in_slot)
        if offset not in self._incoming:
            self._incoming[offset] = len(self.consumed)
            self.consumed.append(0)
        return Word(self._incoming[offset], offset)

    def outgoing(self, unit: str, lane: Lane, to: int, in_slot: bool = False) -> Word:
        """The word that this rank writes at ``to``; ``in_slot`` is the program's."""
        team, me, positions = self._seats(unit)
        offset = self.arena.signal_word(unit, team, lane, positions[to], me, in_slot)
        if (to, offset) not in self._outgoing:
            self._outgoing[to, offset] = len(self.sent)
            self.sent.append(0)
        return Word(self._outgoing[to, offset], offset)

    def spans(self, unit: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Offset and bytes of all words of a unit here, and of its slot's."""
        words, found = self.arena.words, self.arena.words.units[unit]
        slot = words.slots[self.arena.slot_of[unit]]
        start = self.arena.signals
        return (
            (start + found.first * SIGNAL_BYTES, found.size * SIGNAL_BYTES),
            (start + slot.first * SIGNAL_BYTES, slot.count * SIGNAL_BYTES),
        )

    @staticmethod
    def credit(lane: Lane) -> int:
        """Signals of a lane that count as given before the first."""
        return INITIAL_CREDIT.get(lane, 0)

    def satisfied(self, indices: Iterable[int]) -> dict[int, int]:
        """Word that satisfies every wait issued so far, for each of the counters.

        Used to set streams free after a failure. Credits are left out: a larger value than needed does no harm.
        """
        return {index: encode(self.consumed[index]) for index in indices}


class Counters:
    """Words of this rank's own in which the programs of a launch count the steps that they have done.

    They are never reset: launches of one lowered program follow each other, so a step of a launch is done once its
    word has reached what all launches so far add. A word may wrap around: the driver compares cyclically, and the
    launches under way add less than 2**31. Words of a program that is given up go on where they are.

    Parameters
    ----------
    address : int
        Of the first word.

    Attributes
    ----------
    totals : list of int
        What the launches issued so far add to each word, from zeros on.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self.totals = [0] * COUNTERS
        self._free = list(range(COUNTERS))

    def take(self, number: int) -> list[int] | None:
        """Numbers of so many words that nobody uses; None if there are not enough."""
        if number > len(self._free):
            return None
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def give_back(self, taken: Iterable[int]) -> None:
        """Lets others use words, once all that was issued on them has ended."""
        self._free.extend(taken)

    def address(self, number: int) -> int:
        """Of a word."""
        return self._address + 4 * number


def check_distance(count: int, what: str) -> None:
    """Refuses a step that adds or takes more signals than the words can tell apart."""
    if not 0 < count < VALUES // 4:
        raise TransportError(f"{what}: {count} signals in one step; flag words can count up to {VALUES // 4 - 1}")
