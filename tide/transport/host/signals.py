"""Order between processes: fences, and sleeping until a peer rings.

A signal is a counter in the receiver's arena that only its sender writes: data first, then a fence, then
one aligned 8-byte store. The receiver loads the counter, sees it large enough, fences, and reads the data.

* x86-64 keeps stores in order, and loads too, except the non-temporal stores that ``memcpy`` uses for large
  blocks. A locked instruction orders those as well; taking an uncontended lock is one.
* aarch64 keeps neither order. ``membarrier(2)`` with ``GLOBAL_EXPEDITED`` is documented to be a full barrier
  of the calling thread, and interrupts nobody as no process registers for it.
* Elsewhere nothing is claimed: :class:`~tide.errors.CapabilityError`.

A rank with nothing to do sleeps on its *doorbell*, a futex word behind its arena, which a peer changes after
each signal. Several peers may ring at once, without atomic addition: each writes a value that nobody else
writes, so a sleeper that has seen an older one never misses a ring.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
import time
from collections.abc import Callable, Sequence

from tide.errors import CapabilityError
from tide.transport.host.memory import DOORBELL, Segment

#: Numbers of futex(2) and membarrier(2).
_NUMBERS = {"x86_64": (202, 324), "aarch64": (98, 283)}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MEMBARRIER_QUERY, _MEMBARRIER_GLOBAL_EXPEDITED = 0, 2


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _numbers(machine: str | None = None) -> tuple[int, int]:
    machine = platform.machine() if machine is None else machine
    try:
        return _NUMBERS[machine]
    except KeyError:
        raise CapabilityError(
            f"the host transport knows the memory ordering of {' and '.join(_NUMBERS)}, not of {machine}"
        ) from None


def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def locked_fence() -> Callable[[], None]:
    """Full fence for x86-64."""
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()

    return fence


def membarrier_fence(machine: str | None = None) -> Callable[[], None]:
    """Full fence through the kernel, for any architecture.

    Raises
    ------
    CapabilityError
        If the kernel does not offer it.
    """
    call, number = _syscall(), ctypes.c_long(_numbers(machine)[1])
    offered = call(number, _MEMBARRIER_QUERY, 0)
    if offered < 0 or not offered & _MEMBARRIER_GLOBAL_EXPEDITED:
        raise CapabilityError("the host transport needs membarrier(2) on this architecture, which the kernel refuses")

    def fence() -> None:
        call(number, _MEMBARRIER_GLOBAL_EXPEDITED, 0)

    return fence


def make_fence(machine: str | None = None) -> Callable[[], None]:
    """The fence of this machine's architecture."""
    machine = platform.machine() if machine is None else machine
    _numbers(machine)
    return locked_fence() if machine == "x86_64" else membarrier_fence(machine)


def futex_works() -> bool:
    """Whether this process may use futex(2); some sandboxes filter it."""
    word = ctypes.c_uint32(0)
    return _syscall()(ctypes.c_long(_numbers()[0]), ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) >= 0


class Doorbells:
    """The doorbells of all ranks.

    Parameters
    ----------
    segments : sequence of Segment
        Shared memory of every rank.
    rank : int
        This rank.
    fence : callable
        Full fence.
    futex : bool
        Sleep on the word; otherwise look again after a short sleep.
    """

    #: Sleeps without a futex, seconds: first and longest.
    NAPS = (50e-6, 1e-3)

    def __init__(self, segments: Sequence[Segment], rank: int, fence: Callable[[], None], futex: bool) -> None:
        self._rank, self._world, self._rings = rank, len(segments), 0
        self._fence, self._futex = fence, futex
        self._words = [s.header(DOORBELL, DOORBELL + 4, "I") for s in segments]
        self._addresses = [ctypes.c_void_p(s.address + s.arena + DOORBELL) for s in segments]
        self._call, self._number = _syscall(), ctypes.c_long(_numbers()[0])
        self._nap = self.NAPS[0]

    def seen(self) -> int:
        """Value of the own doorbell; take it before looking at signals, then pass it to :meth:`sleep`."""
        value = int(self._words[self._rank][0])
        self._fence()  # the signals are looked at after this, or a ring in between would be missed
        return value

    def ring(self, peer: int) -> None:
        """Wakes ``peer``; call after the signal has been stored."""
        if peer == self._rank or not self._futex:
            return
        self._fence()  # whoever sees the new value sees the signal
        self._rings += 1
        self._words[peer][0] = (self._rings * self._world + self._rank) & 0xFFFFFFFF
        self._call(self._number, self._addresses[peer], _FUTEX_WAKE, 1, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleeps until the doorbell is no longer ``seen``, for ``seconds`` at most."""
        if not self._futex:
            time.sleep(min(self._nap, seconds))
            self._nap = min(2 * self._nap, self.NAPS[1])
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        address = self._addresses[self._rank]
        failed = self._call(self._number, address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
        if failed and ctypes.get_errno() == errno.ENOSYS:
            self._futex = False

    def rested(self) -> None:
        """Something arrived: the next sleep is a short one again."""
        self._nap = self.NAPS[0]

    def release(self) -> None:
        """Lets go of the memory."""
        self._words.clear()
        self._addresses.clear()
