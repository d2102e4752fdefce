"""Where the host's time of a collective goes: before the first step, in the steps, in the driver, in the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from tide.transport.cuda.lowered import Lowered

#: The driver's calls of a collective.
CALLS = (
    *("event_record", "event_query", "stream_wait_event", "memory_operations", "copy_batch"),
    *("copy", "copy_2d", "upload", "launch"),
)


class DriverClock:
    """Counts a driver's calls, and their microseconds.

    Lowered programs keep the functions that they call: to be made before the first collective.

    Parameters
    ----------
    driver : Driver
        Whose calls.
    """

    def __init__(self, driver: Any) -> None:
        self._spent: dict[str, list[float]] = {name: [] for name in CALLS}
        for name in CALLS:
            if (function := getattr(driver, name)) is not None:  # older drivers have no batches
                setattr(driver, name, self._timed(function, self._spent[name]))

    @staticmethod
    def _timed(function: Callable[..., int], spent: list[float]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            begin = time.perf_counter()
            result = function(*arguments)
            spent.append((time.perf_counter() - begin) * 1e6)
            return result

        call.argtypes = getattr(function, "argtypes", None)  # type: ignore[attr-defined]  # for `laid_down`
        return call

    def clear(self) -> None:
        """Forgets what was called so far."""
        for spent in self._spent.values():
            spent.clear()

    def row(self) -> dict[str, tuple[int, float]]:
        """Calls, and microseconds of all of them, by name."""
        return {name: (len(spent), sum(spent)) for name, spent in self._spent.items() if spent}


def split(
    transport: Any,
    collective: str,
    issue: Callable[[], None],
    repeats: int,
    typical: Callable[[Sequence[float]], float],
    ready: Callable[[int], None] = lambda turn: None,
) -> dict[str, float]:
    """Microseconds of a call.

    Parameters
    ----------
    transport : CudaTransport
        That carries it out; ``issue`` has been called before.
    collective : str
        Which of the collectives that ``issue`` calls is meant; the last one of its kind.
    issue : callable
        Calls it, and what belongs to a call.
    repeats : int
        Times that it is called, for each of two measurements.
    typical : callable
        Makes one figure of all: their median, or the least.
    ready : callable
        Called before each, with its number.

    Returns
    -------
    dict of str to float
        ``whole`` is all of ``issue``; ``run`` the transport's part, of which ``prepare`` comes before the first step,
        ``steps`` are the steps, with their driver calls, and ``rest`` is the rest.
    """
    whole, spent = [], {"run": [0.0], "prepare": [0.0], "steps": [0.0]}
    clock = time.perf_counter
    for turn in range(repeats):
        ready(turn)
        begin = clock()
        issue()
        whole.append((clock() - begin) * 1e6)

    def timed(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = clock()
            result = function(*arguments)
            spent[key].append((clock() - begin) * 1e6)
            return result

        return call

    lowered = [found for found in transport._lowered.values() if found.program.collective == collective][-1]
    operations = lowered.operations

    def steps() -> None:
        for operation in operations:
            operation()

    def run(program: Any, binding: Any) -> Any:
        if program.collective != collective:
            return original(program, binding)
        with mock.patch.object(Lowered, "prepare", timed("prepare", Lowered.prepare)):
            return timed_run(program, binding)

    original = transport.run
    timed_run = timed("run", original)
    with (
        mock.patch.object(transport, "run", run),
        mock.patch.object(lowered, "operations", [timed("steps", steps)]),
    ):
        for turn in range(repeats):
            ready(turn)
            issue()
    found = {"whole": typical(whole), **{key: typical(values[1:]) for key, values in spent.items()}}
    return {**found, "rest": found["run"] - found["prepare"] - found["steps"]}
