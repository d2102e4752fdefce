"""The few driver calls that the transport needs, straight through ctypes.

The prebuilt argument arrays are passed by address, so that issuing a batch of copies costs one call and no
conversions; cuda-python's objects cost about a microsecond per argument.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from tide.errors import CapabilityError, TransportError

_P, _U32, _U64, _INT, _SIZE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t

SUCCESS, NOT_READY = 0, 600

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
WAIT_GEQ = 0
WAIT_FLUSH = 1 << 30
MEM_OP_WAIT_32, MEM_OP_WRITE_32 = 1, 2
#: 64-bit words of one operation of ``cuStreamBatchMemOp``.
MEM_OP_WORDS = 6
#: 64-bit words of ``CUDA_MEMCPY2D``.
COPY_2D_WORDS = 16
MEMORY_UNIFIED = 4

ATTRIBUTE_MAX_PITCH = 11
ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (_P,),
    "cuGetErrorName": (_INT, _P),
    "cuGetErrorString": (_INT, _P),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxGetCurrent": (_P,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxGetStreamPriorityRange": (_P, _P),
    "cuStreamCreateWithPriority": (_P, _U32, _INT),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamQuery": (_P,),
    "cuStreamWaitEvent": (_P, _P, _U32),
    "cuStreamWaitValue32_v2": (_P, _U64, _U32, _U32),
    "cuStreamWriteValue32_v2": (_P, _U64, _U32, _U32),
    "cuStreamBatchMemOp_v2": (_P, _U32, _P, _U32),
    "cuEventCreate": (_P, _U32),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuThreadExchangeStreamCaptureMode": (_P,),
    "cuEventSynchronize": (_P,),
    "cuMemcpyAsync": (_U64, _U64, _SIZE, _P),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _P),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemcpy2DAsync_v2": (_P, _P),
    "cuLaunchKernel": (_P, *[_U32] * 7, _P, _P, _P),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _SIZE, _P),
}


def laid_down(function: Callable[..., int], *arguments: int) -> tuple[Any, ...]:
    """The first arguments of a driver's function, where they never change, as ctypes hands them on.

    It converts ints anew at each call, those of 32 bits and sizes in more time than the call itself takes.
    """
    kinds = getattr(function, "argtypes", None)  # functions of Python's take them as they are
    return arguments if kinds is None else tuple(kind(value) for kind, value in zip(kinds, arguments, strict=False))


class _Location(ctypes.Structure):
    _fields_ = (("type", _INT), ("id", _INT))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", _INT), ("source", _Location), ("destination", _Location), ("flags", _U32))


_CAPTURE_RELAXED = 2

#: Source read in stream order; the copy should rather overlap with kernels than be fast alone.
_STREAM_ORDER, _PREFER_OVERLAP = 1, 1


class Driver:
    """libcuda on one device.

    Parameters
    ----------
    device : int
        Device ordinal.

    Raises
    ------
    CapabilityError
        If there is no driver or it lacks a call.
    """

    def __init__(self, device: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")  # not PyDLL: a full queue blocks, the watchdog must run on
        except OSError as error:
            raise CapabilityError(f"the CUDA transport needs NVIDIA's driver: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise CapabilityError(f"this driver has no {name}; TIDE needs driver 525 or later")
            function.argtypes, function.restype = arguments, _INT
        self.device = device
        context = ctypes.c_void_p()
        self.check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "primary context")
        self._context = context.value
        self._bound = threading.local()
        self.bind_thread()
        self.version = self._integer("cuDriverGetVersion")
        self.max_pitch = self.attribute(ATTRIBUTE_MAX_PITCH)
        flush = self.attribute(ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)
        #: Flags of every wait: data that arrived before the flag word must be visible after it.
        self.wait_flags = WAIT_GEQ | (WAIT_FLUSH if flush else 0)
        self._attributes = _Attributes(_STREAM_ORDER, _Location(), _Location(), _PREFER_OVERLAP)
        self._first = _SIZE(0)
        self.copy_batch: Callable[[int, int, int, int, int], int] | None = self._find_batch()
        self._name_calls()

    def _name_calls(self) -> None:
        """The hot calls, as attributes; each returns the driver's result code."""
        library = self._library
        self.event_record = library.cuEventRecord  # (event, stream)
        self.event_query = library.cuEventQuery  # (event)
        self.stream_wait_event = library.cuStreamWaitEvent  # (stream, event, 0)
        self.wait_value = library.cuStreamWaitValue32_v2  # (stream, address, value, flags)
        self.write_value = library.cuStreamWriteValue32_v2  # (stream, address, value, flags)
        self.memory_operations = library.cuStreamBatchMemOp_v2  # (stream, count, operations, 0)
        self.copy = library.cuMemcpyDtoDAsync_v2  # (destination, source, bytes, stream)
        self.copy_2d = library.cuMemcpy2DAsync_v2  # (descriptor, stream)
        self.upload = library.cuMemcpyHtoDAsync_v2  # (destination, host source, bytes, stream)
        self.download = library.cuMemcpyDtoHAsync_v2  # (host destination, source, bytes, stream)
        self.launch = library.cuLaunchKernel  # (function, grid x 3, block x 3, shared bytes, stream, arguments, None)
        self.fill = library.cuMemsetD8Async  # (destination, byte, bytes, stream)

    def _find_batch(self) -> Callable[[int, int, int, int, int], int] | None:
        """``copy_batch(destinations, sources, sizes, count, stream)``; None before driver 570 (CUDA 12.8)."""
        attributes, first = _P(ctypes.addressof(self._attributes)), _P(ctypes.addressof(self._first))
        one = _SIZE(1)
        newest = getattr(self._library, "cuMemcpyBatchAsync_v2", None)
        if newest is not None:  # CUDA 13 dropped the index of the copy that failed
            newest.argtypes, newest.restype = (_P, _P, _P, _SIZE, _P, _P, _SIZE, _P), _INT

            def batch(destinations: int, sources: int, sizes: int, count: int, stream: int) -> int:
                result: int = newest(destinations, sources, sizes, count, attributes, first, one, stream)
                return result

            return batch
        older = getattr(self._library, "cuMemcpyBatchAsync", None)
        if older is None:
            return None
        older.argtypes, older.restype = (_P, _P, _P, _SIZE, _P, _P, _SIZE, _P, _P), _INT
        failed = ctypes.byref(_SIZE())

        def batch_with_index(destinations: int, sources: int, sizes: int, count: int, stream: int) -> int:
            result: int = older(destinations, sources, sizes, count, attributes, first, one, failed, stream)
            return result

        return batch_with_index

    def current_stream(self) -> int:
        """Handle of torch's current stream in this thread."""
        return int(torch._C._cuda_getCurrentRawStream(self.device))

    def range_push(self, name: str) -> None:
        """Opens an NVTX range."""
        torch.cuda.nvtx.range_push(name)

    def range_pop(self) -> None:
        """Closes the innermost NVTX range."""
        torch.cuda.nvtx.range_pop()

    # Rare calls --------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        """Makes the device's context current in this thread; autograd and the watchdog have their own."""
        if not getattr(self._bound, "done", False):
            self.check(self._library.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
            self._bound.done = True

    def check(self, result: int, what: str) -> None:
        """Raises TransportError unless the call succeeded."""
        if result != SUCCESS:
            raise TransportError(f"{what}: {self.error(result)}")

    def error(self, result: int) -> str:
        """The driver's name and text of a result code."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(name))
        self._library.cuGetErrorString(result, ctypes.byref(text))
        return f"{(name.value or b'error').decode()} ({result}): {(text.value or b'unknown').decode()}"

    def allow_captures(self) -> None:
        """Lets this thread's queries go on while another thread captures a graph, and not spoil it."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self.check(self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "capture mode")

    def attribute(self, number: int) -> int:
        """A device attribute."""
        return self._integer("cuDeviceGetAttribute", number, self.device)

    def _integer(self, name: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self.check(getattr(self._library, name)(ctypes.byref(value), *arguments), name)
        return value.value

    def new_stream(self) -> int:
        """A stream of the highest priority that does not wait for the legacy default stream."""
        lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.check(
            self._library.cuCtxGetStreamPriorityRange(ctypes.byref(lowest), ctypes.byref(highest)),
            "stream priorities",
        )
        self.check(
            self._library.cuStreamCreateWithPriority(ctypes.byref(stream), STREAM_NON_BLOCKING, highest.value),
            "new stream",
        )
        assert stream.value is not None
        return stream.value

    def new_event(self) -> int:
        """An event without timing."""
        event = ctypes.c_void_p()
        self.check(self._library.cuEventCreate(ctypes.byref(event), EVENT_DISABLE_TIMING), "new event")
        assert event.value is not None
        return event.value

    def done(self, event: int) -> bool:
        """Whether all that an event was recorded after has finished (True for one never recorded)."""
        result = self.event_query(event)
        if result not in (SUCCESS, NOT_READY):
            self.check(result, "event query")
        return bool(result == SUCCESS)

    def synchronize_event(self, event: int) -> None:
        """Blocks the host until an event has passed."""
        self.check(self._library.cuEventSynchronize(event), "event")

    def free_stream(self, stream: int) -> None:
        """Destroys a stream."""
        self._library.cuStreamDestroy_v2(stream)

    def free_event(self, event: int) -> None:
        """Destroys an event."""
        self._library.cuEventDestroy_v2(event)

    def close(self) -> None:
        """Gives the context back."""
        if self._context is not None:
            self._library.cuDevicePrimaryCtxRelease_v2(self.device)
            self._context = None
