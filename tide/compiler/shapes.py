"""Parameter shapes of public models, from their published configurations.

Names are those of the models' reference implementations, with the experts of a layer as one tensor
per projection, as they are trained. ``model_parameters(name)`` is a list that `tide.compiler.read`
takes; ``scaled(name, divisor)`` is the same list small enough for the simulator, which carries real
bytes, with each parameter cut as unevenly among the ranks as in the full model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tide.errors import InputError

Shape = tuple[int, ...]
#: Names within a block (or the model) and shapes.
Rows = tuple[tuple[str, Shape], ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of one kind.

    Parameters
    ----------
    kind : str
        What to call them in a report.
    first : int
        Number of the first.
    count : int
        How many there are.
    rows : tuple of (str, tuple of int)
        Parameters of each.
    """

    kind: str
    first: int
    count: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of one model.

    Parameters
    ----------
    root, after : tuple of (str, tuple of int)
        Parameters outside of the blocks: those before and those after them.
    layers : str
        Name of the list of blocks.
    blocks : tuple of Blocks
        Kinds of blocks in the order in which they follow each other.
    """

    root: Rows
    layers: str
    blocks: tuple[Blocks, ...]
    after: Rows = ()

    @property
    def numel(self) -> int:
        """Parameters in all."""
        inside = sum(kind.count * _numel(kind.rows) for kind in self.blocks)
        return inside + _numel(self.root + self.after)


def model_parameters(name: str, *, blocks: int | None = None) -> dict[str, Shape]:
    """Every parameter of a public model with its shape.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    blocks : int, optional
        At most so many blocks of each kind, for tests.

    Examples
    --------
    >>> model_parameters("Llama-3.1-70B")["model.layers.12.self_attn.k_proj.weight"]
    (1024, 8192)
    """
    return dict(_expand(_model(name), blocks))


def scaled(
    name: str,
    divisor: int,
    *,
    worlds: Iterable[int] = range(1, 10),
    shard_dim: Callable[[str, Shape], int] | None = None,
    blocks: int | None = None,
) -> dict[str, Shape]:
    """Every parameter of a public model at reduced size, divided among ranks as the full one is.

    Two things make up the pattern of a sharded extent ``n`` over ``W`` ranks: the remainder
    ``n mod W``, which says how many rows the last shard lacks, and whether the shards are long enough
    that no rank is left without any (sure for every ``n > (W - 1) ** 2``). The reduced extent has the
    same remainder for every world size in ``worlds``, as it differs from ``n`` by a multiple of their
    least common multiple, and stays above that bound wherever ``n`` is; an ``n`` up to it is kept. So
    the shards of each world size are full, short and empty at the same ranks, and short by the same
    number of rows. The other extents set the length of a row and are divided by ``divisor``; an extent
    above one stays at least two, so that a dimension before the sharded one still makes several runs.

    Parameters
    ----------
    name : str
        A key of `MODELS`.
    divisor : int
        For the extents that are not sharded.
    worlds : iterable of int
        World sizes whose pattern must hold.
    shard_dim : callable, optional
        ``(name, shape) -> dim`` as for the readers; dim 0 by default.
    blocks : int, optional
        At most so many blocks of each kind.
    """
    sizes = sorted(set(worlds))
    if divisor < 1 or not sizes or sizes[0] < 1:
        raise InputError(f"scaled: divisor {divisor} and world sizes {sizes} must be at least 1")
    period, floor = math.lcm(*sizes), (sizes[-1] - 1) ** 2 + 1

    def sharded(extent: int) -> int:
        return extent if extent < floor else floor + (extent - floor) % period

    def along(extent: int) -> int:
        return max(min(extent, 2), extent // divisor)

    def reduce(parameter: str, shape: Shape) -> Shape:
        dim = 0 if shard_dim is None else shard_dim(parameter, shape)
        dim %= len(shape)
        return tuple(sharded(extent) if axis == dim else along(extent) for axis, extent in enumerate(shape))

    return {parameter: reduce(parameter, shape) for parameter, shape in _expand(_model(name), blocks)}


def _model(name: str) -> Architecture:
    try:
        return MODELS[name]
    except KeyError:
        close = difflib.get_close_matches(name, MODELS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(MODELS)}"
        raise InputError(f"no shapes for model {name!r}; {hint}") from None


def _expand(model: Architecture, limit: int | None) -> Iterator[tuple[str, Shape]]:
    yield from model.root
    for kind in model.blocks:
        for number in range(kind.first, kind.first + (kind.count if limit is None else min(limit, kind.count))):
            for name, shape in kind.rows:
                yield f"{model.layers}.{number}.{name}", shape
    yield from model.after


def _numel(rows: Rows) -> int:
    return sum(math.prod(shape) for _, shape in rows)


def _weights(prefix: str, table: dict[str, Shape], *, bias: bool = False) -> Rows:
    """A row for each weight and, with ``bias``, one for its bias (as long as the weight has rows)."""
    rows: list[tuple[str, Shape]] = []
    for name, shape in table.items():
        rows.append((f"{prefix}{name}.weight", shape))
        if bias:
            rows.append((f"{prefix}{name}.bias", shape[:1]))
    return tuple(rows)


def _attention(width: int, queries: int, keys: int, *, bias: bool = False) -> Rows:
    """Grouped-query attention: ``queries`` and ``keys`` are the widths of all query and all key heads."""
    return _weights(
        "self_attn.",
        {
            "q_proj": (queries, width),
            "k_proj": (keys, width),
            "v_proj": (keys, width),
            "o_proj": (width, queries),
        },
        bias=bias,
    )


def _gated_mlp(prefix: str, width: int, inner: int) -> Rows:
    return _weights(prefix, {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)})


def _experts(experts: int, width: int, inner: int) -> Rows:
    return (
        ("mlp.experts.w1", (experts, inner, width)),
        ("mlp.experts.w2", (experts, width, inner)),
        ("mlp.experts.w3", (experts, inner, width)),
    )


def _norms(width: int) -> Rows:
    return _weights("", {"input_layernorm": (width,), "post_attention_layernorm": (width,)})


def _language_model(width: int, vocabulary: int, *blocks: Blocks) -> Architecture:
    before = _weights("", {"model.embed_tokens": (vocabulary, width)})
    after = _weights("", {"model.norm": (width,), "lm_head": (vocabulary, width)})
    return Architecture(before, "model.layers", blocks, after)


def _llama(width: int, inner: int, layers: int) -> Architecture:
    """Llama 3.1: as many query heads as fit the width, eight key heads of 128."""
    block = _attention(width, width, 8 * 128) + _gated_mlp("mlp.", width, inner) + _norms(width)
    return _language_model(width, 128256, Blocks("dense", 0, layers, block))


def _qwen3_moe() -> Architecture:
    width, experts = 2048, 128
    block = (
        _attention(width, 32 * 128, 4 * 128)
        + _weights("self_attn.", {"q_norm": (128,), "k_norm": (128,)})
        + _norms(width)
        + _weights("mlp.", {"gate": (experts, width)})
        + _experts(experts, width, 768)
    )
    return _language_model(width, 151936, Blocks("mixture of experts", 0, 48, block))


def _deepseek_v3() -> Architecture:
    """Latent attention: 128 heads of 128 + 64 for queries and keys, 128 for values; ranks 1536 and 512."""
    width, heads, experts = 7168, 128, 256
    attention = _weights(
        "self_attn.",
        {
            "q_a_proj": (1536, width),
            "q_a_layernorm": (1536,),
            "q_b_proj": (heads * (128 + 64), 1536),
            "kv_a_proj_with_mqa": (512 + 64, width),
            "kv_a_layernorm": (512,),
            "kv_b_proj": (heads * (128 + 128), 512),
            "o_proj": (width, heads * 128),
        },
    ) + _norms(width)
    dense = attention + _gated_mlp("mlp.", width, 18432)
    sparse = (
        attention
        + _weights("mlp.", {"gate": (experts, width)})
        + _experts(experts, width, 2048)
        + _gated_mlp("mlp.shared_experts.", width, 2048)
    )
    return _language_model(width, 129280, Blocks("dense", 0, 3, dense), Blocks("mixture of experts", 3, 58, sparse))


def _gpt_oss(layers: int, experts: int) -> Architecture:
    width = inner = 2880
    block = (
        *_attention(width, 64 * 64, 8 * 64, bias=True),
        ("self_attn.sinks", (64,)),
        *_norms(width),
        *_weights("mlp.", {"router": (experts, width)}, bias=True),
        ("mlp.experts.mlp1_weight", (experts, 2 * inner, width)),
        ("mlp.experts.mlp1_bias", (experts, 2 * inner)),
        ("mlp.experts.mlp2_weight", (experts, width, inner)),
        ("mlp.experts.mlp2_bias", (experts, width)),
    )
    return _language_model(width, 201088, Blocks("mixture of experts", 0, layers, block))


def _wan22() -> Architecture:
    """One of the two expert transformers of the video model, each of which is trained on its own."""
    width, inner = 5120, 13824
    block: Rows = (("scale_shift_table", (1, 6, width)),)
    for attention in ("attn1.", "attn2."):
        square = (width, width)
        block += _weights(attention, {"to_q": square, "to_k": square, "to_v": square, "to_out.0": square}, bias=True)
        block += _weights(attention, {"norm_q": (width,), "norm_k": (width,)})
    block += _weights("", {"norm2": (width,), "ffn.net.0.proj": (inner, width), "ffn.net.2": (width, inner)}, bias=True)
    root: Rows = (("scale_shift_table", (1, 2, width)),)
    root += _weights("", {"patch_embedding": (width, 16, 1, 2, 2)}, bias=True)
    root += _weights(
        "condition_embedder.",
        {
            "time_embedder.linear_1": (width, 256),
            "time_embedder.linear_2": (width, width),
            "time_proj": (6 * width, width),
            "text_embedder.linear_1": (width, 4096),
            "text_embedder.linear_2": (width, width),
        },
        bias=True,
    )
    after = _weights("", {"proj_out": (64, width)}, bias=True)
    return Architecture(root, "blocks", (Blocks("video transformer", 0, 40, block),), after)


#: Public models by the name they were published under.
MODELS: dict[str, Architecture] = {
    "Llama-3.1-8B": _llama(4096, 14336, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80),
    "Llama-3.1-405B": _llama(16384, 53248, 126),
    "Qwen3-30B-A3B": _qwen3_moe(),
    "DeepSeek-V3": _deepseek_v3(),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "Wan2.2-A14B": _wan22(),
}
