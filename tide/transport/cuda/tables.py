"""Kernel launches of one stream of a program: records for all of them, in one piece of device memory.

The kernels read their addresses from tables. The tables of all launches of a stream lie one behind the other in
one allocation, so that a call with other gradients costs one vector addition on the host and one small copy to
the device, however many launches there are. Everything that could block the host (compiling, loading,
allocating) happens before the first step of a call is issued: a rank that stops in the middle of issuing stops
its peers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from tide.compiler.steps import Accumulate, Cast, Place, Sum, SwitchReduce
from tide.kernels import accumulate as sums
from tide.kernels import place as placing
from tide.kernels import switch_reduce as switched
from tide.kernels.build import Variant
from tide.kernels.launch import Tuning, prepare, scratch_size, with_scratch
from tide.kernels.segments import Block, Division, Table, make_chain, make_table
from tide.kernels.tiles import factors
from tide.torch_types import to_torch
from tide.transport.cuda.bases import EVERYWHERE, Bases, Int64s, Located
from tide.transport.cuda.launcher import plain_launch

#: Words to which a table is aligned: the kernels are compiled for 16-byte aligned pointers.
_ALIGN_WORDS = 2
#: A base keeps its place relative to this many bytes, a power of two, or the tables are made anew.
_CLASS = 16


@dataclass(frozen=True, slots=True)
class _Job:
    """One launch: blocks that share element types and number of operands."""

    variant: Callable[[int], Variant]  # by treatment of the sum
    division: Division
    blocks: Sequence[tuple[Block, tuple[int, ...]]]  # addresses are offsets; base of each operand
    final: bool
    steps: tuple[int, ...] = ()  # of a chain: blocks of each step
    counters: tuple[int, ...] = ()  # and address of each step's counter, 0 for none

    def table(self, blocks: Sequence[Block]) -> Table:
        """Table or chain for these blocks."""
        if not self.steps:
            return make_table(blocks, self.division)
        rest = iter(blocks)
        return make_chain([list(islice(rest, number)) for number in self.steps], self.division, self.counters)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that is ready but for the table's address: offset in words, number of programs."""

    job: _Job
    offset: int
    length: int
    programs: int


