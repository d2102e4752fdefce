"""The predicted clock: a plan's own programs run step by step on stated link figures.

An alpha–beta model; every time is a prediction, see :mod:`tide.compiler.cost`. A step costs a fixed
latency (alpha) plus its bytes over a rate (beta)::

    Copy                 copies · copy_latency    + bytes / copy_engine
    Multicast            switch_latency + copies · copy_latency + ranks of the node · bytes / copy_engine
    Put                  network_latency          + bytes / network
    Place, Accumulate    kernel_latency           + bytes read and written / memory
    SwitchReduce         kernel_latency + switch_latency + ranks of the node · bytes / copy_engine
    Signal → Wait        signal_latency within a node, network_latency between nodes, none to oneself

The steps of a stream follow each other, streams run side by side, and a wait ends when its signals
have arrived. Left out, at first order: the host's time to issue steps, two streams that share the
device's memory or a port, short rows of 2-D copies, and whatever computes meanwhile.

`scope="group"` runs every rank of the shard group and assumes nothing. Where that would be many steps,
nodes are taken to be alike and the clock runs over the ranks of one (`scope="node"`), or even over one
rank alone (`scope="rank"`): what a rank outside would signal is taken to come when the rank inside, in
the same relation, sends its own. Where shards are so uneven that the other side never sends, the wait
ends at once and is counted in `Clock.assumed`; the rank's own network port still bounds what can have
arrived. Even shards give the same times in every scope.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.rates import copy_seconds, multicast_seconds, switch_seconds
from tide.compiler.schedule.rails import put_batches, rail_steps
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import (
    INITIAL_CREDIT,
    Accumulate,
    Buffer,
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Signal,
    Step,
    SwitchReduce,
    Wait,
)
from tide.errors import InputError, PlanError
from tide.topology import Links, Team

#: Ranks up to which the clock runs over the whole group, and steps up to which it runs over a whole node.
GROUP_RANKS = 16
NODE_STEPS = 25_000

#: Lanes of signals that a put carries, and of the signals that allow the put.
_CARRIED = (Lane.WIRE, Lane.PARTIAL, Lane.SPREAD)
_ALLOWING = (Lane.FREE, Lane.WIRE_CREDIT, Lane.SPREAD_CREDIT)


@dataclass(frozen=True, slots=True)
class Event:
    """One step on the predicted clock.

    Attributes
    ----------
    rank : int
        World rank.
    stream : str
        Stream that runs it.
    index : int
        Place in the stream.
    kind : str
        Step in snake case: ``"place"``, ``"copy"``, ``"put"``, ``"wait"``, …
    peer : int or None
        World rank of the other side.
    start, stop : float
        Seconds since the collective began; a wait lasts from when it is reached to when it ends.
    nbytes : int
        Bytes moved; read and written by a kernel; brought by the puts that a wait is for.
    """

    rank: int
    stream: str
    index: int
    kind: str
    peer: int | None
    start: float
    stop: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Predicted course of one collective on the simulated ranks.

    Attributes
    ----------
    unit, collective : str
        What runs.
    scope : str
        ``"rank"``, ``"node"`` or ``"group"``: whose steps were timed.
    events : dict of int to tuple of Event
        By world rank; in the order of streams and steps.
    assumed : int
        Waits for ranks outside the scope that were taken to end at once, because those ranks hold
        other amounts than the ones inside.
    """

    unit: str
    collective: str
    scope: str
    events: dict[int, tuple[Event, ...]]
    assumed: int

    @property
    def seconds(self) -> float:
        """Until the last simulated rank has ended."""
        return max((event.stop for events in self.events.values() for event in events), default=0.0)


def clock(
    compiled: Compiled,
    unit: str,
    collective: str,
    rank: int,
    scope: str | None = None,
    programs: Mapping[int, Program] | None = None,
) -> Clock:
    """Runs the predicted clock of one collective.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        Unit name.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    rank : int
        World rank whose shard group, node and position are meant.
    scope : {"rank", "node", "group"}, optional
        Ranks to run; by default a group of up to `GROUP_RANKS`, else the node if that makes no more than
        `NODE_STEPS` steps, else the rank alone.
    programs : mapping of int to Program, optional
        By position, where they are not those of the whole unit.

    Raises
    ------
    PlanError
        If a wait never ends: the programs lack a signal.
    """
    group, position = compiled.group(unit, rank)
    team = compiled.context(unit, rank).team
    node, _ = team.seat(position)
    if programs is None:
        programs = compiled.programs(unit, collective, rank)
    if scope is None:
        steps = len(programs[position]) * team.per_node
        scope = "group" if team.size <= GROUP_RANKS else "node" if steps <= NODE_STEPS else "rank"
    actors = {"rank": (position,), "node": team.grid[node], "group": tuple(range(team.size))}.get(scope)
    if actors is None:
        raise InputError(f"clock: no scope {scope!r}; there are 'rank', 'node' and 'group'")
    return _Run(compiled, unit, collective, group, team, actors, programs).run(scope)


