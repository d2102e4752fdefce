"""The symmetric arena: one allocation a rank, mapped by every rank of the node.

Providers, in order of preference: windows of a communicator of NCCL 2.31 or later, and torch's symmetric memory
with its CUDA back end, which every supported torch has. Each is probed on every rank, and all ranks take the
first that works everywhere. Steps between nodes need NCCL's window, and communicators that can put; where the
nodes are virtual, they can do without.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide.errors import CapabilityError, TideError
from tide.nccl_library import remedy
from tide.transport.agreement import agree, exchange, ranks_text, world_ranks
from tide.transport.cuda import nccl
from tide.transport.cuda.window import Window, WireNeeds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("tide")

#: torch would otherwise create a multicast object for every rendezvous, which this transport has no use for.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(eq=False, slots=True)
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
    window : Window or None
        NCCL's, where it was asked to put.
    multicast : int or None
        Multicast address of the arenas of this rank's node, where it was asked for.
    seconds : float
        Time that allocation and registration took on this rank.
    """

    provider: str
    addresses: Mapping[int, int]
    owner: object
    close: Callable[[], None]
    notes: list[tuple[str, str]] = field(default_factory=list)
    window: Window | None = None
    multicast: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the arena has to offer beside memory.

    Attributes
    ----------
    reachable : collection of int
        Ranks whose memory must be mapped: those of this node, or all where nodes are virtual.
    needs : WireNeeds or None
        What puts between nodes need of NCCL; None where none are wanted.
    required : bool
        Whether the plan cannot run without them.
    multicast : int
        Nodes that need a multicast address, one each and of all their ranks, which only windows of NCCL have; 0 where
        none does.
    """

    reachable: Collection[int]
    needs: WireNeeds | None = None
    required: bool = False
    multicast: int = 0


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
    request: Request | None = None,
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
    request : Request, optional
        What it has to offer beside memory; by default every rank's address.

    Raises
    ------
    CapabilityError
        If no provider works on every rank, or none can put between real nodes; the message has each with its
        reason.
    """
    if group is None:
        begin = time.perf_counter()
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = time.perf_counter() - begin
        return Arena("torch (one rank)", {0: memory.data_ptr()}, memory, lambda: None, seconds=seconds)
    request = request or Request(range(dist.get_world_size(control)))

    def window(needs: WireNeeds | None) -> Arena:
        return _open_nccl(size, rank, device, control, timeout, request, needs)

    providers: dict[str, _Provider] = {
        "nccl": (nccl.unusable, lambda: window(None)),
        "torch": (
            lambda: _probe_torch(device, request.multicast > 0),
            lambda: _open_torch(size, rank, device, group, control, timeout),
        ),
    }
    if only is not None and only not in providers:
        raise CapabilityError(f"no arena provider {only!r}; there are {', '.join(providers)}")
    notes: list[tuple[str, str]] = []
    if request.needs is not None:
        putting: _Provider = (
            nccl.unusable if only != "torch" else lambda: "arena provider torch was asked for",
            lambda: window(request.needs),
        )
        arena, reason = _attempt("nccl", putting, control, timeout)
        if arena is not None:
            arena.notes = [("arena from nccl", "on"), ("puts between nodes", "NCCL"), *arena.notes]
            return arena
        if request.required:
            raise CapabilityError(f"the plan has steps between nodes, but {reason}. {_remedy()}")
        notes.append(("puts between nodes", f"copies between virtual nodes: {reason}"))
        if rank == 0:
            logger.warning("steps between virtual nodes run as copies, not as NCCL puts: %s. %s", reason, _remedy())
    for name, provider in providers.items():
        if only not in (None, name):
            continue
        arena, reason = _attempt(name, provider, control, timeout)
        if arena is not None:
            arena.notes = [*notes, (f"arena from {name}", "on"), *arena.notes]
            return arena
        notes.append((f"arena from {name}", f"off: {reason}"))
    raise CapabilityError("no symmetric memory: " + "; ".join(f"{name} {answer}" for name, answer in notes))


#: Why a rank cannot have it (None if it can), and how to get it.
_Provider = tuple[Callable[[], str | None], Callable[[], Arena]]


