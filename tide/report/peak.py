"""A training step as the allocator sees it: FSDP2's allocations one by one, and the moment at which most is held.

torch's allocator counts a block from the host's call that takes it to the one that gives it back, whatever the
streams are at. So the order is the host's (torch 2.11 to 2.14), for each unit:

forward        cast of the shard, flat buffer · the flat buffer of the unit before goes · parameters, copied out of
               the flat buffer, which stays for one unit more · resharded
backward       parameters, copied out; the flat buffer goes · cast and flat buffer of the next · gradients, one by
               one · parameters go · the last unit's reduce-scatter input goes · reduce-scatter input, gradients are
               copied into it and go · reduced gradients

Under TIDE, what is gathered lies in the arena, and gradients stay where the reduce-scatter reads them until the
next unit's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tide.compiler.dtypes import itemsize
from tide.compiler.liveness import Module, in_order, module_tree
from tide.compiler.model import Parameter, Unit
from tide.compiler.shard import padded_numel, shard

#: What holds the memory of a step, in the order of reports.
REDUCED = "reduced gradients"
UNSHARDED = "unsharded parameters"
CAST = "cast shards"
FLAT = "flat all-gather buffers"
COPIES = "copies for other dims"
INPUT = "reduce-scatter input"
WINDOWS = "windows of flat buffers"
GRADIENTS = "whole gradients"
RUNNING = "running sums"
KINDS = (REDUCED, UNSHARDED, CAST, FLAT, COPIES, INPUT, WINDOWS, GRADIENTS, RUNNING)

#: What a memory pool rounds a segment to.
SEGMENT = 2 << 20


@dataclass(slots=True)
class Ledger:
    """Bytes held now, by kind, and the most that was ever held.

    Attributes
    ----------
    now, peak : dict of str to int
        Bytes by kind, and what they were when their sum was largest.
    when, peak_when : str
        The moment now, and at the peak.
    """

    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    when: str = ""
    peak_when: str = "no unit"

    def take(self, kind: str, nbytes: int) -> None:
        """Takes memory."""
        self.now[kind] = self.now.get(kind, 0) + nbytes
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak, self.peak_when = dict(self.now), self.when

    def give(self, kind: str, nbytes: int) -> None:
        """Gives memory back."""
        self.now[kind] -= nbytes


@dataclass(slots=True)
class Windows:
    """Segments of a memory pool that are never split or given back; each serves what fits, the smallest first."""

    ledger: Ledger
    free: list[int] = field(default_factory=list)

    def take(self, nbytes: int) -> int:
        """Bytes of a segment that holds as many."""
        fitting = [size for size in self.free if size >= nbytes]
        if fitting:
            self.free.remove(min(fitting))
            return min(fitting)
        size = -(-nbytes // SEGMENT) * SEGMENT
        self.ledger.take(WINDOWS, size)
        return size

    def give(self, size: int) -> None:
        """Gives a segment back to the pool."""
        self.free.append(size)


def unsharded_nbytes(unit: Unit) -> int:
    """Bytes of a unit's parameters as stock FSDP2 gathers them, with padding."""
    return sum(padded_numel(p, unit.mesh.size) * itemsize(p.dtype) for p in unit.parameters)


def shard_nbytes(unit: Unit, parameter: Parameter) -> int:
    """Bytes of a parameter's shard as FSDP2 keeps it, with padding."""
    return padded_numel(parameter, unit.mesh.size) // unit.mesh.size * itemsize(parameter.shard_dtype)


def gradient_nbytes(parameter: Parameter) -> int:
    """Bytes of a parameter's whole gradient, as autograd makes it: of the storage's type, or wider if accumulated."""
    if parameter.grad_dtype is None:
        return 0
    return parameter.numel * max(itemsize(parameter.grad_dtype), itemsize(parameter.dtype))


