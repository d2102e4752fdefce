"""A clock that knows kinds of steps only, for groups too large for :mod:`tide.compiler.clock`.

It runs on the columns of all positions (:mod:`tide.compiler.columns`): no step of theirs has to be made. Every put
takes as long as every other, and so on; what it tells is an order in which all ranks can go on together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tide.compiler.columns import KINDS, PUT, SIGNAL, WAIT, ProgramRows, Rows, fields
from tide.compiler.steps import INITIAL_CREDIT, Accumulate, Copy, Lane, Multicast, Place, Put, Stream, SwitchReduce
from tide.errors import PlanError

#: Durations by kind of step, in those of a put; others take none.
DURATIONS = {Place: 0.2, Copy: 0.5, Put: 1.0, Multicast: 0.5, Accumulate: 0.3, SwitchReduce: 0.3}
#: Of the way of a signal to another rank.
WAY = 0.01

#: Columns of one stream as lists: kind, peer, lane, count.
_Columns = tuple[list[int], list[int], list[int], list[int]]


def nominal_times(programs: Iterable[ProgramRows], position: int) -> list[list[float]]:
    """When each step of one position is issued: a wait when it ends, any other when it begins.

    Parameters
    ----------
    programs : iterable of ProgramRows
        Of all positions, in order.
    position : int
        Whose times.

    Returns
    -------
    list of list of float
        By stream and step, in no unit of time.

    Raises
    ------
    PlanError
        If a wait never ends.
    """
    streams = [(who, _lists(stream)) for who, rows in enumerate(programs) for stream in rows.streams]
    state, now = [0] * len(streams), [0.0] * len(streams)
    found: list[list[float]] = [[] for who, _ in streams if who == position]
    own = (number for number, (who, _) in enumerate(streams) if who == position)
    mine = dict(zip(own, found, strict=True))
    credit = {int(lane): count for lane, count in INITIAL_CREDIT.items()}
    durations = {KINDS[step]: duration for step, duration in DURATIONS.items()}
    arrived: dict[tuple[int, int, int], list[float]] = {}  # by who waits, who signals, and lane
    taken: dict[tuple[int, int, int], int] = {}
    waiting: dict[tuple[int, int, int], int] = {}
    ready = deque(range(len(streams)))
    while ready:
        number = ready.popleft()
        who, (kinds, peers, lanes, counts) = streams[number]
        at, time, times = state[number], now[number], mine.get(number)
        while at < len(kinds):
            kind, moment = kinds[at], time
            if kind == WAIT:
                key = who, peers[at], lanes[at]
                came, need = arrived.get(key), taken.get(key, 0) + counts[at]
                first = credit.get(lanes[at], 0)
                if need > first:
                    if came is None or len(came) < need - first:
                        if waiting.setdefault(key, number) != number:
                            raise PlanError(f"two streams of position {who} wait for {Lane(lanes[at]).name} at a time")
                        break
                    time = moment = max(time, came[need - first - 1])
                taken[key] = need
            else:
                time += durations.get(kind, 0.0)
            if kind in (SIGNAL, PUT):
                key = peers[at], who, lanes[at]
                arrival = time if peers[at] == who else time + WAY
                arrived.setdefault(key, []).extend([arrival] * (counts[at] if kind == SIGNAL else 1))
                if (woken := waiting.pop(key, None)) is not None:
                    ready.append(woken)
            if times is not None:
                times.append(moment)
            at += 1
        state[number], now[number] = at, time
    if waiting:
        (who, peer, lane), number = next(iter(waiting.items()))
        raise PlanError(
            f"position {who} waits for ever for {Lane(lane).name} of position {peer}, at step {state[number]} of one "
            "of its streams; run verify() on the plan"
        )
    return found


def _lists(stream: Rows | Stream) -> _Columns:
    """Columns of a stream as lists."""
    if isinstance(stream, Rows):
        kind, peer, lane, number = (column.tolist() for column in stream.columns)
        return kind, peer, lane, number
    rows = [fields(step) for step in stream.steps]
    kinds, peers, lanes, counts = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return kinds, peers, lanes, counts
