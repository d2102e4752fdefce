"""A Llama in plain torch modules, of any size, also on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are those of Llama-3.1-70B."""

    dim: int = 8192
    hidden: int = 28672
    layers: int = 80
    heads: int = 64
    kv_heads: int = 8
    vocab: int = 128256


#: Small enough for CPU ranks; the vocabulary does not divide by four, so shards are uneven.
SMALL = LlamaConfig(dim=256, hidden=704, layers=4, heads=8, kv_heads=4, vocab=1001)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt gain of shape ``(dim,)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    """One decoder layer: grouped-query attention with rotary positions, then SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.dim // config.heads
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)
        self.input_layernorm = RMSNorm(config.dim)
        self.post_attention_layernorm = RMSNorm(config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same shape."""
        batch, length, dim = x.shape
        h = self.input_layernorm(x)
        q = self.q_proj(h).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q), _rotate(k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(batch, length, dim))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def _rotate(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float32), 500000.0 ** (-steps / half))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Llama(nn.Module):
    """Decoder-only language model.

    Parameters
    ----------
    config : LlamaConfig
        Sizes.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids ``(batch, length)`` to logits ``(batch, length, vocab)``."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits
