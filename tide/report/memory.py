"""Memory that a rank needs for FSDP2's collectives, stated before anything runs, in four ways of running them.

==========  =======================================================================================
stock       FSDP2 as it is
symmetric   FSDP2 with symmetric memory: its flat all-gather buffers and reduce-scatter inputs lie in
            windows, segments of a pool that are never given back
TIDE        the plan as it is
slot reuse  the plan with Slot-Reuse: what the reduce-scatter receives lies in the unit's own slot
==========  =======================================================================================

All have the resident shards, padded as FSDP2 pads them, which TIDE leaves alone, and the reduced gradients, which
FSDP2 keeps until the optimizer has used them. The rest is what :mod:`tide.report.peak` finds at the worst moment
of a step, and under TIDE the arena and what its kernels read their addresses from. All of it is counted as torch's
allocator counts it (``max_memory_allocated``), with the windows and the arena, which lie outside of it.

Not counted anywhere: the optimizer's state, and activations, with what else the model's own computation allocates.
Both are the same in all columns. Where activations peak at another moment than the collectives, the sum of the two
peaks is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Unit
from tide.compiler.options import PlanOptions
from tide.compiler.place import AREA_ALIGNMENT, align
from tide.compiler.steps import Accumulate, Place, Step, SwitchReduce
from tide.report import peak
from tide.report.peak import Ledger, StockStep, TideStep, shard_nbytes, unsharded_nbytes

__all__ = ["COLUMNS", "EXCLUDED", "Memory", "MemoryRow", "memory", "unsharded_nbytes", "with_slot_reuse"]

#: What the comparison leaves out, for reports.
EXCLUDED = "optimizer state, activations"
#: Columns and their headings.
COLUMNS = {"tide": "TIDE", "reuse": "Slot-Reuse", "symmetric": "symmetric", "stock": "stock FSDP2"}

_NOTES = {
    "shards": "resident, padded as FSDP2 pads them",
    peak.REDUCED: "so far; kept for the optimizer",
    "slots": "unsharded parameters, in place",
    peak.UNSHARDED: "copied out of the flat buffers",
    peak.CAST: "in the storage's type",
    peak.FLAT: "of the unit that is gathered ahead",
    peak.COPIES: "parameters not sharded along dim 0",
    peak.INPUT: "padded, of the reduction's type",
    peak.WINDOWS: "of FSDP2, never given back",
    "receive area": "gradient pieces; Slot-Reuse: where no slot is free",
    "partial and wire areas": "sums between nodes",
    "packed gradients": "small ones, on their way to the owners",
    "spread area": "float32 sums that the switch sums",
    "signals": "counters, by unit, lane and peer",
    "scratch": "tables of the kernels, at most",
    peak.GRADIENTS: "TIDE: and of the unit that is being reduced",
    peak.RUNNING: "where the reduced gradient is not float32",
}

# Of the CUDA transport; reports need neither torch nor a device. tests/gpu holds them against each other.
_PROGRAMS = 32  # CTAs of a launch at most, by the default settings
_PROGRAM_BYTES, _SEGMENT_BYTES, _OPERAND_BYTES, _DESCRIPTOR_BYTES = 72, 48, 16, 128
_MOST_DESCRIBED = 6  # operands of a launch that makes descriptors, at most
_LARGEST_SEGMENT = 1 << 30  # elements
_STEP_BYTES = 24  # of a step in the head of a launch that carries out several
_COUNTERS = 4 * ((1 << 14) + (1 << 12))  # the table of counter values, and words that programs count in
_GRANULE = 512  # of torch's allocator


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the composition; bytes per rank at the peak of each column."""

    name: str
    tide: int = 0
    reuse: int = 0
    symmetric: int = 0
    stock: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Composition of one rank's peak.

    Attributes
    ----------
    rank : int
        World rank.
    rows : tuple of MemoryRow
        Bytes at the peak of each column; `tide`, `reuse`, `symmetric` and `stock` are their sums.
    peaks : dict of str to str
        When the peaks are reached, such as ``"the backward of layers.2"``, by column. A column that there is no
        plan for is missing.
    """

    rank: int
    rows: tuple[MemoryRow, ...]
    peaks: dict[str, str]

    @property
    def tide(self) -> int:
        """Peak bytes under TIDE, with the plan as it is."""
        return self.total("tide")

    @property
    def reuse(self) -> int:
        """Peak bytes under TIDE with Slot-Reuse; 0 if there is no such plan."""
        return self.total("reuse")

    @property
    def symmetric(self) -> int:
        """Peak bytes under FSDP2 with symmetric memory."""
        return self.total("symmetric")

    @property
    def stock(self) -> int:
        """Peak bytes under stock FSDP2."""
        return self.total("stock")

    def total(self, column: str) -> int:
        """Peak bytes of a column."""
        return sum(getattr(row, column) for row in self.rows)

    def row(self, name: str) -> MemoryRow:
        """The line called ``name``."""
        return next(row for row in self.rows if row.name == name)


def can_reuse(options: PlanOptions) -> bool:
    """Whether there is Slot-Reuse: peers that pull may still read a slot that has been vacated."""
    return options.route == "push"


def with_slot_reuse(compiled: Compiled) -> Compiled | None:
    """The plan with Slot-Reuse: itself if it has it; None where there is none, as with pulls."""
    if not can_reuse(compiled.options):
        return None
    if compiled.options.slot_reuse:
        return compiled
    return compile_spec(compiled.spec, compiled.topology, replace(compiled.options, slot_reuse=True))


def memory(compiled: Compiled, rank: int, reuse: Compiled | None = None) -> Memory:
    """Composition of the peak of ``rank``, for the plan, with Slot-Reuse, and for both kinds of FSDP2.

    Parameters
    ----------
    compiled : Compiled
        The plan; nothing is run or allocated.
    rank : int
        World rank.
    reuse : Compiled, optional
        The same model's plan with Slot-Reuse.
    """
    units, prefetch = _held(compiled, rank), _prefetch(compiled)
    step = TideStep(units, rank, prefetch).run()
    columns = {
        "tide": _planned(compiled, rank, step),
        "symmetric": _stepped(StockStep(units, rank, prefetch, windows=True).run()),
        "stock": _stepped(StockStep(units, rank, prefetch).run()),
    }
    if reuse is not None:
        columns["reuse"] = _planned(reuse, rank, step)
    shards = _shards(units)
    for found, _ in columns.values():
        found["shards"] = shards
    rows = tuple(
        MemoryRow(name, note=note, **{column: found.get(name, 0) for column, (found, _) in columns.items()})
        for name, note in _NOTES.items()
    )
    return Memory(rank, rows, {column: when for column, (_, when) in columns.items()})


def planned_nbytes(compiled: Compiled, rank: int, scratch: bool = True) -> int:
    """Peak bytes of ``rank`` under TIDE, as :func:`memory` states them.

    Without ``scratch``, which takes the programs of all units, they are a lower bound that is quick to have.
    """
    units = _held(compiled, rank)
    ledger = TideStep(units, rank, _prefetch(compiled)).run()
    found = {**ledger.peak, **_areas(compiled)}
    return sum(found.values()) + _shards(units) + (scratch_nbytes(compiled, rank) if scratch else 0)


def _held(compiled: Compiled, rank: int) -> list[Unit]:
    """Units that the rank holds shards of."""
    return [unit for unit in compiled.spec.units if unit.mesh.locate(rank) is not None]


def _prefetch(compiled: Compiled) -> int:
    """Modules gathered ahead: FSDP2's one, where the plan leaves it open."""
    prefetch = compiled.options.prefetch
    return 1 if prefetch is None else prefetch


