"""A thin binding of the NCCL calls behind symmetric windows, puts and signals (NCCL 2.31 or later).

Which library that is, and how it lives beside torch's: :mod:`tide.nccl_library`.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tide import nccl_library
from tide.errors import CapabilityError, TransportError
from tide.nccl_library import OLDEST, version_text

#: ``NCCL_WIN_COLL_SYMMETRIC`` and ``NCCL_WIN_STRICT_ORDERING``.
SYMMETRIC, STRICT_ORDERING = 1, 2
#: Windows are registered in multiples of this; it is the granularity of the driver's allocations.
GRANULARITY = 2 << 20
#: ``ncclUint8``: counts are bytes.
UINT8 = 1
#: A field of a structure that keeps the library's default.
UNSET = -(2**31)
_MAGIC = 0xCAFEBEEF

_P, _SIZE, _INT, _U32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, passed by value."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.32; an older library reads as much as it knows.

    Parameters
    ----------
    version : int
        Of the library.
    **choices
        Fields by name; the others keep the library's defaults.
    """

    _fields_ = (
        ("size", _SIZE),
        ("magic", _U32),
        ("version", _U32),
        ("blocking", _INT),
        ("cgaClusterSize", _INT),
        ("minCTAs", _INT),
        ("maxCTAs", _INT),
        ("netName", ctypes.c_char_p),
        ("splitShare", _INT),
        ("trafficClass", _INT),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", _INT),
        ("CTAPolicy", _INT),
        ("shrinkShare", _INT),
        ("nvlsCTAs", _INT),
        ("nChannelsPerNetPeer", _INT),
        ("nvlinkCentricSched", _INT),
        ("graphUsageMode", _INT),
        ("numRmaCtx", _INT),
        ("maxP2pPeers", _INT),
        ("graphStreamOrdering", _INT),
        ("launchOrderImplicit", _INT),
        ("numRmaSig", _INT),
        ("rmaEagerInit", _INT),
        ("hostCftMode", _INT),
        ("nvlsHostMode", _INT),
    )

    def __init__(self, version: int, **choices: Any) -> None:
        super().__init__()
        for name, kind in self._fields_[3:]:
            if kind is _INT:
                setattr(self, name, UNSET)
        self.size, self.magic, self.version = ctypes.sizeof(Config), _MAGIC, version
        for name, value in choices.items():
            setattr(self, name, value)


class Properties(ctypes.Structure):
    """``ncclCommProperties_t`` of NCCL 2.32, as far as TIDE reads it, with room for the rest."""

    _fields_ = (
        ("size", _SIZE),
        ("magic", _U32),
        ("version", _U32),
        ("rank", _INT),
        ("nRanks", _INT),
        ("cudaDev", _INT),
        ("nvmlDev", _INT),
        ("deviceApiSupport", ctypes.c_bool),
        ("multimemSupport", ctypes.c_bool),
        ("ginType", _INT),
        ("nLsaTeams", _INT),
        ("hostRmaSupport", ctypes.c_bool),
        ("railedGinType", _INT),
        ("commHash", ctypes.c_uint64),
        ("rest", ctypes.c_char * 88),
    )

    def __init__(self, version: int) -> None:
        super().__init__()
        self.size, self.magic, self.version = ctypes.sizeof(Properties), _MAGIC, version


class SignalsAwaited(ctypes.Structure):
    """``ncclWaitSignalDesc_t``: how many signals of whom on which index and context."""

    _fields_ = (("count", _INT), ("peer", _INT), ("signal", _INT), ("context", _INT))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (_P,),
    "ncclCommInitRankConfig": (_P, _INT, UniqueId, _INT, _P),
    "ncclCommQueryProperties": (_P, _P),
    "ncclCommDestroy": (_P,),
    "ncclCommAbort": (_P,),
    "ncclMemAlloc": (_P, _SIZE),
    "ncclMemFree": (_P,),
    "ncclCommWindowRegister": (_P, _P, _SIZE, _P, _INT),
    "ncclCommWindowDeregister": (_P, _P),
    "ncclGetPeerDevicePointer": (_P, _SIZE, _INT, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # local buffer, count, type, peer, window, offset, signal, context, flags, communicator, stream
    "ncclPutSignal": (_P, _SIZE, _INT, _INT, _P, _SIZE, _INT, _INT, _U32, _P, _P),
    # peer, signal, context, flags, communicator, stream
    "ncclSignal": (_INT, _INT, _INT, _U32, _P, _P),
    # number, descriptors, communicator, stream
    "ncclWaitSignal": (_INT, _P, _P, _P),
}
#: Asked for only where a plan goes through the switch.
_MULTICAST_SIGNATURES: dict[str, tuple[Any, ...]] = {"ncclGetLsaMultimemDevicePointer": (_P, _SIZE, _P)}


class Library:
    """libnccl with the calls above.

    Parameters
    ----------
    library : ctypes.CDLL
        The loaded library.
    origin : str
        Where it came from, for reports.
    """

    def __init__(self, library: ctypes.CDLL, origin: str = "") -> None:
        self._library, self.origin = library, origin
        self.version = nccl_library.version_of(library)
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.restype = ctypes.c_char_p
        for name, arguments in {**_SIGNATURES, **_MULTICAST_SIGNATURES}.items():
            if function := getattr(library, name, None):
                function.argtypes, function.restype = arguments, _INT

    @property
    def version_text(self) -> str:
        """Version as people write it."""
        return version_text(self.version)

    @property
    def has_multicast(self) -> bool:
        """Whether the library knows multicast addresses."""
        return all(hasattr(self._library, name) for name in _MULTICAST_SIGNATURES)

    def function(self, name: str) -> Any:
        """A call that returns NCCL's result code; see :meth:`check`."""
        return getattr(self._library, name)

    def check(self, result: int, name: str) -> None:
        """Raises what a call says went wrong."""
        if result:
            text = self._library.ncclGetErrorString(result) or b"unknown error"
            last = self._library.ncclGetLastError(None) or b""
            raise TransportError(f"{name}: {text.decode()} ({result}) {last.decode()}".rstrip())

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function and raises what it says went wrong."""
        self.check(getattr(self._library, name)(*arguments), name)

    def unique_id(self) -> bytes:
        """Identity of a new communicator."""
        identity = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(identity))
        return ctypes.string_at(ctypes.byref(identity), ctypes.sizeof(identity))

    def missing(self) -> list[str]:
        """Calls that this library does not have."""
        return [name for name in _SIGNATURES if not hasattr(self._library, name)]


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
        _loaded = Library(*nccl_library.load())
    return _loaded


def unusable() -> str | None:
    """Why this process's NCCL cannot give windows and puts; None if it can."""
    try:
        library = load()
    except CapabilityError as error:
        return str(error)
    if library.version < OLDEST:
        return f"NCCL {library.version_text} ({library.origin}) is too old"
    if missing := library.missing():
        return f"NCCL {library.version_text} ({library.origin}) lacks {', '.join(missing)}"
    return None
