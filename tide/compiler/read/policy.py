"""What every reader needs of element types, shard dimensions and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tide.compiler.dtypes import itemsize
from tide.compiler.model import Mesh, ModelSpec, Parameter
from tide.errors import InputError
from tide.topology import Topology

#: Picks the dimension to shard from a parameter's name and shape; None means 0, as in FSDP2.
ShardDim = Callable[[str, tuple[int, ...]], Any]

#: Element types as the safetensors format spells them.
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

_FLOATING = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})

#: Types that weights are trained in; fp8 weights are for inference.
_DIFFERENTIABLE = frozenset({"float64", "float32", "bfloat16", "float16"})


def dtype_name(dtype: Any, what: str = "dtype") -> str:
    """Name of an element type given as a name, a torch or NumPy dtype, or a safetensors code.

    Parameters
    ----------
    dtype : object
        ``"bfloat16"``, ``"torch.bfloat16"``, ``torch.bfloat16`` and ``"BF16"`` are the same.
    what : str
        Names the tensor or option in the error.

    Raises
    ------
    InputError
        If no plan can carry the type.
    """
    name = str(dtype).removeprefix("torch.")
    name = _SAFETENSORS.get(name, name)
    itemsize(name, what)
    return name


def narrower(storage: str, reduced: str) -> str:
    """What travels: the gradient as it is, or as it is reduced where that is smaller, as with stock FSDP2."""
    return reduced if itemsize(reduced) < itemsize(storage) else storage


@dataclass(frozen=True, slots=True)
class Policy:
    """Mixed precision of a model that FSDP2 has not sharded yet.

    Field for field FSDP2's ``MixedPrecisionPolicy``, and such an object is taken in its place. The
    defaults are the usual recipe: gather in bfloat16, reduce in float32. Readers that get no policy
    behave as FSDP2 without one: nothing is cast, gradients are reduced as they come.

    Parameters
    ----------
    param_dtype : str, torch.dtype or None
        Type that the all-gather delivers; None keeps each parameter's own. Only floating-point
        parameters are cast.
    reduce_dtype : str, torch.dtype or None
        Type of the reduced gradient; None keeps the gradient's own.
    shard_dtype : str, torch.dtype or None
        Type of the resident shard where it differs from the type that was read, e.g. ``"float32"``
        for a bfloat16 checkpoint that is trained with float32 shards.
    """

    param_dtype: str | None = "bfloat16"
    reduce_dtype: str | None = "float32"
    shard_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "shard_dtype"):
            value = getattr(self, field)
            if value is not None:
                name = dtype_name(value, f"Policy.{field}")
                if name not in _FLOATING:
                    raise InputError(f"Policy.{field}: {name} is no floating-point type; parameters are not cast to it")
                object.__setattr__(self, field, name)

    @classmethod
    def of(cls, policy: Any) -> Policy:
        """The policy meant by what a user passes: None, a `Policy`, or FSDP2's ``MixedPrecisionPolicy``."""
        if policy is None:
            return cls(None, None)
        if isinstance(policy, cls):
            return policy
        if not (hasattr(policy, "param_dtype") and hasattr(policy, "reduce_dtype")):
            raise InputError(
                f"policy: expected tide's Policy or FSDP2's MixedPrecisionPolicy, got {type(policy).__name__}"
            )
        if getattr(policy, "param_dtype_override_fn", None) is not None:
            raise InputError(
                "policy: param_dtype_override_fn is resolved by fully_shard; "
                "pass the fully_shard-ed model, or a policy without it"
            )
        return cls(policy.param_dtype, policy.reduce_dtype)

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        dim: int = 0,
        trainable: bool | None = None,
        aliases: Sequence[str] = (),
    ) -> Parameter:
        """Parameter under this policy, by the rules of FSDP2's ``init_dtype_attrs``.

        ``trainable=None`` means that nobody said: then it is if its storage's type has gradients.
        """
        read_as = dtype_name(dtype, name)
        floating = read_as in _FLOATING
        shard = self.shard_dtype if floating and self.shard_dtype else read_as
        storage = self.param_dtype if floating and self.param_dtype else shard
        if trainable is None:
            trainable = storage in _DIFFERENTIABLE
        return Parameter(
            name=name,
            shape=tuple(shape),
            dim=dim,
            dtype=storage,
            shard_dtype=shard,
            grad_dtype=narrower(storage, self.reduce_dtype or storage) if trainable and floating else None,
            out_dtype=self.reduce_dtype or storage,
            aliases=tuple(aliases),
        )


def shard_dim_of(choose: ShardDim | None, name: str, shape: tuple[int, ...]) -> int:
    """Dimension that ``choose`` picks; it may answer with a number, None or a ``Shard`` placement."""
    if choose is None:
        return 0
    if not callable(choose):
        raise InputError(f"shard_dim: expected a callable (name, shape) -> dim, got {type(choose).__name__}")
    answer = choose(name, shape)
    if answer is None:
        return 0
    dim = getattr(answer, "dim", answer)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InputError(f"{name}: shard_dim answered {answer!r}; it must be a dim of shape {shape}, or None for dim 0")
    return dim + len(shape) if -len(shape) <= dim < 0 else dim


def shard_mesh(topology: Topology | None, mesh: Mesh | None, source: str) -> Mesh:
    """Shard groups for a model that carries none: ``mesh``, or one group of all of the topology's ranks."""
    if topology is None:
        raise InputError(
            f"{source}: says nothing of ranks; pass topology=tide.Topology(nodes=…, gpus_per_node=…), "
            "or a model that fully_shard has sharded"
        )
    if mesh is None:
        return Mesh((tuple(range(topology.world_size)),))
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"mesh: expected tide's Mesh of shard groups for {source}, got {type(mesh).__name__}; "
            "a DeviceMesh belongs to fully_shard"
        )
    return mesh


def label(unit: str) -> str:
    """What to call a unit in a message."""
    return f"unit {unit or 'root'!r}"


def check_ranks(spec: ModelSpec, topology: Topology) -> None:
    """Raise if a unit is sharded over ranks that the topology does not have."""
    checked: set[int] = set()
    for unit in spec.units:
        if id(unit.mesh) in checked:  # units of one model share their mesh
            continue
        checked.add(id(unit.mesh))
        low = min(min(group) for group in unit.mesh.groups)
        high = max(max(group) for group in unit.mesh.groups)
        if low < 0 or high >= topology.world_size:
            outside = low if low < 0 else high
            raise InputError(
                f"{label(unit.name)}: its mesh names rank {outside}, but the topology of {topology} has ranks "
                f"0..{topology.world_size - 1}; pass the topology that the model is sharded for"
            )
