"""Which NCCL this process uses for windows and puts, and how it is loaded beside torch's.

torch pins an NCCL of its own, older than what puts need. A newer one is loaded apart from it: with symbols that
nobody else sees, and its own before everybody's. Neither then notices the other, in whatever order they come, and
nothing has to be exported or preloaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from tide.errors import CapabilityError, InputError

#: Oldest version whose windows, puts and signals TIDE relies on.
OLDEST = 23100
#: Environment variable with a libnccl.so.2, or with a folder that has one (``pip install --target``).
PATH_VARIABLE = "TIDE_NCCL_LIBRARY"
#: Name of the library, and where the wheels have it below their folder.
NAME = "libnccl.so.2"
PLACES = ("", "lib", "nvidia/nccl/lib")
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

#: Apart from what is loaded already: its symbols are nobody's, and its own calls meet its own.
APART = os.RTLD_LOCAL | os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0)


def version_text(version: int) -> str:
    """A version number as people write it: 23203 is 2.32.3."""
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def remedy(cuda_major: int | None = None) -> str:
    """How to get an NCCL that can put, in one sentence."""
    wheel = f"nvidia-nccl-cu{cuda_major}" if cuda_major in (12, 13) else "nvidia-nccl-cu13 (cu12 for CUDA 12)"
    return (
        f"puts need NCCL {version_text(OLDEST)[:-2]} or later: pip install --no-deps --target DIR --upgrade {wheel}, "
        f"then {PATH_VARIABLE}=DIR or tide.use_nccl(DIR); TIDE loads it beside torch's own, nothing has to be "
        "preloaded"
    )


def library_in(path: str | os.PathLike[str]) -> Path:
    """The library that a path names: the file itself, or the one in a folder.

    Raises
    ------
    InputError
        If there is none.
    """
    start = Path(path).expanduser()
    if start.is_file():
        return start
    for place in PLACES:
        if (found := start / place / NAME).is_file():
            return found
    raise InputError(f"no {NAME} at {start}: name the file, or the folder it was installed to")


def version_of(library: ctypes.CDLL) -> int:
    """Version number of a loaded library."""
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value


def _named() -> ctypes.CDLL | None:
    """The one that the environment names."""
    path = os.environ.get(PATH_VARIABLE)
    return ctypes.CDLL(str(library_in(path).resolve()), mode=APART) if path else None


def _present() -> ctypes.CDLL | None:
    """The one that is in the process already: torch's, or one that was preloaded."""
    try:
        return ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _installed() -> ctypes.CDLL | None:
    """That of an installed wheel, if it is new enough (then torch's own is older than the wheel: upgraded)."""
    for wheel in WHEELS:
        try:
            found = metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
        parts = tuple(int(part) for part in found.version.split(".")[:3] if part.isdigit())
        path = Path(str(found.locate_file("nvidia/nccl/lib"))) / NAME
        if parts >= (2, OLDEST // 100 % 100) and path.is_file():
            return ctypes.CDLL(str(path.resolve()), mode=APART)
    return None


#: Where the library came from, in words, beside how to look there.
SOURCES: tuple[tuple[str, Callable[[], ctypes.CDLL | None]], ...] = (
    (PATH_VARIABLE, _named),
    ("loaded before", _present),
    ("installed wheel, loaded apart from torch's", _installed),
)

_chosen: tuple[ctypes.CDLL, str] | None = None


def _found() -> Iterator[tuple[ctypes.CDLL, str]]:
    for origin, look in SOURCES:
        if (library := look()) is not None:
            yield library, origin


def load() -> tuple[ctypes.CDLL, str]:
    """The process's NCCL for windows and puts, and where it came from.

    The one that ``TIDE_NCCL_LIBRARY`` or :func:`use_nccl` names; else the first that is new enough of the one loaded
    already and the installed wheel's; else the one loaded already, whatever its version.

    Raises
    ------
    CapabilityError
        If there is none, or the named one cannot be loaded.
    """
    global _chosen
    if _chosen is None:
        oldest: tuple[ctypes.CDLL, str] | None = None
        try:
            for library, origin in _found():
                oldest = oldest or (library, origin)
                if origin == PATH_VARIABLE or version_of(library) >= OLDEST:
                    oldest = library, origin
                    break
        except (OSError, InputError) as error:
            raise CapabilityError(f"NCCL cannot be loaded: {error}") from error
        if oldest is None:
            raise CapabilityError("no NCCL in this process")
        _chosen = oldest
    return _chosen


def use_nccl(path: str | os.PathLike[str], *, torch_too: bool = False) -> str:
    """Chooses the NCCL for TIDE's windows and puts; call it on every rank, before a plan is opened.

    Parameters
    ----------
    path : str or path
        A ``libnccl.so.2``, or the folder that ``pip install --target`` put it in.
    torch_too : bool
        Run torch's own collectives on it as well; then call this before ``import torch``. By default torch keeps the
        NCCL that it came with.

    Returns
    -------
    str
        Its version.

    Raises
    ------
    InputError
        If there is no such file, another NCCL is in use by TIDE, or ``torch_too`` comes too late.
    CapabilityError
        If it cannot be loaded, or is older than what puts need.
    """
    global _chosen
    file = library_in(path).resolve()
    if torch_too and "torch" in sys.modules:
        raise InputError("use_nccl(torch_too=True) comes too late: call it before the first `import torch`")
    try:
        library = ctypes.CDLL(str(file), mode=os.RTLD_GLOBAL | os.RTLD_NOW if torch_too else APART)
    except OSError as error:
        raise CapabilityError(f"{file} cannot be loaded: {error}") from error
    if (version := version_of(library)) < OLDEST:
        raise CapabilityError(f"{file} is NCCL {version_text(version)}; {remedy()}")
    if _chosen is not None and _chosen[0]._handle != library._handle:
        raise InputError(f"TIDE uses another NCCL already ({_chosen[1]}); call use_nccl before plans are opened")
    _chosen = library, "tide.use_nccl, with torch" if torch_too else "tide.use_nccl, apart from torch's"
    return version_text(version)
