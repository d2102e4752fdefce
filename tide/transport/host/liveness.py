"""Whether the process behind a rank still runs."""

from __future__ import annotations

import os
from typing import NamedTuple


class Process(NamedTuple):
    """A process, told from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    started: int


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may itself hold spaces and brackets.
    fields = line[line.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def this_process() -> Process:
    """The calling process."""
    found = _stat(os.getpid())
    assert found is not None, "/proc does not know this process"
    return Process(os.getpid(), found[1])


def alive(process: Process) -> bool:
    """Whether it still runs; a zombie, which only waits for its parent, does not."""
    found = _stat(process.pid)
    return found is not None and found[0] not in "ZXx" and found[1] == process.started
