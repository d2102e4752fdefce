"""Memory that a rank needs for FSDP2's collectives, under TIDE and under stock FSDP2, before anything runs.

Of each unit ``u``, over ``W`` shards, with FSDP2's padding to ``ceil(d / W) · W`` rows::

    U(u)   unsharded parameters    Σ padded elements · itemsize(dtype)
    R(u)   reduce-scatter input    Σ padded elements of trainable parameters · itemsize(out_dtype)
    G(u)   whole gradients         Σ elements of trainable parameters · itemsize(grad_dtype)

Both have the resident shards, ``Σ padded elements / W · itemsize(shard_dtype)``, which FSDP2 allocates and
TIDE leaves alone, and the reduced gradients of the same size and type, which FSDP2 keeps until the
optimizer has used them (in stock FSDP2 they are the output of the reduce-scatter).

Stock FSDP2, backward, while unit ``i`` computes and the reduce-scatter of the unit after it is under way::

    flat all-gather buffers    max over consecutive units of U(i) + U(i+1)   (a pool of their own)
    unsharded parameters       U(i) + Σ U(units before i that stay whole)
    reduce-scatter input       R(i+1)
    whole gradients            G(i)

or, at the moment in which the gradients of ``i`` are copied in, ``U(i)`` gone and ``R(i)`` in place of
``R(i+1)``; the larger of the two, over all units, counts. TIDE has its arena, of constant size, and::

    whole gradients            G(i) + G(i+1)     phase 1 still reads those of i+1
    running sums               float32, where the reduced gradient is not float32 itself

Units of one module (two groups on different meshes in one block) count as one. Not counted on either
side: optimizer state, activations, the buffer into which stock FSDP2 casts its own shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.shard import padded_numel, shard

#: What the comparison leaves out, for reports.
EXCLUDED = "optimizer state, activations"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the composition; bytes per rank."""

    name: str
    tide: int
    stock: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Composition of one rank's peak.

    Attributes
    ----------
    rank : int
        World rank.
    rows : tuple of MemoryRow
        Bytes at the peak of either side; `tide` and `stock` are their sums.
    tide_peak, stock_peak : str
        When the peaks are reached, such as ``"the backward of layers.2"``.
    """

    rank: int
    rows: tuple[MemoryRow, ...]
    tide_peak: str
    stock_peak: str

    @property
    def tide(self) -> int:
        """Peak bytes under TIDE."""
        return sum(row.tide for row in self.rows)

    @property
    def stock(self) -> int:
        """Peak bytes under stock FSDP2."""
        return sum(row.stock for row in self.rows)

    def row(self, name: str) -> MemoryRow:
        """The line called ``name``."""
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class _Module:
    """Units that are whole at the same time; bytes."""

    name: str
    unsharded: int
    flat: int
    reduce_input: int
    gradients: int
    running: int
    stays_whole: bool


def unsharded_nbytes(unit: Unit) -> int:
    """Bytes of a unit's parameters as stock FSDP2 gathers them, with padding."""
    return sum(padded_numel(p, unit.mesh.size) * itemsize(p.dtype) for p in unit.parameters)


def _module(units: list[Unit], rank: int) -> _Module:
    reduce_input = gradients = running = 0
    for unit in units:
        owners = unit.mesh.size
        located = unit.mesh.locate(rank)
        assert located is not None
        for p in unit.parameters:
            if p.grad_dtype is None:
                continue
            reduce_input += padded_numel(p, owners) * itemsize(p.out_dtype)
            gradients += p.numel * itemsize(p.grad_dtype)
            if p.out_dtype != "float32":
                running += int(shard(p, owners).numel[located[1]]) * 4
    unsharded = sum(unsharded_nbytes(unit) for unit in units)
    flat = sum(unsharded_nbytes(unit) for unit in units if unit.mesh.size > 1)
    whole = any(unit.stays_whole for unit in units)
    return _Module(units[0].name or "root", unsharded, flat, reduce_input, gradients, running, whole)


def _modules(compiled: Compiled, rank: int) -> list[_Module]:
    together: dict[object, list[Unit]] = {}
    for order, unit in enumerate(compiled.spec.units):
        if unit.mesh.locate(rank) is not None:
            key = ("module", unit.lives_with) if unit.lives_with >= 0 else ("unit", order)
            together.setdefault(key, []).append(unit)
    return [_module(units, rank) for units in together.values()]


