"""A thin binding of the NCCL calls that a symmetric window needs (NCCL 2.31 or later).

Only a library that is in the process already is used, or the one that ``TIDE_NCCL`` names: a second NCCL loaded
beside torch's own would bind to its symbols. To run torch itself on a newer NCCL, put it into ``LD_PRELOAD``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from tide.errors import CapabilityError, TransportError
from tide.multicast import require

#: Oldest version whose windows and peer pointers TIDE relies on.
OLDEST = 23100
#: Environment variable with the path of a libnccl.so.2 to load apart from torch's.
PATH_VARIABLE = "TIDE_NCCL"
#: ``NCCL_WIN_COLL_SYMMETRIC``
SYMMETRIC = 1
#: Windows are registered in multiples of this; it is the granularity of the driver's allocations.
GRANULARITY = 2 << 20

_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (_P,),
    "ncclCommInitRank": (_P, _INT, UniqueId, _INT),
    "ncclCommDestroy": (_P,),
    "ncclMemAlloc": (_P, _SIZE),
    "ncclMemFree": (_P,),
    "ncclCommWindowRegister": (_P, _P, _SIZE, _P, _INT),
    "ncclCommWindowDeregister": (_P, _P),
    "ncclGetPeerDevicePointer": (_P, _SIZE, _INT, _P),
}
#: Asked for only where a plan goes through the switch.
_MULTICAST_SIGNATURES: dict[str, tuple[Any, ...]] = {"ncclGetLsaMultimemDevicePointer": (_P, _SIZE, _P)}


class Library:
    """libnccl with the calls above.

    Parameters
    ----------
    library : ctypes.CDLL
        The loaded library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        self.version = number.value
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p
        for name, arguments in {**_SIGNATURES, **_MULTICAST_SIGNATURES}.items():
            if function := getattr(library, name, None):
                function.argtypes, function.restype = arguments, _INT

    @property
    def version_text(self) -> str:
        """Version as people write it."""
        major, rest = divmod(self.version, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"

    @property
    def has_multicast(self) -> bool:
        """Whether the library knows multicast addresses."""
        return all(hasattr(self._library, name) for name in _MULTICAST_SIGNATURES)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function and raises what it says went wrong."""
        if result := getattr(self._library, name)(*arguments):
            text = self._library.ncclGetErrorString(result) or b"unknown error"
            last = self._library.ncclGetLastError(None) or b""
            raise TransportError(f"{name}: {text.decode()} ({result}) {last.decode()}".rstrip())

    def unique_id(self) -> bytes:
        """Identity of a new communicator."""
        identity = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(identity))
        return ctypes.string_at(ctypes.byref(identity), ctypes.sizeof(identity))


_loaded: Library | None = None


def load() -> Library:
    """The process's NCCL.

    Raises
    ------
    CapabilityError
        If there is none.
    """
    global _loaded
    if _loaded is None:
        path = os.environ.get(PATH_VARIABLE)
        try:
            if path:
                # Apart from torch's: neither sees the other's symbols.
                mode = os.RTLD_LOCAL | os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0)
                _loaded = Library(ctypes.CDLL(path, mode=mode))
            else:
                _loaded = Library(ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError as error:
            raise CapabilityError(f"no NCCL in this process ({error}); {PATH_VARIABLE} may name one") from error
    return _loaded


def unusable() -> str | None:
    """Why this process's NCCL cannot give an arena; None if it can."""
    try:
        library = load()
    except CapabilityError as error:
        return str(error)
    if library.version < OLDEST:
        return f"NCCL {library.version_text} is loaded, 2.31 or later is needed ({PATH_VARIABLE} may name one)"
    missing = [name for name in _SIGNATURES if not hasattr(library._library, name)]
    return f"NCCL {library.version_text} lacks {', '.join(missing)}" if missing else None


class _Allocation:
    """Memory of ``ncclMemAlloc``, freed with the last reference."""

    def __init__(self, library: Library, size: int) -> None:
        pointer = ctypes.c_void_p()
        library("ncclMemAlloc", ctypes.byref(pointer), size)
        assert pointer.value is not None
        self.address: int = pointer.value
        free = library._library.ncclMemFree
        self._finalizer = weakref.finalize(self, free, ctypes.c_void_p(self.address))
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
    identity : bytes
        Identity of the communicator, from one of the ranks.

    Attributes
    ----------
    memory : object
        Keeps the allocation alive.
    addresses : dict of int to int
        Address of every rank's memory.

    Raises
    ------
    CapabilityError
        If NCCL finds that these ranks cannot have one.
    """

    def __init__(self, library: Library, size: int, rank: int, ranks: int, identity: bytes) -> None:
        self._library = library
        size = -(-size // GRANULARITY) * GRANULARITY
        self._communicator, self._window = ctypes.c_void_p(), ctypes.c_void_p()
        library(
            "ncclCommInitRank",
            ctypes.byref(self._communicator),
            ranks,
            UniqueId.from_buffer_copy(identity),
            rank,
        )
        try:
            self.memory = _Allocation(library, size)
            library(
                "ncclCommWindowRegister",
                self._communicator,
                self.memory.address,
                size,
                ctypes.byref(self._window),
                SYMMETRIC,
            )
            if not self._window.value:  # NCCL reports success here too
                raise CapabilityError(
                    "NCCL gave no window: these ranks have no symmetric memory (peer access between all GPUs of "
                    "the node is needed; NCCL_WIN_ENABLE=0 and NCCL_CUMEM_ENABLE=0 switch it off)"
                )
            self.addresses = {peer: self._pointer(peer) for peer in range(ranks)}
        except BaseException:
            self.close()
            raise

    def _pointer(self, peer: int) -> int:
        pointer = ctypes.c_void_p()
        self._library("ncclGetPeerDevicePointer", self._window, 0, peer, ctypes.byref(pointer))
        if not pointer.value:
            raise CapabilityError(f"NCCL gives no address of rank {peer}'s memory: it is not on this NVLink node")
        return pointer.value

    def multicast_address(self) -> int:
        """Address at which a write reaches every rank's memory, and a ``multimem`` read sums it.

        Collective, as the first call makes the multicast object; nobody may use the address before all ranks have
        come back.

        Raises
        ------
        CapabilityError
            If the environment forbids multicast (NCCL is not asked then), or NCCL has none.
        """
        require("the window's multicast address")
        pointer = ctypes.c_void_p()
        self._library("ncclGetLsaMultimemDevicePointer", self._window, 0, ctypes.byref(pointer))
        if not pointer.value:
            raise CapabilityError("NCCL gives no multicast address: the ranks' GPUs have no NVSwitch with NVLS")
        return pointer.value

    def close(self) -> None:
        """Ends window and communicator; nobody may use the peers' addresses any more. Idempotent."""
        if self._window.value:
            self._library("ncclCommWindowDeregister", self._communicator, self._window)
            self._window = ctypes.c_void_p()
        if self._communicator.value:
            self._library("ncclCommDestroy", self._communicator)
            self._communicator = ctypes.c_void_p()
