"""The order in which one rank issues the steps of a collective.

A host thread feeds all streams of a rank, one step at a time, so it has to choose. Two things hang on that
choice. A signal to oneself becomes a CUDA event, or is counted by a launch, and a wait for what was not issued
yet waits for nothing: the signal has to be issued first. And a device has fewer hardware queues than a program
may have CUDA streams: two streams that share a queue run one after the other, and a wait at the head of it
holds back steps that other ranks wait for.

Both are settled by one order of all steps of all ranks in which every wait comes after its signals. Each rank
issues its own part of it: then even a rank whose streams all share one queue cannot block the others.

Within a node any such order does, and the one with the fewest calls is taken (`issue_order`). Between nodes more hangs
on it, as NCCL runs what a communicator is given in the order of issue: if a rank's puts come before the credits that
its peers wait for, the ranks put in turn, one after the other. There the steps are issued in the order in which the
predicted clock runs them (`in_time`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tide.compiler.clock import Event
from tide.compiler.steps import INITIAL_CREDIT, Lane, Program, Put, Signal, Wait
from tide.errors import PlanError


def issue_order(programs: Mapping[int, Program], position: int) -> list[tuple[int, int]]:
    """Steps of ``position`` in an order that no sharing of queues can block.

    Parameters
    ----------
    programs : mapping of int to Program
        Program of every position that exchanges signals with this one, itself included.
    position : int
        Whose order.

    Returns
    -------
    list of (int, int)
        ``(stream, step)`` indices; within a stream in order.

    Raises
    ------
    PlanError
        If the programs block each other.
    """
    state = {who: [0] * len(program.streams) for who, program in programs.items()}
    counts: Counter[tuple[int, int, Lane]] = Counter()  # (from, to, lane): signals not consumed yet
    order: list[tuple[int, int]] = []
    moved = True
    while moved:
        moved = False
        for who, program in programs.items():
            for number, stream in enumerate(program.streams):
                # One stream as far as it goes: neighbouring waits and signals then share a driver call.
                while state[who][number] < len(stream.steps):
                    step = stream.steps[state[who][number]]
                    if isinstance(step, Wait):
                        key = (step.peer, who, step.lane)
                        if counts[key] + INITIAL_CREDIT.get(step.lane, 0) < step.count:
                            break
                        counts[key] -= step.count
                    elif isinstance(step, Signal):
                        counts[who, step.peer, step.lane] += step.count
                    elif isinstance(step, Put):
                        counts[who, step.peer, step.lane] += 1
                    if who == position:
                        order.append((number, state[who][number]))
                    state[who][number] += 1
                    moved = True
    for who, program in programs.items():
        for number, stream in enumerate(program.streams):
            if state[who][number] < len(stream.steps):
                raise PlanError(
                    f"{program.collective}: stream {stream.name} of position {who} can never pass step "
                    f"{state[who][number]}, {stream.steps[state[who][number]]}: no such signal is left"
                )
    return order


def in_time(program: Program, events: Iterable[Event], latency: float) -> list[tuple[int, int]]:
    """Steps of a rank in the order in which the predicted clock runs them; see `issue_order`.

    Parameters
    ----------
    program : Program
        The rank's.
    events : iterable of Event
        Its steps on the clock; `latency` is that of the network there, in seconds.
    """
    times: dict[str, list[float]] = {stream.name: [] for stream in program.streams}
    for event in events:
        times[event.stream].append(_moment(event, latency))
    return merged(program, [times[stream.name] for stream in program.streams])


def _moment(event: Event, latency: float) -> float:
    """When a step is issued: a wait when it ends.

    A put a little after its start: a wait that ends just then, for the put before it, goes first, as it would
    otherwise be held back by the put on the same communicator. The put's signal comes later still.
    """
    if event.kind == "wait":
        return event.stop
    if event.kind == "put":
        return event.start + min((event.stop - event.start) / 2, 2 * latency)
    return event.start


def merged(program: Program, times: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Steps of a program's streams by their times; of those at the same time, a wait for oneself after its signal."""
    order: list[tuple[int, int]] = []
    state, given = [0] * len(program.streams), Counter[Lane]()
    total, last = sum(len(stream.steps) for stream in program.streams), 0
    while len(order) < total:
        ready: list[tuple[float, bool, int]] = []
        for number, stream in enumerate(program.streams):
            if state[number] == len(stream.steps):
                continue
            step = stream.steps[state[number]]
            if (
                isinstance(step, Wait)
                and step.peer == program.position
                and given[step.lane] + INITIAL_CREDIT.get(step.lane, 0) < step.count
            ):
                continue
            ready.append((times[number][state[number]], number != last, number))
        if not ready:
            raise PlanError(f"{program.collective}: the streams of position {program.position} wait for each other")
        _, _, last = min(ready)
        step = program.streams[last].steps[state[last]]
        if isinstance(step, Signal | Wait) and step.peer == program.position:
            given[step.lane] += step.count if isinstance(step, Signal) else -step.count
        order.append((last, state[last]))
        state[last] += 1
    return order
