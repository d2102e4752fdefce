"""Place steps that one launch can carry out: neighbours in a stream, with only self-signals between.

An all-gather casts its shard piece by piece, and says after each piece that it may leave. As many launches, events
and waits for them cost the host more than anything else of a small all-gather. One launch over all pieces, whose
programs count the pieces that they have done, says the same by words that other streams can wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tide.compiler.steps import Place, Program, Signal, Stream
from tide.transport.cuda.words import Words


class Chain(NamedTuple):
    """Place steps of one stream.

    Parameters
    ----------
    places : tuple of int
        Their indices in the stream.
    steps : tuple of Place
        They themselves.
    signals : tuple of tuple of int
        Indices of the self-signals after each of them but the last: those after that one are no part of it, as all
        of the launch has ended by then.
    """

    places: tuple[int, ...]
    steps: tuple[Place, ...]
    signals: tuple[tuple[int, ...], ...]


def cast_chains(program: Program, stream: Stream) -> Iterator[Chain]:
    """Finds the chains of a stream.

    All steps of a chain cast between the same two types. A signal on a lane with credits ends one: a later program
    may wait for it, by its event.
    """
    found: list[tuple[int, Place]] = []
    for index, step in enumerate(stream.steps):
        if isinstance(step, Place):
            types = _types(step)
            if found and types != _types(found[0][1]):
                yield from _chain(found)
                found = []
            if types is not None:
                found.append((index, step))
        elif not (isinstance(step, Signal) and step.peer == program.position and not Words.credit(step.lane)):
            yield from _chain(found)
            found = []
    yield from _chain(found)


def _types(step: Place) -> tuple[str, str] | None:
    """The element types of a step; None if there are several pairs, or nothing to cast."""
    pairs = {(cast.src_dtype, cast.dst_dtype) for cast in step.casts}
    return pairs.pop() if len(pairs) == 1 else None


def _chain(found: Sequence[tuple[int, Place]]) -> Iterator[Chain]:
    if len(found) > 1:
        places = tuple(index for index, _ in found)
        signals = tuple(tuple(range(place + 1, after)) for place, after in pairwise(places))
        yield Chain(places, tuple(step for _, step in found), signals)
