"""Ahead-of-time compilation of the kernels, without a GPU, and a look at what came out.

:func:`compile_cubin` compiles one kernel for one architecture. ``python -m tide.kernels.build --out DIR`` writes
the cubin and the PTX of every variant in :func:`variants`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time arguments: the unit of compilation, ahead of time and at run time.

    Parameters
    ----------
    name
        Unique among the variants; used for files.
    kernel
        The ``triton.jit`` function.
    signature
        Triton types of the run-time arguments, in order: ``(("table", "*i64"), …)``. Pointers among them must
        be on 16 bytes, which is what the compiler is told.
    constants
        Compile-time arguments, in the kernel's order.
    warps
        Warps of a program.
    """

    name: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int

    def compile(self, arch: int = 90) -> Cubin:
        """:func:`compile_cubin` of this variant."""
        return compile_cubin(self.kernel, dict(self.signature), dict(self.constants), arch, warps=self.warps)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Parameters
    ----------
    name
        Entry point in the cubin.
    cubin
        ELF image.
    ptx
        PTX text.
    arch
        Compute capability × 10.
    warps
        Warps of a program.
    shared
        Bytes of dynamic shared memory of a program.
    registers, stack
        Registers and bytes of local memory of a thread; -1 if the toolkit's ``cuobjdump`` is not at hand.
    """

    name: str
    cubin: bytes
    ptx: str
    arch: int
    warps: int
    shared: int
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        """Number of PTX instructions that match a regular expression."""
        return len(re.findall(pattern, self.ptx))


def compile_cubin(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int = 90,
    *,
    warps: int = 8,
) -> Cubin:
    """Compile a kernel for an architecture; no GPU and no driver is needed.

    Parameters
    ----------
    kernel
        A function decorated with ``triton.jit``.
    signature
        Triton type of each run-time argument (``"*i64"``, ``"fp32"``); pointers are taken to be on 16 bytes.
    constexprs
        Value of each compile-time argument.
    arch
        Compute capability × 10.
    warps
        Warps of a program.

    Raises
    ------
    TypeError
        If the kernel was defined under Triton's interpreter, where nothing can be compiled.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} is not a compilable kernel (defined while TRITON_INTERPRET=1 was set?)")
    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    ordered = {name: types[name] for name in kernel.arg_names}
    aligned: dict[tuple[int, ...], list[Any]] = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(ordered.values()) if kind.startswith("*")
    }
    source = ASTSource(kernel, ordered, dict(constexprs), aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    cubin = compiled.asm["cubin"]
    registers, stack = _usage(cubin)
    return Cubin(
        compiled.metadata.name,
        cubin,
        compiled.asm["ptx"],
        arch,
        warps,
        compiled.metadata.shared,
        registers,
        stack,
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump reads them from the image."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except (AttributeError, RuntimeError):
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def variants() -> Iterator[Variant]:
    """The variants that the transports use: each pair of types, and sums of 1 to 16 pieces and of more."""
    from tide.kernels import accumulate, place, switch_reduce

    yield from place.variants()
    yield from accumulate.variants()
    yield from switch_reduce.variants()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile every variant and write it."""
    parser = argparse.ArgumentParser(prog="python -m tide.kernels.build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the cubins and PTX files")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for variant in variants():
        built = variant.compile(options.arch)
        (options.out / f"{variant.name}.cubin").write_bytes(built.cubin)
        (options.out / f"{variant.name}.ptx").write_text(built.ptx)
        print(
            f"{variant.name:<48} {len(built.cubin):>7} B  {built.registers:>3} registers  "
            f"{built.stack:>4} B stack  {built.shared:>6} B shared",
            flush=True,
        )


if __name__ == "__main__":
    main()
