"""Blocks of public models with their real shapes, for training steps on a few GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tide.demo.llama import Block, LlamaConfig, RMSNorm


class Stack(nn.Module):
    """A few blocks in a row, ending in a mean: enough for a training step without vocabulary."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to a scalar loss."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class MoEBlock(nn.Module):
    """A Qwen3-30B-A3B layer: attention with query and key norms, 128 experts, 8 a token, grouped GEMMs."""

    def __init__(
        self, dim: int = 2048, heads: int = 32, kv_heads: int = 4, head_dim: int = 128, ffn: int = 768,
        experts: int = 128, top: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.top, self.experts = heads, kv_heads, head_dim, top, experts
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim), RMSNorm(dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, ffn, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, ffn))
        self.w3 = nn.Parameter(torch.empty(experts, ffn, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same shape."""
        batch, length, dim = x.shape
        h = self.input_layernorm(x)
        q = self.q_norm(self.q_proj(h).view(batch, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(h).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(batch, length, -1))
        return x + self._mixture(self.post_attention_layernorm(x).view(-1, dim)).view(batch, length, dim)

    def _mixture(self, h: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(h).float().softmax(-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.experts).cumsum(0).int()
        rows = h[order // self.top]
        gate = torch._grouped_mm(rows, self.w1.transpose(1, 2), ends)
        up = torch._grouped_mm(rows, self.w3.transpose(1, 2), ends)
        down = torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), ends)
        down = down * weights.flatten()[order].unsqueeze(1).to(down.dtype)
        return torch.zeros_like(h).index_add_(0, order // self.top, down)


class _WanAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.norm_q(self.to_q(x)), self.norm_k(self.to_k(context)), self.to_v(context))
        )
        out: torch.Tensor = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return out


class WanBlock(nn.Module):
    """A Wan2.2-A14B layer: self-attention, cross-attention to 512 text tokens, feed-forward, modulation."""

    def __init__(self, dim: int = 5120, ffn: int = 13824, heads: int = 40) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, dim))
        self.attn1, self.attn2 = _WanAttention(dim, heads), _WanAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.scale_shift_table.unbind(1)
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + self.attn1(h, h) * (1 + gate1)
        x = x + self.attn2(self.norm2(x), x[:, :512])
        h = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + self.down(F.gelu(self.up(h), approximate="tanh")) * (1 + gate2)


class EmbeddingBlock(nn.Module):
    """Embedding and head of Llama-3.1-70B, untied, in one unit."""

    def __init__(self, vocabulary: int = 128256, dim: int = 8192) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same shape, by way of the tokens that its first elements stand for."""
        h = self.embed((x[..., 0].abs() * 1000).long())
        return h * self.head(h).float().logsumexp(-1, keepdim=True).to(h.dtype)


@dataclass(frozen=True)
class Case:
    """A model's blocks as the benchmarks use them."""

    name: str
    make: Callable[[], nn.Module]
    count: int
    dim: int
    tokens: tuple[int, ...]

    def build(self, device: str) -> Stack:
        """The stack, random weights of float32 on ``device``; every rank has the same."""
        torch.manual_seed(1)
        with torch.device(device):
            stack = Stack([self.make() for _ in range(self.count)])
            with torch.no_grad():
                for name, parameter in stack.named_parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.02)
                    elif "norm" not in name:
                        parameter.zero_()
        return stack


CASES = {
    "llama": Case("Llama-3.1-70B", lambda: Block(LlamaConfig()), 4, 8192, (1024, 2048, 4096, 8192)),
    "qwen3": Case("Qwen3-30B-A3B", MoEBlock, 8, 2048, (4096, 16384)),
    "wan": Case("Wan2.2-A14B", WanBlock, 10, 5120, (4096, 16384)),
    "embedding": Case("embedding and head", EmbeddingBlock, 1, 8192, (16,)),
}
