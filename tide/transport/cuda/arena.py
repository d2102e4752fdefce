"""The symmetric arena: one allocation a rank, mapped by every rank of the node.

Providers, in order of preference: windows of a communicator of NCCL 2.31 or later, and torch's symmetric memory
with its CUDA back end, which every supported torch has. Each is probed on every rank, and all ranks take the
first that works everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide.errors import CapabilityError, TideError
from tide.transport.agreement import exchange, ranks_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: torch would otherwise create a multicast object for every rendezvous, which this transport has no use for.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(slots=True)
class Arena:
    """Memory of this rank and where it sees that of the others.

    Attributes
    ----------
    provider : str
        What the memory came from, for reports.
    addresses : mapping of int to int
        Address of every rank's arena in this process, this rank's included.
    owner : object
        Keeps the memory alive; tensors over it hold it too.
    close : callable
        Ends the mapping; the memory goes when the last tensor over it has gone.
    notes : list of (str, str)
        What was probed, with the answer.
    seconds : float
        Time that allocation and registration took on this rank.
    """

    provider: str
    addresses: Mapping[int, int]
    owner: object
    close: Callable[[], None]
    notes: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


class _View:
    """Raw device memory as torch takes it; lives as long as the tensor over it."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device, owner: object) -> torch.Tensor:
    """1-D tensor over device memory, with a storage object of exactly its own size."""
    out = torch.empty(0, dtype=dtype, device=device)
    if numel == 0:
        return out
    nbytes = numel * dtype.itemsize
    storage = torch.as_tensor(_View(address, nbytes, owner), device=device).untyped_storage()
    return out.set_(storage, 0, (numel,), (1,))


def open_arena(
    size: int,
    rank: int,
    device: torch.device,
    group: ProcessGroup | None,
    control: ProcessGroup | None,
    timeout: float,
    only: str | None = None,
) -> Arena:
    """Allocates and maps the arena. Collective.

    Parameters
    ----------
    size : int
        Bytes, the same on every rank.
    rank : int
        This rank in ``group``.
    device : torch.device
        Where to allocate.
    group : ProcessGroup or None
        The ranks; None for a rank alone.
    control : ProcessGroup or None
        A gloo group of the same ranks.
    timeout : float
        Seconds to wait for the others.
    only : str, optional
        Name of the one provider to try.

    Raises
    ------
    CapabilityError
        If no provider works on every rank; the message has each with its reason.
    """
    if group is None:
        begin = time.perf_counter()
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = time.perf_counter() - begin
        return Arena("torch (one rank)", {0: memory.data_ptr()}, memory, lambda: None, seconds=seconds)
    providers: dict[str, tuple[Callable[[], str | None], Callable[[], Arena]]] = {
        "nccl": (_probe_nccl, lambda: _open_nccl(size, rank, device, control, timeout)),
        "torch": (lambda: _probe_torch(device), lambda: _open_torch(size, rank, device, group, control, timeout)),
    }
    if only is not None and only not in providers:
        raise CapabilityError(f"no arena provider {only!r}; there are {', '.join(providers)}")
    notes: list[tuple[str, str]] = []
    for name, (probe, opened) in providers.items():
        if only not in (None, name):
            continue
        reason = _first(exchange(_tried(probe), control, timeout, f"answer of arena provider {name}"))
        if reason is None:
            arena: Arena | None = None
            failure = None
            begin = time.perf_counter()
            try:
                arena = opened()
                arena.seconds = time.perf_counter() - begin
            except (TideError, RuntimeError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
            reason = _first(exchange(failure, control, timeout, f"state of arena provider {name}"))
            if reason is None and arena is not None:
                arena.notes = [*notes, (f"arena from {name}", "on"), *arena.notes]
                return arena
            if arena is not None:
                arena.close()
        notes.append((f"arena from {name}", f"off: {reason}"))
    raise CapabilityError("no symmetric memory: " + "; ".join(f"{name} {answer}" for name, answer in notes))


def _tried(probe: Callable[[], str | None]) -> str | None:
    try:
        return probe()
    except (RuntimeError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"


def _first(answers: Sequence[str | None]) -> str | None:
    """The reasons of all ranks in one line; None if all are well."""
    holders: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer is not None:
            holders.setdefault(answer, []).append(rank)
    if not holders:
        return None
    return "; ".join(f"{reason} ({ranks_text(ranks)})" for reason, ranks in holders.items())


# torch --------------------------------------------------------------------------------------------


def _probe_torch(device: torch.device) -> str | None:
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    backend = getattr(symmetric, "get_backend", lambda _: "CUDA")(device)
    if backend not in (None, "CUDA"):
        return f"torch's symmetric memory is set to its {backend} back end; TIDE uses CUDA's"
    return None


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def _open_torch(
    size: int, rank: int, device: torch.device, group: ProcessGroup, control: ProcessGroup | None, timeout: float
) -> Arena:
    from torch.distributed import _symmetric_memory as symmetric

    with _without_multicast():
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(memory, group)
    # With a memory pool behind `empty`, the handle speaks of the allocation, and the tensor lies somewhere in it.
    start = memory.data_ptr() - handle.buffer_ptrs[rank]
    addresses = {peer: pointer + start for peer, pointer in enumerate(handle.buffer_ptrs)}
    starts = exchange(start, control, timeout, "places in the pool")
    if len(set(starts)) > 1:
        raise CapabilityError(f"the ranks' allocations start at different places of their pools: {starts}")
    return Arena("torch symmetric memory (CUDA)", addresses, (memory, handle), lambda: None)


# NCCL ---------------------------------------------------------------------------------------------


def _probe_nccl() -> str | None:
    from tide.transport.cuda import nccl

    return nccl.unusable()


def _open_nccl(size: int, rank: int, device: torch.device, control: ProcessGroup | None, timeout: float) -> Arena:
    from tide.transport.cuda import nccl

    library = nccl.load()
    own = library.unique_id() if rank == 0 else b""
    identity = exchange(own, control, timeout, "NCCL communicator")[0]
    with torch.cuda.device(device):
        window = nccl.Window(library, size, rank, dist.get_world_size(control), identity)
    notes = [("NCCL", library.version_text)]
    return Arena("NCCL window", window.addresses, window.memory, window.close, notes)
