"""Simulation: sequences of collectives of all ranks, as FSDP2 would issue them, under any interleaving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

import torch

from tide.compiler.compile import Compiled
from tide.compiler.model import Unit
from tide.compiler.shard import shard_shape
from tide.compiler.steps import Buffer, Region
from tide.errors import InputError, PlanError, SlotError
from tide.torch_types import to_torch
from tide.transport.simulated.checks import ByIndex, by_index, check_outputs, check_tensor, free_gradients
from tide.transport.simulated.lower import cuts, enqueue
from tide.transport.simulated.machine import EndItem, Event, HoldItem, Machine, TraceEvent, Work
from tide.transport.simulated.memory import MARKS, Access, Block, Bytes, Call, bytes_of
from tide.transport.simulated.parts import Inspect, Part, Site, Source
from tide.transport.simulated.reference import (
    random_tensor,
    reference_reduce_scatter,
    split,
    whole_of,
)

#: ``("all_gather", unit)``, ``("use", unit)``, ``("release", unit)`` or
#: ``("reduce_scatter", unit[, indices of the parameters that have a gradient])``.
Operation: TypeAlias = "tuple[str, str] | tuple[str, str, tuple[int, ...] | None]"
#: The stream on which a rank computes.
COMPUTE = "compute"


@dataclass(eq=False, slots=True)
class _Gathered:
    """An all-gather of one rank that has not been released."""

    unit: str
    call: Call
    end: Event
    wholes: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has delivered.

    Attributes
    ----------
    operations : int
        Micro-operations executed.
    wholes : dict of (str, int) to dict of str to Tensor
        Whole parameters by (unit, rank), for units that are still gathered.
    shards : dict of (str, int) to dict of int to Tensor
        Reduced shards by (unit, rank) of each unit's last reduce-scatter.
    trace : tuple of TraceEvent
        Steps in logical time, where asked for.
    """

    operations: int
    wholes: dict[tuple[str, int], dict[str, torch.Tensor]]
    shards: dict[tuple[str, int], dict[int, torch.Tensor]]
    trace: tuple[TraceEvent, ...] = field(default=(), repr=False)


