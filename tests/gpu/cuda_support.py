"""A machine of several GPUs in one process: streams with real bytes, run in random legal orders.

:class:`Machine` stands in for the driver of every rank. Streams are queues of what was issued to them; the
machine runs one operation at a time, from a stream chosen at random among those that can go on. With
``shared_queues`` all streams of a rank run strictly in the order of issue, as streams do that share a hardware
queue. What the host passes by pointer for later use (uploads) is read when the operation runs, what the driver
reads during the call (arguments) is read then: as on a device.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tide.compiler.compile import Compiled
from tide.compiler.place import align
from tide.kernels.segments import HEADER_WORDS, KINDS, PROGRAM_WORDS, STEP_WORDS, VECTOR_BYTES
from tide.session import Session
from tide.transport.cuda import CudaTransport, Settings
from tide.transport.cuda import transport as transport_module
from tide.transport.cuda.arena import Arena
from tide.transport.cuda.driver import MEM_OP_WAIT_32, MEM_OP_WORDS, NOT_READY, SUCCESS
from tide.transport.cuda.request import arena_bytes, arena_request
from tide.transport.cuda.tables import Launch, LaunchSet
from tide.transport.cuda.words import MASK, reached

#: An operation: True once it has run, False while it has to wait.
Run = Callable[[], bool]


#: Addresses from here on are multicast addresses, those of each node in a range of its own.
MULTICAST, MULTICAST_RANGE = 1 << 60, 1 << 48


def word_at(address: int) -> int:
    """The 32-bit word at an address."""
    return ctypes.c_uint32.from_address(address).value


class Machine:
    """Streams of all ranks.

    Parameters
    ----------
    seed : int
        Decides the order.
    shared_queues : bool
        Run each rank's operations strictly in order of issue.
    """

    def __init__(self, seed: int = 0, shared_queues: bool = False) -> None:
        self.random = random.Random(seed)
        self.shared = shared_queues
        self.queues: dict[tuple[int, int], deque[Run]] = {}
        self.recorded: dict[int, int] = {}
        self.completed: dict[int, int] = {}
        self.handles = itertools.count(1)
        self.current = 0
        self.operations = 0
        #: Each rank's multicast address, and where it leads: arenas of all ranks of its node.
        self.reached: dict[int, tuple[int, list[int]]] = {}
        #: Streams that go on only when no other can.
        self.last: set[int] = set()

    def behind(self, rank: int, address: int) -> list[int]:
        """Addresses that an address of ``rank`` stands for: several behind a multicast address."""
        if address < MULTICAST:
            return [address]
        start, arenas = self.reached[rank]
        assert 0 <= address - start < MULTICAST_RANGE, "the multicast address of another node"
        return [arena + address - start for arena in arenas]

    def put(self, rank: int, stream: int, run: Run) -> int:
        """Issues an operation."""
        self.queues.setdefault((rank, 0 if self.shared else stream), deque()).append(run)
        return SUCCESS

    def go(self, most: int) -> int:
        """Runs up to ``most`` operations; returns how many could run."""
        for count in range(most):
            ready = [key for key, queue in list(self.queues.items()) if queue]  # the watchdog may add one
            self.random.shuffle(ready)
            ready.sort(key=lambda key: key[1] in self.last)
            for key in ready:
                if self.queues[key][0]():
                    self.queues[key].popleft()
                    self.operations += 1
                    break
            else:
                return count
        return most

    def drain(self) -> None:
        """Runs until a watchdog has let everything go on: it first gives the peers time to take note."""
        limit = time.monotonic() + 20
        while any(self.queues.values()) and time.monotonic() < limit:
            self.go(1000)
            time.sleep(0.01)
        self.finish()

    def finish(self) -> None:
        """Runs all there is; fails if something is left that can never run."""
        while self.go(10_000):
            pass
        left = {key: len(queue) for key, queue in self.queues.items() if queue}
        assert not left, f"blocked for ever: {left} operations by (rank, stream)"


class FakeDriver:
    """The driver of one rank, with the interface of the real one."""

    version = 13000
    max_pitch = 1 << 31
    wait_flags = 0

    def __init__(self, machine: Machine, rank: int, batches: bool = True) -> None:
        self.machine, self.rank = machine, rank
        self.copy_batch = self._copy_batch if batches else None
        self.calls: list[str] = []

    # Streams and events
    def new_stream(self) -> int:
        return next(self.machine.handles)

    def new_event(self) -> int:
        return next(self.machine.handles)

    def free_stream(self, stream: int) -> None:
        pass

    free_event = free_stream

    def current_stream(self) -> int:
        return self.machine.current

    def event_record(self, event: int, stream: int) -> int:
        machine = self.machine
        number = machine.recorded[event] = machine.recorded.get(event, 0) + 1
        self.calls.append("record")

        def run() -> bool:
            machine.completed[event] = max(number, machine.completed.get(event, 0))  # an earlier one may be stuck
            return True

        return machine.put(self.rank, stream, run)

    def stream_wait_event(self, stream: int, event: int, flags: int) -> int:
        machine = self.machine
        number = machine.recorded.get(event, 0)
        self.calls.append("wait event")
        return machine.put(self.rank, stream, lambda: machine.completed.get(event, 0) >= number)

    def event_query(self, event: int) -> int:
        done = self.machine.completed.get(event, 0) >= self.machine.recorded.get(event, 0)
        return SUCCESS if done else NOT_READY

    def done(self, event: int) -> bool:
        return self.event_query(event) == SUCCESS

    def synchronize_event(self, event: int) -> None:
        while not self.done(event):
            assert self.machine.go(1), "the host waits for something that can never happen"

    # Memory operations
    def wait_value(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append("wait")
        assert 0 <= value <= MASK
        return self.machine.put(self.rank, stream, lambda: reached(word_at(address), value))

    def write_value(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append("write")
        return self.machine.put(self.rank, stream, lambda: _store(address, value))

    def memory_operations(self, stream: int, count: int, address: int, flags: int) -> int:
        self.calls.append("batch of waits and writes")
        words = (ctypes.c_uint64 * (count * MEM_OP_WORDS)).from_address(address)
        for at in range(0, count * MEM_OP_WORDS, MEM_OP_WORDS):
            kind, place, value = words[at], words[at + 1], words[at + 2]
            assert 0 <= value <= MASK
            if kind == MEM_OP_WAIT_32:
                self.machine.put(self.rank, stream, lambda p=place, v=value: reached(word_at(p), v))
            else:
                self.machine.put(self.rank, stream, lambda p=place, v=value: _store(p, v))
        return SUCCESS

    # Copies
    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> int:
        self.calls.append("copy")
        return self.machine.put(self.rank, stream, lambda: self._write(dst, src, nbytes))

    upload = download = copy

    def _write(self, dst: int, src: int, nbytes: int) -> bool:
        for target in self.machine.behind(self.rank, dst):
            ctypes.memmove(target, src, nbytes)
        return True

    def _copy_batch(self, dsts: int, srcs: int, sizes: int, count: int, stream: int) -> int:
        self.calls.append("batch of copies")
        rows = [list((ctypes.c_int64 * count).from_address(array)) for array in (dsts, srcs, sizes)]
        jobs = list(zip(*rows, strict=True))

        def run() -> bool:
            for job in self.machine.random.sample(jobs, len(jobs)):
                self._write(*job)
            return True

        return self.machine.put(self.rank, stream, run)

    def copy_2d(self, descriptor: int, stream: int) -> int:
        self.calls.append("2-D copy")
        words = list((ctypes.c_int64 * 16).from_address(descriptor))
        src, src_pitch, dst, dst_pitch, width, height = (words[i] for i in (4, 6, 11, 13, 14, 15))

        def run() -> bool:
            for row in range(height):
                self._write(dst + row * dst_pitch, src + row * src_pitch, width)
            return True

        return self.machine.put(self.rank, stream, run)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> int:
        def run() -> bool:
            ctypes.memset(address, byte, nbytes)
            return True

        return self.machine.put(self.rank, stream, run)

    # The rest
    def check(self, result: int, what: str) -> None:
        assert result == SUCCESS, what

    def bind_thread(self) -> None:
        pass

    def allow_captures(self) -> None:
        pass

    def range_push(self, name: str) -> None:
        pass

    def range_pop(self) -> None:
        pass

    def close(self) -> None:
        pass


def _store(address: int, value: int) -> bool:
    ctypes.c_uint32.from_address(address).value = value
    return True


# NCCL ---------------------------------------------------------------------------------------------


def _moved(dst: int, src: int, nbytes: int) -> bool:
    ctypes.memmove(dst, src, nbytes)
    return True


class FakeNccl:
    """The one-sided calls of one rank, with the rules of the real ones.

    Signals are counters for each (communicator, sender, index, context), waits add up. Every operation of a
    communicator comes after those issued to it before, also on other streams, where ``serial``. A context stages what
    it signals, so operations of one context from two streams are an error here; on a device they are a race.

    Parameters
    ----------
    machine : Machine
        Whose streams.
    rank : int
        Whose calls.
    memory : mapping of int to int
        Address of every rank's window.
    counters : dict
        Shared by all ranks.
    needs : WireNeeds
        What the communicators were made with.
    serial : bool
        As described.
    """

    FIRST = 1000  # handle of the first communicator; its window has the next hundred's

    def __init__(
        self,
        machine: Machine,
        rank: int,
        memory: dict[int, int],
        counters: dict[tuple[int, ...], int],
        needs: Any,
        serial: bool,
    ) -> None:
        self.machine, self.rank, self.memory, self.counters = machine, rank, memory, counters
        self.needs, self.serial = needs, serial
        self.communicators = [self.FIRST + i for i in range(needs.communicators)]
        self.windows = [handle + 100 for handle in self.communicators]
        self.calls: list[tuple[Any, ...]] = []
        self.aborted = 0
        self._expected: dict[tuple[int, ...], int] = {}
        self._homes: dict[tuple[int, int], int] = {}
        self._issued: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._group: list[tuple[Any, ...]] | None = None

    # The interface of Library and Window
    @property
    def library(self) -> FakeNccl:
        return self

    def function(self, name: str) -> Callable[..., int]:
        return getattr(self, name)  # type: ignore[no-any-return]

    def check(self, result: int, name: str) -> None:
        assert result == 0, name

    def abort(self) -> None:
        self.aborted += 1

    # NCCL's calls
    def ncclGroupStart(self) -> int:
        assert self._group is None
        self._group = []
        return 0

    def ncclGroupEnd(self) -> int:
        assert self._group
        assert len({call[2:] for call in self._group}) == 1, "a group of different kinds runs in an order of NCCL's"
        parts = [part for call in self._group for part in call[0]]
        (*_, communicator, stream), self._group = self._group[0], None
        return self._issue(communicator, stream, parts)

    def ncclPutSignal(
        self,
        address: int,
        count: int,
        kind: int,
        peer: int,
        window: int,
        offset: int,
        signal: int,
        context: int,
        flags: int,
        communicator: int,
        stream: int,
    ) -> int:
        assert kind == 1
        assert window == communicator + 100
        assert flags == 0
        assert self.memory[self.rank] <= address, "the source is not in the window"
        self.calls.append(("put", peer, signal, context, count, communicator, stream))
        to = self.memory[peer] + offset
        parts = [lambda: _moved(to, address, count), self._signal(peer, signal, context, communicator, stream)]
        if self._group is not None:
            self._group.append((parts, offset, peer, signal, context, communicator, stream))
            return 0
        return self._issue(communicator, stream, parts)

    def ncclSignal(self, peer: int, signal: int, context: int, flags: int, communicator: int, stream: int) -> int:
        assert flags == 0
        self.calls.append(("signal", peer, signal, context, communicator, stream))
        return self._issue(communicator, stream, [self._signal(peer, signal, context, communicator, stream)])

    def ncclWaitSignal(self, number: int, descriptors: int, communicator: int, stream: int) -> int:
        rows = [list((ctypes.c_int * 4).from_address(descriptors + 16 * row)) for row in range(number)]
        keys = []
        for count, peer, signal, context in rows:
            assert count > 0
            self._within(signal, context, communicator)
            key = (communicator, self.rank, peer, signal, context)
            self._expected[key] = self._expected.get(key, 0) + count
            keys.append((key, self._expected[key]))
            self.calls.append(("wait", peer, signal, context, count, communicator, stream))
        assert len({key for key, _ in keys}) == number, "one descriptor for each counter"
        return self._issue(communicator, stream, [lambda: all(self.counters.get(k, 0) >= n for k, n in keys)])

    def _within(self, signal: int, context: int, communicator: int) -> None:
        assert 0 <= signal < self.needs.signals
        assert 0 <= context < self.needs.contexts
        assert communicator in self.communicators

    def _signal(self, peer: int, signal: int, context: int, communicator: int, stream: int) -> Run:
        self._within(signal, context, communicator)
        home = self._homes.setdefault((communicator, context), stream)
        assert home == stream, f"context {context} is used from two streams"
        key = (communicator, peer, self.rank, signal, context)

        def run() -> bool:
            self.counters[key] = self.counters.get(key, 0) + 1
            return True

        return run

    def _issue(self, communicator: int, stream: int, parts: list[Run]) -> int:
        turn = self._issued.get(communicator, 0)
        self._issued[communicator] = turn + 1
        for number, part in enumerate(parts):

            def run(part: Run = part, last: bool = number == len(parts) - 1) -> bool:
                if self.serial and self._done.get(communicator, 0) != turn:
                    return False
                if not part():
                    return False
                if last:
                    self._done[communicator] = self._done.get(communicator, 0) + 1
                return True

            self.machine.put(self.rank, stream, run)
        return 0


# Kernels ------------------------------------------------------------------------------------------

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RAW = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
_TYPES = {**_TORCH, **_RAW}


def run_table(
    words: np.ndarray,
    launch: Launch,
    constants: dict[str, Any],
    scalars: tuple[float, ...],
    behind: Callable[[int], list[int]],
    programs: Iterable[int] | None = None,
) -> None:
    """What programs (all by default) do with a table; ``behind`` tells what a multicast address reads."""
    sizes, division = launch.job.division.sizes, launch.job.division
    width = HEADER_WORDS + 2 * len(sizes)
    dst_type, src_type = (_TYPES[str(constants.get(key, "fp32"))] for key in ("DST", "SRC"))
    pieces = constants.get("PIECES", 1)
    for program, kind in itertools.product(programs or range(launch.programs), range(len(KINDS))):
        at = program * PROGRAM_WORDS + 3 * kind
        segment, tile, end = words[at : at + 3].tolist()
        while tile < end:
            record = words[launch.programs * PROGRAM_WORDS + segment * width :][:width].tolist()
            begin, stop, total, per_run = record[:4]
            stop = min(stop, end)
            narrow = KINDS[kind] == "narrow"
            per_tile, lanes = division.tile_vectors(kind), 1 if narrow else division.vector
            vectors = np.arange((tile - begin) * per_tile, min((stop - begin) * per_tile, total))
            row, column = vectors // per_run, vectors % per_run * lanes
            values = []
            for operand, size in enumerate(sizes):
                unit, pitch_unit = (size, 1) if narrow else (VECTOR_BYTES, VECTOR_BYTES // size)
                address, pitch = record[HEADER_WORDS + 2 * operand : HEADER_WORDS + 2 * operand + 2]
                where = (row * pitch * pitch_unit + column)[:, None] + np.arange(lanes)
                if operand == 0:
                    target = address * unit, where.ravel(), size
                    continue
                dtype = torch.float32 if operand > pieces else src_type
                first, *others = [_gather(at, where.ravel(), dtype) for at in behind(address * unit)]
                values.append(sum(others, start=first))
            _scatter(*target, _combine(values, pieces, dst_type, src_type, scalars))
            tile, segment = stop, segment + 1


def _combine(
    values: list[torch.Tensor], pieces: int, dst: torch.dtype, src: torch.dtype, scalars: tuple[float, ...]
) -> torch.Tensor:
    if not scalars:
        return values[0].to(dst) if dst != src else values[0]
    total = values[0].float()
    for value in values[1:pieces]:
        total = total + value.float()
    if len(values) > pieces:
        total = values[pieces] + total
    return (total * scalars[0] / scalars[1]).to(dst)


def _memory(address: int, where: np.ndarray, size: int) -> np.ndarray:
    count = int(where.max(initial=-1)) + 1
    raw = (ctypes.c_uint8 * (count * size)).from_address(address)
    return np.frombuffer(raw, dtype=f"u{size}")


def _gather(address: int, where: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    memory = _memory(address, where, dtype.itemsize)
    return torch.from_numpy(memory[where].view(f"i{dtype.itemsize}")).view(dtype)


def _scatter(address: int, where: np.ndarray, size: int, values: torch.Tensor) -> None:
    raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    _memory(address, where, size)[where] = values.contiguous().view(raw).numpy().view(f"u{size}")


@contextmanager
def fake_kernels(machine: Machine, rank_of_stream: Callable[[int], int]) -> Iterator[None]:
    """Kernel launches become operations of the machine."""
    original = LaunchSet._bind

    def bind(self: LaunchSet, variant: Any, launch: Launch, scalars: tuple[float, ...]) -> Callable[[int], None]:
        part = self.memory[launch.offset : launch.offset + launch.length]
        constants = dict(variant.constants)

        def start(stream: int) -> None:
            rank = rank_of_stream(stream)

            def run() -> bool:
                run_table(part.numpy(), launch, constants, scalars, lambda address: machine.behind(rank, address))
                return True

            machine.put(rank, stream, run)

        def start_chain(stream: int) -> None:
            """Programs go on independently of each other: in any order of (program, step) that keeps each program's."""
            rank = rank_of_stream(stream)
            turns = list(range(launch.programs)) * len(launch.job.steps)
            machine.random.shuffle(turns)
            done = [0] * launch.programs
            for program in turns:

                def run(program: int = program, step: int = done[program]) -> bool:
                    words = part.numpy()
                    first, counter = words[1 + STEP_WORDS * step :][:STEP_WORDS].tolist()
                    run_table(words[first:], launch, constants, scalars, lambda address: [address], (program,))
                    return counter == 0 or _store(counter, (word_at(counter) + 1) & MASK)

                machine.put(rank, stream, run)
                done[program] += 1

        return start_chain if launch.job.steps else start

    LaunchSet._bind = bind  # type: ignore[method-assign]
    try:
        yield
    finally:
        LaunchSet._bind = original  # type: ignore[method-assign]


