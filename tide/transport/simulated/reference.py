"""What collectives must deliver, by arithmetic of its own: no program, no kernel, no table of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Parameter
from tide.errors import InputError
from tide.topology import Team
from tide.torch_types import to_torch
from tide.transport.simulated.parts import scale_and_divide

#: Values that conversions and sums must carry as torch carries them.
SPECIALS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 6e4, -6e4, 1e-7, 3e38, -3e38, 1e-40)

#: Kinds of random payload.
PAYLOADS = ("normal", "special")


def split(whole: torch.Tensor, dim: int, owners: int) -> list[torch.Tensor]:
    """Dense shards of a whole parameter, as FSDP2 cuts it; the last may be short or empty."""
    shards = [piece.contiguous() for piece in torch.chunk(whole, owners, dim)]
    empty = whole.narrow(dim, 0, 0).contiguous()
    return shards + [empty] * (owners - len(shards))


def random_tensor(shape: Sequence[int], dtype: str, seed: str, payload: str = "normal") -> torch.Tensor:
    """Random values of a type.

    Parameters
    ----------
    shape : sequence of int
        Shape.
    dtype : str
        Element type.
    seed : str
        Equal seeds give equal values.
    payload : str
        ``"normal"``, or ``"special"``: a third are NaN, Inf, zeros of both signs, large and tiny.
    """
    if payload not in PAYLOADS:
        raise InputError(f"no payload {payload!r}; there are {' and '.join(PAYLOADS)}")
    random = np.random.default_rng(Random(seed).getrandbits(64))
    kind = to_torch(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(tuple(shape), dtype=kind)
    if dtype == "bool":
        return torch.from_numpy(random.integers(0, 2, count).astype(np.bool_)).reshape(tuple(shape))
    if not kind.is_floating_point:
        raw = random.integers(0, 256, count * itemsize(dtype), dtype=np.uint8)
        return torch.from_numpy(raw).view(kind).reshape(tuple(shape))
    # Far apart in magnitude, so that float32 sums are rounded and show the order of their terms.
    spread = 12 if kind.itemsize < 2 or dtype == "float16" else 30
    values = np.ldexp(random.standard_normal(count, dtype=np.float32), random.integers(-spread, spread, count))
    if payload == "special" and count:
        where = random.integers(0, count, -(-count // 3))
        values[where] = random.choice(np.array(SPECIALS, dtype=np.float32), len(where))
    return torch.from_numpy(values).to(kind).reshape(tuple(shape))


def whole_of(shards: Sequence[torch.Tensor], parameter: Parameter) -> torch.Tensor:
    """The whole parameter in its storage type, from its shards in order of their owners."""
    kept = [shard for shard in shards if shard.numel()]
    whole = torch.cat(kept, parameter.dim) if kept else torch.empty(0, dtype=to_torch(parameter.shard_dtype))
    return whole.to(to_torch(parameter.dtype)).reshape(parameter.shape).contiguous()


def reference_reduce_scatter(
    grads: Sequence[torch.Tensor],
    parameter: Parameter,
    team: Team,
    scale: float = 1.0,
    divisor: float = 1.0,
    wire_dtype: str = "float32",
    by_switch: bool = False,
) -> list[torch.Tensor]:
    """Reduced shards of one parameter, summed in the order that the design documents.

    Each node sums its ranks' gradients in float32, in rank order. An owner on node ``n`` starts from
    its own node's sum and adds those of ``n - 1``, ``n - 2``, … (all modulo the number of nodes), rounded to
    ``wire_dtype``; then come scale and divisor, and the rounding to ``out_dtype``.

    Parameters
    ----------
    grads : sequence of Tensor
        Whole gradient of each position.
    parameter : Parameter
        Shape, dim and types.
    team : Team
        Positions of each node.
    scale, divisor : float
        Factors of the sum, in this order.
    wire_dtype : str
        Type in which sums travel between nodes.
    by_switch : bool
        The other nodes' sums come in groups, one sum a rank of the owner's node; each group is added up in rank
        order, as where the switch is stood in for, with zeros for ranks that hold none.

    Returns
    -------
    list of Tensor
        Dense shard of each position.
    """
    out: list[torch.Tensor] = [torch.empty(0)] * team.size
    with np.errstate(all="ignore"):
        sums: list[npt.NDArray[np.float32]] = []
        for row in team.grid:
            total = grads[row[0]].to(torch.float32, copy=True).numpy()
            for position in row[1:]:
                total = total + grads[position].to(torch.float32).numpy()
            sums.append(total)
        carried = [torch.from_numpy(np.asarray(x)).to(to_torch(wire_dtype)).float().numpy() for x in sums]
        for node, row in enumerate(team.grid):
            for local, position in enumerate(row):
                total = sums[node].copy()
                for group in _groups(carried, node, local, team.per_node) if by_switch else ():
                    total = total + sum(group[1:], start=group[0])
                for j in range(1, 1 if by_switch else team.nodes):
                    total = total + carried[(node - j) % team.nodes]
                scale_and_divide(total, scale, divisor)
                rounded = torch.from_numpy(np.asarray(total)).to(to_torch(parameter.out_dtype))
                out[position] = split(rounded, parameter.dim, team.size)[position]
    return out


def _groups(
    carried: Sequence[npt.NDArray[np.float32]], node: int, local: int, ranks: int
) -> Iterator[list[npt.NDArray[np.float32]]]:
    """What each rank of a node holds for one of them, group by group."""
    others = len(carried) - 1
    for first in range(0, others, ranks):
        backs = [first + (rank - local) % ranks for rank in range(ranks)]
        yield [carried[(node - 1 - j) % len(carried)] if j < others else np.zeros_like(carried[0]) for j in backs]


def error_bound(
    grads: Sequence[torch.Tensor],
    parameter: Parameter,
    scale: float = 1.0,
    divisor: float = 1.0,
    wire_dtype: str = "float32",
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The whole result in float64, and how far any float32 sum of fixed order may be from it.

    ``n`` gradients take ``n - 1`` roundings of partial sums that are bounded by the sum of magnitudes,
    one more for each factor, and one to the output's type. Sums that travel between nodes in a narrower type are
    rounded once more, by half a unit in its last place, and bounded by the sum of magnitudes too.

    Parameters
    ----------
    grads : sequence of Tensor
        Whole finite gradient of each position.
    parameter : Parameter
        For the type of the output.
    scale, divisor : float
        Factors of the sum.
    wire_dtype : str
        Type in which sums travel between nodes.
    """
    values = np.stack([grad.to(torch.float64).numpy() for grad in grads])
    factor = float(np.float32(scale)) / float(np.float32(divisor))
    exact = values.sum(axis=0) * factor
    magnitude = np.abs(values).sum(axis=0) * abs(factor)
    unit = 2.0**-24
    wire = torch.finfo(to_torch(wire_dtype))
    carried = 0.0 if wire_dtype == "float32" else wire.eps / 2 * (1 + len(grads) * unit)
    bound = ((len(grads) + 2) * unit + carried) * magnitude + len(grads) * wire.smallest_normal * wire.eps
    info = torch.finfo(to_torch(parameter.out_dtype))
    rounding = info.eps / 2 * (np.abs(exact) + bound) + info.smallest_normal * info.eps
    return exact, bound + rounding
