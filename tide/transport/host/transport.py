"""Carries out programs between processes of one machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from tide.compiler.compile import Compiled
from tide.compiler.steps import Lane, Program, Wait
from tide.errors import CapabilityError, PeerError, TransportError
from tide.transport.agreement import (
    agree,
    control_group,
    plan_facts,
    raise_failures,
    resolve_group,
    resolve_timeout,
    settle,
    world_ranks,
)
from tide.transport.base import Binding, Ticket, Transport
from tide.transport.host.liveness import Process, alive, this_process
from tide.transport.host.memory import Segment, check_one_machine, check_platform, create, machine_identity
from tide.transport.host.operations import Await, Call, Operation
from tide.transport.host.prepare import Prepared, Preparer, Rank
from tide.transport.host.signals import Doorbells, futex_works, make_fence
from tide.transport.host.stamps import Stamps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: States of a rank, in its header. From BROKEN on: that, plus the rank it takes to be the cause.
OPEN, CLOSED, BROKEN = 0, 1, 2
#: Seconds between two looks at the peers that are waited for.
WATCH = 0.05
#: Seconds that a rank looks for signals before it sleeps, where every rank has a core of its own.
SPIN = 50e-6


class _Cursor:
    """How far one stream has come."""

    __slots__ = ("at", "name", "operations", "since", "steps")

    def __init__(self, name: str, operations: tuple[Operation, ...], steps: tuple[int, ...]) -> None:
        self.name, self.operations, self.steps = name, operations, steps
        self.at, self.since = 0, 0.0

    @property
    def done(self) -> bool:
        return self.at == len(self.operations)

    def advance(self, call: Call) -> bool:
        """Runs until the end or a wait that has to wait; says whether any operation ran."""
        first, at, count, operations = self.at, self.at, len(self.operations), self.operations
        while at < count and operations[at].run(call):
            at += 1
            self.at = at
        return at > first


class HostTransport(Transport):
    """Programs between processes of one machine, over shared memory; see :meth:`open`.

    All streams of a program are taken in turn in the calling thread, and ``run`` returns when they have
    ended. Calls from several threads wait for each other.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    rank : int
        This rank.
    segments : sequence of Segment
        Shared memory of every rank, mapped.
    processes : sequence of Process
        Process of every rank.
    timeout : float
        Seconds that a wait may take.
    names : sequence of int, optional
        World rank of each of the plan's ranks.
    """

    name = "host"

    def __init__(
        self,
        compiled: Compiled,
        rank: int,
        segments: Sequence[Segment],
        processes: Sequence[Process],
        timeout: float,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(compiled, rank, names)
        arena = compiled.arena
        self.timeout = timeout
        #: Time that making and mapping the arenas took.
        self.seconds = 0.0
        self._segments, self._processes = list(segments), list(processes)
        self._futex, fence = futex_works(), make_fence()
        self._doorbells = Doorbells(self._segments, rank, fence, self._futex)
        self._stamps = Stamps(self._segments, rank, fence)
        words = [segment.words(arena.signals) for segment in self._segments]
        consumed = [0] * arena.words.count
        self._context = Rank(compiled, rank, self._segments, words, consumed, self._doorbells, fence, self.names)
        # In the order of their last use; with the program, so that its identity stays its own.
        self._prepared: dict[tuple[int, str, tuple[int, ...]], tuple[Prepared, Program]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._failure: str | None = None
        self._closed = False
        # Where ranks share cores, looking again and again takes the core from the rank that is waited for.
        self._spin = SPIN if len(self._segments) <= len(os.sched_getaffinity(0)) else 0.0

    @classmethod
    def open(
        cls,
        compiled: Compiled,
        rank: int | None = None,
        group: ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> HostTransport:
        """Makes the arenas of all ranks, maps them everywhere and compares the plans; collective.

        Parameters
        ----------
        compiled : Compiled
            The plan, for as many ranks as the group has.
        rank : int, optional
            This rank; that of the process group by default.
        group : ProcessGroup, optional
            The plan's ranks; the default group if there is one. A plan of one rank needs none.
        timeout : float, optional
            Seconds that any wait may take, here and later; ``TIDE_TIMEOUT`` or 60 by default.

        Raises
        ------
        InputError
            If there is no process group, or its size is not the plan's.
        CapabilityError
            If this machine lacks what the transport needs, or the ranks are on several machines.
        PeerError
            If the ranks hold different plans, or one does not come.
        """
        timeout = resolve_timeout(timeout)
        group, rank = resolve_group(compiled.topology.world_size, rank, group)
        begin = time.perf_counter()
        if compiled.topology.world_size == 1:
            check_platform()
            make_fence()
            descriptor = create(compiled.arena.size, 1)
            try:
                segment = Segment.map(f"/proc/self/fd/{descriptor}", compiled.arena.size)
            finally:
                os.close(descriptor)
            segments, processes = [segment], [this_process()]
        else:
            with control_group(group, timeout) as control:
                segments, processes = _connect(compiled, control, timeout)
        names = None if group is None else world_ranks(group)
        made = cls(compiled, rank, segments, processes, timeout, names)
        made.seconds = time.perf_counter() - begin
        return made

    def arena_tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D tensor over this rank's arena, with a storage object of exactly its own size.

        It keeps the memory mapped, also beyond :meth:`close`.
        """
        self._check_usable()
        return self._segments[self.rank].tensor(offset, numel, dtype)

    def run(self, program: Program, binding: Binding) -> Ticket:
        """Carries out ``program``; it has ended when this returns.

        Raises
        ------
        InputError
            If a tensor does not fit; nothing has been moved then.
        PeerError
            If a peer died or gave up, or did not answer within the deadline. The transport cannot be used
            after that, as nobody knows how far the others came.
        """
        with self._lock:
            self._check_usable()
            key = (id(program), binding.unit, binding.ranks)
            found = self._prepared.pop(key, None)
            prepared = Preparer(self._context, program, binding).prepare() if found is None else found[0]
            self._prepared[key] = prepared, program
            if len(self._prepared) > self.most_prepared:
                del self._prepared[next(iter(self._prepared))]
            call = prepared.bind(binding)
            try:
                self._check_peers(binding, program)
                self._stamps.begin(program, binding)
                self._execute(prepared, call, binding.unit)
                self._check_stamps(f"unit {binding.unit!r}, {program.collective}")
            except BaseException as error:  # an interrupt too leaves the programs of the ranks apart
                self._give_up(error, self.rank)
                raise
        return _DONE

    def poison(self, unit: str) -> None:
        """Fills a vacated unit's storage with ones, which are NaN in every float type, once no peer reads it.

        Raises
        ------
        PeerError
            As :meth:`run`.
        """
        with self._lock:
            self._check_usable()
            ranks, _ = self.compiled.group(unit, self.rank)
            slot = self.compiled.arena.slot_of[unit]
            program = self.compiled.program(unit, "all_gather", self.rank)
            preparer = Preparer(self._context, program, Binding(unit, slot, ranks))
            # Its next all-gather begins by consuming these; here they are only looked at.
            waits = [
                (stream.name, index, preparer.wait(step))
                for stream in program.streams
                for index, step in enumerate(stream.steps)
                if isinstance(step, Wait) and step.lane == Lane.DONE
            ]
            since = watched = time.monotonic()
            try:
                while late := [row for row in waits if not row[2].here()]:
                    seen = self._doorbells.seen()
                    if all(not row[2].here() for row in late):
                        self._doorbells.sleep(seen, WATCH)
                    if (now := time.monotonic()) - watched >= WATCH:
                        watched = now
                        for name, index, wait in late:
                            self._watch(wait, since, f"unit {unit!r}, poison, stream {name}, step {index}")
            except BaseException as error:
                self._give_up(error, self.rank)
                raise
            offset = self.compiled.arena.slots[slot].offset
            self._segments[self.rank].array[offset : offset + self.compiled.layouts[unit].size] = 0xFF

    def close(self) -> None:
        """Lets go of all arenas. Idempotent.

        The memory is freed when no rank maps it any more, and the last tensor over it is gone: a peer may
        still be reading, and so may the holder of a tensor.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid and self._segments:
            if self._failure is None:
                self._segments[self.rank].state[0] = CLOSED
            for peer in range(len(self._segments)):
                self._doorbells.ring(peer)
        self._storages.clear()
        self._prepared.clear()
        self._doorbells.release()
        self._stamps.release()
        self._context.words.clear()
        self._segments.clear()

    def describe(self) -> Sequence[tuple[str, str]]:
        """What was probed and chosen, as ``(capability, answer with reason)``."""
        cores = len(os.sched_getaffinity(0))
        spin = f"after {SPIN * 1e6:.0f} µs of looking" if self._spin else "at once, as ranks share cores"
        return (
            ("arena", f"memfd, {self.compiled.arena.size} bytes, mapped by every rank in {self.seconds:.3f} s"),
            ("ordering", f"{os.uname().machine}: counters stored after a full fence"),
            ("sleep", f"{'futex' if self._futex else 'polling, as futex is refused here'}, {spin}"),
            ("cores", f"{cores} for {self.compiled.topology.world_size} ranks"),
            ("deadline", f"{self.timeout:g} s a wait; a dead peer within about {2 * WATCH:g} s"),
        )

    # Execution ---------------------------------------------------------------------------------

    def _check_peers(self, binding: Binding, program: Program) -> None:
        """Raises if a peer has given up: it may have sent enough before for this collective to seem to succeed."""
        for peer in binding.ranks:
            if self._segments[peer].state[0] >= BROKEN and (gone := self._gone(peer)) is not None:
                reason, cause = gone
                self._fail(f"{reason}; unit {binding.unit!r}, {program.collective}, before its first step", cause)

    def _check_stamps(self, where: str) -> None:
        """Raises if a peer is in another collective: what has been moved does not belong together."""
        if (peer := self._stamps.other()) is not None:
            self._fail(
                f"rank {self.names[peer]} is in another collective than rank {self.names[self.rank]}; {where}. Every "
                "rank must run the same modules in the same order, and make gradients of the same parameters",
                peer,
            )

    def _execute(self, prepared: Prepared, call: Call, unit: str) -> None:
        """Takes the streams in turn until all have ended."""
        active = [cursor for row in prepared.streams if not (cursor := _Cursor(*row)).done]
        idle = watched = 0.0  # when nothing began to move; when the peers were last looked at
        while True:
            seen = self._doorbells.seen()
            moved = False
            for cursor in active:
                if cursor.advance(call):
                    cursor.since, moved = 0.0, True
            active = [cursor for cursor in active if not cursor.done]
            if not active:
                return
            if moved:
                self._doorbells.rested()
                idle = 0.0
                continue
            now = time.monotonic()
            for cursor in active:
                cursor.since = cursor.since or now
            if idle == 0.0:
                idle = watched = now
            if now - watched >= WATCH:
                watched = now
                for cursor in active:
                    wait = cursor.operations[cursor.at]
                    assert isinstance(wait, Await)
                    where = (
                        f"unit {unit!r}, {prepared.program.collective}, stream {cursor.name}, "
                        f"step {cursor.steps[cursor.at]}"
                    )
                    self._watch(wait, cursor.since, where)
            if now - idle < self._spin:
                os.sched_yield()
            else:
                self._doorbells.sleep(seen, WATCH)

    def _watch(self, wait: Await, since: float, where: str) -> None:
        """Raises if the peer that is waited for cannot answer any more, or took too long."""
        if wait.peer != self.rank and (gone := self._gone(wait.peer)) is not None:
            self._context.fence()
            if wait.here():  # it answered before it went
                return
            self._check_stamps(f"{where}: {wait}")  # it may have gone because of this rank, which then says why
            reason, cause = gone
            self._fail(f"{reason}; {where}: {wait}", cause)
        self._check_stamps(f"{where}: {wait}")
        if time.monotonic() - since > self.timeout:
            self._fail(
                f"rank {self.names[wait.peer]} did not answer within {self.timeout:g} s; {where}: {wait}. It runs, so "
                "it may be busy, hang, or have issued another collective; TIDE_TIMEOUT sets the deadline",
                wait.peer,
            )

    def _gone(self, peer: int) -> tuple[str, int] | None:
        """Why a peer will not answer any more, and which rank is the cause; None if it may still."""
        process, state, name = self._processes[peer], int(self._segments[peer].state[0]), self.names[peer]
        if state >= BROKEN:
            cause = state - BROKEN
            return f"rank {name} gave up" + (f" because of rank {self.names[cause]}" if cause != peer else ""), cause
        if state == CLOSED:
            return f"rank {name} has closed its transport", peer
        if not alive(process):
            return f"rank {name} (process {process.pid}) died", peer
        return None

    def _fail(self, message: str, cause: int) -> None:
        error = PeerError(message)
        self._give_up(error, cause)
        raise error

    def _give_up(self, error: BaseException, cause: int) -> None:
        self._break(f"{type(error).__name__}: {error}", cause)

    def fail(self, message: str) -> None:
        """Marks this rank as broken, as if a collective had failed."""
        self._break(message, self.rank)

    def _break(self, message: str, cause: int) -> None:
        """Marks this rank as broken, for itself and for its peers; the first reason counts."""
        if self._failure is None:
            self._failure = message
            self._segments[self.rank].state[0] = BROKEN + cause
            for peer in range(len(self._segments)):
                self._doorbells.ring(peer)

    @property
    def failure(self) -> str | None:
        """What a collective failed for; every later one fails too."""
        return self._failure

    def _check_usable(self) -> None:
        if self._closed:
            raise TransportError("the host transport has been closed")
        if self._failure is not None:
            raise PeerError(
                f"the host transport broke earlier and has to be opened again on every rank: {self._failure}"
            )
        if os.getpid() != self._pid:
            raise TransportError("the host transport was opened before this process was forked; open one here")


#: All collectives have ended when ``run`` returns.
_DONE = Ticket()


def _connect(compiled: Compiled, group: ProcessGroup | None, timeout: float) -> tuple[list[Segment], list[Process]]:
    """Shared memory and processes of all ranks, after they have agreed."""
    size, world = compiled.arena.size, compiled.topology.world_size
    descriptor, failure = -1, None
    same: dict[str, object] = plan_facts(compiled)
    own: dict[str, object] = {}
    try:
        # A rank that fails here must still come to the exchange: its peers are waiting there.
        try:
            check_platform()
            make_fence()
            same |= {"transport": "host", "futex": futex_works(), "arena bytes": size}
            descriptor = create(size, world)
        except CapabilityError as error:
            failure = str(error)
        machine, host = machine_identity()
        own = {
            "failure": failure,
            "machine": machine,
            "host": host,
            "process": tuple(this_process()) if failure is None else (0, 0),
            "descriptor": descriptor,
        }
        peers = agree(same, own, group, timeout)
        names = world_ranks(group)
        raise_failures([peer["failure"] for peer in peers], names, CapabilityError)  # type: ignore[misc]
        check_one_machine(peers, names)
        processes = [Process(*peer["process"]) for peer in peers]  # type: ignore[misc]
        segments: list[Segment] = []
        try:
            for peer, process in zip(peers, processes, strict=True):
                segments.append(Segment.map(f"/proc/{process.pid}/fd/{peer['descriptor']}", size))
        except CapabilityError as error:
            failure = str(error)
        settle(failure, group, timeout, CapabilityError)  # nobody closes its descriptor before this
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
    return segments, processes
