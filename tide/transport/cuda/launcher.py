"""Launching a compiled kernel straight through the driver.

Triton's own launch parses its arguments anew each time, about ten microseconds. Ours never change between two
bindings, so they are laid down once and passed by address. How the kernel takes its arguments is read from its
PTX; where that is not the plain case, Triton's launch is used.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

from tide.transport.cuda.driver import laid_down

_SIZES = {"u64": 8, "b64": 8, "f32": 4, "u32": 4, "b32": 4}


def parameters_of(ptx: str) -> list[int] | None:
    """Bytes of each kernel parameter, or None if the text is not understood."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        return None
    sizes = []
    for parameter in filter(None, (part.strip() for part in entry[1].split(","))):
        found = re.match(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", parameter)
        if found is None or found[1] not in _SIZES or "[" in parameter:
            return None
        sizes.append(_SIZES[found[1]])
    return sizes


def plain_launch(
    compiled: Any, address: int, scalars: Sequence[float], programs: int, launch: Callable[..., int], scratch: int = 0
) -> Callable[[int], int] | None:
    """A function of the stream that launches the kernel; None where only Triton knows how.

    Parameters
    ----------
    compiled : triton.compiler.CompiledKernel
        Loaded: its function is known.
    address : int
        The first argument, a pointer.
    scalars : sequence of float
        The others, float32.
    programs : int
        Size of the grid.
    launch : callable
        ``cuLaunchKernel``.
    scratch : int
        Address of the scratch memory of a kernel that needs some.
    """
    metadata = compiled.metadata
    plain = (
        getattr(metadata, "num_ctas", 1) == 1
        and not getattr(metadata, "launch_cooperative_grid", False)
        and not getattr(metadata, "launch_pdl", False)
        and (scratch != 0 or not getattr(metadata, "global_scratch_size", 0))
        and not getattr(metadata, "profile_scratch_size", 0)
        and isinstance(compiled.function, int)
    )
    sizes = parameters_of(compiled.asm["ptx"]) if plain else None
    own = [8] + [4] * len(scalars)
    # What follows are Triton's pointers to scratch memory, for the kernel and for profiling; null if not needed.
    if sizes is None or sizes[: len(own)] != own or any(size != 8 for size in sizes[len(own) :]):
        return None
    if scratch and len(sizes) == len(own):
        return None
    values: list[Any] = [ctypes.c_uint64(address), *map(ctypes.c_float, scalars)]
    values += [ctypes.c_uint64(address) for address in (scratch, 0, 0)[: len(sizes) - len(own)]]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    fixed = laid_down(launch, compiled.function, programs, 1, 1, metadata.num_warps * 32, 1, 1, metadata.shared)

    def start(stream: int, keep: Any = values) -> int:
        return launch(*fixed, stream, pointers, None)

    return start
