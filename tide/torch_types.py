"""Element types of the compiler, by name, and those of torch."""

from __future__ import annotations

import torch

from tide.compiler.dtypes import itemsize


def to_torch(dtype: str) -> torch.dtype:
    """torch's type called ``dtype``."""
    itemsize(dtype)
    found: torch.dtype = getattr(torch, dtype)
    return found


def from_torch(dtype: torch.dtype) -> str:
    """Name of a torch type, without the module."""
    return str(dtype).removeprefix("torch.")
