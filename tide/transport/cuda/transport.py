"""The CUDA transport: copy engines, flag words and a few kernels, on streams of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tide.compiler.compile import Compiled
from tide.compiler.steps import Lane, Program, Wait
from tide.errors import CapabilityError, InputError, PeerError, TransportError
from tide.kernels import place
from tide.transport.agreement import (
    TIMEOUT_VARIABLE,
    agree,
    control_group,
    plan_facts,
    resolve_group,
    resolve_timeout,
    settle,
    world_ranks,
)
from tide.transport.base import Binding, Transport
from tide.transport.cuda.arena import Arena, open_arena, tensor_at
from tide.transport.cuda.books import Books
from tide.transport.cuda.lower import lower
from tide.transport.cuda.lowered import Lowered
from tide.transport.cuda.multicast import demand
from tide.transport.cuda.operations import Device
from tide.transport.cuda.peers import PeersByProgram
from tide.transport.cuda.request import arena_bytes, arena_request, why_no_switch, wire_of
from tide.transport.cuda.ticket import CudaTicket, Settings
from tide.transport.cuda.watchdog import Watchdog
from tide.transport.cuda.words import COUNTERS, MASK, STRIDE, VALUES, Counters, Words, value_table

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
#: Books of transports that were closed while collectives were stuck, which may still read and write their tensors.
_STUCK: list[Books] = []


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
        self.words = Words(compiled, rank)
        self.abort_offset, self.abort_words = compiled.arena.size, compiled.arena.world_size
        self.broken: str | None = None
        self.value_table = arena.addresses[rank] + arena_bytes(compiled)[1]
        table = torch.zeros(VALUES + COUNTERS, dtype=torch.int64)
        table[:VALUES] = torch.from_numpy(value_table().astype("int64"))
        tensor_at(self.value_table, len(table), torch.int32, device, arena.owner).copy_(table)
        self.write_to_peers = settings.signals == "write" or (
            settings.signals == "auto" and driver.version < NO_PEER_WRITES
        )
        self.wire = wire_of(arena, compiled, self.words, self.value_table, settings)
        self.books = Books(driver)
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
            counters=Counters(self.value_table + 4 * VALUES) if settings.fused_casts else None,
            wire=self.wire,
            record=self.books.record,
            multicast=arena.multicast,
            stand_in=settings.multicast == "standin",
        )
        self._lowered: dict[tuple[int, str], Lowered] = {}  # in the order of their last use
        self._peers = PeersByProgram(compiled, rank, self.most_prepared)
        self._retired: list[Lowered] = []  # no more to be used, but perhaps under way
        self._vacated: dict[int, int] = {}
        self.poisoned: dict[int, int] = {}  # words that poison waits for, by their counters
        self._own: dict[tuple[int, Lane], int] = {}
        self._issue = threading.RLock()
        self._numbers = 0
        self.spoilt = False  # whether a peer that gave up may have written to this rank's memory unnoticed
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
                settle(why_no_switch(wanted, compiled, device), control, timeout, CapabilityError)
            request = arena_request(compiled, rank, settings, wanted is not None)
            arena = open_arena(size, rank, device, group, control, timeout, provider, request)
            transport, failure = None, None
            try:
                start = arena.addresses[rank] + compiled.arena.zeroed
                stream = torch.cuda.current_stream(device)
                driver.check(driver.fill(start, 0, size - compiled.arena.zeroed, stream.cuda_stream), "zero signals")
                transport = cls(compiled, rank, arena, driver, device, settings, timeout)
                transport.names = world_ranks(group)
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
            key = id(program), binding.unit  # of a program that what is kept keeps alive
            lowered = self._lowered.pop(key, None) or self._lower(program, binding)
            self._lowered[key] = lowered
            self.books.make_room(program.collective)
            tensors = lowered.prepare(binding)
            behind = self.books.unawaited(binding.slot) if program.uses_slot else []
            self._numbers = lowered.last = self._numbers + 1
            ticket = CudaTicket(self, self._numbers, binding, lowered, behind)
            if program.uses_slot:
                ticket.gate = self._vacated.get(binding.slot, 0)
            lowered.ticket, lowered.unawaited = ticket, self.books.ends(behind) if behind else []
            ticket.hold(lowered, tensors)
            self.driver.range_push(lowered.name)
            try:
                ticket.entry = self.books.record(self.driver.current_stream())
                for operation in lowered.operations:
                    operation()
                ticket.released = list(ticket.midway)
                for stream, reads_gradients in lowered.ends:
                    event = self.books.record(stream)
                    ticket.ends.append(event)
                    if reads_gradients:
                        ticket.released.append(event)
            except BaseException as error:
                # The counters no longer say what the device has been told.
                self.fail(f"{program.collective} of unit {binding.unit!r} broke off while it was issued: {error!r}")
                self._adopt(ticket, lowered)
                raise
            finally:
                self.driver.range_pop()
            self.books.add(ticket, binding.slot if program.uses_slot else None)
            return ticket

    def _adopt(self, ticket: CudaTicket, lowered: Lowered) -> None:
        """Takes in what was issued of a collective that broke off: the watchdog sets its waits free."""
        with suppress(TransportError):  # of a device that does not answer any more, nothing can be waited for
            ticket.ends = [self.books.record(stream) for stream in lowered.streams]
        self.books.add(ticket, None)

    def _lower(self, program: Program, binding: Binding) -> Lowered:
        lowered = lower(program, binding, self._peers.of(program, binding), self._device)
        limit = self.driver.max_pitch
        if lowered.copies.widest_pitch() > limit:
            raise CapabilityError(
                f"unit {binding.unit!r}: runs {lowered.copies.widest_pitch()} bytes apart; this device's 2-D copies "
                f"take at most {limit}. Shard another dim"
            )
        while len(self._lowered) >= self.most_prepared:
            self._retired.append(self._lowered.pop(next(iter(self._lowered))))
        oldest = min((head.number for head in self.books.heads()), default=self._numbers + 1)
        for old in [old for old in self._retired if old.last < oldest]:
            self._retired.remove(old)
            old.close()
        return lowered

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
            for event in (self._vacated[slot], *self.books.ends(self.books.unawaited(slot))):
                driver.check(driver.stream_wait_event(stream, event, 0), "event wait")
            for _, _, step in program.steps():
                if isinstance(step, Wait) and step.lane is Lane.DONE:
                    # The same value that the next all-gather will wait for; it is not consumed here.
                    index, word = self.words.incoming(unit, step.lane, group[step.peer])
                    self.poisoned[index] = word
                    count = self.words.consumed[index] + step.count
                    value = ((count - self.words.credit(step.lane)) * STRIDE) & MASK
                    driver.check(driver.wait_value(stream, own + word, value, driver.wait_flags), "wait")
            start = own + layout.slots[slot].offset
            driver.check(driver.fill(start, 0xFF, self.compiled.layouts[unit].size, stream), "poison")
            driver.check(driver.event_record(self._vacated[slot], stream), "event record")

    # Tickets -----------------------------------------------------------------------------------

    def order_after(self, ticket: CudaTicket, events: Sequence[int]) -> None:
        """Makes the current stream wait for events of a ticket, and lets go of its gradients."""
        if self.broken is not None:
            raise PeerError(self.broken)
        self.books.order_after(ticket, events)

    def outstanding(self) -> list[CudaTicket]:
        """Collectives that have not ended, oldest first."""
        return self.books.outstanding()

    def heads(self) -> list[CudaTicket]:
        """The oldest outstanding ticket of each collective."""
        return self.books.heads()

    # Failing and closing -----------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """What broke the transport."""
        return self.broken

    def fail(self, message: str) -> None:
        """Marks the transport broken, and tells the peers; the first reason stays."""
        if self.broken is None:
            self.broken = message  # first: whoever notes an optimizer step looks at it afterwards
            self.watchdog.look_at_updates()
            self.watchdog.tell_peers()

    def updating(self) -> None:
        """Notes that an optimizer step follows what the current stream has been given so far.

        Steps that are captured into a graph are not noted: nothing of TIDE's is called when it is replayed.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with self._issue:
            self.driver.bind_thread()
            self.books.note_update(self.driver.current_stream())

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
                _STUCK.append(self.books)
            if stuck or self.broken is not None:
                # The device may not answer, and destroying its streams would block for ever. Peers that come late
                # may still write here, and those that are gone never join in ending a communicator.
                return
            events = [*self.books.pool, *self.books.updates, *self._vacated.values(), *self._own.values()]
            for lowered in (*self._lowered.values(), *self._retired):
                lowered.close()
            for event in events:
                self.driver.free_event(event)
            for stream in self._streams.values():
                self.driver.free_stream(stream)
            self._lowered.clear()
            self._retired.clear()
            self._streams.clear()
            self.books.clear()
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
