"""Which gradients a unit reduces: the same on every rank, or an error.

FSDP2 reduces the gradients that a backward pass has made. Ranks that made others run programs that put other bytes
in the same places, and none of their waits need tell: sums would be wrong, and nobody would know. So a rank whose
gradients are others than the last time compares them with its peers before it reduces. All begin with the plan's,
which they have agreed upon, and a rank that changes alone waits in vain: as long as there is no error, all have the
same, and steps in which nothing changes cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tide.errors import PeerError
from tide.torch_types import to_torch
from tide.transport.agreement import agree, control_group, resolve_timeout

if TYPE_CHECKING:
    from tide.fsdp.unit import AttachedUnit

#: Types that are not the plan's, by parameter index.
_Others = dict[int, torch.dtype]


class AgreedGradients:
    """The gradients that all ranks of a unit's shard group reduce.

    Parameters
    ----------
    unit : AttachedUnit
        Bound, on every rank of the group.
    """

    def __init__(self, unit: AttachedUnit) -> None:
        self.unit = unit
        parameters = unit.spec.parameters
        self._planned = [None if p.grad_dtype is None else to_torch(p.grad_dtype) for p in parameters]
        self._last: tuple[tuple[int, ...], _Others] = (
            tuple(index for index, parameter in enumerate(parameters) if parameter.trainable),
            {},
        )

    def check(self, indices: tuple[int, ...], sent: Mapping[int, torch.Tensor]) -> None:
        """Compares the gradients with the peers' if they are others than the last time; collective then.

        Parameters
        ----------
        indices : tuple of int
            Parameters that have a gradient, in FSDP2's order.
        sent : mapping of int to Tensor
            Gradients as they are sent; those of an early part, which has been agreed upon, are left out.

        Raises
        ------
        PeerError
            If a peer reduces others, or does not come here within the deadline.
        """
        planned = self._planned
        others = {index: grad.dtype for index, grad in sent.items() if grad.dtype is not planned[index]}
        found = indices, others
        if found != self._last:
            self._compare(*found)
            self._last = found

    def _compare(self, indices: tuple[int, ...], others: _Others) -> None:
        unit, before = self.unit, self._last[0]
        names = [parameter.name for parameter in unit.spec.parameters]
        changes = [f"there is one of {names[index]}" for index in indices if index not in before]
        changes += [f"there is none of {names[index]}" for index in before if index not in indices]
        changes += [f"that of {names[index]} is {dtype}" for index, dtype in others.items()]
        facts = {f"gradient of {names[index]}": others.get(index, self._planned[index]) for index in indices}
        timeout = resolve_timeout()
        try:
            with control_group(unit.group.mesh_info.shard_process_group, timeout) as control:
                agree(facts, None, control, timeout, "gradients")
        except (PeerError, RuntimeError) as error:  # torch raises the other where a group cannot be made
            raise PeerError(
                f"unit {unit.name!r}: the gradients of rank {dist.get_rank()} are others than before "
                f"({'; '.join(changes[:3]) or 'in their types'}), and not on all ranks. Every rank must make the same "
                "ones: let its loss use all parameters, times 0 if need be, or call "
                f"set_reduce_scatter_unused_params(True) where torch has it. {error}"
            ) from error
