"""Deadlines: a thread that finds the collective that does not end, says why, and sets the device free.

A wait on a flag word that a dead peer never writes would block its stream for ever, and every later CUDA call of
the process behind it. So a daemon thread looks at the outstanding collectives now and then. A collective's time
runs while it is the oldest of its kind and all that the caller asked it to wait for has happened: a host that
runs far ahead of the device, or a caller's own kernel that takes long, is not its fault.

On expiry the flag words tell who is missing. They are then overwritten with what the streams wait for, so that
everything drains; the data is worthless, and the transport raises :class:`~tide.errors.PeerError` from then on.
Peers are told through a word of theirs, so that they need not wait for their own deadline. Streams that are set free
push to peers, too, whose memory may be in use: so the peers get time to take note, after which they take no optimizer
step any more (:meth:`CudaTransport.fail`), and say so by their own words. Each looks at its words now and then, also
while nothing is outstanding. A peer that does not answer in time finds in the word that it was not waited for.

The word also says what this rank was waiting in: each looks at what the ranks that it waits for have told, and so
finds out that they are alive and have issued other collectives. Their signals would never have answered its waits
(:mod:`tide.compiler.signals`); the deadline is what ends them.

A wait of NCCL's is on a word that nobody else can write, and a put waits for the network. Collectives that put to
other nodes are not set free at all: ranks there, which cannot be told, would sum what comes. If a stream does not
drain, the communicators are broken off, on a thread of their own, as NCCL may wait for it. A host that has run
into it would hang for ever: after a last respite the process ends itself, with the reason on stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tide.errors import TransportError
from tide.transport.cuda.words import MASK, STRIDE, VALUES, encode, reached

if TYPE_CHECKING:
    from tide.transport.cuda.lowered import Crossing
    from tide.transport.cuda.ticket import CudaTicket
    from tide.transport.cuda.transport import CudaTransport

#: Seconds between two looks.
INTERVAL = 0.25
#: Seconds after which a look includes the peers' word that they have given up, and between two such looks.
ASK_PEERS = 1.0
#: Seconds that peers get to take note, before streams are set free that may write to their memory.
TAKE_NOTE = 3.0
#: Seconds that reading the flag words may take.
READ_TIMEOUT = 5.0
#: Seconds that streams get to drain before NCCL's communicators are broken off.
DRAIN = 1.0
#: Seconds from the deadline to the end of a process whose streams wait in NCCL for what never comes.
RESPITE = 30.0
#: Its exit code then (``EX_PROTOCOL``).
EXIT_CODE = 76

#: What a failure says where the device may run an optimizer step on what no collective has brought.
UPDATED = (
    " An optimizer step had been issued behind it, which the device may run on worthless gradients: do not use or save "
    "this rank's parameters and optimizer state; load a checkpoint."
)

#: What a rank that has given up tells its peers, as the number of a counter value: that it has; from `_WAITS` on,
#: also which collective of which unit it was in.
_GONE, _WAITS = 1, 2
#: Added to the number once streams were set free although a peer had not taken note.
_NOT_WAITED_FOR = VALUES // 2
_COLLECTIVES = ("all_gather", "reduce_scatter", "claim")


class Open(NamedTuple):
    """The wait that a stream is at."""

    step: int
    rank: int
    text: str


class Watchdog:
    """Watches over one transport.

    Parameters
    ----------
    transport : CudaTransport
        Whose collectives.
    timeout : float
        Seconds that a collective may take.
    """

    def __init__(self, transport: CudaTransport, timeout: float) -> None:
        self._transport, self.timeout = transport, timeout
        self._stop = threading.Event()
        self._side: int | None = None
        self._pinned: torch.Tensor | None = None
        self._event = 0
        self._started: dict[int, float] = {}
        self._aborting: threading.Thread | None = None
        self._stuck_since: float | None = None
        self._told = _GONE
        self._asked = 0.0  # when the peers' words were last looked at
        self._noted = False  # whether the peers have taken note that this rank has given up, or have had their time
        self._units = [unit.name for unit in transport.compiled.spec.units]
        interval = min(INTERVAL, timeout / 4)
        self._respite = 4 * interval  # for peers to tell what they wait for
        self._thread = threading.Thread(target=self._run, args=(interval,), name="tide-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch; allocates now what it will need when nothing can be allocated any more."""
        driver, layout = self._transport.driver, self._transport.compiled.arena
        self._side, self._event = driver.new_stream(), driver.new_event()
        units, slots = layout.words.units.values(), layout.words.slots
        words = 2 * max((unit.size for unit in units), default=0) + 2 * max((row.count for row in slots), default=0)
        words = max(words, self._transport.abort_words)  # what is read at a time
        self._pinned = torch.zeros(words, dtype=torch.int32, pin_memory=self._transport.device.type == "cuda")
        self._asked = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=READ_TIMEOUT + 1)
        if self._side is not None and not self._thread.is_alive():
            self._transport.driver.free_stream(self._side)
            self._transport.driver.free_event(self._event)
            self._side = None

    def _run(self, interval: float) -> None:
        self._transport.driver.bind_thread()
        self._transport.driver.allow_captures()
        while not self._stop.wait(interval):
            try:
                self.look()
            except Exception as error:
                # A device that has failed altogether: every call of the user's fails too, and says so.
                self._transport.fail(f"the watchdog cannot reach the device any more: {error}")
                return

    def look(self) -> None:
        """One look at the outstanding collectives."""
        transport = self._transport
        heads = transport.heads()
        now = time.monotonic()
        if transport.broken is not None:
            if heads or transport.poisoned:  # poison is no collective, and may wait all the same
                self._set_free()
            if heads:
                self._break_off(now)
            return
        self._started = {key: when for key, when in self._started.items() if any(key == t.number for t in heads)}
        for ticket in heads:
            if not transport.books.could_start(ticket):
                self._started.pop(ticket.number, None)
                continue
            waited = now - self._started.setdefault(ticket.number, now)
            if waited >= self.timeout:
                self._expire(ticket, f"has not finished {self.timeout:g} s after it could start")
                return
        if now - self._asked >= min(ASK_PEERS, self.timeout):
            self._asked = now
            self._ask_peers(heads)

    def _ask_peers(self, heads: Sequence[CudaTicket]) -> None:
        """Finds out whether a peer has given up: nothing can be run any more then."""
        transport = self._transport
        good = transport.books.updates_done()  # before the look: what was done then, no peer has spoilt
        if (gone := self._gave_up()) is None:
            return
        if not gone:
            transport.books.forget_updates(good)
            return
        told = " and ".join(f"rank {transport.names[rank]}{self._where(number)}" for rank, number in gone.items())
        started = [ticket for ticket in heads if ticket.number in self._started]
        if started:
            self._expire(started[0], f"was given up by {told}")
            return
        name = transport.names[transport.rank]
        transport.fail(f"rank {name}: {told} gave up: a collective there did not end. Look at its output")

    # Reading -----------------------------------------------------------------------------------

    def _read(self, *spans: tuple[int, int]) -> list[int] | None:
        """32-bit words of the own memory, ``(offset, bytes)`` after each other; None if the device does not answer.

        Through a stream of its own.
        """
        transport, driver = self._transport, self._transport.driver
        assert self._pinned is not None
        assert self._side is not None
        own, host, at = transport.arena.addresses[transport.rank], self._pinned.data_ptr(), 0
        for offset, nbytes in spans:
            driver.check(driver.download(host + at, own + offset, nbytes, self._side), "read of flag words")
            at += nbytes
        driver.check(driver.event_record(self._event, self._side), "event record")
        end = time.monotonic() + READ_TIMEOUT
        while not driver.done(self._event):
            if time.monotonic() > end or self._stop.is_set():
                return None
            time.sleep(0.001)
        return [value & MASK for value in self._pinned[: at // 4].tolist()]

    def _read_signals(self, unit: str) -> dict[int, int] | None:
        """The flag words of a unit and its slot, by offset in the arena."""
        spans = self._transport.words.spans(unit)
        words = self._read(*spans)
        if words is None:
            return None
        offsets = [offset + at for offset, nbytes in spans for at in range(0, nbytes, 4)]
        return dict(zip(offsets, words, strict=True))

    def _gave_up(self) -> dict[int, int] | None:
        """Peers that have given up, and the number that each has told; None if the device does not answer."""
        transport = self._transport
        words = self._read((transport.abort_offset, 4 * transport.abort_words))
        if words is None:
            return None
        told = {rank: word // STRIDE for rank, word in enumerate(words) if word}
        transport.spoilt |= any(number >= _NOT_WAITED_FOR for number in told.values())
        return told

    # What ranks tell each other ------------------------------------------------------------------

    def _number(self, ticket: CudaTicket) -> int:
        """What this rank tells of the collective that it is in."""
        number = self._units.index(ticket.unit) * len(_COLLECTIVES) + _COLLECTIVES.index(ticket.collective) + _WAITS
        return number if number < _NOT_WAITED_FOR else _GONE

    def _where(self, number: int) -> str:
        """What a peer has told, in words."""
        if number % _NOT_WAITED_FOR < _WAITS:
            return ""
        unit, which = divmod(number % _NOT_WAITED_FOR - _WAITS, len(_COLLECTIVES))
        return f" in {_COLLECTIVES[which]} of unit {self._units[unit]!r}"

    def _ask(self, ranks: Collection[int], respite: float) -> dict[int, int]:
        """What ranks have told, once all of them have, or after a respite: they have to find out first."""
        end = time.monotonic() + respite
        while not set(ranks) <= (told := self._gave_up() or {}).keys() and time.monotonic() < end:
            if self._stop.wait(respite / 20):
                break
        return {rank: number % _NOT_WAITED_FOR for rank, number in told.items()}

    def _judge(self, ranks: Collection[int], own: int) -> str:
        """Why ranks that are waited for do not answer, as far as can be known."""
        told, found, names = self._ask(ranks, self._respite), list[str](), self._transport.names
        if others := {rank: told[rank] for rank in ranks if told.get(rank, own) not in (own, _GONE)}:
            waits = " and ".join(f"rank {names[rank]} waits{self._where(number)}" for rank, number in others.items())
            found.append(
                f"{waits}: it is alive, so the ranks have most likely issued different collectives, unless it waits "
                "for a third rank, which its own message names. Every rank must run the same modules in the same order"
            )
        if same := [f"rank {names[rank]}" for rank in ranks if told.get(rank) == own != _GONE]:
            found.append(f"{' and '.join(same)} {'waits' if len(same) == 1 else 'wait'} in this collective, too")
        if silent := [f"rank {names[rank]}" for rank in ranks if told.get(rank, _GONE) == _GONE]:
            has, its = ("has", "its") if len(silent) == 1 else ("have", "their")
            found.append(
                f"{' and '.join(silent)} {has} died or given up, or {has} not come to this collective; look at {its} "
                "output"
            )
        return ". ".join(found)

    # Failing -----------------------------------------------------------------------------------

    def _expire(self, ticket: CudaTicket, what: str) -> None:
        transport = self._transport
        self._told = self._number(ticket)
        self.tell_peers()
        words = self._read_signals(ticket.unit)
        message = f"rank {transport.names[transport.rank]}: {ticket.collective} of unit {ticket.unit!r} {what}; "
        if words is None:
            message += "the flag words cannot be read: the device itself does not answer"
        elif found := self.blocked(ticket, words):
            message += ", ".join(
                f"stream {stream} waits at step {wait.step} {wait.text}" for stream, wait in found.items()
            )
            ranks = sorted({wait.rank for wait in found.values()})
            message += f". {self._judge(ranks, self._told)}. A larger deadline: TIDE_TIMEOUT"
        else:
            message += "no wait on a peer is open: a kernel or a copy does not end"
        transport.fail(message)
        self._set_free()

    def _set_free(self) -> None:
        """Lets the streams go on, once the peers to whose memory they may write have taken note."""
        if not self._noted:
            peers = self._transport.arena.addresses.keys() - {self._transport.rank}
            if peers - self._ask(peers, min(TAKE_NOTE, 4 * self.timeout)).keys():
                self._told += _NOT_WAITED_FOR
                self.tell_peers()
            self._noted = True
            self.look_at_updates()
        self._release()

    def blocked(self, ticket: CudaTicket, words: Mapping[int, int]) -> dict[str, Open]:
        """What each stream of a collective waits for, given the flag words by their offsets; streams that do not wait
        for a peer are left out."""
        transport = self._transport
        base = dict(zip(ticket.indices, ticket.base, strict=True))
        found: dict[str, Open] = {}  # first open wait of each stream
        for awaited in ticket.awaited:
            needed = encode(base[awaited.index] + awaited.total - transport.words.credit(awaited.lane))
            word = words[awaited.word]
            if not reached(word, needed):
                missing = ((needed - word) & MASK) // STRIDE
                text = f"for {missing} signal(s) {awaited.lane.name} of rank {transport.names[awaited.rank]}"
                found.setdefault(awaited.stream, Open(awaited.step, awaited.rank, text))
        for crossing in self._open_crossings(ticket):
            name = transport.names[crossing.rank]
            text = f"for {crossing.count} signal(s) {crossing.lane.name} of rank {name} through NCCL"
            last = found.get(crossing.stream)
            if last is None or crossing.step < last.step:
                found[crossing.stream] = Open(crossing.step, crossing.rank, text)
        return found

    def _open_crossings(self, ticket: CudaTicket) -> list[Crossing]:
        """Waits by NCCL that are not known to have passed."""
        done = [self._transport.driver.done(event) for event in list(ticket.marks)]
        return [c for c in ticket.crossings if c.mark >= len(done) or not done[c.mark]]

    def _break_off(self, now: float) -> None:
        """Breaks NCCL's communicators off if the streams do not drain, and in the end the process."""
        transport = self._transport
        if transport.wire is None:
            return
        if self._stuck_since is None:
            self._stuck_since = now
        if self._aborting is None:
            if now - self._stuck_since >= DRAIN:
                self._aborting = threading.Thread(target=self._abort, name="tide-nccl-abort", daemon=True)
                self._aborting.start()
        elif now - self._stuck_since >= RESPITE:
            message = f"{transport.broken}\nThe device still waits {RESPITE:g} s later: this process ends itself.\n"
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(message)
                sys.stderr.flush()
            os._exit(EXIT_CODE)

    def _abort(self) -> None:
        transport = self._transport
        assert transport.wire is not None
        transport.driver.bind_thread()
        with contextlib.suppress(TransportError):  # what is being broken off may well complain
            transport.wire.abort()

    def look_at_updates(self) -> None:
        """Says of a failure whether an optimizer step may run on what no collective has brought."""
        transport, books = self._transport, self._transport.books
        with contextlib.suppress(TransportError):  # of a device that does not answer
            late = books.updates and (transport.spoilt or books.updates_done() < len(books.updates))
            if late and transport.broken is not None and UPDATED not in transport.broken:
                transport.broken += UPDATED

    def tell_peers(self) -> None:
        """Lets the peers know that this rank has given up, and in what, so that they need not wait any longer."""
        transport, driver = self._transport, self._transport.driver
        assert self._side is not None
        for rank, address in transport.arena.addresses.items():
            if rank != transport.rank:
                place = address + transport.abort_offset + 4 * transport.rank
                driver.copy(place, transport.value_table + 4 * self._told, 4, self._side)

    def _release(self) -> None:
        """Writes what is awaited into the flag words; again at each look, since a late peer may overwrite them.

        Not for collectives that put to other nodes: what they would put is worthless, and nobody there can be told.
        """
        transport, driver = self._transport, self._transport.driver
        assert self._side is not None
        own = transport.arena.addresses[transport.rank]
        waiting = [ticket for ticket in transport.outstanding() if not ticket.puts]
        places = {awaited.index: awaited.word for ticket in waiting for awaited in ticket.awaited}
        places |= transport.poisoned
        for index, value in transport.words.satisfied(places).items():
            driver.write_value(self._side, own + places[index], value, 0)