# Sessions -----------------------------------------------------------------------------------------


class Cluster:
    """A session of every rank, on one machine."""

    def __init__(
        self,
        compiled: Compiled,
        machine: Machine,
        settings: Settings | None = None,
        poison: bool = True,
        batches: bool = True,
        timeout: float = 3600.0,
        serial: bool = True,
    ) -> None:
        self.compiled, self.machine = compiled, machine
        world = compiled.topology.world_size
        size, table = arena_bytes(compiled)
        self.memory = [torch.full((size + 4096,), 0xEE, dtype=torch.uint8) for _ in range(world)]
        addresses = {rank: align(memory.data_ptr(), 4096) for rank, memory in enumerate(self.memory)}
        for address in addresses.values():
            start = compiled.arena.zeroed
            ctypes.memset(address + start, 0, table - start)
        self.kept: list[object] = []
        self.sessions = []
        settings = settings or Settings(4, 4, puts="copy")
        counters: dict[tuple[int, ...], int] = {}
        self.nccl: list[FakeNccl] = []
        for rank in range(world):
            driver = FakeDriver(machine, rank, batches)
            request = arena_request(compiled, rank, settings)
            number = compiled.topology.node_of(rank)
            node = [addresses[r] for r in range(world) if compiled.topology.node_of(r) == number]
            multicast = MULTICAST + number * MULTICAST_RANGE
            machine.reached[rank] = multicast, node
            mapped = {peer: addresses[peer] for peer in request.reachable}
            arena = Arena("fake", mapped, self.memory, lambda: None, multicast=multicast)
            if request.needs is not None:
                self.nccl.append(FakeNccl(machine, rank, addresses, counters, request.needs, serial))
                arena.window = self.nccl[-1]  # type: ignore[assignment]
            transport = CudaTransport(compiled, rank, arena, driver, torch.device("cpu"), settings, timeout)
            self.sessions.append(Session(compiled, transport, poison=poison))

    def owner(self, stream: int) -> int:
        """Rank of a stream."""
        for session in self.sessions:
            assert isinstance(session.transport, CudaTransport)
            if stream in session.transport._streams.values():
                return session.rank
        raise AssertionError(f"nobody's stream {stream}")

    def close(self) -> None:
        """Ends the watchdogs."""
        for session in self.sessions:
            session.close()


def host_tensor(address: int, numel: int, dtype: torch.dtype, device: torch.device, owner: object) -> torch.Tensor:
    """Stand-in for the arena's tensors over device memory."""
    out = torch.empty(0, dtype=dtype)
    if numel == 0:
        return out
    raw = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


@contextmanager
def cluster(compiled: Compiled, machine: Machine, **settings: Any) -> Iterator[Cluster]:
    """Sessions on a fake machine, closed at the end."""
    real = transport_module.tensor_at
    transport_module.tensor_at = host_tensor
    made = Cluster(compiled, machine, **settings)
    try:
        with fake_kernels(machine, made.owner):
            yield made
    finally:
        machine.finish()
        made.close()
        transport_module.tensor_at = real