class _Lanes:
    """Arrival times of one sender's signals on one lane at one receiver."""

    __slots__ = ("taken", "times")

    def __init__(self, initial: int) -> None:
        self.times: list[float] = [0.0] * initial
        self.taken = 0

    def take(self, count: int) -> float | None:
        """Time at which the next ``count`` signals have come, or None while they have not."""
        if len(self.times) < self.taken + count:
            return None
        self.taken += count
        return max(self.times[self.taken - count : self.taken], default=0.0)

    def force(self, count: int) -> None:
        """Makes up what is missing for the next ``count``."""
        missing = self.taken + count - len(self.times)
        self.times += [0.0] * missing


@dataclass(eq=False, slots=True)
class _Queue:
    """A stream under way."""

    actor: int
    name: str
    steps: Sequence[Step]
    arrivals: dict[int, int]  # step index of a wait for puts -> bytes that they bring
    at: int = 0
    now: float = 0.0


class _Run:
    """One run of the clock."""

    def __init__(
        self,
        compiled: Compiled,
        unit: str,
        collective: str,
        group: tuple[int, ...],
        team: Team,
        actors: tuple[int, ...],
        programs: Mapping[int, Program],
    ) -> None:
        self.unit, self.collective, self.group, self.team = unit, collective, group, team
        self.links: Links = compiled.topology.links
        self.actors = frozenset(actors)
        # Partners on a rail are at node ^ 2**k for powers of two, else at node + 2**k; in a reduce-scatter always
        # at a distance. Either way the picture of one node is that of all.
        self.by_xor = collective == "all_gather" and team.nodes & (team.nodes - 1) == 0
        self.queues: list[_Queue] = []
        self.events: dict[int, dict[str, list[Event]]] = {}
        for actor in actors:
            program = programs[actor]
            arrivals = _arrivals(compiled.context(unit, group[actor]), program)
            self.events[actor] = {stream.name: [] for stream in program.streams}
            self.queues += [
                _Queue(actor, stream.name, stream.steps, arrivals.get(stream.name, {})) for stream in program.streams
            ]
        self.lanes: dict[tuple[int, int, Lane], _Lanes] = {}
        self.allowed: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.port_free: dict[int, float] = defaultdict(float)
        self.waiting: dict[tuple[int, int, Lane], _Queue] = {}
        self.seats = {position: team.seat(position) for position in range(team.size)}
        self.assumed = 0

    def run(self, scope: str) -> Clock:
        ready = deque(self.queues)
        while ready or self.waiting:
            while ready:
                self.advance(ready.popleft(), ready)
            if self.waiting:
                self.assume(ready)
        events = {
            self.group[actor]: tuple(event for stream in streams.values() for event in stream)
            for actor, streams in self.events.items()
        }
        return Clock(self.unit, self.collective, scope, events, self.assumed)

    def advance(self, queue: _Queue, ready: deque[_Queue]) -> None:
        """Runs a stream up to its end or to a wait that cannot end yet."""
        while queue.at < len(queue.steps):
            step = queue.steps[queue.at]
            start, nbytes, peer = queue.now, 0, getattr(step, "peer", None)
            if isinstance(step, Wait):
                came = self.lane(queue.actor, step.peer, step.lane).take(step.count)
                if came is None:
                    self.waiting[queue.actor, step.peer, step.lane] = queue
                    return
                queue.now = max(start, came)
                if step.lane in _CARRIED:
                    nbytes = queue.arrivals.get(queue.at, 0)
                    queue.now = max(queue.now, self.through_port(queue.actor, step.peer, nbytes))
            elif isinstance(step, Signal):
                if step.lane in _ALLOWING:
                    self.allowed[queue.actor, step.peer].extend([start] * step.count)
                self.deliver(queue.actor, step.peer, step.lane, step.count, start, ready)
            else:
                seconds, nbytes = _cost(step, self.links)
                queue.now = start + seconds
                if isinstance(step, Put):
                    self.deliver(queue.actor, step.peer, step.lane, 1, queue.now, ready, carried=True)
            self.events[queue.actor][queue.name].append(
                Event(
                    self.group[queue.actor],
                    queue.name,
                    queue.at,
                    _KIND[type(step)],
                    None if peer is None else self.group[peer],
                    start,
                    queue.now,
                    nbytes,
                )
            )
            queue.at += 1

    def lane(self, receiver: int, sender: int, lane: Lane) -> _Lanes:
        key = (receiver, sender, lane)
        if key not in self.lanes:
            self.lanes[key] = _Lanes(INITIAL_CREDIT.get(lane, 0))
        return self.lanes[key]

    def deliver(
        self,
        sender: int,
        receiver: int,
        lane: Lane,
        count: int,
        now: float,
        ready: deque[_Queue],
        carried: bool = False,
    ) -> None:
        """Brings signals to the receiver, or to whom stands for it, and wakes the stream that waits for them."""
        if sender == receiver or carried:  # the put's own time already holds the network's latency
            arrival = now
        elif self.seats[sender][0] == self.seats[receiver][0]:
            arrival = now + self.links.signal_latency
        else:
            arrival = now + self.links.network_latency
        if receiver not in self.actors:
            sender, receiver = self.image(sender, receiver)
        self.lane(receiver, sender, lane).times += [arrival] * count
        waiting = self.waiting.pop((receiver, sender, lane), None)
        if waiting is not None:
            ready.append(waiting)

    def image(self, sender: int, receiver: int) -> tuple[int, int]:
        """The same relation seen from inside: who, to the ranks that run, is what ``sender`` is to ``receiver``."""
        (node, local), (far, there) = self.seats[sender], self.seats[receiver]
        mirror = far if self.by_xor else (2 * node - far) % self.team.nodes
        inside = self.team.grid[node][there]
        if inside in self.actors:
            return self.team.grid[mirror][local], inside
        return self.team.grid[mirror][(2 * local - there) % self.team.per_node], sender

    def through_port(self, actor: int, source: int, nbytes: int) -> float:
        """When ``nbytes`` from ``source`` can have come in through the network port of ``actor``."""
        allowed = self.allowed[actor, source]
        start = max(self.port_free[actor], allowed.popleft() if allowed else 0.0)
        self.port_free[actor] = start + nbytes / self.links.network
        return self.port_free[actor] + self.links.network_latency

    def assume(self, ready: deque[_Queue]) -> None:
        """Ends the earliest wait for a rank outside, whose counterpart inside never sends."""
        outside = {key: queue for key, queue in self.waiting.items() if key[1] not in self.actors}
        if not outside:
            (actor, sender, lane), queue = min(self.waiting.items(), key=lambda item: item[1].now)
            raise PlanError(
                f"unit {self.unit!r}, {self.collective}: rank {self.group[actor]}, stream {queue.name}, step "
                f"{queue.at} waits for ever for {lane.name} of rank {self.group[sender]}; run verify() on the plan"
            )
        key = min(outside, key=lambda key: (outside[key].now, key))
        queue = self.waiting.pop(key)
        step = queue.steps[queue.at]
        assert isinstance(step, Wait)
        self.lane(*key).force(step.count)
        self.assumed += 1
        ready.append(queue)