class Simulation:
    """All ranks of a compiled plan in one process, on real bytes.

    A step takes effect in parts, which mix with those of all other streams and ranks in a legal order
    that ``family`` and ``seed`` decide. A difference, a read of unwritten, stale or overwritten bytes,
    a write over unread ones, a deadlock or an unmatched signal is a :class:`~tide.errors.PlanError`.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    seed : int
        Decides the interleaving, the cuts and the payload.
    family : str
        Seed family, one of :data:`~tide.transport.simulated.FAMILIES`.
    pieces : int
        Parts into which a data step is cut, about.
    payload : str
        ``"normal"`` or ``"special"`` (with NaN, Inf and the like).
    trace : bool
        Keep the events of each run.

    Examples
    --------
    >>> simulation = Simulation(compiled, seed=3, family="burst")      # doctest: +SKIP
    >>> simulation.run([("all_gather", "layers.0"), ("use", "layers.0"), ("release", "layers.0")])
    """

    def __init__(
        self,
        compiled: Compiled,
        seed: int = 0,
        family: str = "uniform",
        pieces: int = 3,
        payload: str = "normal",
        trace: bool = False,
    ) -> None:
        self.compiled, self.seed, self.family = compiled, seed, family
        self.pieces, self.payload = pieces, payload
        self.machine = Machine(compiled, trace)
        self._random = Random(f"cuts {seed}")
        self._gathered: dict[tuple[int, int], _Gathered] = {}
        self._vacated: dict[tuple[int, int], Event] = {}
        self._reduced: dict[tuple[int, int], Event] = {}  # by (rank, slot): end of the last reduce-scatter there
        self._calls: dict[tuple[str, str], int] = {}
        self._slot_calls: dict[int, int] = {}
        self._wholes: dict[tuple[str, int], tuple[list[torch.Tensor], list[list[torch.Tensor]]]] = {}
        self._outs: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        self._index = {unit.name: number for number, unit in enumerate(compiled.spec.units)}

    # What a user calls -------------------------------------------------------------------------

    def run(self, sequence: Iterable[Operation]) -> Result:
        """Executes operations, in this order on each rank; what a rank waits for are signals only.

        Parameters
        ----------
        sequence : iterable of Operation
            ``all_gather`` and ``reduce_scatter`` advance on streams of their own; ``use`` reads the whole
            unit on the compute stream once it is there, ``release`` vacates its slot after that.

        Raises
        ------
        PlanError
            If anything goes wrong that the plan should have prevented.
        SlotError
            If a slot is asked to hold two units at a time.
        """
        self.build(sequence)
        return self._go()

    def all_gather(self, unit: str, shards: Mapping[int, ByIndex]) -> dict[int, dict[str, torch.Tensor]]:
        """Gathers given shards and releases the unit.

        Parameters
        ----------
        unit : str
            Unit name.
        shards : mapping of int to (sequence or mapping of int to) Tensor
            Dense shards of each world rank, by parameter index.

        Returns
        -------
        dict of int to dict of str to Tensor
            Whole parameters by world rank and name.
        """
        found = self.compiled.spec.unit(unit)
        for number, group in enumerate(found.mesh.groups):
            rows = [by_index(found, shards, rank) for rank in group]
            for index, parameter in enumerate(found.parameters):
                for position, row in enumerate(rows):
                    shape = shard_shape(parameter, len(group), position)
                    what = f"{parameter.name}: the shard of rank {group[position]}"
                    check_tensor(what, row.get(index), parameter.shard_dtype, math.prod(shape))
            columns = [[row[index] for row in rows] for index in range(len(found.parameters))]
            self._wholes[unit, number] = (
                [whole_of(column, p) for p, column in zip(found.parameters, columns, strict=True)],
                [[tensor.contiguous() for tensor in column] for column in columns],
            )
        try:
            self.build([("all_gather", unit), ("use", unit)])
            result = self._go()
            self.run([("release", unit)])
        finally:
            for number in range(len(found.mesh.groups)):
                self._wholes.pop((unit, number), None)
        return {rank: wholes for (name, rank), wholes in result.wholes.items() if name == unit}

    def reduce_scatter(
        self, unit: str, grads: Mapping[int, ByIndex], scale: float = 1.0, divisor: float = 1.0
    ) -> dict[int, dict[int, torch.Tensor]]:
        """Reduces given gradients, which every rank must give for the same parameters.

        Parameters
        ----------
        unit : str
            Unit name.
        grads : mapping of int to (sequence or mapping of int to) Tensor
            Whole gradients of each world rank, by parameter index.
        scale, divisor : float
            Factors of the float32 sum, in this order.

        Returns
        -------
        dict of int to dict of int to Tensor
            Reduced shards by world rank and parameter index.
        """
        found = self.compiled.spec.unit(unit)
        for group in found.mesh.groups:
            given = [by_index(found, grads, rank) for rank in group]
            subset = sorted(given[0])
            if any(sorted(row) != subset for row in given):
                raise InputError(f"unit {unit!r}: ranks {group} give gradients of different parameters")
            for rank, row in zip(group, given, strict=True):
                self._outs.pop((unit, rank), None)
                for index, tensor in row.items():
                    parameter = found.parameters[index]
                    if parameter.grad_dtype is None:
                        raise InputError(f"{parameter.name} is frozen: there is no gradient to reduce")
                    what = f"{parameter.name}: the gradient of rank {rank}"
                    check_tensor(what, tensor, parameter.grad_dtype, parameter.numel)
            self._reduce_scatter(found, group, subset, given, scale, divisor)
        self._calls["reduce_scatter", unit] = self._calls.get(("reduce_scatter", unit), 0) + 1
        result = self._go()
        return {rank: shards for (name, rank), shards in result.shards.items() if name == unit}

    # Building ----------------------------------------------------------------------------------

    def build(self, sequence: Iterable[Operation]) -> None:
        """Appends operations to the streams of all ranks, without running them."""
        for kind, name, *rest in sequence:
            unit = self.compiled.spec.unit(name)
            for number, group in enumerate(unit.mesh.groups):
                if kind == "all_gather":
                    self._all_gather(unit, number, group)
                elif kind == "reduce_scatter":
                    self._random_gradients(unit, group, rest[0] if rest else None)
                elif kind in ("use", "release"):
                    for rank in group:
                        (self._use if kind == "use" else self._release)(unit, rank)
                else:
                    raise InputError(f"no operation {kind!r}; there are all_gather, use, release and reduce_scatter")
            if kind in ("all_gather", "reduce_scatter"):
                self._calls[kind, name] = self._calls.get((kind, name), 0) + 1
            if kind == "all_gather":
                slot = self.compiled.arena.slot_of[name]
                self._slot_calls[slot] = self._slot_calls.get(slot, 0) + 1

    def _call(self, unit: Unit, collective: str, rank: int, group: tuple[int, ...]) -> Call:
        slot = self.compiled.arena.slot_of[unit.name]
        if collective == "all_gather":
            turn = slot * 37 + self._slot_calls.get(slot, 0)
        else:
            turn = self._index[unit.name] * 37 + self._calls.get((collective, unit.name), 0)
        return Call(unit, collective, rank, group, slot, 1 + turn % MARKS)

    def _all_gather(self, unit: Unit, number: int, group: tuple[int, ...]) -> None:
        wholes, shards = self._shards(unit, number, len(group))
        for position, rank in enumerate(group):
            call = self._call(unit, "all_gather", rank, group)
            holder = self._gathered.get((rank, call.slot))
            if holder is not None:
                raise SlotError(
                    f"unit {unit.name!r} needs slot {call.slot}, which unit {holder.unit!r} still holds on rank "
                    f"{rank}; release that unit first, or compile the plan with more slots"
                )
            for index in range(len(unit.parameters)):
                block = Block.of(shards[index][position], call.mark)
                call.blocks[Buffer.SHARD, index] = self.machine.keep(block)
            program = self.compiled.program(unit.name, "all_gather", rank)
            after = self._slot_users(rank, call.slot)
            end, _ = enqueue(self.machine, call, program, after, self.pieces, self._random)
            self._gathered[rank, call.slot] = _Gathered(unit.name, call, end, wholes)

    def _slot_users(self, rank: int, slot: int) -> list[Event]:
        """What has to have ended before a rank's slot is used again."""
        return [users[rank, slot] for users in (self._vacated, self._reduced) if (rank, slot) in users]

    def _shards(self, unit: Unit, number: int, owners: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Whole parameters of a shard group in storage type, and their shards by parameter and owner."""
        key = (unit.name, number)
        if key not in self._wholes:
            wholes, shards = [], []
            for parameter in unit.parameters:
                seed = f"shard {self.seed} {parameter.name} {number}"
                master = random_tensor(parameter.shape, parameter.shard_dtype, seed, self.payload)
                shards.append(split(master, parameter.dim, owners))
                wholes.append(master.to(to_torch(parameter.dtype)).contiguous())
            self._wholes[key] = wholes, shards
        return self._wholes[key]

    def _use(self, unit: Unit, rank: int) -> None:
        gathered = self._holder(unit, rank, "used")
        call, layout = gathered.call, self.compiled.layouts[unit.name]
        site = Site(call, COMPUTE, 0, None)
        parts: list[Part] = []
        each = -(-self.pieces // len(unit.parameters))
        for index, (parameter, whole) in enumerate(zip(unit.parameters, gathered.wholes, strict=True)):
            if not parameter.numel:
                continue
            expected = bytes_of(whole)
            size = whole.element_size()
            for _, _, first, count in cuts(1, parameter.numel, each, self._random):
                start, stop = first * size, (first + count) * size
                region = Region(Buffer.STORAGE, 0, layout.offsets[index] + start)
                source = Source(self.machine.memory, call, Access(rank, region, 1, stop - start))
                parts.append(Inspect(site, source, expected[start:stop], parameter.dtype))
        items = self.machine.actor(rank, COMPUTE).items
        items.append(HoldItem(site, gathered.end))
        if parts:
            items.append(Work(site, parts))

    def _holder(self, unit: Unit, rank: int, what: str) -> _Gathered:
        gathered = self._gathered.get((rank, self.compiled.arena.slot_of[unit.name]))
        if gathered is None or gathered.unit != unit.name:
            raise SlotError(f"unit {unit.name!r} is {what} on rank {rank} without having been gathered")
        return gathered

    def _release(self, unit: Unit, rank: int) -> None:
        gathered = self._holder(unit, rank, "released")
        slot = gathered.call.slot
        vacated = self.machine.event(f"release of {unit.name!r} on rank {rank}", 1)
        items = self.machine.actor(rank, COMPUTE).items
        items += [HoldItem(Site(gathered.call, COMPUTE, 0, None), gathered.end), EndItem(vacated)]
        self._vacated[rank, slot] = vacated
        del self._gathered[rank, slot]

    def _random_gradients(self, unit: Unit, group: tuple[int, ...], subset: Sequence[int] | None) -> None:
        chosen = [i for i, p in enumerate(unit.parameters) if p.trainable] if subset is None else sorted(subset)
        turn = self._calls.get(("reduce_scatter", unit.name), 0)
        grads: list[dict[int, torch.Tensor]] = []
        for rank in group:
            row = {}
            for index in chosen:
                parameter = unit.parameters[index]
                if parameter.grad_dtype is None:
                    raise InputError(f"{parameter.name} is frozen: there is no gradient to reduce")
                seed = f"gradient {self.seed} {parameter.name} {rank} {turn}"
                row[index] = random_tensor(parameter.shape, parameter.grad_dtype, seed, self.payload)
            grads.append(row)
        self._reduce_scatter(unit, group, chosen, grads, 1.0, float(len(group)))

    def _reduce_scatter(
        self,
        unit: Unit,
        group: tuple[int, ...],
        subset: Sequence[int],
        grads: Sequence[Mapping[int, torch.Tensor]],
        scale: float,
        divisor: float,
    ) -> None:
        if not subset:
            return
        trainable = [index for index, parameter in enumerate(unit.parameters) if parameter.trainable]
        named = None if list(subset) == trainable else tuple(subset)
        team = self.compiled.context(unit.name, group[0]).team
        expected = {
            index: reference_reduce_scatter(
                [row[index] for row in grads],
                unit.parameters[index],
                team,
                scale,
                divisor,
                self.compiled.options.wire_dtype,
                unit.name in self.compiled.spread,
            )
            for index in subset
        }
        for position, rank in enumerate(group):
            call = self._call(unit, "reduce_scatter", rank, group)
            call.scale, call.divisor = scale, divisor
            outs: dict[int, torch.Tensor] = {}
            for index in subset:
                parameter = unit.parameters[index]
                shape = shard_shape(parameter, len(group), position)
                outs[index] = torch.empty(shape, dtype=to_torch(parameter.out_dtype))
                blocks = {
                    Buffer.GRAD: Block.of(grads[position][index].contiguous(), call.mark),
                    Buffer.OUT: Block.of(outs[index]),
                    Buffer.RUNNING: Block.poisoned(outs[index].numel() * 4),
                }
                for buffer, block in blocks.items():
                    call.blocks[buffer, index] = self.machine.keep(block)
            # Gradients exist from this point of the compute stream on.
            ready = self.machine.event(f"gradients of {unit.name!r} on rank {rank}", 1)
            self.machine.actor(rank, COMPUTE).items.append(EndItem(ready))
            vacant = (rank, call.slot) not in self._gathered
            program = self.compiled.program(unit.name, "reduce_scatter", rank, named, in_slot=vacant)
            after = [ready, *self._slot_users(rank, call.slot)] if program.in_slot else [ready]
            end, released = enqueue(self.machine, call, program, after, self.pieces, self._random)
            if program.in_slot:
                self._reduced[rank, call.slot] = end
            released.action = partial(free_gradients, call)
            wanted = {index: bytes_of(shards[position].contiguous()) for index, shards in expected.items()}
            end.action = partial(self._ended, call, wanted)
            self._outs[unit.name, rank] = outs

    def _ended(self, call: Call, wanted: Mapping[int, Bytes]) -> None:
        """Checks what a reduce-scatter leaves."""
        self.machine.memory.check_read(call)
        check_outputs(call, wanted)

    # Running -----------------------------------------------------------------------------------

    def replay(self, family: str, seed: int) -> int:
        """Executes what has been built from the start, and keeps it to be executed again.

        Parameters
        ----------
        family, seed
            Decide the interleaving; the payload and the cuts stay the same.

        Returns
        -------
        int
            Micro-operations executed.

        Raises
        ------
        PlanError
            If anything goes wrong; the message ends with family and seed.
        """
        self.machine.reset()
        self.machine.start(family, seed)
        try:
            self.machine.drive()
        except PlanError as error:
            raise PlanError(f"{error} [seed family {family}, seed {seed}]") from None
        return self.machine.clock

    def _go(self) -> Result:
        machine = self.machine
        machine.start(self.family, self.seed)
        before = machine.clock
        machine.drive()
        machine.forget()
        self._vacated.clear()
        self._reduced.clear()
        wholes = {}
        for (rank, _), gathered in self._gathered.items():
            unit = gathered.call.unit
            offset = self.compiled.arena.slots[gathered.call.slot].offset
            wholes[unit.name, rank] = {
                p.name: machine.memory.arenas[rank].tensor(p.dtype, offset + start, 0, 1, p.numel).view(p.shape).clone()
                for p, start in zip(unit.parameters, self.compiled.layouts[unit.name].offsets, strict=True)
            }
        trace = tuple(machine.trace or ())
        if machine.trace is not None:
            machine.trace.clear()
        return Result(machine.clock - before, wholes, dict(self._outs), trace)
