"""The predicted clock as a Chrome trace, to be opened in Perfetto or ``chrome://tracing``."""

from __future__ import annotations

import json
from pathlib import Path

from tide.compiler.clock import clock
from tide.compiler.compile import Compiled
from tide.report.schedule_picture import step_label
from tide.report.units import show_name


def chrome_trace(
    compiled: Compiled,
    unit: str,
    collective: str,
    rank: int,
    *,
    scope: str | None = None,
    path: str | Path | None = None,
) -> dict[str, object]:
    """Trace events of one collective: process = rank, thread = stream, one event a step.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        Unit name.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    rank : int
        World rank; the ranks that the clock runs besides are in the trace, too.
    scope : {"rank", "node", "group"}, optional
        Ranks to run; see :func:`tide.compiler.clock.clock`.
    path : str or Path, optional
        File to write the JSON to.

    Returns
    -------
    dict
        The trace in the JSON object format; times in µs, as the format has them.
    """
    course = clock(compiled, unit, collective, rank, scope)
    out: list[dict[str, object]] = []
    for member, events in sorted(course.events.items()):
        program = compiled.program(unit, collective, member)
        threads = {stream.name: number for number, stream in enumerate(program.streams)}
        node = compiled.topology.node_of(member)
        out.append({"ph": "M", "name": "process_name", "pid": member, "args": {"name": f"rank {member}, node {node}"}})
        for name, thread in threads.items():
            out.append({"ph": "M", "name": "thread_name", "pid": member, "tid": thread, "args": {"name": name}})
        for event in events:
            named = {"pid": member, "tid": threads[event.stream], "cat": event.kind, "ts": event.start * 1e6}
            args: dict[str, object] = {"step": event.index}
            if event.peer is not None:
                args["peer"] = event.peer
            if event.nbytes:
                args["bytes"] = event.nbytes
            seconds = event.stop - event.start
            if event.kind == "signal":
                out.append({"ph": "i", "s": "t", "name": f"signal {event.peer}", **named, "args": args})
                continue
            if event.nbytes and seconds and event.kind != "wait":
                args["GB/s"] = round(event.nbytes / seconds / 1e9, 3)
            label = f"wait {event.peer}" if event.kind == "wait" else f"{event.kind} {step_label(event, program)}"
            out.append({"ph": "X", "name": label, **named, "dur": seconds * 1e6, "args": args})
    trace: dict[str, object] = {
        "traceEvents": out,
        "displayTimeUnit": "ms",
        "otherData": {
            "what": f"tide::{collective}/{show_name(unit)}",
            "source": compiled.spec.source,
            "topology": str(compiled.topology),
            "digest": compiled.digest,
            "times": "predicted",
            "scope": course.scope,
            "assumed_waits": course.assumed,
        },
    }
    if path is not None:
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
    return trace
