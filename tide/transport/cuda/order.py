"""The order in which one rank issues the steps of a collective.

A host thread feeds all streams of a rank, one step at a time, so it has to choose. Two things hang on that
choice. A signal to oneself becomes a CUDA event, or is counted by a launch, and a wait for what was not issued
yet waits for nothing: the signal has to be issued first. And a device has fewer hardware queues than a program
may have CUDA streams: two streams that share a queue run one after the other, and a wait at the head of it
holds back steps that other ranks wait for.

Both are settled by one order of all steps of all ranks in which every wait comes after its signals. Each rank
issues its own part of it: then even a rank whose streams all share one queue cannot block the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
