"""Events of a simulated run in Chrome's trace format, which Perfetto reads too."""

from __future__ import annotations

from collections.abc import Iterable

from tide.transport.simulated.machine import TraceEvent


def chrome_trace(events: Iterable[TraceEvent]) -> dict[str, object]:
    """A trace of one process per rank and one thread per stream.

    Time is logical: one microsecond per micro-operation, of which one is executed at a time.

    Parameters
    ----------
    events : iterable of TraceEvent
        As in :attr:`Result.trace`.

    Returns
    -------
    dict
        Ready for ``json.dump``.
    """
    rows: list[dict[str, object]] = []
    threads: dict[tuple[int, str], int] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.stream, e.start, e.end)):
        key = (event.rank, event.stream)
        if key not in threads:
            threads[key] = sum(1 for rank, _ in threads if rank == event.rank)
            if threads[key] == 0:
                rows.append(_name("process_name", event.rank, 0, f"rank {event.rank}"))
            rows.append(_name("thread_name", event.rank, threads[key], event.stream))
        call = event.site.call
        rows.append(
            {
                "name": event.title,
                "cat": call.collective,
                "ph": "X",
                "pid": event.rank,
                "tid": threads[key],
                "ts": event.start,
                "dur": event.end - event.start,
                "args": {"unit": call.unit.name, "collective": call.collective, "step": event.site.index},
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