def _shards(units: Sequence[Unit]) -> int:
    return sum(shard_nbytes(unit, p) for unit in units for p in unit.parameters)


def _stepped(ledger: Ledger) -> tuple[dict[str, int], str]:
    return dict(ledger.peak), ledger.peak_when


def _planned(compiled: Compiled, rank: int, ledger: Ledger) -> tuple[dict[str, int], str]:
    found = {**ledger.peak, **_areas(compiled), "scratch": scratch_nbytes(compiled, rank)}
    return found, ledger.peak_when


def _areas(compiled: Compiled) -> dict[str, int]:
    """Of the arena."""
    arena, areas = compiled.arena, compiled.arena.receive
    return {
        "slots": sum(slot.size for slot in arena.slots),
        "receive area": areas.partial - areas.receive,
        "partial and wire areas": areas.staged - areas.partial,
        "packed gradients": areas.spread - areas.staged,
        "spread area": arena.signals - areas.spread,
        "signals": arena.size - arena.signals,
    }


def scratch_nbytes(compiled: Compiled, rank: int) -> int:
    """Bytes of what the CUDA transport keeps beside the arena's layout, at most.

    Counter values, counters and the peers' abort words, and for each stream of a program the tables that its kernels
    read their addresses from, with scratch memory for descriptors. Each unit has tables of its own. Where slots are
    reused, both forms of a reduce-scatter are counted: through the slot, and beside it. Reductions of some of a
    unit's gradients, and of gradients of other types than planned, take tables of their own, which are not counted.
    """
    total = _COUNTERS + align(4 * compiled.arena.world_size, AREA_ALIGNMENT)
    sizes: dict[int, int] = {}
    for unit in _held(compiled, rank):
        programs = [compiled.program(unit.name, "all_gather", rank)]
        if any(p.trainable for p in unit.parameters):
            forms = (True, False) if compiled.options.slot_reuse else (True,)
            programs += [compiled.program(unit.name, "reduce_scatter", rank, in_slot=form) for form in forms]
        for program in {id(program): program for program in programs}.values():
            if id(program) not in sizes:
                sizes[id(program)] = sum(_stream_nbytes(stream.steps) for stream in program.streams)
            total += sizes[id(program)]
    return total


