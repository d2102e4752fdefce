"""One allocation, registered as a symmetric window with every rank: the arena that NCCL provides.

Set-up is collective, and NCCL waits for all ranks in each of its calls. So every stage ends with the ranks telling
each other how it went: nobody enters the next one alone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tide.errors import CapabilityError
from tide.multicast import require
from tide.transport.cuda.nccl import GRANULARITY, STRICT_ORDERING, SYMMETRIC, Config, Library, Properties, UniqueId

_T = TypeVar("_T")
#: Does one rank's part of a stage; a failure on any rank is an error on all.
Stage = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True)
class WireNeeds:
    """What the steps between nodes need of the communicators.

    Attributes
    ----------
    contexts : int
        Contexts: operations on one are in order for each peer.
    signals : int
        Signal indices.
    communicators : int
        Communicators over the one window. NCCL runs the operations of one communicator in the order of their
        issue, whatever their streams.
    strict : bool
        Whether a word that is put after data must not be seen before it.
    """

    contexts: int
    signals: int
    communicators: int = 1
    strict: bool = False


class _Allocation:
    """Memory of ``ncclMemAlloc``, freed with the last reference."""

    def __init__(self, library: Library, size: int) -> None:
        pointer = ctypes.c_void_p()
        library("ncclMemAlloc", ctypes.byref(pointer), size)
        assert pointer.value is not None
        self.address: int = pointer.value
        self._finalizer = weakref.finalize(self, library.function("ncclMemFree"), ctypes.c_void_p(self.address))
        self._finalizer.atexit = False  # the driver may have gone by then, and takes the memory with it


class Window:
    """One symmetric window over one allocation.

    Parameters
    ----------
    library : Library
        NCCL.
    size : int
        Bytes, the same on every rank.
    rank, ranks : int
        This rank, and how many there are.
    identities : sequence of bytes
        Identity of each communicator, from one of the ranks.
    reachable : collection of int
        Ranks whose memory has to be mapped here: those of this node.
    stage : callable
        Called with the name of a stage and this rank's part of it.
    needs : WireNeeds, optional
        What puts and signals need; None where nothing crosses nodes.

    Attributes
    ----------
    memory : object
        Keeps the allocation alive.
    addresses : dict of int to int
        Address of each reachable rank's memory.
    facts : dict of str to object
        What the ranks have to agree on.

    Raises
    ------
    CapabilityError
        If NCCL finds that these ranks cannot have one.
    """

    def __init__(
        self,
        library: Library,
        size: int,
        rank: int,
        ranks: int,
        identities: Sequence[bytes],
        reachable: Collection[int],
        stage: Stage,
        needs: WireNeeds | None = None,
    ) -> None:
        self.library, self.rank, self.ranks, self.needs = library, rank, ranks, needs
        self._size = -(-size // GRANULARITY) * GRANULARITY
        self.communicators: list[int] = []
        self.windows: list[int] = []
        self.facts: dict[str, object] = {"NCCL": library.version_text, "needs": needs}
        try:
            self.memory = stage("allocation", lambda: _Allocation(library, self._size))
            for number, identity in enumerate(identities):
                stage(f"communicator {number}", partial(self._join, identity))
                stage(f"window {number}", self._register)
            self.addresses = stage("peers", lambda: {peer: self._pointer(peer) for peer in sorted(reachable)})
        except BaseException:
            self.close()
            raise

    def _join(self, identity: bytes) -> None:
        """Makes the next communicator, and asks it whether it can put."""
        library, needs, made = self.library, self.needs, ctypes.c_void_p()
        choices = {} if needs is None else {"numRmaCtx": needs.contexts, "numRmaSig": needs.signals}
        config = Config(library.version, blocking=1, commName=b"tide", **choices)
        identity_value = UniqueId.from_buffer_copy(identity)
        library(
            "ncclCommInitRankConfig", ctypes.byref(made), self.ranks, identity_value, self.rank, ctypes.byref(config)
        )
        assert made.value is not None
        self.communicators.append(made.value)
        if needs is not None:
            found = self._properties(made.value)
            self.facts["host RMA"], self.facts["LSA teams"] = bool(found.hostRmaSupport), found.nLsaTeams
            if not found.hostRmaSupport:
                raise CapabilityError(
                    f"NCCL {library.version_text} cannot put between these ranks (hostRmaSupport is false): they need "
                    "peer access or an RDMA network with GPUDirect on every rank (IB, or libnccl-rma.so through "
                    "NCCL_RMA_PLUGIN); NCCL_RMA_DISABLE=1, NCCL_NUM_RMA_CTX=0, NCCL_WIN_ENABLE=0 and "
                    "NCCL_CUMEM_ENABLE=0 switch it off"
                )

    def _properties(self, communicator: int) -> Properties:
        found = Properties(self.library.version)
        self.library("ncclCommQueryProperties", ctypes.c_void_p(communicator), ctypes.byref(found))
        return found

    def _register(self) -> None:
        strict = self.needs is not None and self.needs.strict
        made, flags = ctypes.c_void_p(), SYMMETRIC | (STRICT_ORDERING if strict else 0)
        self.library(
            "ncclCommWindowRegister",
            ctypes.c_void_p(self.communicators[-1]),
            ctypes.c_void_p(self.memory.address),
            self._size,
            ctypes.byref(made),
            flags,
        )
        if not made.value:  # NCCL reports success here too
            raise CapabilityError(
                "NCCL gave no window (a success that means: no symmetric memory among these ranks). Within a node all "
                "GPUs need peer access, between nodes every rank needs an RDMA network with GPUDirect. "
                "NCCL_WIN_ENABLE=0 and NCCL_CUMEM_ENABLE=0 switch it off, NCCL_DEBUG=INFO tells the reason"
            )
        self.windows.append(made.value)

    def _pointer(self, peer: int) -> int:
        if peer == self.rank:
            return self.memory.address  # puts take their source by the address that was registered, not by its alias
        pointer = ctypes.c_void_p()
        self.library("ncclGetPeerDevicePointer", ctypes.c_void_p(self.windows[0]), 0, peer, ctypes.byref(pointer))
        if not pointer.value:
            raise CapabilityError(
                f"NCCL gives no address of the memory of the plan's rank {peer}: it is not on this NVLink node, "
                "though the topology says so; pass the topology of the job"
            )
        return pointer.value

    def require_domains(self, nodes: int) -> None:
        """Refuses unless NCCL's NVLink domains (its LSA teams) are the plan's nodes, rank for rank.

        The window has addresses of all ranks of the own node, so each node lies in one team. Teams are disjoint and
        hold all ranks: with as many of them as there are nodes, each is one node and no more.

        Parameters
        ----------
        nodes : int
            Nodes of the plan's topology, which must be real.

        Raises
        ------
        CapabilityError
            If a multicast address would reach other ranks than those of the node.
        """
        teams = self._properties(self.communicators[0]).nLsaTeams
        self.facts["LSA teams"] = teams
        if teams != nodes:
            raise CapabilityError(
                f"NCCL sees {teams} NVLink domain(s) where the plan has {nodes} node(s), and a multicast address "
                "reaches the ranks of a domain. Compile the plan for the domains (Topology(nodes=...)), or without "
                "the switch (PlanOptions: multicast='off', switch_reduce='off')"
            )

    def multicast_address(self) -> int:
        """Address at which a write reaches every rank's memory in the NVLink domain, and a ``multimem`` read sums it.

        Collective, as the first call makes the multicast object; nobody may use the address before all ranks have
        come back. Which ranks it reaches: :meth:`require_domains`.

        Raises
        ------
        CapabilityError
            If the environment forbids multicast (NCCL is not asked then), or NCCL has none.
        """
        require("the window's multicast address")
        pointer = ctypes.c_void_p()
        self.library("ncclGetLsaMultimemDevicePointer", ctypes.c_void_p(self.windows[0]), 0, ctypes.byref(pointer))
        if not pointer.value:
            raise CapabilityError("NCCL gives no multicast address: the ranks' GPUs have no NVSwitch with NVLS")
        return pointer.value

    def abort(self) -> None:
        """Breaks all communicators off; may block as long as a stream waits for a signal that never comes."""
        communicators, self.communicators, self.windows = self.communicators, [], []
        for communicator in communicators:
            self.library("ncclCommAbort", ctypes.c_void_p(communicator))

    def close(self) -> None:
        """Ends window and communicators; nobody may use the peers' addresses any more. Idempotent."""
        for communicator, window in zip(self.communicators, self.windows, strict=False):
            self.library("ncclCommWindowDeregister", ctypes.c_void_p(communicator), ctypes.c_void_p(window))
        self.windows = []
        for communicator in self.communicators:
            self.library("ncclCommDestroy", ctypes.c_void_p(communicator))
        self.communicators = []
