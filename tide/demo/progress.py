"""A line that tells what takes long, and for how long it has."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds after which a task shows that it is still running.
PATIENCE = 2.0


@contextmanager
def progress(task: str) -> Iterator[None]:
    """Shows ``task`` with its running time on standard error once it has taken more than two seconds."""
    stop = threading.Event()
    terminal = sys.stderr.isatty()

    def show() -> None:
        began = time.monotonic()
        delay = PATIENCE
        while not stop.wait(delay):
            seconds = time.monotonic() - began
            if terminal:
                print(f"\r  … {task}: {seconds:.0f} s", end="", file=sys.stderr, flush=True)
                delay = 0.5
            else:
                print(f"  … {task}: {seconds:.0f} s", file=sys.stderr, flush=True)
                delay = 10.0
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="tide-demo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
