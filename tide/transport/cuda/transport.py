"""The CUDA transport: copy engines, flag words and a few kernels, on streams of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tide.compiler.compile import COLLECTIVES, Compiled
from tide.compiler.place import AREA_ALIGNMENT, align
from tide.compiler.steps import Buffer, Lane, Program, Wait
from tide.errors import CapabilityError, InputError, PeerError
from tide.kernels import place
from tide.torch_types import from_torch
from tide.transport.agreement import (
    TIMEOUT_VARIABLE,
    agree,
    control_group,
    plan_facts,
    resolve_group,
    resolve_timeout,
    settle,
)
from tide.transport.base import Binding, Transport
from tide.transport.cuda.arena import Arena, Request, open_arena, tensor_at
from tide.transport.cuda.lower import lower
from tide.transport.cuda.lowered import Lowered
from tide.transport.cuda.multicast import demand, unavailable
from tide.transport.cuda.operations import Device
from tide.transport.cuda.ticket import CudaTicket, Settings
from tide.transport.cuda.watchdog import Watchdog
from tide.transport.cuda.wire import Wire, crossing_units, needs_of
from tide.transport.cuda.words import MASK, STRIDE, VALUES, Words, value_table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that a collective may take where nobody says otherwise.
DEFAULT_TIMEOUT = 120.0
#: From here on, the driver does not write to a peer's memory from a stream (CUDA 13.1).
NO_PEER_WRITES = 13010
#: Program streams that give and take the same signals as another one have to share its CUDA stream.
SAME_STREAM = {"claim": "ag.node"}

#: Arenas of all transports that are not closed. One that is dropped without close, as with a model after
#: an exception, leaks its arena: peers may still write there, and an unmapped address would end their processes.
_OPEN: set[Arena] = set()


def arena_request(compiled: Compiled, rank: int, settings: Settings, multicast: bool = False) -> Request:
    """What the arena has to offer for a plan.

    Raises
    ------
    CapabilityError
        If copies are asked for between real nodes.
    """
    topology = compiled.topology
    node = topology.node_of(rank)
    real = topology.nodes > 1 and not topology.virtual
    reachable = [r for r in range(topology.world_size) if not real or topology.node_of(r) == node]
    if not crossing_units([unit.mesh.groups for unit in compiled.spec.units], topology):
        return Request(reachable, multicast=multicast)
    if settings.puts == "copy":
        if real:
            raise CapabilityError(
                f"puts='copy' reaches ranks of one machine only, and the plan is for {topology}; use puts='nccl', or "
                "Topology(..., virtual=True) where all ranks are on one machine"
            )
        return Request(reachable, multicast=multicast)
    needs = needs_of(compiled.arena, settings.communicators, settings.wire_signals == "word")
    return Request(reachable, needs, required=real or settings.puts == "nccl", multicast=multicast)


def arena_bytes(compiled: Compiled) -> tuple[int, int]:
    """Bytes of the arena with the peers' abort words and the table of counter values, and where that begins."""
    table = compiled.arena.size + align(4 * compiled.arena.world_size, AREA_ALIGNMENT)
    return table + align(4 * VALUES, AREA_ALIGNMENT), table


def _wire(arena: Arena, compiled: Compiled, words: Words, values: int, settings: Settings) -> Wire | None:
    window = arena.window
    if window is None:
        return None
    return Wire(
        window.library,
        window.communicators,
        window.windows,
        compiled.arena,
        compiled.topology,
        words.rank,
        window.abort,
        words if settings.wire_signals == "word" else None,
        values,
    )


def _why_no_switch(wanted: str, compiled: Compiled, device: torch.device) -> str | None:
    reason = unavailable(compiled.topology, device)
    if reason is None:
        return None
    return (
        f"the plan was compiled with {wanted}, but {reason}. Compile it with multicast='off' and switch_reduce='off', "
        "or open it with Settings(multicast='standin') for a test without the switch"
    )


