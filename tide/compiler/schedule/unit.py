"""One unit, ready to be scheduled, and the coalescing of its shards into few transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import ReceiveLayout, UnitLayout
from tide.compiler.shard import Int64, ShardTable, shard
from tide.compiler.steps import Buffer, Cast, Region, Transfer
from tide.topology import Links, Team


@dataclass(frozen=True, eq=False, slots=True)
class UnitContext:
    """What a schedule needs to know of a unit.

    Attributes
    ----------
    unit : Unit
        Its parameters.
    layout : UnitLayout
        Its storage.
    team : Team
        The positions that shard it.
    receive : ReceiveLayout
        Areas of the reduce-scatter.
    options : PlanOptions
        Limits and depths.
    links : Links
        Rates by which routes are chosen.
    fills_nodes : bool
        Whether every node of the team has all ranks of a node of the topology: what a multicast reaches.
    slot_bytes : int
        Bytes of the unit's vacated slot that its reduce-scatter may use; 0 if it may not.
    by_switch : bool
        Whether partial sums of other nodes are spread over the node's ranks and summed in the switch.
    memo : dict
        What programs of several positions share; made once, so that all positions of a team cost little more
        than one.
    """

    unit: Unit
    layout: UnitLayout
    team: Team
    receive: ReceiveLayout
    options: PlanOptions
    links: Links
    fills_nodes: bool
    slot_bytes: int = 0
    by_switch: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def table(self, index: int) -> ShardTable:
        """Shards of parameter ``index``."""
        return shard(self.unit.parameters[index], self.team.size)


def coalesce(first: Int64, second: Int64, lengths: Int64) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Merges runs into as few equally spaced groups as a greedy pass finds.

    Parameters
    ----------
    first, second : ndarray of int64, shape (n,)
        Start of each run on either side, in ascending order of ``second``.
    lengths : ndarray of int64, shape (n,)
        Length of each run; zero-length runs are dropped.

    Yields
    ------
    tuple
        ``(first, second, runs, length, first pitch, second pitch)``.
    """
    keep = lengths > 0
    first, second, lengths = first[keep], second[keep], lengths[keep]
    if not len(lengths):
        return
    # Runs that touch on both sides are one run.
    touching = (first[:-1] + lengths[:-1] == first[1:]) & (second[:-1] + lengths[:-1] == second[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~touching)))
    lengths = np.add.reduceat(lengths, heads)
    first, second = first[heads], second[heads]
    n, i = len(lengths), 0
    step_first, step_second = np.diff(first), np.diff(second)
    while i < n:
        j = i + 1
        if j < n and lengths[j] == lengths[i]:
            pitch_first, pitch_second = step_first[i], step_second[i]
            fits = (lengths[j:] == lengths[i]) & (step_first[i:] == pitch_first) & (step_second[i:] == pitch_second)
            stop = np.flatnonzero(~fits)
            runs = 1 + (int(stop[0]) if len(stop) else len(fits))
        else:
            runs = 1
        if runs == 1:
            yield int(first[i]), int(second[i]), 1, int(lengths[i]), 0, 0
        else:
            yield (
                int(first[i]),
                int(second[i]),
                runs,
                int(lengths[i]),
                int(step_first[i]),
                int(step_second[i]),
            )
        i += runs


def storage_transfers(context: UnitContext, owners: Sequence[int]) -> tuple[Transfer, ...]:
    """Transfers that carry the shards of ``owners`` from storage to the same place in storage.

    Bundled parameters go as their owners' bundle segments.
    """
    key = ("storage", tuple(owners))
    if key in context.memo:
        found: tuple[Transfer, ...] = context.memo[key]
        return found
    chosen = np.asarray(sorted(owners), dtype=np.int64)
    transfers: list[Transfer] = []

    def add(offset: int, runs: int, length: int, pitch: int) -> None:
        region = Region(Buffer.STORAGE, 0, offset, pitch)
        transfers.append(Transfer(region, region, runs, length))

    for index, parameter in enumerate(context.unit.parameters):
        if context.layout.bundled(index):
            continue
        table, size, base = context.table(index), itemsize(parameter.dtype), context.layout.offsets[index]
        starts, lengths = base + table.offset[chosen] * size, table.run[chosen] * size
        if table.outer == 1:
            for start, _, runs, length, pitch, _ in coalesce(starts, starts, lengths):
                add(start, runs, length, pitch)
        elif table.outer > 1:
            for start, _, runs, length, pitch, _ in coalesce(starts, starts, lengths):
                for run in range(runs):  # neighbours have merged; the rest are strided runs already
                    add(start + run * pitch, table.outer, length, table.pitch * size)
    if (bundle := context.layout.bundle) is not None:
        starts = bundle.offset + bundle.base[chosen]
        for start, _, runs, length, pitch, _ in coalesce(starts, starts, bundle.length[chosen]):
            add(start, runs, length, pitch)
    context.memo[key] = found = tuple(transfers)
    return found