class Step:
    """One rank's training step; its collectives are those of the subclass.

    Parameters
    ----------
    units : sequence of Unit
        Those that the rank holds shards of, in forward order.
    rank : int
        World rank.
    prefetch : int
        Modules that are gathered ahead; beyond one, FSDP2 has been told to.
    """

    def __init__(self, units: Sequence[Unit], rank: int, prefetch: int) -> None:
        self.rank, self.prefetch, self.ledger = rank, max(1, prefetch), Ledger()
        self._tree = module_tree(units)
        self._order: list[Module] = []
        self._places: dict[int, int] = {}
        self._cast = {u.name for u in units if any(p.dtype != p.shard_dtype for p in u.parameters)}

    def run(self) -> Ledger:
        """The second of two steps, which finds what the first has left; the optimizer frees gradients in between."""
        self._run()
        self.ledger.now[REDUCED] = 0
        self.ledger.peak, self.ledger.peak_when = {}, "no unit"
        self._run()
        return self.ledger

    def _run(self) -> None:
        for backward in (False, True):
            self._order = [module for module, _ in in_order(self._tree, backward)]
            self._places = {id(module): place for place, module in enumerate(self._order)}
            for module in reversed(self._tree) if backward else self._tree:
                (self._backward if backward else self._forward)(module)
            self.end_pass()

    def _ahead(self, module: Module) -> list[Unit]:
        place = self._places[id(module)] + 1
        return [unit for later in self._order[place : place + self.prefetch] for unit in later.units]

    def _forward(self, module: Module) -> None:
        self.ledger.when = f"the forward of {module.name}"
        for unit in module.units:
            self.gather(unit)
            self.use(unit, forward=True)
        if self.prefetch > 1:
            for unit in self._ahead(module):
                self.gather(unit)
        for inner in module.inner:
            self._forward(inner)
        self.ledger.when = f"the forward of {module.name}"
        for unit in module.units:
            if not unit.stays_whole:
                self.reshard(unit)

    def _backward(self, module: Module) -> None:
        self.ledger.when = f"the backward of {module.name}"
        for unit in module.units:
            self.gather(unit)
            self.use(unit, forward=False)
        for unit in self._ahead(module):
            self.gather(unit)
        for unit in module.units:
            self._gradients(unit, [p for i, p in enumerate(unit.parameters) if i in unit.tail])
        for inner in reversed(module.inner):
            self._backward(inner)
        self.ledger.when = f"the backward of {module.name}"
        for unit in module.units:
            self._gradients(unit, [p for i, p in enumerate(unit.parameters) if i not in unit.tail])
        for unit in reversed(module.units):
            self.ledger.when = f"the copy-in of the gradients of {module.name}"
            self.reshard(unit)
            if unit is module.units[-1]:
                self.recycle()
            trained = [p for p in unit.parameters if p.trainable]
            if trained:
                self.reduce(unit, trained)

    def _gradients(self, unit: Unit, parameters: Sequence[Parameter]) -> None:
        self.ledger.take(GRADIENTS, sum(map(gradient_nbytes, parameters)))

    def _output(self, unit: Unit, trained: Sequence[Parameter]) -> None:
        """The reduced gradients, first in the reduction's type, then in the shard's."""
        output = sum(padded_numel(p, unit.mesh.size) // unit.mesh.size * itemsize(p.out_dtype) for p in trained)
        kept = sum(shard_nbytes(unit, p) for p in trained)
        self.ledger.take(REDUCED, output)
        if any(p.out_dtype != p.shard_dtype for p in trained):
            self.ledger.take(REDUCED, kept)
            self.ledger.give(REDUCED, output)

    # What differs ------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> None:
        """An all-gather is issued, unless the unit is whole or on its way."""
        raise NotImplementedError

    def use(self, unit: Unit, forward: bool) -> None:
        """The unit is made whole."""
        raise NotImplementedError

    def reshard(self, unit: Unit) -> None:
        """The unit is given up."""
        raise NotImplementedError

    def recycle(self) -> None:
        """Earlier reduce-scatters are waited for, and what they read is given back."""
        raise NotImplementedError

    def reduce(self, unit: Unit, trained: Sequence[Parameter]) -> None:
        """A reduce-scatter is issued."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """The end of forward and of backward."""
        self.recycle()


class StockStep(Step):
    """Stock FSDP2; with ``windows``, its flat buffers lie in a pool of symmetric memory."""

    def __init__(self, units: Sequence[Unit], rank: int, prefetch: int, windows: bool = False) -> None:
        super().__init__(units, rank, prefetch)
        self._pools = {kind: Windows(self.ledger) for kind in (FLAT, INPUT)} if windows else {}
        self._flat: dict[str, int] = {}  # of units on their way
        self._whole: set[str] = set()
        self._parked = 0
        self._inputs: list[int] = []

    def _take(self, kind: str, nbytes: int) -> int:
        if kind in self._pools:
            return self._pools[kind].take(nbytes) if nbytes else 0
        self.ledger.take(kind, nbytes)
        return nbytes

    def _give(self, kind: str, nbytes: int) -> None:
        if kind not in self._pools:
            self.ledger.give(kind, nbytes)
        elif nbytes:
            self._pools[kind].give(nbytes)

    def gather(self, unit: Unit) -> None:
        """Casts the shards and takes the flat buffer."""
        if unit.name in self._whole or unit.name in self._flat:
            return
        flat = unsharded_nbytes(unit) if unit.mesh.size > 1 else 0
        cast = flat // unit.mesh.size if unit.name in self._cast else 0
        self.ledger.take(CAST, cast)
        self._flat[unit.name] = self._take(FLAT, flat)
        self.ledger.give(CAST, cast)

    def use(self, unit: Unit, forward: bool) -> None:
        """Copies the parameters out of the flat buffer."""
        if unit.name in self._whole:
            return
        if forward:
            self._give(FLAT, self._parked)
            self._parked = 0
        self.ledger.take(UNSHARDED, unsharded_nbytes(unit))
        copies = sum(padded_numel(p, unit.mesh.size) * itemsize(p.dtype) for p in unit.parameters if p.dim)
        self.ledger.take(COPIES, copies)
        self.ledger.give(COPIES, copies)
        self._whole.add(unit.name)
        flat = self._flat.pop(unit.name)
        if forward:
            self._parked = flat
        else:
            self._give(FLAT, flat)

    def reshard(self, unit: Unit) -> None:
        """Frees the parameters."""
        if unit.name in self._whole:
            self._whole.remove(unit.name)
            self.ledger.give(UNSHARDED, unsharded_nbytes(unit))

    def recycle(self) -> None:
        """Frees reduce-scatter inputs."""
        for nbytes in self._inputs:
            self._give(INPUT, nbytes)
        self._inputs = []

    def reduce(self, unit: Unit, trained: Sequence[Parameter]) -> None:
        """Copies the gradients into the input, frees them, takes the output."""
        copy = max((gradient_nbytes(p) for p in trained if p.dim), default=0)
        self.ledger.take(COPIES, copy)
        self.ledger.give(COPIES, copy)
        padded = sum(padded_numel(p, unit.mesh.size) * itemsize(p.out_dtype) for p in trained)
        self._inputs.append(self._take(INPUT, padded))
        last = gradient_nbytes(trained[-1])  # a loop variable of `foreach_reduce` holds it to the end
        self.ledger.give(GRADIENTS, sum(map(gradient_nbytes, trained)) - last)
        self._output(unit, trained)
        self.ledger.give(GRADIENTS, last)

    def end_pass(self) -> None:
        """The root drops the last flat buffer of the forward pass."""
        super().end_pass()
        self._give(FLAT, self._parked)
        self._parked = 0


class TideStep(Step):
    """TIDE: what is gathered and received lies in the arena."""

    def __init__(self, units: Sequence[Unit], rank: int, prefetch: int) -> None:
        super().__init__(units, rank, prefetch)
        self._read: list[int] = []
        self._sums: list[int] = []

    def gather(self, unit: Unit) -> None:
        """Into its slot."""

    def use(self, unit: Unit, forward: bool) -> None:
        """In its slot."""

    def reshard(self, unit: Unit) -> None:
        """The slot stays."""

    def recycle(self) -> None:
        """Frees gradients that have been read."""
        for nbytes in self._read:
            self.ledger.give(GRADIENTS, nbytes)
        self._read = []

    def reduce(self, unit: Unit, trained: Sequence[Parameter]) -> None:
        """Takes the output; the gradients stay until the next one, running sums until the one after."""
        self._output(unit, trained)
        narrow = [p for p in trained if p.grad_dtype is not None and itemsize(p.grad_dtype) < itemsize(p.dtype)]
        copies = sum(p.numel * itemsize(p.grad_dtype or "") for p in narrow)
        self.ledger.take(GRADIENTS, copies)
        self._read.append(sum(map(gradient_nbytes, trained)) + copies)
        found = unit.mesh.locate(self.rank)
        assert found is not None
        owned = [int(shard(p, unit.mesh.size).numel[found[1]]) for p in trained if p.out_dtype != "float32"]
        self.ledger.take(RUNNING, 4 * sum(owned))
        self._sums.append(4 * sum(owned))
        if len(self._sums) > 2:
            self.ledger.give(RUNNING, self._sums.pop(0))
