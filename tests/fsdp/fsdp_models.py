"""Small models for the parity suite; odd sizes, so that shards are uneven, empty and misaligned."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

#: Where the suite trains: tests/gpu/parity_ranks.py sets it to "cuda" before anything is made.
DEVICE = "cpu"


class Block(nn.Module):
    """Norm, two projections, residual; 13 rows do not divide by 2, 3 or 4, and a bias of 2 leaves ranks empty."""

    def __init__(self, width: int = 12, hidden: int = 13, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.gate = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y * self.gate[0] + self.gate[1] * 0.1


class Stack(nn.Module):
    """Token embedding, blocks, head; the head may be tied to the embedding."""

    def __init__(self, depth: int = 3, tied: bool = False, dtype: torch.dtype | None = None, hidden: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12, dtype=dtype)
        self.layers = nn.ModuleList(Block(hidden=hidden, dtype=dtype) for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False, dtype=dtype)
        self.depth_used = depth
        self.segment = 0
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        layers = list(self.layers)[: self.depth_used]
        if self.segment:
            for first in range(0, len(layers), self.segment):
                run = nn.Sequential(*layers[first : first + self.segment])
                x = checkpoint(run, x, use_reentrant=False)
        else:
            for layer in layers:
                x = layer(x)
        return self.head(x)


class Experts(nn.Module):
    """Three-dimensional expert weights, every token through every expert, weighted."""

    def __init__(self, experts: int = 4, width: int = 12, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = torch.bmm(torch.tanh(torch.bmm(flat.expand(self.up.shape[0], *flat.shape), self.up)), self.down)
        return (out * weights.reshape(-1, weights.shape[-1]).t().unsqueeze(-1)).sum(0).view_as(x)


class MoEBlock(nn.Module):
    """A dense part, a router and experts."""

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.dense = Block(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        return x + self.experts(x, torch.softmax(self.router(x), dim=-1))


class MoE(nn.Module):
    """Embedding, MoE blocks, head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(MoEBlock() for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Lora(nn.Module):
    """A frozen projection and two small trainable ones."""

    def __init__(self, width: int = 12, rank: int = 2, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False, dtype=dtype).requires_grad_(False)
        self.a = nn.Linear(width, rank, bias=False)
        self.b = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x)))


class LoraStack(nn.Module):
    """Blocks with frozen parameters, and a frozen embedding: the first block's input needs no gradient."""

    def __init__(self, depth: int = 3, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12).requires_grad_(False)
        self.layers = nn.ModuleList(Lora(dtype=dtype) for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Towers(nn.Module):
    """Two towers with frozen embeddings: each first block stays whole until its backward pass has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = LoraStack(), LoraStack()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.left(tokens) + self.right(tokens.flip(-1))


class TpBlock(nn.Module):
    """Two projections for tensor parallelism, column- then row-wise, and a norm beside them."""

    def __init__(self, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TpStack(nn.Module):
    """Blocks for tensor parallelism between an embedding and a head without."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(TpBlock() for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Twice(nn.Module):
    """The same blocks run twice in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x)


class Deep(nn.Module):
    """Blocks that hold a wrapped module of their own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Linear(12, 12)) for _ in range(depth))
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data(step: int, rank: int, count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of a step: tokens and targets, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)

    def draw() -> torch.Tensor:
        return torch.randint(17, (3, 5), generator=generator).to(DEVICE)

    return [(draw(), draw()) for _ in range(count)]
