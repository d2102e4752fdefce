"""The arena in shared memory, and the page behind it that ranks use to wake and watch each other.

The memory is a ``memfd``: shared memory without a name. Peers map it through ``/proc/<pid>/fd/<n>`` while
all ranks are still setting up, and then every descriptor is closed. So there is nothing to unlink and
nothing that could be left behind, whatever ends a process; the kernel frees the pages with the last
mapping. It is not bounded by the size of ``/dev/shm`` either, which containers keep small::

    mapping ├─ arena (as compiled) ─────────────────┤─ header page ───────────┤
                                                     └ doorbell · state · stamps
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from tide.errors import CapabilityError

Bytes = npt.NDArray[np.uint8]

#: Bytes behind the arena for this transport's own words; a page, so that it shares no line with signals.
HEADER_BYTES = 4096
#: Offsets in the header: a cache line each, and what the peers do up to its end.
DOORBELL, STATE, STAMPS = 0, 64, 128


def check_platform() -> None:
    """Raises unless this system has what the transport is made of.

    Raises
    ------
    CapabilityError
        Elsewhere than on 64-bit Linux.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        raise CapabilityError(f"the host transport needs Linux (memfd, futex); this is {sys.platform}")
    if sys.maxsize < 2**32:
        raise CapabilityError("the host transport needs a 64-bit process: signals are 8-byte words stored at once")


def machine_identity() -> tuple[str, str]:
    """What is equal for ranks that can share memory, and a name for messages: (identity, host name)."""
    host = socket.gethostname()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        # Process ids, by which peers find each other's memory, mean the same within one namespace only.
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{host} {platform.release()}", host
    return f"{boot} {namespace}", host


def check_one_machine(peers: Sequence[Mapping[str, object]], names: Sequence[int]) -> None:
    """Raises if the ranks cannot share memory.

    Parameters
    ----------
    peers : sequence of mapping
        ``"machine"`` and ``"host"`` of each, see `machine_identity`.
    names : sequence of int
        World rank of each, for the message.
    """
    machines: dict[object, list[int]] = {}
    hosts: dict[object, object] = {}
    for rank, peer in zip(names, peers, strict=True):
        machines.setdefault(peer["machine"], []).append(rank)
        hosts[peer["machine"]] = peer["host"]
    if len(machines) > 1:
        told = ", ".join(f"{rows} on {hosts[machine]}" for machine, rows in machines.items())
        raise CapabilityError(f"the host transport needs all ranks on one machine, and in one container; ranks {told}")


def available_memory() -> int | None:
    """Bytes that this machine, and the memory limit of this container, can still give; None if unknown."""
    found: list[int] = []
    try:
        with open("/proc/meminfo") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            most = limit.read().strip()
            if most != "max":
                found.append(max(int(most) - int(used.read()), 0))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


class Segment:
    """One rank's shared memory, mapped into this process; unmapped with the last view of it.

    Parameters
    ----------
    array : ndarray of uint8
        The whole mapping; keeps it alive.
    arena : int
        Bytes of the arena; the header follows.
    """

    __slots__ = ("arena", "array", "state")

    def __init__(self, array: Bytes, arena: int) -> None:
        self.array, self.arena = array, arena
        self.state = self.header(STATE, STATE + 8)

    @classmethod
    def map(cls, path: str, arena: int) -> Segment:
        """Maps the memory behind ``path``.

        Raises
        ------
        CapabilityError
            If the system refuses.
        """
        try:
            # torch maps the file, closes it, and unmaps it when its storage is gone: unlike an `mmap` object, it
            # keeps no descriptor, and no view can outlive the memory.
            whole = torch.from_file(path, shared=True, size=arena + HEADER_BYTES, dtype=torch.uint8)
        except (RuntimeError, OSError) as error:
            raise CapabilityError(f"cannot map {arena + HEADER_BYTES} bytes of shared memory: {error}") from error
        return cls(whole.numpy(), arena)

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return int(self.array.ctypes.data)

    def words(self, offset: int) -> memoryview:
        """The arena from ``offset`` on as 8-byte words."""
        return self.array[offset : self.arena].data.cast("Q")

    def header(self, start: int, stop: int, code: Literal["I", "Q"] = "Q") -> memoryview:
        """A part of the header as words, of 8 bytes or as ``code`` says."""
        return self.array[self.arena + start : self.arena + stop].data.cast(code)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D tensor at ``offset`` with a storage of exactly its size, which cannot be resized."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        if offset < 0 or offset + nbytes > self.arena:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are outside an arena of {self.arena}")
        # A slice, not the argument `offset`: with that the storage would begin where the buffer begins.
        return torch.frombuffer(self.array[offset : offset + nbytes].data, dtype=dtype)


def create(arena: int, ranks: int) -> int:
    """Makes one rank's shared memory, zeroed, and returns its descriptor.

    Parameters
    ----------
    arena : int
        Bytes of the arena.
    ranks : int
        Ranks that make one of this size on this machine.

    Raises
    ------
    CapabilityError
        If the machine does not have the memory. Pages come into being as they are touched, so without this
        check the system would end a process in the middle of a collective instead.
    """
    wanted, free = ranks * (arena + HEADER_BYTES), available_memory()
    if free is not None and wanted > free:
        raise CapabilityError(
            f"the plan's arenas need {wanted / 2**20:.0f} MiB on this machine ({ranks} × {arena / 2**20:.0f} MiB), "
            f"but only {free / 2**20:.0f} MiB are available; use fewer slots, fewer ranks or a smaller model"
        )
    try:
        descriptor = os.memfd_create("tide-arena", os.MFD_CLOEXEC)
    except OSError as error:
        raise CapabilityError(f"cannot make shared memory: {error}") from error
    try:
        os.ftruncate(descriptor, arena + HEADER_BYTES)
    except OSError as error:
        os.close(descriptor)
        raise CapabilityError(f"cannot make {arena + HEADER_BYTES} bytes of shared memory: {error}") from error
    return descriptor
