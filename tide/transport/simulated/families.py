"""Seed families: which of the streams that could go on does so next.

Every order of micro-operations that the signals allow is legal. Drawing it evenly finds little: ranks
stay close together. Each family is adversarial in its own way, and each seed draws its own victim,
strength or priorities within the family.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from tide.errors import InputError

if TYPE_CHECKING:
    from tide.transport.simulated.machine import Actor


class Policy:
    """``uniform``: any stream of any rank, with equal chances.

    Parameters
    ----------
    random : Random
        Source of all choices.
    streams : sequence of Actor
        Those known so far; others may be added later.
    """

    def __init__(self, random: Random, streams: Sequence[Actor]) -> None:
        self.random = random
        self.draw = random.random
        self.able: list[Actor] = []

    def add(self, stream: Actor) -> None:
        """The stream has a micro-operation to execute."""
        stream.place = len(self.able)
        self.able.append(stream)

    def remove(self, stream: Actor) -> None:
        """The stream is blocked or has ended."""
        last = self.able.pop()
        if last is not stream:
            self.able[stream.place] = last
            last.place = stream.place
        stream.place = -1

    def pick(self) -> Actor | None:
        """Whose micro-operation is next; None if no stream can go on."""
        able = self.able
        return able[int(self.draw() * len(able))] if able else None


class _Starving(Policy):
    """Victims run when nobody else can, or once in a long while."""

    def __init__(self, random: Random, streams: Sequence[Actor]) -> None:
        super().__init__(random, streams)
        self.starved: list[Actor] = []
        self.leak = random.choice((0.0, 0.0, 0.02))
        self.victim = self.choose(sorted({self.trait(stream) for stream in streams}))

    def choose(self, traits: list[str]) -> str | None:
        return self.random.choice(traits) if traits else None

    def trait(self, stream: Actor) -> str:
        raise NotImplementedError

    def _list(self, stream: Actor) -> list[Actor]:
        return self.starved if self.trait(stream) == self.victim else self.able

    def add(self, stream: Actor) -> None:
        able = self._list(stream)
        stream.place = len(able)
        able.append(stream)

    def remove(self, stream: Actor) -> None:
        able = self._list(stream)
        last = able.pop()
        if last is not stream:
            able[stream.place] = last
            last.place = stream.place
        stream.place = -1

    def pick(self) -> Actor | None:
        able = self.able
        if self.starved and (not able or self.draw() < self.leak):
            able = self.starved
        return able[int(self.draw() * len(able))] if able else None


class SlowRank(_Starving):
    """``slow_rank``: one rank stands still as long as any other can go on."""

    def trait(self, stream: Actor) -> str:
        return str(stream.rank)


class StarvedStream(_Starving):
    """``starved_stream``: the same stream stands still on all ranks (or puts stay on the wire)."""

    def trait(self, stream: Actor) -> str:
        return stream.name.partition(" ")[0]


class LoneStream(_Starving):
    """``lone_stream``: one stream of one rank stands still (or the puts from one rank to another)."""

    def trait(self, stream: Actor) -> str:
        return f"{stream.rank} {stream.name}"


class Burst(Policy):
    """``burst``: depth first, a stream keeps going until it blocks, or nearly so."""

    def __init__(self, random: Random, streams: Sequence[Actor]) -> None:
        super().__init__(random, streams)
        self.stay = random.choice((0.8, 0.95, 1.0))
        self.last: Actor | None = None

    def pick(self) -> Actor | None:
        last = self.last
        if last is None or last.place < 0 or self.draw() > self.stay:
            last = self.last = super().pick()
        return last


class Prioritised(Policy):
    """``priority``: a random strict order of all streams, changed at a few random moments (PCT)."""

    def __init__(self, random: Random, streams: Sequence[Actor]) -> None:
        super().__init__(random, streams)
        self.order: dict[int, float] = {}
        self.heap: list[tuple[float, int, Actor]] = []
        self.noise = self.choose_noise()

    def choose_noise(self) -> float:
        return self.random.choice((0.002, 0.01, 0.05))

    def rate(self, stream: Actor) -> float:
        """Streams with the lowest figure go first."""
        return self.draw()

    def add(self, stream: Actor) -> None:
        super().add(stream)
        order = self.order.get(stream.number)
        if order is None:
            order = self.order[stream.number] = self.rate(stream)
        heapq.heappush(self.heap, (order, stream.number, stream))

    def pick(self) -> Actor | None:
        if not self.able:
            return None
        heap, order = self.heap, self.order
        while heap[0][2].place < 0 or heap[0][0] != order[heap[0][1]]:
            heapq.heappop(heap)  # has blocked, or its priority has changed
        if self.draw() < self.noise:
            return self.disturb(heap[0][2])
        return heap[0][2]

    def disturb(self, first: Actor) -> Actor:
        """The stream that leads becomes the last."""
        order = self.order[first.number] = self.order[first.number] + 1.0
        heapq.heappush(self.heap, (order, first.number, first))
        while self.heap[0][0] != self.order[self.heap[0][1]] or self.heap[0][2].place < 0:
            heapq.heappop(self.heap)
        return self.heap[0][2]


class Reverse(Prioritised):
    """``reverse``: last rank first, and the streams made last first; a little noise."""

    def choose_noise(self) -> float:
        return self.random.choice((0.0, 0.05, 0.2))

    def rate(self, stream: Actor) -> float:
        return -(stream.rank * 64.0 + stream.number % 64)

    def disturb(self, first: Actor) -> Actor:
        return self.able[int(self.draw() * len(self.able))]


_POLICIES: dict[str, type[Policy]] = {
    "uniform": Policy,
    "slow_rank": SlowRank,
    "starved_stream": StarvedStream,
    "lone_stream": LoneStream,
    "burst": Burst,
    "priority": Prioritised,
    "reverse": Reverse,
}

#: Names of all seed families.
FAMILIES: tuple[str, ...] = tuple(_POLICIES)


def policy(family: str, random: Random, streams: Sequence[Actor]) -> Policy:
    """A fresh policy of a family.

    Raises
    ------
    InputError
        If there is no such family.
    """
    if family not in _POLICIES:
        raise InputError(f"no seed family {family!r}; there are {', '.join(FAMILIES)}")
    return _POLICIES[family](random, streams)
