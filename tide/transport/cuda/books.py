"""Book-keeping of collectives: which are under way, what a slot has to wait for, and the events that they use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide.transport.cuda.ticket import CudaTicket


class Books:
    """Collectives of one transport. The watchdog reads them while others are issued.

    Parameters
    ----------
    driver : Driver
        Driver calls.

    Attributes
    ----------
    pool : list of int
        Events that nobody uses at the moment.
    updates : deque of int
        Events before optimizer steps, oldest first; until the watchdog finds that no peer had given up by then.
    """

    def __init__(self, driver: Any) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._tickets: dict[str, deque[CudaTicket]] = {}  # by collective, each in order of issue
        self._gathers: dict[int, CudaTicket] = {}  # last one into each slot
        self._reductions: dict[int, CudaTicket] = {}  # last reduce-scatter in each slot
        self.pool: list[int] = []
        self.updates: deque[int] = deque()

    def record(self, stream: int) -> int:
        """A new event on a stream."""
        event: int = self.pool.pop() if self.pool else self._driver.new_event()
        if result := self._driver.event_record(event, stream):
            self._driver.check(result, "event record")
        return event

    def make_room(self, collective: str) -> None:
        """Before another collective of a kind: lets go of those that have ended."""
        if len(self._tickets.get(collective, ())) > 1:
            self._reap(collective)

    def add(self, ticket: CudaTicket, slot: int | None) -> None:
        """Takes a collective in that has been issued; ``slot`` is the one that it uses."""
        with self._lock:
            self._tickets.setdefault(ticket.collective, deque()).append(ticket)
        if slot is not None:
            (self._reductions if ticket.collective == "reduce_scatter" else self._gathers)[slot] = ticket

    def unawaited(self, slot: int) -> list[CudaTicket]:
        """The slot's last collectives, whose ends the next one begins after.

        An all-gather's streams write the slot, and push from it to peers; it counts unless the caller has waited for
        it before vacating the slot. A reduce-scatter in the slot always counts: callers wait for its end on another
        stream, and after they have vacated the slot. All that peers write into the slot for it, it has read.
        """
        gather, reduction = self._gathers.get(slot), self._reductions.get(slot)
        if gather is not None and gather.awaited_for:
            gather = None
        with self._lock:
            return [ticket for ticket in (gather, reduction) if ticket is not None and not ticket.finished]

    def ends(self, tickets: Sequence[CudaTicket]) -> list[int]:
        """Their events; none of those that have ended and been let go."""
        with self._lock:
            return [event for ticket in tickets for event in ticket.ends]

    def order_after(self, ticket: CudaTicket, events: Sequence[int]) -> None:
        """Makes the current stream wait for events of a ticket, and lets go of its gradients."""
        with self._lock:
            if not ticket.finished:
                self._driver.bind_thread()
                stream = self._driver.current_stream()
                for event in events:
                    if result := self._driver.stream_wait_event(stream, event, 0):
                        self._driver.check(result, "event wait")
            ticket.gradients = None

    def is_finished(self, ticket: CudaTicket) -> bool:
        """Whether a collective has ended."""
        self._driver.bind_thread()
        with self._lock:
            return ticket.finished or all(self._driver.done(event) for event in ticket.ends)

    def could_start(self, ticket: CudaTicket) -> bool:
        """Whether all that a collective has to wait for on this rank has happened.

        Those before it in its slot have clocks of their own, which say what they wait for.
        """
        with self._lock:
            if ticket.finished:
                return False
            gates = (ticket.entry, *((ticket.gate,) if ticket.gate else ()))
            if not all(self._driver.done(event) for event in gates):
                return False
            return all(self._driver.done(event) for before in ticket.behind for event in before.ends)

    def outstanding(self) -> list[CudaTicket]:
        """Collectives that have not ended, oldest first."""
        with self._lock:
            return sorted((t for tickets in self._tickets.values() for t in tickets), key=lambda t: t.number)

    def heads(self) -> list[CudaTicket]:
        """The oldest outstanding ticket of each collective."""
        for collective in list(self._tickets):
            self._reap(collective)
        with self._lock:
            return [tickets[0] for tickets in self._tickets.values() if tickets]

    def _reap(self, collective: str) -> None:
        """Lets go of collectives that have ended; those of one kind end in order."""
        tickets = self._tickets.get(collective)
        while tickets:
            with self._lock:
                if not tickets or not all(self._driver.done(event) for event in tickets[0].ends):
                    return
                ticket = tickets.popleft()
                ticket.finished = True
                ticket.gradients = ticket.outputs = ticket.tensors = None
                self.pool += [ticket.entry, *ticket.ends, *ticket.marks, *ticket.midway]
                ticket.ends, ticket.released, ticket.marks, ticket.midway = [], [], [], []
                ticket.entry = ticket.gate = 0
                ticket.behind = []

    # Optimizer steps ---------------------------------------------------------------------------

    def note_update(self, stream: int) -> None:
        """Notes that an optimizer step is about to be issued on a stream."""
        self.updates.append(self.record(stream))

    def updates_done(self) -> int:
        """How many of the optimizer steps noted the device has come to by now."""
        self._driver.bind_thread()
        return sum(1 for _ in takewhile(self._driver.done, list(self.updates)))

    def forget_updates(self, number: int) -> None:
        """Lets go of the first ones: nothing can have been wrong with their gradients."""
        for _ in range(number):
            self.pool.append(self.updates.popleft())

    def clear(self) -> None:
        """Forgets the slots and the events."""
        self._gathers.clear()
        self._reductions.clear()
        self.updates.clear()
        self.pool.clear()
