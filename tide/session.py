"""A plan in use on one rank: slots, tensors and the transport that moves the bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import GRADIENT_DTYPES
from tide.compiler.model import Parameter
from tide.compiler.shard import shard, shard_shape
from tide.compiler.steps import Buffer, Lane, Program, Signal, Step, Stream, Wait
from tide.errors import InputError, SlotError
from tide.torch_types import from_torch, to_torch
from tide.transport.base import Binding, Ticket, Transport


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    """What every call on a unit needs, looked up once: a training step calls a few microseconds at a time."""

    compiled: Compiled
    slot: int
    group: tuple[int, ...]
    position: int
    parameters: tuple[Parameter, ...]
    numels: tuple[int, ...]  # of this rank's shards
    shards: tuple[tuple[tuple[Buffer, int], torch.dtype, int], ...]  # key, type and elements of each
    #: Keys, elements and types of each gradient and its output; None for a frozen parameter's types.
    grads: tuple[tuple[tuple[Buffer, int], int, torch.dtype | None, tuple[Buffer, int], torch.dtype | None], ...]
    trainable: list[int]
    gather: Program
    scatter: Program | None  # of all trainable parameters, in a slot that nobody holds


class Session:
    """Runs the collectives of a compiled plan through a transport.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    transport : Transport
        Open, on the same plan.
    poison : bool
        Fill a slot with NaN when its unit is released, so that a stale read shows at once.
    """

    def __init__(self, compiled: Compiled, transport: Transport, poison: bool = False) -> None:
        self.compiled, self.transport, self.poison = compiled, transport, poison
        self.rank = transport.rank
        self._occupant: dict[int, str] = {}
        #: What each slot holds since the last all-gather into it, whether its unit has been released or not.
        self._content: dict[int, str] = {}
        self._claims: dict[str, Program] = {}
        self._units: dict[str, _Known] = {}

    def _known(self, unit: str) -> _Known:
        known = self._units.get(unit)
        if known is None or known.compiled is not self.compiled:
            group, position = self.compiled.group(unit, self.rank)
            parameters = self.compiled.spec.unit(unit).parameters
            numels = tuple(int(shard(p, len(group)).numel[position]) for p in parameters)
            known = self._units[unit] = _Known(
                self.compiled,
                self.compiled.arena.slot_of[unit],
                group,
                position,
                parameters,
                numels,
                tuple(((Buffer.SHARD, i), to_torch(p.shard_dtype), numels[i]) for i, p in enumerate(parameters)),
                tuple(
                    ((Buffer.GRAD, i), p.numel, None, (Buffer.OUT, i), None)
                    if p.grad_dtype is None
                    else ((Buffer.GRAD, i), p.numel, to_torch(p.grad_dtype), (Buffer.OUT, i), to_torch(p.out_dtype))
                    for i, p in enumerate(parameters)
                ),
                [i for i, p in enumerate(parameters) if p.trainable],
                self.compiled.program(unit, "all_gather", self.rank),
                self.compiled.program(unit, "reduce_scatter", self.rank)
                if any(p.trainable for p in parameters)
                else None,
            )
        return known

    def occupant(self, unit: str) -> str | None:
        """The unit that now holds the slot of ``unit``: itself, another, or None."""
        return self._occupant.get(self.compiled.arena.slot_of[unit])

    def storage(self, unit: str) -> list[torch.Tensor]:
        """Flat storage of each parameter of the unit."""
        count = len(self.compiled.spec.unit(unit).parameters)
        return [self.transport.storage(unit, index) for index in range(count)]

    def whole(self, unit: str) -> dict[str, torch.Tensor]:
        """Views of the unit's whole parameters in the arena."""
        return {
            p.name: flat[: p.numel].view(p.shape)
            for p, flat in zip(self.compiled.spec.unit(unit).parameters, self.storage(unit), strict=True)
        }

    def all_gather(self, unit: str, shards: Sequence[torch.Tensor]) -> Ticket:
        """Makes the unit whole in its slot.

        Parameters
        ----------
        unit : str
            Unit name.
        shards : sequence of Tensor
            This rank's shard of each parameter, dense, of the parameter's ``shard_dtype``; more elements than
            the shard has (FSDP2's padding) are ignored.

        Raises
        ------
        SlotError
            If another unit that has not been released holds the slot.
        InputError
            If a shard has the wrong type or size.
        """
        slot, known = self._free_slot(unit), self._known(unit)
        if len(shards) != len(known.parameters):
            raise InputError(f"unit {unit!r} has {len(known.parameters)} parameters, got {len(shards)} shards")
        tensors: dict[tuple[Buffer, int], torch.Tensor] = {}
        for (key, dtype, numel), tensor in zip(known.shards, shards, strict=True):
            if tensor.dtype is not dtype or tensor.numel() < numel or not tensor.is_contiguous():
                raise self._wrong_shard(known, key[1], tensor)
            tensors[key] = tensor.detach() if tensor.requires_grad else tensor
        self._content.pop(slot, None)
        ticket = self.transport.run(known.gather, Binding(unit, slot, known.group, tensors))
        self._occupant[slot] = self._content[slot] = unit
        return ticket

    def _wrong_shard(self, known: _Known, index: int, tensor: torch.Tensor) -> InputError:
        parameter = known.parameters[index]
        if from_torch(tensor.dtype) != parameter.shard_dtype:
            return InputError(
                f"{parameter.name}: the plan was compiled for a {parameter.shard_dtype} shard, got "
                f"{from_torch(tensor.dtype)}; compile the plan again"
            )
        if tensor.numel() < known.numels[index]:
            shape, rank = shard_shape(parameter, len(known.group), known.position), self.transport.names[self.rank]
            return InputError(
                f"{parameter.name}: rank {rank} holds {tensor.numel()} elements of its shard, the plan "
                f"expects {known.numels[index]} {shape}; compile the plan again"
            )
        return InputError(f"{parameter.name}: its shard is not contiguous; call .contiguous() on it")

    def claim(self, unit: str) -> Ticket:
        """Takes the unit's slot for data that the caller writes itself. Collective over the unit's shard group.

        When the ticket has been waited for, no peer reads the slot's previous content any more.

        Raises
        ------
        SlotError
            If another unit that has not been released holds the slot.
        """
        slot = self._free_slot(unit)
        group, position = self.compiled.group(unit, self.rank)
        if unit not in self._claims:  # kept, as transports prepare a program once
            team = self.compiled.context(unit, self.rank).team
            # Only pulls of the node's ranks read this rank's storage; what others put there has been waited for.
            pulled = self.compiled.options.route == "pull"
            peers = [peer for peer in team.grid[team.seat(position)[0]] if pulled and peer != position]
            steps: list[Step] = [Wait(peer, Lane.DONE) for peer in peers]
            steps += [Signal(peer, Lane.DONE) for peer in peers]
            self._claims[unit] = Program("claim", position, (Stream("claim", tuple(steps)),))
        self._occupant[slot] = unit
        self._content.pop(slot, None)
        return self.transport.run(self._claims[unit], Binding(unit, slot, group))

    def resume(self, unit: str) -> bool:
        """Takes a released unit's slot again with what its last all-gather left there.

        Moves nothing, so the shards must be what they were; every rank of the group must do the same.

        Returns
        -------
        bool
            False if the slot has been used since: gather the unit then.
        """
        slot = self.compiled.arena.slot_of[unit]
        if self._content.get(slot) != unit or self._occupant.get(slot) not in (None, unit):
            return False
        self._occupant[slot] = unit
        return True

    def _free_slot(self, unit: str) -> int:
        """Number of the unit's slot, which nobody else holds."""
        slot = self.compiled.arena.slot_of[unit]
        holder = self._occupant.get(slot)
        if holder not in (None, unit):
            raise SlotError(
                f"unit {unit!r} needs slot {slot}, which unit {holder!r} still holds; release that unit first, "
                "or compile the plan with more slots (slots=None gives every unit its own)"
            )
        return slot

    def release(self, unit: str) -> None:
        """Vacates the unit's slot: its storage may be overwritten by the next unit of the slot."""
        slot = self.compiled.arena.slot_of[unit]
        if self._occupant.get(slot) == unit:
            del self._occupant[slot]
            self.transport.vacated(unit)
            if self.poison:
                self._content.pop(slot, None)
                self.transport.poison(unit)

    def reduce_scatter(
        self,
        unit: str,
        grads: Mapping[int, torch.Tensor],
        outs: Mapping[int, torch.Tensor],
        scale: float = 1.0,
        divisor: float = 1.0,
    ) -> Ticket:
        """Sums whole gradients over the shard group into this rank's shards.

        Where the plan reuses slots, the unit's slot receives the gradients if nobody holds it (the unit, for one, has
        been released); what it held is gone then. If it is held, the call goes through the arena's spare areas, in
        smaller pieces. Either must be so on every rank, as it is where all issue the same calls in the same order.

        Parameters
        ----------
        unit : str
            Unit name.
        grads : mapping of int to Tensor
            Whole gradient by parameter index; every rank must give the same indices and element types. A type other
            than the parameter's ``grad_dtype`` takes a program of its own, made when it first comes. Gradients that
            are not contiguous are copied first.
        outs : mapping of int to Tensor
            Dense tensor of ``out_dtype`` for each shard of a gradient; as many elements as the shard or more.
        scale, divisor : float
            The sum is multiplied by ``scale``, then divided by ``divisor``, in float32.
        """
        if not math.isfinite(scale) or not math.isfinite(divisor) or divisor == 0:
            raise InputError(
                f"unit {unit!r}: cannot multiply by {scale} and divide by {divisor}; both must be finite, and the "
                "divisor not 0"
            )
        known = self._known(unit)
        tensors: dict[tuple[Buffer, int], torch.Tensor] = {}
        subset = sorted(grads)
        other: dict[int, str] = {}
        for index in subset:
            grad, out = grads[index], outs[index]
            grad_key, numel, grad_dtype, out_key, out_dtype = known.grads[index]
            if grad.dtype is not grad_dtype or out.dtype is not out_dtype or grad.numel() != numel:
                other[index] = self._other_dtype(known, index, grad, out)
            if grad.requires_grad or not grad.is_contiguous():
                grad = grad.detach().contiguous()
            tensors[grad_key] = grad
            tensors[out_key] = out.detach() if out.requires_grad else out
            if out_dtype is not torch.float32:
                tensors[Buffer.RUNNING, index] = torch.empty(
                    known.numels[index], dtype=torch.float32, device=out.device
                )
        if not subset:
            return Ticket()
        vacant = not self.compiled.options.slot_reuse or known.slot not in self._occupant
        usual = subset == known.trainable and not other
        program = known.scatter if vacant and usual else None
        if program is None:
            chosen = None if usual else subset
            program = self.compiled.program(unit, "reduce_scatter", self.rank, chosen, other, in_slot=vacant)
        if program.in_slot:
            self._content.pop(known.slot, None)
        binding = Binding(unit, known.slot, known.group, tensors, scale, divisor)
        return self.transport.run(program, binding)

    def _other_dtype(self, known: _Known, index: int, grad: torch.Tensor, out: torch.Tensor) -> str:
        """Type of a gradient that is not what the plan says.

        Raises
        ------
        InputError
            If it, or its output, cannot be taken.
        """
        parameter, (_, numel, _, _, out_dtype) = known.parameters[index], known.grads[index]
        if parameter.grad_dtype is None:
            raise InputError(f"{parameter.name}: frozen in the plan, yet it has a gradient; compile the plan again")
        if grad.numel() != numel:
            raise InputError(
                f"{parameter.name}: gradient of shape {tuple(grad.shape)}, but the parameter has {parameter.shape}"
            )
        if (dtype := from_torch(grad.dtype)) not in GRADIENT_DTYPES:
            raise InputError(
                f"{parameter.name}: cannot reduce a {dtype} gradient; supported are {', '.join(GRADIENT_DTYPES)}. "
                "Cast it"
            )
        if out.dtype is not out_dtype:
            raise InputError(
                f"{parameter.name}: the plan reduces into {parameter.out_dtype}, got an output of "
                f"{from_torch(out.dtype)}"
            )
        return dtype

    def new_outs(self, unit: str, indices: Sequence[int], device: torch.device | str) -> dict[int, torch.Tensor]:
        """Empty tensors for the reduced shards of the given parameters."""
        group, position = self.compiled.group(unit, self.rank)
        parameters = self.compiled.spec.unit(unit).parameters
        return {
            index: torch.empty(
                shard_shape(parameters[index], len(group), position),
                dtype=to_torch(parameters[index].out_dtype),
                device=device,
            )
            for index in indices
        }

    def close(self) -> None:
        """Closes the transport."""
        self.transport.close()
