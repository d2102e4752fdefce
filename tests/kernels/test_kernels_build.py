"""Compilation for sm_90 without a GPU: that it works, and what came out."""

from __future__ import annotations

import re

import pytest
import torch

from tide.kernels import accumulate, place
from tide.kernels.build import Variant, variants
from tide.kernels.launch import Tuning

VARIANTS = {variant.name: variant for variant in variants()}

# 16 bytes at once: into registers, or from global straight to shared memory.
WIDE_LOADS = r"ld\.global[\w.:]*\.v4\.b32|ld\.global[\w.:]*\.v2\.b64|cp\.async\.cg[^;]*, 0x10"
WIDE_STORES = r"st\.global[\w.:]*\.v4\.b32|st\.global[\w.:]*\.v2\.b64"


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str):
    variant = VARIANTS[name]
    built = variant.compile()
    assert built.cubin[:4] == b"\x7fELF"
    assert len(built.cubin) > 4000
    assert re.search(r"\.target sm_90a?\b", built.ptx)
    assert f".entry {built.name}(" in built.ptx
    assert built.shared <= 227 << 10
    # A few bytes for the call of the division; more would be spilled registers.
    assert built.stack <= 16
    assert built.count(WIDE_STORES) > 0
    constants = dict(variant.constants)
    if variant.kernel.__name__ == "switch_reduce_kernel":
        assert built.count(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.v4\.f32") > 0
        assert built.count(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.f32") > 0
    else:
        assert built.count(WIDE_LOADS) > 0
        # the narrow loop reads single elements
        size = constants["SRC"].primitive_bitwidth
        assert built.count(rf"ld\.global[\w.:]*\.b{size}\b") > 0
    if constants.get("FACTORS") == 2:
        assert built.count(r"div\.(rn|full)\.f32") == built.count(r"div\.rn\.f32") > 0
    else:
        assert built.count(r"div\.\w+\.f32") == 0
    assert built.count(r"\.ftz") == 0, "subnormal numbers must not become zero"
    assert built.count(r"fma\.rn") == 0 or constants.get("FACTORS") == 2, "sums and factors must not be fused"


def test_pipelined_loads_keep_a_tile_of_each_piece_in_flight():
    """The sum of eight pieces copies ahead: no wide load goes through a register on its way to the sum."""
    (variant,) = [found for name, found in VARIANTS.items() if name.startswith("accumulate_8xbf16_fp32_f1")]
    built = variant.compile()
    constants = dict(variant.constants)
    assert constants["STAGES"] >= 2
    assert built.shared >= (constants["STAGES"] - 1) * constants["BLOCK"] * 8 * 2
    assert built.count(r"cp\.async\.cg") >= 8
    assert built.count(r"ld\.global[\w.:]*\.v4\.b32") == 0


@pytest.mark.parametrize("dst", [torch.bfloat16, torch.float32], ids=str)
def test_steps_are_counted_after_a_barrier(dst: torch.dtype):
    """One thread says for its program that a step is done: its stores are visible, to copy engines too."""
    plain, chain = (place.variant_of(torch.float32, dst, place.DEFAULT, which)[0].compile() for which in (False, True))
    code = re.sub(r"//.*|\.loc.*", "", chain.ptx)
    count = r"bar\.sync\s+0;(?:(?!bar\.sync)[^:])*@%p\d+ atom\.global\.sys\.release\.add\.u32"
    (counting,) = re.findall(count, code)  # no label, and so no jump, between the two
    assert not re.search(r"\bst\.|\bcp\.", counting)
    assert chain.count(r"\batom\.") == 1
    assert plain.count(r"\batom\.") == 0
    assert (chain.shared, chain.stack) == (plain.shared, 0)


def bulk_variant(kernel: str) -> Variant:
    """What a reduce-scatter or an all-gather launches, with bulk copies."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if kernel == "place":
        return place.variant_of(fp32, bf16, place.DEFAULT)[0]
    return accumulate.variant_of(accumulate.Form(2, bf16, fp32, False), 1, accumulate.default_tuning(2))


@pytest.mark.parametrize("kernel", ["accumulate", "place"])
def test_bulk_copies(kernel: str):
    """A tile of each operand is one instruction, and no value goes through shared memory to change threads."""
    variant = bulk_variant(kernel)
    built, constants = variant.compile(), dict(variant.constants)
    operands = 2 if kernel == "accumulate" else 1
    load = r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global"  # the older name of it up to Triton 3.6
    # once in the loop, and once for each stage that is loaded ahead of it
    assert built.count(load) == operands * constants["STAGES"]
    assert constants["STAGES"] >= 3
    assert built.shared <= 227 << 10
    assert built.stack == 0
    assert built.count(r"st\.shared\.v4|st\.shared\.v2\.b64|stmatrix") == 0
    assert built.count(WIDE_STORES) > 0
    assert built.count(r"fma\.rn|\.ftz") == 0


def test_bulk_sum_widens_with_one_instruction():
    """In the loop over whole tiles, bf16 becomes fp32 by a shift or a mask of its pair, not by a conversion."""
    plain = accumulate.variant_of(accumulate.Form(2, torch.bfloat16, torch.float32, False), 1, Tuning(block=8192))
    bulk_built, built = bulk_variant("accumulate").compile(), plain.compile()
    assert bulk_built.count(r"cvt\.f32\.bf16") < built.count(r"cvt\.f32\.bf16")
