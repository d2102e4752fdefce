"""A communicator with a window, for all-gathers by copy engine or for symmetric reduce-scatters."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from tide.transport.cuda import nccl
from tide.transport.cuda.arena import tensor_at

UNSET = -(2**31)
#: CTA policies: NCCL's own choice, and copy engines where they can do it.
DEFAULT, ZERO_CTA = 0, 2
SYMMETRIC = 1
NCCL_AVG = 4
DTYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.31 and 2.32; unset numbers keep the library's defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("numbers", ctypes.c_int * 4),  # blocking, cgaClusterSize, minCTAs, maxCTAs
        ("net_name", ctypes.c_char_p),
        ("more", ctypes.c_int * 2),  # splitShare, trafficClass
        ("comm_name", ctypes.c_char_p),
        ("collnet", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("rest", ctypes.c_int * 13),
    )


class Communicator:
    """All ranks of the job, with one window for all buffers.

    Parameters
    ----------
    nbytes : int
        Bytes of the window, the same on every rank.
    policy : int
        CTA policy.
    ctas : int, optional
        CTAs of its kernels; by default as many as NCCL takes.
    """

    def __init__(self, nbytes: int, policy: int, ctas: int | None = None) -> None:
        if reason := nccl.unusable():
            raise RuntimeError(f"symmetric-memory baseline: {reason}")
        self.library = nccl.load()
        raw: Any = self.library._library
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        raw.ncclCommInitRankConfig.argtypes = (pointer, number, nccl.UniqueId, number, pointer)
        raw.ncclAllGather.argtypes = (pointer, pointer, size, number, pointer, pointer)
        raw.ncclReduceScatter.argtypes = (pointer, pointer, size, number, number, pointer, pointer)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, self.library.version)
        for field in ("numbers", "more", "rest"):
            values = getattr(config, field)
            for index in range(len(values)):
                values[index] = UNSET
        config.collnet, config.cta_policy = UNSET, policy
        config.numbers[0] = 1  # blocking
        if ctas is not None:
            config.numbers[2] = config.numbers[3] = ctas
        identity = [self.library.unique_id() if dist.get_rank() == 0 else b""]
        dist.broadcast_object_list(identity, 0)
        self.comm, self.window, memory = pointer(), pointer(), pointer()
        unique = nccl.UniqueId.from_buffer_copy(identity[0])
        self.library(
            "ncclCommInitRankConfig",
            ctypes.byref(self.comm),
            dist.get_world_size(),
            unique,
            dist.get_rank(),
            ctypes.byref(config),
        )
        self.library("ncclMemAlloc", ctypes.byref(memory), nbytes)
        self.address = memory.value
        self.library("ncclCommWindowRegister", self.comm, self.address, nbytes, ctypes.byref(self.window), SYMMETRIC)
        if not self.window.value:
            raise RuntimeError("symmetric-memory baseline: NCCL gave no window")

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in the window."""
        device = torch.device("cuda", torch.cuda.current_device())
        return tensor_at(self.address + offset, numel, dtype, device, self)

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """In place or not, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        kind = DTYPES[source.dtype]
        self.library("ncclAllGather", source.data_ptr(), target.data_ptr(), source.numel(), kind, self.comm, stream)

    def reduce_scatter_mean(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Mean over the ranks, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        kind = DTYPES[source.dtype]
        self.library(
            "ncclReduceScatter",
            source.data_ptr(),
            target.data_ptr(),
            target.numel(),
            kind,
            NCCL_AVG,
            self.comm,
            stream,
        )

    def close(self) -> None:
        """Ends window and communicator."""
        torch.cuda.synchronize()
        dist.barrier()
        self.library("ncclCommWindowDeregister", self.comm, self.window)
        self.library("ncclCommDestroy", self.comm)
        self.library("ncclMemFree", self.address)
