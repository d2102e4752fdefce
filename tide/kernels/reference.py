"""What the kernels compute, in PyTorch: for tests, and the arithmetic of the host transport.

Works on CPU and CUDA tensors, strided as they like. Three rules hold for the kernels too:

* Sums are made in fp32, piece 0 first: ``((piece[0] + piece[1]) + piece[2]) + …``, then ``base + sum``, then
  ``* scale``, then ``/ divisor``, each rounded to nearest even. A factor of 1 is left out, which changes no bit.
* A result is rounded once more, to nearest even, if it is stored as bf16 or fp16; too large becomes infinite.
* NaN and infinities go through as IEEE arithmetic takes them. Which NaN comes out is not defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tide.errors import InputError

#: Elements that are summed at a time: 1 MiB in fp32, so that a running sum stays in a core's cache.
CHUNK = 1 << 18

#: An operation after the sum and its second operand.
_Factor = tuple[Callable[..., torch.Tensor], torch.Tensor | float]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def place_reference(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Cast ``src`` into ``dst``, which may be strided; one run of a block is one row.

    Parameters
    ----------
    src, dst
        Same shape, usually (runs × count); no overlap. Any types; between floating-point types, to nearest even.
    """
    if src.shape != dst.shape:
        raise InputError(f"source of shape {tuple(src.shape)} for a destination of {tuple(dst.shape)}")
    dst.copy_(src)


def accumulate_reference(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    base: torch.Tensor | None = None,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """``out = (base + (pieces[0] + pieces[1] + …)) * scale / divisor``, in fp32 and in this order.

    Parameters
    ----------
    pieces
        At least one; fp32, bf16 or fp16, all of the shape of ``out``. Types may differ.
    out
        fp32, bf16 or fp16. May be the same memory as ``base`` or one of the pieces, element for element.
    base
        fp32, of the shape of ``out``.
    scale, divisor
        Taken as fp32.
    """
    if not pieces:
        raise InputError("nothing to accumulate: no piece was given")
    inputs = [*pieces] if base is None else [*pieces, base]
    for tensor in (out, *inputs):
        if tensor.shape != out.shape:
            raise InputError(f"piece of shape {tuple(tensor.shape)} for an output of {tuple(out.shape)}")
        if tensor.dtype not in _FLOATS:
            raise InputError(f"cannot accumulate {tensor.dtype}; only {', '.join(map(str, _FLOATS))}")
    if base is not None and base.dtype != torch.float32:
        raise InputError(f"base must be float32, not {base.dtype}")
    # The running sum lives in `out` itself where nothing read later can lie there: one pass over memory less.
    # (Piece 0 has been read when the first sum is written.)
    direct = out.dtype == torch.float32 and not any(_overlap(out, tensor) for tensor in inputs[1:])
    factors = _factors(scale, divisor, out.device)
    scratch = None if direct else torch.empty(min(CHUNK, out.numel()), dtype=torch.float32, device=out.device)
    for target, *parts in _chunks([out, *inputs]):
        total = target if scratch is None else scratch[: target.numel()].view(target.shape)
        total.copy_(parts[0])
        for part in parts[1 : len(pieces)]:
            total.add_(part)
        if base is not None:
            torch.add(parts[-1], total, out=total)
        for operation, factor in factors:
            operation(total, factor, out=total)
        if scratch is not None:
            target.copy_(total)


def switch_reduce_reference(
    partials: Sequence[torch.Tensor],
    out: torch.Tensor,
    base: torch.Tensor | None = None,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """Sum of every rank's fp32 partial: what one ``multimem.ld_reduce`` returns, added to ``base`` and scaled.

    The switch does not state its order of summation, so the hardware's result may differ in the last bits;
    here it is the ranks' order.

    Parameters
    ----------
    partials
        One of each rank, fp32, of the shape of ``out``.
    out, base, scale, divisor
        As in :func:`accumulate_reference`.
    """
    for tensor in partials:
        if tensor.dtype != torch.float32:
            raise InputError(f"the switch sums float32; it would return a sum of {tensor.dtype} rounded to that")
    accumulate_reference(partials, out, base, scale, divisor)


def fold_divisor(scale: float, divisor: float) -> tuple[float, float]:
    """Scale and divisor of the same result with a divisor of 1, where there is one.

    Division by a power of two is the same as multiplication by its inverse, bit for bit.
    """
    if divisor == 0.0 or math.isnan(divisor):
        raise InputError(f"divisor must be a number other than 0, got {divisor}")
    mantissa, exponent = math.frexp(divisor)
    if scale == 1.0 and mantissa == 0.5 and abs(exponent) < 126:
        return 1.0 / divisor, 1.0
    return scale, divisor


def _factors(
    scale: float, divisor: float, device: torch.device
) -> list[tuple[Callable[..., torch.Tensor], torch.Tensor | float]]:
    """The operations after the sum."""
    scale, divisor = fold_divisor(scale, divisor)
    factors: list[_Factor] = []
    if scale != 1.0:
        factors.append((torch.mul, scale))
    if divisor != 1.0:
        # As a tensor on the device: CUDA multiplies by the inverse of a number, which rounds differently.
        factors.append((torch.div, torch.full((), divisor, dtype=torch.float32, device=device)))
    return factors


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if one.numel() == 0 or other.numel() == 0 or one.device != other.device:
        return False
    (start, end), (first, last) = (_extent(tensor) for tensor in (one, other))
    return start < last and first < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors, all of one shape, in parts of at most `CHUNK` elements, as views."""
    shape = tensors[0].shape
    if tensors[0].numel() <= CHUNK:
        if tensors[0].numel():
            yield tensors
    elif len(shape) > 1 and all(tensor.is_contiguous() for tensor in tensors):
        yield from _chunks([tensor.view(-1) for tensor in tensors])
    else:
        inner = tensors[0].numel() // shape[0]  # elements of one index of the first dimension
        if inner > CHUNK:
            for index in range(shape[0]):
                yield from _chunks([tensor[index] for tensor in tensors])
        else:
            step = CHUNK // inner
            for start in range(0, shape[0], step):
                yield [tensor[start : start + step] for tensor in tensors]