def own_casts(context: UnitContext, position: int) -> tuple[Cast, ...]:
    """Casts of a rank's shards into its runs of storage, and into its bundle segment."""
    casts = []
    for index, parameter in enumerate(context.unit.parameters):
        table = context.table(index)
        count = int(table.run[position])
        if count * table.outer == 0:
            continue
        size = itemsize(parameter.dtype)
        src = Region(Buffer.SHARD, index, 0, count * itemsize(parameter.shard_dtype) if table.outer > 1 else 0)
        offset = context.layout.offsets[index] + int(table.offset[position]) * size
        dst = Region(Buffer.STORAGE, 0, offset, table.pitch * size if table.outer > 1 else 0)
        casts.append(Cast(src, dst, table.outer, count, parameter.shard_dtype, parameter.dtype))
        if context.layout.bundled(index):
            bundle = context.layout.bundle
            assert bundle is not None
            row = bundle.members.index(index)
            start = bundle.offset + int(bundle.base[position] + bundle.at[row, position])
            dst = Region(Buffer.STORAGE, 0, start, count * size if table.outer > 1 else 0)
            casts.append(Cast(src, dst, table.outer, count, parameter.shard_dtype, parameter.dtype))
    return tuple(casts)


def bundle_casts(context: UnitContext, position: int) -> tuple[Cast, ...]:
    """Casts that scatter all other owners' bundle segments into storage."""
    bundle = context.layout.bundle
    if bundle is None:
        return ()
    casts = []
    owners = np.delete(np.arange(context.team.size), position)
    for row, index in enumerate(bundle.members):
        parameter, table = context.unit.parameters[index], context.table(index)
        size, dtype = itemsize(parameter.dtype), parameter.dtype
        src = bundle.offset + bundle.base[owners] + bundle.at[row, owners]
        dst = context.layout.offsets[index] + table.offset[owners] * size
        lengths = table.run[owners] * size

        def add(
            src: int,
            dst: int,
            runs: int,
            length: int,
            src_pitch: int,
            dst_pitch: int,
            dtype: str = dtype,
            size: int = size,
        ) -> None:
            regions = Region(Buffer.STORAGE, 0, src, src_pitch), Region(Buffer.STORAGE, 0, dst, dst_pitch)
            casts.append(Cast(*regions, runs, length // size, dtype, dtype))

        if table.outer == 1:
            for group in coalesce(src, dst, lengths):
                add(*group)
        else:
            for s, d, length in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
                if length:
                    add(s, d, table.outer, length, length, table.pitch * size)
    return tuple(casts)


#: Cuts inside a run fall on multiples of this many bytes, so that both parts stay aligned.
SPLIT_ALIGNMENT = 512


def batches(transfers: Iterable[Transfer], limit: int) -> list[tuple[Transfer, ...]]:
    """Cuts transfers into batches of at most ``limit`` bytes each (``limit`` >= SPLIT_ALIGNMENT)."""
    out: list[tuple[Transfer, ...]] = []
    batch: list[Transfer] = []
    room = limit
    queue = [part for transfer in transfers for part in _singled(transfer, limit)]
    queue.reverse()
    while queue:
        transfer = queue.pop()
        if transfer.nbytes <= room:
            batch.append(transfer)
            room -= transfer.nbytes
            continue
        if transfer.runs > 1:
            head, rest = _cut_runs(transfer, room // transfer.length)
        else:
            head, rest = _cut_bytes(transfer, room - room % SPLIT_ALIGNMENT)
        if head is not None:
            batch.append(head)
        queue.append(rest)
        if batch:
            out.append(tuple(batch))
        batch, room = [], limit
    if batch:
        out.append(tuple(batch))
    return out


def _singled(transfer: Transfer, limit: int) -> list[Transfer]:
    """The transfer itself, or its runs one by one where a single run exceeds the limit."""
    if transfer.runs == 1 or transfer.length <= limit:
        return [transfer]
    return [_moved(transfer, run, 0)._replace(runs=1) for run in range(transfer.runs)]


def _cut_runs(transfer: Transfer, runs: int) -> tuple[Transfer | None, Transfer]:
    if runs == 0:
        return None, transfer
    return transfer._replace(runs=runs), _moved(transfer, runs, 0)._replace(runs=transfer.runs - runs)


def _cut_bytes(transfer: Transfer, nbytes: int) -> tuple[Transfer | None, Transfer]:
    if nbytes == 0:
        return None, transfer
    rest = _moved(transfer, 0, nbytes)._replace(length=transfer.length - nbytes)
    return transfer._replace(length=nbytes), rest


def _moved(transfer: Transfer, runs: int, nbytes: int) -> Transfer:
    src, dst = (
        region._replace(offset=region.offset + runs * region.pitch + nbytes) for region in (transfer.src, transfer.dst)
    )
    return transfer._replace(src=src, dst=dst)
