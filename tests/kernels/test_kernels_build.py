"""Compilation for sm_90 without a GPU: that it works, and what came out."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from kernels_support import interpreted

from tide.kernels import build
from tide.kernels.build import Variant, compile_cubin, variants

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


def test_casts_round_to_nearest_even():
    (variant,) = [found for name, found in VARIANTS.items() if name.startswith("place_fp32_bf16")]
    assert variant.compile().count(r"cvt\.rn\.bf16x2\.f32") > 0


def test_names_are_unique():
    assert len(VARIANTS) == len(list(variants()))


def test_interpreted_kernel_cannot_be_compiled():
    kernel = interpreted().place.place_kernel
    with pytest.raises(TypeError, match="not a compilable kernel"):
        compile_cubin(kernel, {"table": "*i64"}, {})


def test_main_writes_files(tmp_path, monkeypatch, capsys):
    @triton.jit
    def double(x, COUNT: tl.constexpr):
        place = x + tl.arange(0, COUNT)
        tl.store(place, tl.load(place) * 2)

    variant = Variant("double", double, (("x", "*fp32"),), (("COUNT", 128),), 1)
    monkeypatch.setattr(build, "variants", lambda: [variant])
    build.main(["--out", str(tmp_path / "cubins")])
    assert (tmp_path / "cubins" / "double.cubin").read_bytes()[:4] == b"\x7fELF"
    assert ".target sm_90" in (tmp_path / "cubins" / "double.ptx").read_text()
    assert "registers" in capsys.readouterr().out
