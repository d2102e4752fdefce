"""The flat output that FSDP2 wants a unit's reduced gradients in: one shard after the other, each padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.shard import padded_numel, shard
from tide.errors import AttachError


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places of the gradients of these parameters."""

    indices: tuple[int, ...]
    sizes: list[int]  # elements, padding included
    numel: int
    pads: list[tuple[int, int]]  # [begin, end)


class FlatOutput:
    """Makes and divides the flat outputs of one unit's reductions.

    Parameters
    ----------
    unit : Unit
        The plan's.
    owners : int
        Ranks that the parameters are sharded over.
    position : int
        This rank's among them.

    Attributes
    ----------
    gradient_bytes : list of int
        Bytes of a rank's shard of each parameter's gradient, as it is sent; 0 for a frozen one.
    """

    def __init__(self, unit: Unit, owners: int, position: int) -> None:
        self.name, parameters = unit.name, unit.parameters
        # Elements that FSDP2 reserves for this rank's shard of each gradient, and how many of them are padding.
        self._reserved = [padded_numel(parameter, owners) // owners for parameter in parameters]
        self._padding = [
            reserved - int(shard(parameter, owners).numel[position])
            for reserved, parameter in zip(self._reserved, parameters, strict=True)
        ]
        self.gradient_bytes = [
            reserved * itemsize(parameter.grad_dtype) if parameter.grad_dtype is not None else 0
            for reserved, parameter in zip(self._reserved, parameters, strict=True)
        ]
        self._last = self._layout(tuple(range(len(parameters))))

    def _layout(self, indices: tuple[int, ...]) -> _Layout:
        pads, end = [], 0
        for index in indices:
            end += self._reserved[index]
            if padding := self._padding[index]:
                pads.append((end - padding, end))
        return _Layout(indices, [self._reserved[index] for index in indices], end, pads)

    def _layout_of(self, indices: tuple[int, ...]) -> _Layout:
        """As a rule that of the last call."""
        if indices != self._last.indices:
            self._last = self._layout(indices)
        return self._last

    def new(self, indices: tuple[int, ...], numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for reduced gradients: zero where FSDP2 pads, since its hooks and all-reduces see it."""
        output = torch.empty(numel, dtype=dtype, device=device)
        if pads := self._layout_of(indices).pads:  # not all of it: clearing takes as long as a tenth of the reduction
            torch._foreach_zero_([output[begin:end] for begin, end in pads])
        return output

    def lay_out(
        self, indices: tuple[int, ...], grads: Sequence[torch.Tensor | None], output: torch.Tensor
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """What is reduced, and the place of each result in ``output``, by parameter index.

        Parameters
        ----------
        indices : tuple of int
            All parameters that have a place, in FSDP2's order.
        grads : sequence of Tensor or None
            Their whole gradients; None is left out.
        output : Tensor
            Flat, as FSDP2 wants it.

        Raises
        ------
        AttachError
            If FSDP2 wants more or fewer elements than the plan has.
        """
        layout = self._layout_of(indices)
        if layout.numel != output.numel():
            raise AttachError(
                f"unit {self.name!r}: FSDP2 wants {output.numel()} elements of reduced gradients, the plan has "
                f"{layout.numel}; call tide.detach(model) and report it"
            )
        sent, outs, widest = {}, {}, output.itemsize
        for index, grad, place in zip(indices, grads, output.split_with_sizes(layout.sizes), strict=True):
            if grad is not None:
                # Copies, where they are needed, are made here: they are kept as long as the gradients are.
                if grad.itemsize > widest:
                    grad = grad.to(output.dtype)
                sent[index] = grad if grad.is_contiguous() else grad.contiguous()
                outs[index] = place
        return sent, outs