def memory(compiled: Compiled, rank: int) -> Memory:
    """Composition of the peak of ``rank``, for the plan and for stock FSDP2.

    Parameters
    ----------
    compiled : Compiled
        The plan; nothing is run or allocated.
    rank : int
        World rank.
    """
    shards = reduced = 0
    for unit in compiled.spec.units:
        if unit.mesh.locate(rank) is None:
            continue
        for p in unit.parameters:
            nbytes = padded_numel(p, unit.mesh.size) // unit.mesh.size * itemsize(p.shard_dtype)
            shards += nbytes
            reduced += nbytes if p.trainable else 0
    modules = _modules(compiled, rank)
    pairs = [first.flat + second.flat for first, second in pairwise(modules)]
    flat = max(pairs, default=modules[0].flat if modules else 0)
    stock, stock_peak = _stock_peak(modules)
    tide, tide_peak = _tide_peak(modules)
    arena, areas = compiled.arena, compiled.arena.receive
    rows = (
        MemoryRow("shards", shards, shards, "resident, padded as FSDP2 pads them"),
        MemoryRow("reduced gradients", reduced, reduced, "kept until the optimizer has used them"),
        MemoryRow("slots", areas.receive, 0, "unsharded parameters, in place"),
        MemoryRow("unsharded parameters", 0, stock[0], "copied out of the flat buffers"),
        MemoryRow("flat all-gather buffers", 0, flat, "two units at a time"),
        MemoryRow("reduce-scatter input", 0, stock[1], "padded, of the reduction's type"),
        MemoryRow("receive area", areas.partial - areas.receive, 0, _receive_note(compiled)),
        MemoryRow(
            "partial and wire areas",
            areas.staged - areas.partial,
            0,
            f"{compiled.options.wire_dtype} sums between nodes",
        ),
        MemoryRow("packed gradients", areas.spread - areas.staged, 0, "small ones, on their way to the owners"),
        MemoryRow("spread area", arena.signals - areas.spread, 0, "float32 sums that the switch sums"),
        MemoryRow("signals", arena.size - arena.signals, 0, "counters, one a lane and peer"),
        MemoryRow("whole gradients", tide[0], stock[2], "of the unit in backward; TIDE: and of the one in phase 1"),
        MemoryRow("running sums", tide[1], 0, "where the reduced gradient is not float32"),
    )
    return Memory(rank, rows, tide_peak, stock_peak)


def _receive_note(compiled: Compiled) -> str:
    """What the receive area is for."""
    if not compiled.options.slot_reuse:
        return "gradient pieces, chunked"
    if compiled.beside:
        count = len(compiled.beside)
        return f"gradient pieces of {count} unit{'s' * (count > 1)} that the own slot does not hold"
    return "spare, for gradients that find their unit's slot held"


def _stock_peak(modules: list[_Module]) -> tuple[tuple[int, int, int], str]:
    """Unsharded parameters, reduce-scatter input and whole gradients at the worst moment, and which it is."""
    best, when = (0, 0, 0), "no unit"
    reducing, whole = 0, sum(module.unsharded for module in modules if module.stays_whole)
    for module in reversed(modules):  # the order of the backward pass
        before = whole - (module.unsharded if module.stays_whole else 0)
        moments = (
            ((before + module.unsharded, reducing, module.gradients), f"the backward of {module.name}"),
            ((before, module.reduce_input, module.gradients), f"the copy-in of the gradients of {module.name}"),
        )
        for moment, name in moments:
            if sum(moment) > sum(best):
                best, when = moment, name
        whole, reducing = before, module.reduce_input or reducing
    return best, when


def _tide_peak(modules: list[_Module]) -> tuple[tuple[int, int], str]:
    """Whole gradients and running sums at the worst moment, and which it is."""
    best, when = (0, 0), "no unit"
    reading, running = 0, 0
    for module in reversed(modules):
        moment = (module.gradients + reading, max(running, module.running))
        if sum(moment) > sum(best):
            best, when = moment, f"the backward of {module.name}"
        if module.gradients:
            reading, running = module.gradients, module.running
    return best, when
