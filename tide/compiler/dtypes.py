"""Element types by name, so that the compiler needs no torch."""

from __future__ import annotations

from tide.errors import InputError

#: Bytes per element of every type a plan can carry.
ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

#: Types a gradient may arrive in; they are summed in float32.
GRADIENT_DTYPES = ("bfloat16", "float16", "float32")


def itemsize(dtype: str, what: str = "tensor") -> int:
    """Bytes per element of ``dtype``; ``what`` names the tensor in the error."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise InputError(
            f"{what}: dtype {dtype} is not supported; supported are {', '.join(sorted(ITEMSIZE))}. "
            "Cast the tensor, or leave it out of the plan (FSDP2: ignored_params)"
        ) from None
