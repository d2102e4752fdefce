"""What a collective will cost one rank: time, kernels' share of it, and bytes on each link.

Every figure is a **prediction**, not a measurement: bytes and steps are those of the plan's programs,
times come from the link figures stated in the topology (:class:`tide.topology.Links`) by way of the
clock of :mod:`tide.compiler.clock`, whose docstring says what it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide.compiler.clock import Clock, Event, clock
from tide.compiler.compile import Compiled
from tide.compiler.steps import Copy, Multicast, Put

#: Kinds of events that run on streaming multiprocessors, and on copy engines.
KERNELS = frozenset({"place", "accumulate", "switch_reduce"})
COPIES = frozenset({"copy", "multicast"})


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of one collective of one unit on one rank.

    Attributes
    ----------
    unit, collective : str
        What runs.
    rank : int
        World rank.
    seconds : float
        From start to end.
    released : float
        Seconds until the gradients are no longer read; equal to `seconds` for an all-gather.
    sm_seconds : float
        Bytes that kernels read and write over the memory rate, without launch latency.
    kernels, transfers, puts : int
        Kernel launches; pieces, flat or pitched, that copies and puts consist of; puts.
    nvlink_bytes : int
        Bytes that this rank's copy engines move within the node.
    network_bytes, network_bytes_in : int
        Bytes that this rank puts to other nodes, and that are put to it.
    copy_seconds, network_seconds : float
        How long the copy engine, and the busier direction of the network port, are in use.
    assumed : int
        See `Clock.assumed`.
    events : tuple of Event
        This rank's steps on the clock.
    """

    unit: str
    collective: str
    rank: int
    seconds: float
    released: float
    sm_seconds: float
    kernels: int
    transfers: int
    puts: int
    nvlink_bytes: int
    network_bytes: int
    network_bytes_in: int
    copy_seconds: float
    network_seconds: float
    assumed: int
    events: tuple[Event, ...] = field(repr=False)

    @property
    def bound(self) -> str:
        """What the time goes to: ``"network"``, ``"copy engine"``, ``"memory"``, or ``"latency"``."""
        busy = {
            "network": self.network_seconds,
            "copy engine": self.copy_seconds,
            "memory": self.sm_seconds,
        }
        name = max(busy, key=lambda key: busy[key])
        return name if busy[name] > 0.5 * self.seconds else "latency"


def predict(compiled: Compiled, unit: str, collective: str, rank: int) -> Prediction:
    """Predicted cost of one collective of ``unit`` on world rank ``rank``.

    Parameters
    ----------
    compiled : Compiled
        The plan; rates come from its topology's links.
    unit : str
        Unit name.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    rank : int
        World rank; must hold a shard of the unit.
    """
    return summary(compiled, clock(compiled, unit, collective, rank), rank)


def summary(compiled: Compiled, course: Clock, rank: int) -> Prediction:
    """One rank's totals on a clock that holds it."""
    program = compiled.program(course.unit, course.collective, rank)
    events, links = course.events[rank], compiled.topology.links
    read_until = {
        stream.name: len(stream.steps) if stream.released is None else stream.released
        for stream in program.streams
        if stream.name in program.release
    }
    seconds = max((event.stop for event in events), default=0.0)
    reads = (event.stop for event in events if event.index < read_until.get(event.stream, 0))
    released = max(reads, default=seconds)
    kernels = [event for event in events if event.kind in KERNELS]
    copies = [event for event in events if event.kind in COPIES]
    puts = [event for event in events if event.kind == "put"]
    incoming = sum(event.nbytes for event in events if event.kind == "wait")
    transfers = sum(len(step.transfers) for _, _, step in program.steps() if isinstance(step, Copy | Multicast | Put))
    return Prediction(
        course.unit,
        course.collective,
        rank,
        seconds,
        released,
        sum(event.nbytes for event in kernels) / links.memory,
        len(kernels),
        transfers,
        len(puts),
        sum(event.nbytes for event in copies),
        sum(event.nbytes for event in puts),
        incoming,
        sum(event.stop - event.start for event in copies),
        max(sum(event.stop - event.start for event in puts), incoming / links.network),
        course.assumed,
        events,
    )
