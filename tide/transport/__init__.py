"""Transports: what carries a program out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tide.errors import InputError

if TYPE_CHECKING:
    from tide.compiler.compile import Compiled
    from tide.transport.base import Transport

TRANSPORTS = ("host", "cuda")


def open_transport(name: str, compiled: Compiled, rank: int | None = None, **settings: Any) -> Transport:
    """Opens a transport by name. Collective over all ranks of the plan.

    Parameters
    ----------
    name : str
        ``"host"`` or ``"cuda"``.
    compiled : Compiled
        The plan.
    rank : int, optional
        This rank; the process group's by default.
    **settings
        Passed on to the transport.
    """
    if name == "host":
        from tide.transport.host import HostTransport

        return HostTransport.open(compiled, rank, **settings)
    if name == "cuda":
        from tide.transport.cuda import CudaTransport

        return CudaTransport.open(compiled, rank, **settings)
    raise InputError(f"no transport {name!r}; there are {', '.join(TRANSPORTS)}")