def _stream_nbytes(steps: Sequence[Step]) -> int:
    """Of the launches of one stream: tables, one behind the other, and scratch memory, which they share."""
    tables, described = 0, set[int]()
    for step in steps:
        blocks: dict[tuple[int, str, str, bool], list[int]] = {}  # segments of those of each launch
        if isinstance(step, Place):
            tables += _STEP_BYTES
            for cast in step.casts:
                form = 2, cast.src_dtype, cast.dst_dtype, False
                blocks.setdefault(form, []).append(_segments(cast.runs, cast.count))
        elif isinstance(step, Accumulate | SwitchReduce):
            for total in step.sums:
                operands = 1 + len(total.srcs) + (total.base is not None)
                form = operands, total.src_dtype, total.dst_dtype, total.base is not None
                blocks.setdefault(form, []).append(_segments(total.runs, total.count))
        for (operands, *_), counts in blocks.items():
            tables += _PROGRAMS * _PROGRAM_BYTES + sum(counts) * (_SEGMENT_BYTES + _OPERAND_BYTES * operands)
            tables += -tables % 16
            if operands <= _MOST_DESCRIBED:
                described.add(operands)
    scratch = sum(align(_PROGRAMS * _DESCRIPTOR_BYTES * operands, _GRANULE) for operands in described)
    return align(tables, _GRANULE) + scratch


def _segments(runs: int, count: int) -> int:
    """Segments that a block is divided into at most.

    Whole tiles, what is left of a tile, and single elements before and after them, as alignment wants it; larger
    blocks are cut, each of those into less than twice as many pieces as fill them, and one.
    """
    return 4 + 2 * (8 * runs * count // _LARGEST_SEGMENT)
