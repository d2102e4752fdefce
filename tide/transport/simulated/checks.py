"""What is checked where a collective begins and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from tide.compiler.model import Unit
from tide.compiler.steps import Buffer
from tide.errors import InputError, PlanError
from tide.torch_types import from_torch
from tide.transport.simulated.memory import UNWRITTEN, Bytes, Call
from tide.transport.simulated.parts import differing_bytes

#: Tensors of one rank by parameter index.
ByIndex: TypeAlias = "Mapping[int, torch.Tensor] | Sequence[torch.Tensor]"


def by_index(unit: Unit, tensors: Mapping[int, ByIndex], rank: int) -> dict[int, torch.Tensor]:
    """The tensors that were given for a rank."""
    if rank not in tensors:
        raise InputError(f"unit {unit.name!r}: nothing given for rank {rank}, which holds a shard of it")
    given = tensors[rank]
    return dict(given) if isinstance(given, Mapping) else dict(enumerate(given))


def check_tensor(what: str, tensor: torch.Tensor | None, dtype: str, numel: int) -> None:
    """Refuses a tensor that is missing, or not of the type and size of the plan."""
    if tensor is None:
        raise InputError(f"{what} is missing")
    if from_torch(tensor.dtype) != dtype or tensor.numel() != numel:
        raise InputError(
            f"{what} has {tensor.numel()} elements of {from_torch(tensor.dtype)}, the plan expects {numel} of {dtype}"
        )


def free_gradients(call: Call) -> None:
    """The caller may free gradients now: a later read is an error."""
    for (buffer, _), block in call.blocks.items():
        if buffer is Buffer.GRAD:
            block.marks.fill(UNWRITTEN)


def check_outputs(call: Call, wanted: Mapping[int, Bytes]) -> None:
    """Every byte of the reduced shards was written, and is the reference's."""
    for index, expected in wanted.items():
        block, parameter = call.blocks[Buffer.OUT, index], call.unit.parameters[index]
        where = f"unit {call.unit.name!r}, reduce_scatter, rank {call.rank}: parameter {parameter.name!r}"
        missing = block.marks != call.mark
        if missing.any():
            raise PlanError(f"{where}: byte {int(missing.argmax())} of the reduced shard was never written")
        if (wrong := differing_bytes(block.data, expected, parameter.out_dtype)) is not None:
            raise PlanError(f"{where}: bytes {wrong[0]}..{wrong[1]} of the reduced shard differ from the reference")