class CudaTransport(Transport):
    """Runs programs on GPUs: by copy engine within a node, by NCCL's puts between nodes.

    Made by :meth:`open`.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    rank : int
        This rank.
    arena : Arena
        Mapped symmetric memory.
    driver : Driver
        Driver calls.
    device : torch.device
        Where everything happens.
    settings : Settings
        Choices.
    timeout : float
        Seconds that a collective may take.
    """

    name = "cuda"

    def __init__(
        self,
        compiled: Compiled,
        rank: int,
        arena: Arena,
        driver: Any,
        device: torch.device,
        settings: Settings,
        timeout: float,
    ) -> None:
        super().__init__(compiled, rank)
        self.arena, self.driver, self.device, self.settings = arena, driver, device, settings
        self.words = Words(compiled.arena, rank)
        self.abort_offset, self.abort_words = compiled.arena.size, compiled.arena.world_size
        self.broken: str | None = None
        self.value_table = arena.addresses[rank] + arena_bytes(compiled)[1]
        table = torch.from_numpy(value_table().astype("int64"))
        tensor_at(self.value_table, VALUES, torch.int32, device, arena.owner).copy_(table)
        self.write_to_peers = settings.signals == "write" or (
            settings.signals == "auto" and driver.version < NO_PEER_WRITES
        )
        self.wire = _wire(arena, compiled, self.words, self.value_table, settings)
        self._streams: dict[str, int] = {}
        self._device = Device(
            driver=driver,
            torch_device=device,
            rank=rank,
            arenas=arena.addresses,
            values=self.value_table,
            words=self.words,
            stream=self.stream,
            last=self._last_event,
            write_to_peers=self.write_to_peers,
            wait_flags=driver.wait_flags,
            place=replace(place.DEFAULT, ctas=settings.place_ctas),
            accumulate_ctas=settings.accumulate_ctas,
            wire=self.wire,
            record=self._record,
            multicast=arena.multicast,
            stand_in=settings.multicast == "standin",
        )
        self._lowered: dict[tuple[int, str], Lowered] = {}  # in the order of their last use
        self._retired: list[Lowered] = []  # no more to be used, but perhaps under way
        self._vacated: dict[int, int] = {}
        self._gathers: dict[int, CudaTicket] = {}  # last one into each slot
        self._reductions: dict[int, CudaTicket] = {}  # last reduce-scatter in each slot
        self._own: dict[tuple[int, Lane], int] = {}
        self._tickets: dict[str, deque[CudaTicket]] = {}  # by collective, each in order of issue
        self._pool: list[int] = []
        self._issue, self._books = threading.RLock(), threading.Lock()
        self._numbers = 0
        self._closed = False
        self.watchdog = Watchdog(self, timeout)
        self.watchdog.start()
        _OPEN.add(arena)

    @classmethod
    def open(
        cls,
        compiled: Compiled,
        rank: int | None = None,
        *,
        group: ProcessGroup | None = None,
        device: torch.device | int | None = None,
        timeout: float | None = None,
        provider: str | None = None,
        settings: Settings | None = None,
    ) -> CudaTransport:
        """Opens the transport. Collective over all ranks of the plan.

        Parameters
        ----------
        compiled : Compiled
            The plan.
        rank : int, optional
            This rank; the process group's by default.
        group : ProcessGroup, optional
            The plan's ranks; the default group if left out.
        device : torch.device or int, optional
            The current CUDA device by default.
        timeout : float, optional
            Seconds that a collective may take; ``TIDE_TIMEOUT``, else 120.
        provider : str, optional
            Arena provider to use, ``"nccl"`` or ``"torch"``; the first that works by default.
        settings : Settings, optional
            Choices; the same on every rank.

        Raises
        ------
        CapabilityError
            If a rank has no CUDA device, no symmetric memory can be had, NCCL cannot put between real nodes, or the
            plan goes through the switch and a rank cannot use it (`Settings.multicast`).
        PeerError
            If the ranks hold different plans or settings, or one does not come.
        """
        from tide.transport.cuda.driver import Driver

        if not torch.cuda.is_available():
            raise CapabilityError("the CUDA transport needs a CUDA device; there is the host transport without")
        if timeout is None and TIMEOUT_VARIABLE not in os.environ:
            timeout = DEFAULT_TIMEOUT
        timeout = resolve_timeout(timeout)
        settings = settings or Settings()
        if not isinstance(device, torch.device):
            device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        group, rank = resolve_group(compiled.topology.world_size, rank, group)
        size, _ = arena_bytes(compiled)
        if group is None and not torch.distributed.is_initialized():
            arena = open_arena(size, rank, device, None, None, timeout)
            return cls(compiled, rank, arena, Driver(device.index), device, settings, timeout)
        group = group if group is not None else torch.distributed.group.WORLD
        with control_group(group, timeout) as control, torch.cuda.device(device):
            driver = Driver(device.index)
            facts = {**plan_facts(compiled), "settings": settings, "driver": driver.version}
            agree(facts, None, control, timeout)
            wanted = demand(compiled) if settings.multicast == "switch" else None
            if wanted is not None:  # on every rank, as the plans are equal
                settle(_why_no_switch(wanted, compiled, device), control, timeout, CapabilityError)
            request = arena_request(compiled, rank, settings, wanted is not None)
            arena = open_arena(size, rank, device, group, control, timeout, provider, request)
            transport, failure = None, None
            try:
                start = arena.addresses[rank] + compiled.arena.zeroed
                stream = torch.cuda.current_stream(device)
                driver.check(driver.fill(start, 0, size - compiled.arena.zeroed, stream.cuda_stream), "zero signals")
                transport = cls(compiled, rank, arena, driver, device, settings, timeout)
                stream.synchronize()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            # Also the barrier after which every rank's flag words are zero.
            settle(failure, control, timeout, CapabilityError)
        assert transport is not None
        return transport

    # Memory ------------------------------------------------------------------------------------

    def arena_tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D tensor over this rank's arena, with a storage object of exactly its own size."""
        if numel < 0 or offset < 0 or offset + numel * dtype.itemsize > self.compiled.arena.size:
            raise InputError(f"{numel} elements at offset {offset} are outside the arena")
        return tensor_at(self.arena.addresses[self.rank] + offset, numel, dtype, self.device, self.arena.owner)

    def stream(self, name: str) -> int:
        """CUDA stream of a program stream; made at the first call, kept until the end."""
        name = SAME_STREAM.get(name, name)
        if name not in self._streams:
            self._streams[name] = self.driver.new_stream()
        return self._streams[name]

    def _last_event(self, slot: int, lane: Lane) -> int:
        """Event of the last signal on a lane to oneself, for waits of a later program."""
        if (slot, lane) not in self._own:
            self._own[slot, lane] = self.driver.new_event()
        return self._own[slot, lane]

    # Running -----------------------------------------------------------------------------------

    def run(self, program: Program, binding: Binding) -> CudaTicket:
        """Issues ``program`` and returns at once; collective over the unit's shard group.

        Waits, on the device, for what the caller's current stream has been given so far where the program
        touches the caller's tensors.

        Raises
        ------
        PeerError
            If this or an earlier collective found a peer missing.
        """
        with self._issue:
            self.raise_if_broken()
            self.driver.bind_thread()
            lowered = self._lowered.pop((id(program), binding.unit), None) or self._lower(program, binding)
            self._lowered[id(program), binding.unit] = lowered
            if len(self._tickets.get(program.collective, ())) > 1:
                self._reap(program.collective)
            tensors = lowered.prepare(binding)
            lowered.vacated = self._vacated.get(binding.slot, 0) if program.uses_slot else 0
            behind = self._unawaited(binding.slot) if program.uses_slot else []
            lowered.unawaited = self._ends(behind)
            lowered.record, lowered.released = self._record, []
            self._numbers += 1
            lowered.last = self._numbers
            ticket = CudaTicket(self, self._numbers, binding, lowered, behind)
            lowered.marks = ticket.marks
            self.driver.range_push(lowered.name)
            try:
                ticket.entry = lowered.entry = self._record(self.driver.current_stream())
                for operation in lowered.operations:
                    operation()
                ticket.midway = lowered.released
                ticket.released = list(ticket.midway)
                for (name, handle), stream in zip(lowered.streams, program.streams, strict=True):
                    event = self._record(handle)
                    ticket.ends.append(event)
                    if name in program.release and stream.released is None:
                        ticket.released.append(event)
            except BaseException as error:
                # The counters no longer say what the device has been told.
                self.fail(f"{program.collective} of unit {binding.unit!r} broke off while it was issued: {error}")
                raise
            finally:
                self.driver.range_pop()
            if program.collective == "reduce_scatter":
                ticket.gradients = lowered.of(Buffer.GRAD, tensors)
                ticket.outputs = lowered.of(Buffer.OUT, tensors)
                # Nobody but the ticket holds the running sums: they stay, whichever stream waits for it.
                ticket.tensors = lowered.of(Buffer.RUNNING, tensors), lowered.keep_alive()
            else:
                ticket.tensors = tensors, lowered.keep_alive()
            with self._books:
                self._tickets.setdefault(program.collective, deque()).append(ticket)
            if program.uses_slot:
                reduces = program.collective == "reduce_scatter"
                (self._reductions if reduces else self._gathers)[binding.slot] = ticket
            return ticket

    def _unawaited(self, slot: int) -> list[CudaTicket]:
        """The slot's last collectives, whose ends the next one begins after.

        An all-gather's streams write the slot, and push from it to peers; it counts unless the caller has waited for
        it before vacating the slot. A reduce-scatter in the slot always counts: callers wait for its end on another
        stream, and after they have vacated the slot. All that peers write into the slot for it, it has read.
        """
        gather, reduction = self._gathers.get(slot), self._reductions.get(slot)
        if gather is not None and gather.awaited_for:
            gather = None
        with self._books:
            return [ticket for ticket in (gather, reduction) if ticket is not None and not ticket.finished]

    def _ends(self, tickets: Sequence[CudaTicket]) -> list[int]:
        """Their events; none of those that have ended and been let go."""
        with self._books:
            return [event for ticket in tickets for event in ticket.ends]

    def _lower(self, program: Program, binding: Binding) -> Lowered:
        lowered = lower(program, binding, self._programs(program, binding), self._device)
        limit = self.driver.max_pitch
        if lowered.copies.widest_pitch() > limit:
            raise CapabilityError(
                f"unit {binding.unit!r}: runs {lowered.copies.widest_pitch()} bytes apart; this device's 2-D copies "
                f"take at most {limit}. Shard another dim"
            )
        while len(self._lowered) >= self.most_prepared:
            self._retired.append(self._lowered.pop(next(iter(self._lowered))))
        for collective in self._tickets:
            self._reap(collective)
        oldest = min((tickets[0].number for tickets in self._tickets.values() if tickets), default=self._numbers + 1)
        for old in [old for old in self._retired if old.last < oldest]:
            self._retired.remove(old)
            old.close()
        return lowered

    def _programs(self, program: Program, binding: Binding) -> Mapping[int, Program]:
        """The programs of all positions in the collective of which ``program`` is this rank's part."""
        own = {program.position: program}
        if program.collective not in COLLECTIVES:  # a claim: waits on credits only
            return own
        found: tuple[Sequence[int] | None, Mapping[int, str]] = None, {}
        in_slot = program.in_slot
        if program is not self.compiled.program(binding.unit, program.collective, self.rank, in_slot=in_slot):
            parameters = self.compiled.spec.unit(binding.unit).parameters
            grads = {i: from_torch(t.dtype) for (buffer, i), t in binding.tensors.items() if buffer is Buffer.GRAD}
            outs = sorted(i for buffer, i in binding.tensors if buffer is Buffer.OUT)
            found = outs, {i: dtype for i, dtype in grads.items() if dtype != parameters[i].grad_dtype}
        others = {
            position: self.compiled.program(binding.unit, program.collective, rank, *found, in_slot=in_slot)
            for position, rank in enumerate(binding.ranks)
        }
        return {**others, **own}

    def _record(self, stream: int) -> int:
        event = self._pool.pop() if self._pool else self.driver.new_event()
        self.driver.check(self.driver.event_record(event, stream), "event record")
        return int(event)

    def vacated(self, unit: str) -> None:
        """Notes that what the current stream has been given so far is the last to read the unit's storage."""
        with self._issue:
            self.driver.bind_thread()
            slot = self.compiled.arena.slot_of[unit]
            if slot not in self._vacated:
                self._vacated[slot] = self.driver.new_event()
            self.driver.check(
                self.driver.event_record(self._vacated[slot], self.driver.current_stream()), "event record"
            )

    def poison(self, unit: str) -> None:
        """Fills a vacated unit's storage with bytes of ones (NaN in every float type), once nobody reads it.

        Nobody else: peers that pull say when they have done so, and this rank's own pushes have ended with its
        all-gather. Peers write again only when the next all-gather has said that the slot is free, which it does
        after the fill.
        """
        with self._issue:
            self.raise_if_broken()
            self.vacated(unit)
            layout, slot = self.compiled.arena, self.compiled.arena.slot_of[unit]
            program = self.compiled.program(unit, "all_gather", self.rank)
            group, _ = self.compiled.group(unit, self.rank)
            stream, driver, own = self.stream("poison"), self.driver, self.arena.addresses[self.rank]
            for event in (self._vacated[slot], *self._ends(self._unawaited(slot))):
                driver.check(driver.stream_wait_event(stream, event, 0), "event wait")
            for _, _, step in program.steps():
                if isinstance(step, Wait) and step.lane is Lane.DONE:
                    # The same value that the next all-gather will wait for; it is not consumed here.
                    rank = group[step.peer]
                    count = self.words.consumed[self.words.index(slot, step.lane, rank)] + step.count
                    value = ((count - self.words.credit(step.lane)) * STRIDE) & MASK
                    place = own + self.words.incoming(slot, step.lane, rank)
                    driver.check(driver.wait_value(stream, place, value, driver.wait_flags), "wait")
            start = own + layout.slots[slot].offset
            driver.check(driver.fill(start, 0xFF, self.compiled.layouts[unit].size, stream), "poison")
            driver.check(driver.event_record(self._vacated[slot], stream), "event record")

    # Tickets -----------------------------------------------------------------------------------

    def order_after(self, ticket: CudaTicket, events: Sequence[int]) -> None:
        """Makes the current stream wait for events of a ticket, and lets go of its gradients."""
        if self.broken is not None:
            raise PeerError(self.broken)
        with self._books:
            if not ticket.finished:
                self.driver.bind_thread()
                stream = self.driver.current_stream()
                for event in events:
                    self.driver.check(self.driver.stream_wait_event(stream, event, 0), "event wait")
            ticket.gradients = None

    def is_finished(self, ticket: CudaTicket) -> bool:
        """Whether a collective has ended."""
        self.driver.bind_thread()
        with self._books:
            return ticket.finished or all(self.driver.done(event) for event in ticket.ends)

    def could_start(self, ticket: CudaTicket) -> bool:
        """Whether all that a collective has to wait for on this rank has happened.

        Those before it in its slot have clocks of their own, which say what they wait for.
        """
        with self._books:
            if ticket.finished:
                return False
            gates = (ticket.entry, *((ticket.gate,) if ticket.gate else ()))
            if not all(self.driver.done(event) for event in gates):
                return False
            return all(self.driver.done(event) for before in ticket.behind for event in before.ends)

    def outstanding(self) -> list[CudaTicket]:
        """Collectives that have not ended, oldest first."""
        with self._books:
            return sorted((t for tickets in self._tickets.values() for t in tickets), key=lambda t: t.number)

    def heads(self) -> list[CudaTicket]:
        """The oldest outstanding ticket of each collective."""
        for collective in list(self._tickets):
            self._reap(collective)
        with self._books:
            return [tickets[0] for tickets in self._tickets.values() if tickets]

    def _reap(self, collective: str) -> None:
        """Lets go of collectives that have ended; those of one kind end in order."""
        tickets = self._tickets.get(collective)
        while tickets:
            with self._books:
                if not tickets or not all(self.driver.done(event) for event in tickets[0].ends):
                    return
                ticket = tickets.popleft()
                ticket.finished = True
                ticket.gradients = ticket.outputs = ticket.tensors = None
                self._pool += [ticket.entry, *ticket.ends, *ticket.marks, *ticket.midway]
                ticket.ends, ticket.released, ticket.marks, ticket.midway = [], [], [], []
                ticket.entry = ticket.gate = 0
                ticket.behind = []

    # Failing and closing -----------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Marks the transport broken; the first reason stays."""
        if self.broken is None:
            self.broken = message

    def raise_if_broken(self) -> None:
        """Raises what broke the transport."""
        if self.broken is not None:
            raise PeerError(self.broken)
        if self._closed:
            raise InputError("the transport is closed; open the plan again")

    def close(self) -> None:
        """Waits for what is under way and gives everything back. Idempotent."""
        with self._issue:
            if self._closed:
                return
            self._closed = True
            self.driver.bind_thread()
            limit = time.monotonic() + self.watchdog.timeout + 10
            while self.heads() and time.monotonic() < limit:
                time.sleep(1e-3)
            stuck = bool(self.outstanding())
            self.watchdog.stop()
            self._storages.clear()
            if stuck:
                return  # the device does not answer: destroying its streams would block for ever
            events = [*self._pool, *self._vacated.values(), *self._own.values()]
            for lowered in (*self._lowered.values(), *self._retired):
                lowered.close()
            for event in events:
                self.driver.free_event(event)
            for stream in self._streams.values():
                self.driver.free_stream(stream)
            self._lowered.clear()
            self._retired.clear()
            self._gathers.clear()
            self._reductions.clear()
            self._streams.clear()
            self._pool.clear()
            self._vacated.clear()
            self._own.clear()
            self.arena.close()
            self.arena.owner = None  # the memory goes with the last tensor over it
            _OPEN.discard(self.arena)
            self.driver.close()

    def __enter__(self) -> CudaTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> Sequence[tuple[str, str]]:
        """What was probed and chosen, as ``(capability, answer with reason)``."""
        from tide.transport.cuda.describe import describe

        return describe(self)
