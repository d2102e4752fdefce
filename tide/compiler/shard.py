"""Where each rank's shard lies inside a parameter: the addressing math of ``Shard(dim)``.

A parameter of shape ``(d0, …)`` sharded along dim ``k`` over ``W`` owners, with
``outer = d0·…·d(k-1)`` and ``inner = d(k+1)·…``::

    storage, row-major          owner 0        owner 1        owner 2
                              rows·inner     rows·inner     rows·inner
    run 0            ▐██████████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░▌   ← pitch = d_k · inner
    run 1            ▐██████████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░▌
      ⋮ outer runs

Each owner holds ``ceil(d_k / W)`` rows of dim ``k``; the last ones hold fewer, or none. Its shard is
the dense tensor ``(outer, rows, inner)``, so the shard's own pitch is ``rows · inner`` and padding is
neither stored nor moved. For ``k = 0`` there is one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tide.compiler.model import Parameter

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class ShardTable:
    """Shards of one parameter for every owner; all figures in elements.

    Attributes
    ----------
    outer : int
        Runs of each non-empty shard.
    inner : int
        Elements of one row of the sharded dim.
    pitch : int
        Elements from one run to the next in storage.
    start, rows : ndarray of int64, shape (W,)
        First row and number of rows of each owner along the sharded dim.
    """

    outer: int
    inner: int
    pitch: int
    start: Int64
    rows: Int64

    @property
    def run(self) -> Int64:
        """Elements of one run, per owner."""
        return self.rows * self.inner

    @property
    def numel(self) -> Int64:
        """Elements of the shard, per owner."""
        return self.outer * self.rows * self.inner

    @property
    def offset(self) -> Int64:
        """Storage offset of the first run, per owner."""
        return self.start * self.inner


@lru_cache(maxsize=65536)
def _table(shape: tuple[int, ...], dim: int, owners: int) -> ShardTable:
    extent = shape[dim]
    chunk = -(-extent // owners)
    start = np.minimum(np.arange(owners, dtype=np.int64) * chunk, extent)
    stop = np.minimum(start + chunk, extent)
    inner = math.prod(shape[dim + 1 :])
    table = ShardTable(math.prod(shape[:dim]), inner, extent * inner, start, stop - start)
    table.start.setflags(write=False)
    table.rows.setflags(write=False)
    return table


def shard(parameter: Parameter, owners: int) -> ShardTable:
    """Table of the shards of ``parameter`` over ``owners`` ranks (FSDP2's chunking, any dim, uneven too)."""
    return _table(parameter.shape, parameter.dim, owners)


def shard_shape(parameter: Parameter, owners: int, position: int) -> tuple[int, ...]:
    """Shape of the shard that ``position`` holds."""
    rows = int(shard(parameter, owners).rows[position])
    return (*parameter.shape[: parameter.dim], rows, *parameter.shape[parameter.dim + 1 :])


def padded_numel(parameter: Parameter, owners: int) -> int:
    """Elements that stock FSDP2 would hold for it: every shard padded to ``ceil(d_k / W)`` rows."""
    extent = parameter.shape[parameter.dim]
    rest = math.prod(parameter.shape[: parameter.dim]) * math.prod(parameter.shape[parameter.dim + 1 :])
    return -(-extent // owners) * owners * rest