def _attempt(
    name: str, provider: _Provider, control: ProcessGroup | None, timeout: float
) -> tuple[Arena | None, str | None]:
    """The provider's arena, if every rank gets one; else the ranks' reasons."""
    probe, opened = provider
    reason = _first(_tried(probe), control, timeout, f"answer of arena provider {name}")
    if reason is not None:
        return None, reason
    arena: Arena | None = None
    failure = None
    begin = time.perf_counter()
    try:
        arena = opened()
        arena.seconds = time.perf_counter() - begin
    except (TideError, RuntimeError, OSError) as error:
        failure = str(error) if isinstance(error, CapabilityError) else f"{type(error).__name__}: {error}"
    reason = _first(failure, control, timeout, f"state of arena provider {name}")
    if reason is not None and arena is not None:
        arena.close()
    return (arena, None) if reason is None else (None, reason)


def _remedy() -> str:
    found = torch.version.cuda
    return remedy(int(found.split(".")[0]) if found else None)


def _tried(probe: Callable[[], str | None]) -> str | None:
    try:
        return probe()
    except (RuntimeError, OSError, ImportError) as error:
        return f"{type(error).__name__}: {error}"


def _first(own: str | None, control: ProcessGroup | None, timeout: float, what: str) -> str | None:
    """The reasons of all ranks in one line, with the ranks unless it is one of all; None if all are well."""
    holders: dict[str, list[int]] = {}
    answers = exchange(own, control, timeout, what)
    for rank, answer in zip(world_ranks(control), answers, strict=True):
        if answer is not None:
            holders.setdefault(answer, []).append(rank)
    if not holders:
        return None
    if len(answers) in map(len, holders.values()):
        return next(iter(holders))
    return "; ".join(f"{reason} ({ranks_text(ranks)})" for reason, ranks in holders.items())


# torch --------------------------------------------------------------------------------------------


def _probe_torch(device: torch.device, multicast: bool) -> str | None:
    if multicast:
        return "the plan goes through the switch, and TIDE has multicast addresses from windows of NCCL only"
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


def _open_nccl(
    size: int,
    rank: int,
    device: torch.device,
    control: ProcessGroup | None,
    timeout: float,
    request: Request,
    needs: WireNeeds | None,
) -> Arena:
    library = nccl.load()
    count = 1 if needs is None else needs.communicators
    own = [library.unique_id() for _ in range(count)] if rank == 0 else []
    identities = exchange(own, control, timeout, "NCCL communicators")[0]

    def stage(what: str, work: Callable[[], Any]) -> Any:
        result, failure = _within(timeout, device, what, work)
        # A rank that has waited for NCCL in vain comes late.
        if reason := _first(failure, control, 2 * timeout, f"state of NCCL's {what}"):
            raise CapabilityError(reason)
        return result

    window = Window(library, size, rank, dist.get_world_size(control), identities, request.reachable, stage, needs)
    try:
        agree(window.facts, None, control, timeout, "NCCL set-ups")
        multicast = None
        if request.multicast:
            # The second call is collective within a domain: all ranks have found the domains right before the first
            # of them makes it, and nobody uses the address before all have it.
            stage("NVLink domains", lambda: window.require_domains(request.multicast))
            multicast = stage("multicast address", window.multicast_address)
    except TideError:
        window.close()
        raise
    notes = [("NCCL", f"{library.version_text}, {library.origin}")]
    if needs is not None:
        notes.append(
            (
                "NCCL communicators",
                f"{needs.communicators}, each with {needs.contexts} contexts and {needs.signals} signals; "
                f"{window.facts['LSA teams']} LSA team(s)",
            )
        )
    wired = window if needs is not None else None
    return Arena("NCCL window", window.addresses, window.memory, window.close, notes, wired, multicast)


def _within(timeout: float, device: torch.device, what: str, work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``work`` gives, or what went wrong; NCCL itself waits for a peer without end, so a thread does it."""
    results: list[Any] = []
    failures: list[str] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                results.append(work())
        except Exception as error:
            failures.append(str(error) if isinstance(error, TideError) else f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name=f"tide-nccl-{what}", daemon=True)
    thread.start()
    thread.join(timeout)
    if results:
        return results[0], None
    return None, failures[0] if failures else f"NCCL's {what} was not ready within {timeout:g} s"
