"""Stand-ins for tensors that FSDP2 would copy gradients into, and that TIDE never makes.

`FlatGradients` takes the place of the reduce-scatter's rank-major input: it has its size and type but no
memory, and the copy into it only notes which gradients were to be copied. `WholeGradient` takes the place
of a gradient that is sharded along another dimension than 0, which FSDP2 would cut into chunks and
concatenate first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tide.errors import CapabilityError

if TYPE_CHECKING:
    from tide.fsdp.unit import AttachedUnit


class WholeGradient(torch.Tensor):
    """A whole gradient that can be chunked and concatenated without being touched.

    Parameters
    ----------
    grad : Tensor
        The gradient.
    shape : sequence of int, optional
        Shape to show, where it is not the gradient's.
    """

    grad_: torch.Tensor

    @staticmethod
    def __new__(cls, grad: torch.Tensor, shape: Sequence[int] | None = None) -> WholeGradient:
        shown = grad.shape if shape is None else torch.Size(shape)
        made: WholeGradient = torch.Tensor._make_wrapper_subclass(cls, shown, dtype=grad.dtype, device=grad.device)
        made.grad_ = grad
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.chunk:
            return _chunk(*args, **kwargs)
        if func is torch.cat:
            return _cat(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _copy_in():
            return _capture(args, kwargs or {})
        raise _unknown(func)


def _chunk(grad: WholeGradient, chunks: int, dim: int = 0) -> list[WholeGradient]:
    """As FSDP2 asks for it: equal chunks."""
    shape = list(grad.shape)
    shape[dim] //= chunks
    return [WholeGradient(grad.grad_, shape) for _ in range(chunks)]


def _cat(chunks: Sequence[WholeGradient], dim: int = 0) -> WholeGradient:
    """As FSDP2 asks for it: all chunks of one gradient."""
    shape = list(chunks[0].shape)
    shape[dim] *= len(chunks)
    return WholeGradient(chunks[0].grad_, shape)


@dataclass(slots=True)
class Record:
    """What became of a `FlatGradients`, shared by its views.

    Attributes
    ----------
    grads : list of Tensor
        What was to be copied, in that order.
    divided : float
        What FSDP2 divided the input by.
    kept : object
        Whatever must live as long.
    """

    grads: list[torch.Tensor] = field(default_factory=list)
    divided: float = 1.0
    kept: object = None


class FlatGradients(torch.Tensor):
    """The flat input of a reduce-scatter, without memory.

    FSDP2 keeps it until the gradients may be freed, and so do they live as long as it does.

    Parameters
    ----------
    shape : sequence of int
        As FSDP2 asks for it.
    dtype : torch.dtype
        Type of the reduction.
    device : torch.device
        Where the gradients are.
    record : Record, optional
        That of the tensor this one is a view of.
    """

    record: Record

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, record: Record | None = None
    ) -> FlatGradients:
        made: FlatGradients = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.record = Record() if record is None else record
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def capture(self, grads: Sequence[torch.Tensor]) -> None:
        """Notes the gradients instead of copying them."""
        self.record.grads = [grad.grad_ if isinstance(grad, WholeGradient) else grad for grad in grads]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in _copy_in():
            return _capture(args, kwargs)
        own: FlatGradients = args[0]
        if func is aten.view.default:
            shape = [int(size) for size in args[1]]
            if -1 in shape:
                shape[shape.index(-1)] = own.numel() // -math.prod(shape)
            return FlatGradients(shape, own.dtype, own.device, own.record)
        if func in (aten.div_.Tensor, aten.div_.Scalar):
            own.record.divided *= float(args[1])
            return own
        if func is aten.empty_like.default:  # a buffer in between, of another type
            return FlatGradients(own.shape, kwargs.get("dtype") or own.dtype, own.device)
        if func is aten.copy_.default and isinstance(args[1], FlatGradients):
            own.record.grads = args[1].record.grads
            return own
        raise _unknown(func)


class TideReduceScatter(ReduceScatter):
    """Reduce-scatter of a unit, as FSDP2 calls it: with a flat input that has no memory."""

    def __init__(self, unit: AttachedUnit) -> None:
        self.unit = unit
        self._pending: FlatGradients | None = None

    def reset(self) -> None:
        """Forgets a reduction that an exception has cut short."""
        self._pending = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input of the next reduction, then its output."""
        numel = int(size[0])
        pending, self._pending = self._pending, None
        if pending is not None and pending.numel() == numel * self.unit.owners:
            return self.unit.new_output(numel, pending, dtype, device)
        self._pending = FlatGradients((numel,), dtype, device)
        return self._pending

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sums the captured gradients into the output."""
        assert isinstance(input_tensor, FlatGradients)
        self.unit.reduce_scatter(output_tensor, input_tensor, op)


def _capture(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    out = kwargs["out"] if "out" in kwargs else args[3]
    out.capture(args[0])


def _copy_in() -> frozenset[Any]:
    from tide.fsdp import versions

    return versions.copy_in_operators()


def _unknown(func: Any) -> CapabilityError:
    return CapabilityError(
        f"FSDP2 of torch {torch.__version__} applies {func} to a gradient on its way to the reduction, which "
        "tide.attach does not know; call tide.detach(model) and report it"
    )
