"""The machine: streams of all ranks, counters and events, and the loop that lets them run.

Only parts of data steps are scheduled. Signals, waits and events are executed as soon as the stream
reaches them: they move no bytes and only ever let others go on, so a race that some order of them
allows is also there when they come early, and the scheduler has fewer steps to order.

Counters have one source and (in a sound plan) one consuming stream, so whether a set of programs blocks
does not depend on the order of execution: one interleaving finds a deadlock, many find the races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from tide.compiler.compile import Compiled
from tide.compiler.steps import INITIAL_CREDIT, Lane, Wait
from tide.errors import PlanError
from tide.transport.simulated.families import Policy, policy
from tide.transport.simulated.memory import Block, Memory
from tide.transport.simulated.parts import Part, Site


class TraceEvent(NamedTuple):
    """One step, from its first to its last micro-operation, in logical time."""

    rank: int
    stream: str
    site: Site
    title: str
    start: int
    end: int


@dataclass(eq=False, slots=True)
class Event:
    """Something that streams of one rank wait for: the end of ``expected`` streams of a collective.

    Attributes
    ----------
    what : str
        For messages: what has happened then.
    expected, remaining : int
        How many ends it takes, and how many are missing.
    action : callable or None
        Runs at that moment.
    """

    what: str
    expected: int
    remaining: int
    action: Callable[[], None] | None = None
    waiting: list[Actor] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Work:
    """A data step; a put also has a far half, delivered through ``channel``."""

    site: Site
    parts: list[Part]
    channel: Actor | None = None
    deliveries: list[Part] = field(default_factory=list)
    arrival: SignalItem | None = None


@dataclass(eq=False, slots=True)
class SignalItem:
    """Adds to a counter."""

    site: Site
    counter: int
    count: int


@dataclass(eq=False, slots=True)
class WaitItem:
    """Takes from a counter once it is high enough."""

    site: Site
    counter: int
    count: int


@dataclass(eq=False, slots=True)
class HoldItem:
    """Holds the stream back until an event has happened."""

    site: Site
    event: Event


@dataclass(eq=False, slots=True)
class EndItem:
    """One of the ends that make an event happen."""

    event: Event


Item: TypeAlias = Work | SignalItem | WaitItem | HoldItem | EndItem


@dataclass(eq=False, slots=True)
class Actor:
    """A stream of one rank, or the channel of puts from one rank to another.

    Attributes
    ----------
    rank : int
        Rank whose stream it is; the target of a channel.
    name : str
        Name of the stream.
    number : int
        In order of creation.
    items : list
        What it executes, in order.
    at : int
        The item it has reached.
    pending : list of Part
        Parts of that item which have not been executed.
    place : int
        For the policy's own use; -1 while the stream cannot go on.
    began : int
        When it began the data step or the wait it is at.
    waiting : bool
        Whether it is at a wait.
    is_channel : bool
        Whether it carries puts.
    """

    rank: int
    name: str
    number: int
    items: list[Item] = field(default_factory=list)
    at: int = 0
    pending: list[Part] = field(default_factory=list)
    place: int = -1
    began: int = 0
    waiting: bool = False
    is_channel: bool = False


class Machine:
    """All ranks of a topology.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    trace : bool
        Keep the events of the run.
    """

    def __init__(self, compiled: Compiled, trace: bool = False) -> None:
        self.compiled = compiled
        self.memory = Memory(compiled)
        self.actors: dict[tuple[object, ...], Actor] = {}
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.trace: list[TraceEvent] | None = [] if trace else None
        self.clock = 0
        self._ids: dict[tuple[int, int], int] = {}
        self._names: list[tuple[int, str]] = []
        self._initial: list[int] = []
        self._counts: list[int] = []
        self._waiting: list[list[Actor]] = []
        self._ready: list[Actor] = []
        self._policy: Policy = policy("uniform", Random(0), ())
        self._draw = Random(0).random

    # Building ----------------------------------------------------------------------------------

    def counter(self, rank: int, word: int, lane: Lane, what: str) -> int:
        """Number of the counter that ``rank`` keeps in a word of its arena; ``what`` says whose signals it counts."""
        key = (rank, word)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self._initial)
            # Kept apart from what the lane's steps do: credits that exist before the first signal.
            self._initial.append(INITIAL_CREDIT.get(lane, 0))
            self._counts.append(self._initial[-1])
            self._waiting.append([])
            self._names.append((rank, what))
        return found

    def actor(self, rank: int, name: str) -> Actor:
        """The stream of a rank with this name; it lives as long as the machine."""
        key = (rank, name)
        if key not in self.actors:
            self.actors[key] = Actor(rank, name, len(self.actors))
        return self.actors[key]

    def channel(self, source: int, rank: int) -> Actor:
        """Puts from ``source`` to ``rank``: they arrive in order, others in any order."""
        key = ("put", source, rank)
        if key not in self.actors:
            self.actors[key] = Actor(rank, f"put from rank {source}", len(self.actors), is_channel=True)
        return self.actors[key]

    def event(self, what: str, expected: int) -> Event:
        """An event that happens when ``expected`` streams have reached it."""
        event = Event(what, expected, expected)
        self.events.append(event)
        return event

    def keep(self, block: Block) -> Block:
        """Registers memory outside of the arenas, so that :meth:`reset` restores it."""
        self.blocks.append(block)
        return block

    # Running -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Back to the start, with the same streams to run."""
        self.memory.reset()
        for block in self.blocks:
            block.reset()
        self._counts[:] = self._initial
        for waiting in self._waiting:
            waiting.clear()
        for event in self.events:
            event.remaining = event.expected
            event.waiting.clear()
        for actor in self.actors.values():
            actor.at, actor.pending, actor.place, actor.waiting = 0, [], -1, False
            if actor.is_channel:
                actor.items.clear()
        self.clock = 0
        if self.trace is not None:
            self.trace.clear()

    def forget(self) -> None:
        """Drops finished work; arenas and counters stay as they are."""
        for actor in self.actors.values():
            del actor.items[: actor.at]
            actor.at = 0
        self.blocks.clear()
        self.events.clear()

    def start(self, family: str, seed: int) -> None:
        """Sets the order in which streams will run; they must be at rest."""
        random = Random(f"{family} {seed}")
        self._draw = random.random
        actors = [actor for actor in self.actors.values() if actor.items or actor.is_channel]
        self._policy = policy(family, random, actors)
        for actor in actors:
            actor.place = -1
            if actor.pending:
                self._policy.add(actor)

    def drive(self, until: Event | None = None) -> None:
        """Runs micro-operations until nothing is left to do, or until an event has happened.

        Raises
        ------
        PlanError
            If streams block each other, or a step reads or writes what it must not.
        """
        self._ready += [a for a in self.actors.values() if not a.pending and not a.waiting and a.at < len(a.items)]
        with np.errstate(all="ignore"):  # NaN and Inf are payload here
            self._advance()
            self._loop(until)
        if until is None or until.remaining:
            self._check_finished()

    def _loop(self, until: Event | None) -> None:
        chosen, draw = self._policy, self._draw
        while True:
            if until is not None and not until.remaining:
                return
            actor = chosen.pick()
            if actor is None:
                return
            pending = actor.pending
            left = len(pending)
            self.clock += 1
            if left > 1:
                other = int(draw() * left)
                part = pending[other]
                pending[other] = pending[-1]
                pending.pop()
                part.run()
                continue
            pending.pop().run()
            self._finish(actor)
            self._advance()

    def _finish(self, actor: Actor) -> None:
        """The data step that the stream was at has ended."""
        item = actor.items[actor.at]
        assert isinstance(item, Work)
        if item.channel is not None:
            channel = item.channel
            channel.items += [Work(item.site, item.deliveries)] if item.deliveries else []
            channel.items += [item.arrival] if item.arrival is not None else []
            if not channel.pending:
                self._ready.append(channel)
        if self.trace is not None:
            title = item.site.title
            if actor.is_channel:
                title = f"{title}: arrival"
            self.trace.append(TraceEvent(actor.rank, actor.name, item.site, title, actor.began, self.clock))
        actor.at += 1
        self._ready.append(actor)

    def _advance(self) -> None:
        """Lets every stream that is ready execute what moves no bytes, up to its next data step."""
        ready, counts, waiting = self._ready, self._counts, self._waiting
        while ready:
            actor = ready.pop()
            items, at = actor.items, actor.at
            work: Work | None = None
            while at < len(items):
                item = items[at]
                if isinstance(item, Work):
                    work = item
                    break
                if isinstance(item, SignalItem):
                    counts[item.counter] += item.count
                    if waiting[item.counter]:
                        self._wake(waiting[item.counter])
                elif isinstance(item, WaitItem):
                    if counts[item.counter] < item.count:
                        self._block(actor, waiting[item.counter])
                        break
                    counts[item.counter] -= item.count
                    if actor.waiting:
                        self._end_wait(actor, item.site)
                elif isinstance(item, HoldItem):
                    if item.event.remaining:
                        self._block(actor, item.event.waiting)
                        break
                    if actor.waiting:
                        self._end_wait(actor, item.site)
                else:
                    self._happen(item.event)
                at += 1
            actor.at = at
            if work is not None:
                if not actor.pending:
                    actor.pending = work.parts.copy()
                    actor.began = self.clock
                if actor.place < 0:
                    self._policy.add(actor)
            elif actor.place >= 0:
                self._policy.remove(actor)

    def _block(self, actor: Actor, waiting: list[Actor]) -> None:
        waiting.append(actor)
        if not actor.waiting:
            actor.waiting, actor.began = True, self.clock

    def _end_wait(self, actor: Actor, site: Site) -> None:
        actor.waiting = False
        if self.trace is not None:
            title = site.title if isinstance(site.step, Wait) else "Wait"
            self.trace.append(TraceEvent(actor.rank, actor.name, site, title, actor.began, self.clock))

    def _wake(self, waiting: list[Actor]) -> None:
        self._ready += waiting
        waiting.clear()

    def _happen(self, event: Event) -> None:
        event.remaining -= 1
        if not event.remaining:
            if event.action is not None:
                event.action()
            self._wake(event.waiting)

    # Checking ----------------------------------------------------------------------------------

    def _check_finished(self) -> None:
        blocked = [actor for actor in self.actors.values() if actor.at < len(actor.items)]
        if blocked:
            self._deadlock(blocked)
        wrong = [n for n, count in enumerate(self._counts) if count != self._initial[n]]
        if wrong:
            lines = []
            for number in wrong[:8]:
                rank, what = self._names[number]
                lines.append(f"rank {rank} has {self._counts[number]} of {what}, expected {self._initial[number]}")
            more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
            raise PlanError("all streams have ended, but signals do not match waits: " + "; ".join(lines) + more)

    def _deadlock(self, blocked: Iterable[Actor]) -> NoReturn:
        lines: list[str] = []
        held = 0
        for actor in blocked:
            item = actor.items[actor.at]
            if isinstance(item, WaitItem):
                step = item.site.step
                assert isinstance(step, Wait)
                peer = item.site.call.group[step.peer]
                lines.append(
                    f"{item.site}: waits for {item.count} × {step.lane.name} from rank {peer}, "
                    f"has {self._counts[item.counter]}"
                )
            else:
                held += 1
        shown = lines[:16]
        if len(lines) > len(shown):
            shown.append(f"and {len(lines) - 16} more streams")
        if held:
            shown.append(f"{held} streams are held back by those")
        raise PlanError("deadlock: no stream can go on\n  " + "\n  ".join(shown))