_KIND: dict[type, str] = {
    Place: "place",
    Copy: "copy",
    Put: "put",
    Multicast: "multicast",
    Signal: "signal",
    Wait: "wait",
    Accumulate: "accumulate",
    SwitchReduce: "switch_reduce",
}


def _cost(step: Step, links: Links) -> tuple[float, int]:
    """Seconds and bytes of a step that moves data."""
    if isinstance(step, Copy):
        nbytes = sum(transfer.nbytes for transfer in step.transfers)
        return copy_seconds(links, len(step.transfers), nbytes), nbytes
    if isinstance(step, Multicast):
        nbytes = sum(transfer.nbytes for transfer in step.transfers)
        return multicast_seconds(links, len(step.peers) + 1, len(step.transfers), nbytes), nbytes
    if isinstance(step, Put):
        nbytes = sum(transfer.nbytes for transfer in step.transfers)
        return links.network_latency + nbytes / links.network, nbytes
    if isinstance(step, Place):
        nbytes = sum(
            cast.runs * cast.count * (itemsize(cast.src_dtype) + itemsize(cast.dst_dtype)) for cast in step.casts
        )
        return links.kernel_latency + nbytes / links.memory, nbytes
    if isinstance(step, Accumulate):
        nbytes = sum(
            total.runs
            * total.count
            * (
                len(total.srcs) * itemsize(total.src_dtype)
                + (0 if total.base is None else 4)
                + itemsize(total.dst_dtype)
            )
            for total in step.sums
        )
        return links.kernel_latency + nbytes / links.memory, nbytes
    if isinstance(step, SwitchReduce):
        nbytes = sum(total.runs * total.count * 4 for total in step.sums)
        return switch_seconds(links, len(step.peers), nbytes), nbytes
    raise InputError(f"no cost for a step of type {type(step).__name__}")


def _arrivals(context: UnitContext, program: Program) -> dict[str, dict[int, int]]:
    """Bytes that each wait for puts brings: ``{stream: {step index: bytes}}``."""
    team = context.team
    out: dict[str, dict[int, int]] = {}
    if team.nodes == 1:
        return out
    node, local = team.seat(program.position)
    batches = iter(
        [
            sum(transfer.nbytes for transfer in batch)
            for step in rail_steps(team.nodes, node)
            for batch in put_batches(context, step.received, local) or [()]
        ]
    )
    for stream in program.streams:
        found = out.setdefault(stream.name, {})
        for index, step in enumerate(stream.steps):
            if not isinstance(step, Wait):
                continue
            if step.lane is Lane.WIRE:
                found[index] = sum(itertools.islice(batches, step.count))
            elif step.lane is Lane.PARTIAL and index + 1 < len(stream.steps):
                following = stream.steps[index + 1]
                if isinstance(following, Accumulate):
                    found[index] = sum(
                        itemsize(total.src_dtype) * total.runs * total.count
                        for total in following.sums
                        if total.srcs[0].buffer is Buffer.WIRE
                    )
    return out
