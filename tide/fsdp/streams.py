"""Streams as FSDP2 handles them, without torch's detours on CUDA.

``torch.cuda.stream`` and ``torch.cuda.current_stream`` ask anew which device is current, whether there is CUDA at
all, and make stream objects: several microseconds each, in calls that an all-gather and a reduction make each time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class _Current:
    """Context in which a CUDA stream of the current device is the current one."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _set(*self._before)


def _set(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def _at_hand(handle: Any, stream: Any) -> bool:
    """Whether a stream is one of the current CUDA device."""
    return handle is torch.cuda and torch._C._cuda_getDevice() == stream.device_index


def on(handle: Any, stream: Any) -> AbstractContextManager[Any]:
    """Context in which a stream is the current one.

    Parameters
    ----------
    handle : module
        FSDP2's device handle, such as ``torch.cuda``.
    stream : Stream
        Of that kind of device.
    """
    if _at_hand(handle, stream):
        return _Current(stream)
    context: AbstractContextManager[Any] = handle.stream(stream)
    return context


def current(handle: Any, likely: Any) -> Any:
    """The current stream.

    Parameters
    ----------
    handle : module
        FSDP2's device handle.
    likely : Stream
        The one that it most likely is; it is returned where it is.
    """
    if _at_hand(handle, likely):
        known = likely.stream_id, likely.device_index, likely.device_type
        if torch._C._cuda_getCurrentStream(likely.device_index) == known:
            return likely
    return handle.current_stream()
