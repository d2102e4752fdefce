"""Models of transformers and diffusers for the parity suite: narrow, random weights, sharded as their users do.

Both libraries are imported by the ranks that build from them, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fsdp_cases import MIXED, all_on_tide
from fsdp_parity import FEW, Case, Side, run_chosen
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BF16, FP32 = torch.bfloat16, torch.float32
#: Does not divide by 2 or 4, as the experts and the hidden size below.
VOCABULARY = 131
#: More than the slots that take turns.
DEPTH = 3
WORLDS = (2, 4)
#: Where all is summed in float32, but on four ranks in another order.
WIDE: dict[str, Any] = {"worlds": WORLDS, "bounded": (4,), "check": all_on_tide}
#: Of two that divide their parameters alike, on four ranks only the other one runs.
PAIR: dict[str, Any] = {"worlds": (2,), "check": all_on_tide}


# transformers ----------------------------------------------------------------------------------


def causal(side: Side, step: int, rank: int) -> list[torch.Tensor]:
    """Next-token loss of one batch, as the model computes it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    loss = side.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach()]


def by_layer(model: Any, **options: Any) -> Any:
    """Each decoder layer, then the root: embedding, norm and head stay with the root."""
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MIXED, **options)
    return fully_shard(model, mp_policy=MIXED, **options)


def by_part(model: Any) -> Any:
    """Embedding, each decoder layer, norm and head in one group, then the root, which is left with nothing."""
    fully_shard(model.model.embed_tokens, mp_policy=MIXED)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MIXED)
    fully_shard([model.model.norm, model.lm_head], mp_policy=MIXED, reshard_after_forward=False)
    return fully_shard(model, mp_policy=MIXED)


def llama(**options: Any) -> Any:
    """Grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 171,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=DEPTH, max_position_embeddings=64, **sizes, **options)
    return LlamaForCausalLM(config).train()


def tied(world: int) -> Any:
    """The head is the embedding: one parameter of the root."""
    model = by_layer(llama(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def checkpointed(world: int) -> Any:
    """Activation checkpointing as transformers turns it on."""
    model = llama()
    # the old name is deprecated from transformers 5.24 on
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return by_part(model)


def qwen3_moe(experts: str | None = None) -> Any:
    """Six experts a layer in two 3-D parameters, two of them for each token, with the router's own loss."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=171,
        moe_intermediate_size=24,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        max_position_embeddings=64,
        experts_implementation=experts,
    )
    model = Qwen3MoeForCausalLM(config).train()
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (6, 48, 64)
    return model


def experts_apart(world: int) -> Any:
    """Each layer's experts as a unit within the layer's."""
    model = qwen3_moe("eager")
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mp_policy=MIXED)
    return by_part(model)


# diffusers -------------------------------------------------------------------------------------


def denoise(dtype: torch.dtype) -> Callable[[Side, int, int], list[torch.Tensor]]:
    """One step of flow matching on a clip of a few latents: 16 tokens."""

    def step(side: Side, step: int, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        latents, noise = torch.randn(2, 2, 4, 2, 8, 4, generator=generator)
        text = torch.randn(2, 7, 24, generator=generator)
        sigma = torch.rand(2, generator=generator)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        velocity = side.model(
            noisy.to(dtype), timestep=sigma * 1000, encoder_hidden_states=text.to(dtype), return_dict=False
        )[0]
        loss = nn.functional.mse_loss(velocity.float(), noise - latents)
        loss.backward()
        return [loss.detach()]

    return step


def wan() -> Any:
    """Text to video, with the modulation tables and the normalisation across heads."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=171,
        num_layers=DEPTH,
        rope_max_seq_len=32,
    ).train()


def by_block(model: Any, policy: MixedPrecisionPolicy) -> Any:
    """Each block, then the root."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def kept_apart(world: int) -> Any:
    """What diffusers keeps in float32 has a policy of its own, where it is a module with parameters."""
    model = wan()
    kept = MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)
    for block in model.blocks:
        fully_shard(block.norm2, mp_policy=kept)
    fully_shard(model.condition_embedder.time_embedder, mp_policy=kept)
    return by_block(model, MIXED)


class Lora(nn.Module):
    """A frozen projection and float32 adapters, as peft computes them."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.up(self.down(x.to(self.down.weight.dtype))).to(out.dtype)


def adapted(world: int) -> Any:
    """Loaded in bf16 but for what diffusers keeps in float32, frozen, and float32 adapters: two types in a group."""
    model = wan().requires_grad_(False)
    for name, param in model.named_parameters():
        if not any(part in name.split(".") for part in model._keep_in_fp32_modules):
            param.data = param.data.to(BF16)
    assert {param.dtype for param in model.blocks[0].parameters()} == {BF16, FP32}
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.to_q, attention.to_v = Lora(attention.to_q), Lora(attention.to_v)
    return by_block(model, MixedPrecisionPolicy(reduce_dtype=FP32, cast_forward_inputs=False))


# The table -------------------------------------------------------------------------------------

LIBRARIES = ("transformers", "diffusers")
CASES = (
    Case("Llama", lambda world: by_layer(llama()), causal, **PAIR),
    Case("Llama, tied", tied, causal, **WIDE),
    Case("Llama, by part, checkpointed", checkpointed, causal, **WIDE),
    Case("Qwen3-MoE", lambda world: by_layer(qwen3_moe()), causal, **WIDE),
    Case("Qwen3-MoE, experts apart", experts_apart, causal, **PAIR),
    Case("Wan", lambda world: by_block(wan(), MIXED), denoise(FP32), **PAIR),
    Case("Wan, kept in float32", kept_apart, denoise(FP32), **WIDE),
    Case("Wan in bf16 with adapters", adapted, denoise(BF16), **WIDE),
)


def run_models(rank: int, world: int, told: bool = False) -> dict[str, str]:
    """Runs them all in the same processes, as the imports take longest; returns what went wrong, by name."""
    return run_chosen([case for case in CASES if world in case.worlds], rank, world, FEW, told)


if __name__ == "__main__":  # python tests/fsdp/fsdp_real_models.py 2
    import sys

    from fsdp_real_models import run_models as run

    from ranks import run_ranks

    found = run_ranks(run, int(sys.argv[1]), True, timeout=280, env={"HF_HUB_OFFLINE": "1"})[0]
    print("\n".join(f"{name}: {text}" for name, text in found.items()) or "all equal")