def _block(
    runs: int, count: int, places: Sequence[Located], sizes: Sequence[int], item: int
) -> tuple[Block, tuple[int, ...]]:
    """A block whose addresses are offsets, and the bases of its operands."""
    offsets = tuple(place.offset for place in places)
    pitches = tuple(place.pitch // size for place, size in zip(places, sizes, strict=True))
    return Block(runs, count, offsets, pitches, item), tuple(place.base for place in places)


def place_jobs(step: Place, bases: Bases, tuning: Tuning) -> list[_Job]:
    """Launches of a Place step, one for each pair of element types."""
    groups: dict[tuple[str, str], list[Cast]] = {}
    for cast in step.casts:
        groups.setdefault((cast.src_dtype, cast.dst_dtype), []).append(cast)
    jobs = []
    for (src, dst), casts in groups.items():
        variant, sizes = placing.variant_of(to_torch(src), to_torch(dst), tuning)
        pairs = _cast_blocks(casts, bases, sizes)
        division = placing.division_of(sizes, tuning)
        jobs.append(_Job(lambda mode, chosen=variant: chosen, division, pairs, False))  # type: ignore[misc]
    return jobs


def chain_job(steps: Sequence[Place], counters: Sequence[int], bases: Bases, tuning: Tuning) -> _Job:
    """One launch of several Place steps, all of one pair of element types.

    Parameters
    ----------
    steps : sequence of Place
        In order.
    counters : sequence of int
        Address of the word in which programs count each step, 0 for none.
    bases : Bases
        Numbers of the buffers.
    tuning : Tuning
        How casts are cut.
    """
    first = steps[0].casts[0]
    variant, sizes = placing.variant_of(to_torch(first.src_dtype), to_torch(first.dst_dtype), tuning, chain=True)
    pairs = [pair for step in steps for pair in _cast_blocks(step.casts, bases, sizes)]
    lengths = tuple(len(step.casts) for step in steps)
    division = placing.division_of(sizes, tuning)
    return _Job(lambda mode: variant, division, pairs, False, lengths, tuple(counters))


def _cast_blocks(casts: Sequence[Cast], bases: Bases, sizes: tuple[int, int]) -> list[tuple[Block, tuple[int, ...]]]:
    """Blocks of casts of one pair of element types, which a variant takes to have these sizes."""
    parts = to_torch(casts[0].dst_dtype).itemsize // sizes[0]
    return [
        _block(cast.runs, cast.count * parts, (bases.locate(cast.dst), bases.locate(cast.src)), sizes, item)
        for item, cast in enumerate(casts)
    ]


def accumulate_jobs(step: Accumulate, bases: Bases, ctas: int, ranks: Sequence[int] | None = None) -> list[_Job]:
    """Launches of an Accumulate step on so many programs at most, one for each form of sum.

    Sources are those of each of ``ranks``, if given.
    """
    groups: dict[tuple[int, str, str, bool], list[Sum]] = {}
    for total in step.sums:
        key = (len(total.srcs) * len(ranks or (0,)), total.src_dtype, total.dst_dtype, total.base is not None)
        groups.setdefault(key, []).append(total)
    jobs = []
    for (pieces, src, dst, based), totals in groups.items():
        form = sums.Form(pieces, to_torch(src), to_torch(dst), based)
        chosen = sums.default_tuning(pieces, ctas)
        pairs = []
        for item, total in enumerate(totals):
            places = [bases.locate(total.dst)]
            places += [bases.locate(src, rank) for src in total.srcs for rank in ranks or (None,)]
            places += [bases.locate(total.base)] if total.base is not None else []
            pairs.append(_block(total.runs, total.count, places, form.sizes, item))
        division = sums.division_of(form, chosen)

        def variant(mode: int, form: sums.Form = form, chosen: Tuning = chosen) -> Variant:
            return sums.variant_of(form, mode, chosen)

        jobs.append(_Job(variant, division, pairs, step.final))
    return jobs


def switch_jobs(step: SwitchReduce, bases: Bases, ranks: Sequence[int], ctas: int) -> list[_Job]:
    """Launches of a SwitchReduce step.

    Parameters
    ----------
    step : SwitchReduce
        The step.
    bases : Bases
        Numbers of the buffers.
    ranks : sequence of int
        Whose arenas the kernel reads: `EVERYWHERE` alone, by the multicast address; or the peers in rank order, in
        its stead.
    ctas : int
        CTAs of a sum over the peers' memory at most.
    """
    for total in step.sums:
        switched.require_float32(to_torch(total.src_dtype), "SwitchReduce")
    if list(ranks) != [EVERYWHERE]:
        return accumulate_jobs(Accumulate(step.sums, step.final), bases, ctas, ranks)
    groups: dict[switched.Form, list[Sum]] = {}
    for total in step.sums:
        groups.setdefault(switched.Form(to_torch(total.dst_dtype), total.base is not None), []).append(total)
    jobs = []
    for form, totals in groups.items():
        pairs = []
        for item, total in enumerate(totals):
            places = [bases.locate(total.dst), bases.locate(total.srcs[0], EVERYWHERE)]
            places += [bases.locate(total.base)] if total.base is not None else []
            pairs.append(_block(total.runs, total.count, places, form.sizes, item))

        def variant(mode: int, form: switched.Form = form) -> Variant:
            return switched.variant_of(form, mode, switched.DEFAULT)

        jobs.append(_Job(variant, switched.division(form, switched.DEFAULT), pairs, step.final))
    return jobs


class LaunchSet:
    """All launches of one stream of a program.

    Parameters
    ----------
    driver : Driver
        Driver calls.
    device : torch.device
        Where the kernels run.
    """

    def __init__(self, driver: Any, device: torch.device) -> None:
        self.driver, self.device = driver, device
        self._steps: list[list[_Job]] = []
        self._classes: bytes | None = None
        self.launches: list[list[Launch]] = []
        # Scratch memory for all launches, as they follow each other. Bound launches may use all but the last.
        self._scratch: list[torch.Tensor] = []

    def add(self, jobs: list[_Job]) -> int:
        """Adds the launches of a step; returns the step's number."""
        self._steps.append(jobs)
        return len(self._steps) - 1

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not any(self._steps)

    def rebase(self, addresses: Int64s) -> bool:
        """Completes the tables for these addresses of the bases.

        Returns
        -------
        bool
            True if the tables were made anew, in new memory: what was bound to the old ones has to be bound
            again, and the old memory kept until its last launch has run.
        """
        classes = (addresses & (_CLASS - 1)).tobytes()
        if classes != self._classes:
            self._classes = None  # should there be no memory for the new ones: the old ones are gone
            self._make(addresses)
            self._classes = classes
            return True
        self.words[self._positions] = (addresses[self._bases] + self._offsets) // self._units
        return False

    def _make(self, addresses: Int64s) -> None:
        words, positions, numbers, offsets, units = [], [], [], [], []
        cursor, self.launches = 0, []
        for jobs in self._steps:
            launches = []
            for job in jobs:
                which = np.array([bases for _, bases in job.blocks], np.int64)
                relative = np.array([block.addresses for block, _ in job.blocks], np.int64)
                moved = (addresses[which] + relative).tolist()
                blocks = [
                    replace(block, addresses=tuple(row)) for (block, _), row in zip(job.blocks, moved, strict=True)
                ]
                table = job.table(blocks)
                if not any(table.tiles) and not job.steps:  # a chain's counters are awaited all the same
                    continue
                length = -(-len(table.words) // _ALIGN_WORDS) * _ALIGN_WORDS
                words.append(np.pad(table.words, (0, length - len(table.words))))
                positions.append((table.positions + cursor).ravel())
                numbers.append(which[table.blocks].ravel())
                offsets.append((relative[table.blocks] + table.offsets).ravel())
                units.append(np.broadcast_to(table.units, table.positions.shape).ravel())
                launches.append(Launch(job, cursor, length, table.programs))
                cursor += length
            self.launches.append(launches)

        def joined(parts: list[Any]) -> Int64s:
            return np.concatenate(parts) if parts else np.zeros(0, np.int64)

        self.words = joined(words)
        self._positions, self._bases = joined(positions), joined(numbers)
        self._offsets, self._units = joined(offsets), joined(units)
        self.memory = torch.empty(max(cursor, 1), dtype=torch.int64, device=self.device)

    def programs(self, step: int) -> int:
        """Programs of a step's only launch."""
        (launch,) = self.launches[step]
        return launch.programs

    def starts(self, step: int, scale: float, divisor: float) -> list[Callable[[int], None]]:
        """Functions of a stream that carry a step out, compiled and loaded."""
        out = []
        mode, scale, divisor = factors(scale, divisor)
        plain, _, _ = factors(1.0, 1.0)
        for launch in self.launches[step]:
            final = launch.job.final
            variant = launch.job.variant(mode if final else plain)
            scalars = (scale, divisor) if final else (1.0, 1.0)
            out.append(self._bind(variant, launch, scalars[: len(variant.signature) - 1]))  # a Place takes none
        return out

    def _bind(self, variant: Variant, launch: Launch, scalars: tuple[float, ...]) -> Callable[[int], None]:
        compiled = prepare(variant, self.device)
        address, driver = self.memory.data_ptr() + 8 * launch.offset, self.driver
        # As much as any launch of the variant needs, so that memory is taken once for it, whatever comes first.
        scratch = self._scratch_of(scratch_size(compiled, launch.job.division.programs))
        with torch.cuda.device(self.device):
            runner = with_scratch(compiled[(launch.programs, 1, 1)], scratch)  # loads the kernel
        place = 0 if scratch is None else scratch.data_ptr()
        plain = plain_launch(compiled, address, scalars, launch.programs, driver.launch, place)
        if plain is not None:
            direct, check = plain, driver.check

            def start(stream: int) -> None:
                if result := direct(stream):
                    check(result, "kernel launch")

            return start
        values = tuple(value for _, value in variant.constants)

        def start_through_triton(stream: int) -> None:
            runner(address, *scalars, *values, stream=stream)

        return start_through_triton

    def _scratch_of(self, size: int) -> torch.Tensor | None:
        """Memory of at least so many bytes for a launch's tensor descriptors; None for 0."""
        if size and (not self._scratch or len(self._scratch[-1]) < size):
            self._scratch.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return self._scratch[-1] if size else None
