"""What a reader gives to the compiler: parameters, the units they travel in, the ranks that shard them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tide.compiler.dtypes import GRADIENT_DTYPES, itemsize
from tide.errors import InputError

#: Bytes of the largest parameter; larger shapes are mistakes, and would take for ever to schedule.
LARGEST = 1 << 44


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter as its shard group sees it.

    Parameters
    ----------
    name : str
        Fully qualified name.
    shape : tuple of int
        Shape of the whole; of the local tensor where tensor parallelism has already cut it.
    dim : int
        Tensor dimension that is sharded.
    dtype : str
        Element type of the storage, i.e. what compute reads and the all-gather delivers.
    shard_dtype : str
        Element type of the resident shard; cast to ``dtype`` as it is placed.
    grad_dtype : str or None
        Element type of the gradient that the reduce-scatter reads; None for a frozen parameter.
    out_dtype : str
        Element type of the reduced shard of the gradient.
    aliases : tuple of str
        Other names of the same tensor (tied parameters travel once).

    Raises
    ------
    InputError
        For scalars, an unsupported dtype, or a dim outside the shape.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    dtype: str = "bfloat16"
    shard_dtype: str = "float32"
    grad_dtype: str | None = "bfloat16"
    out_dtype: str = "float32"
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.shape:
            raise InputError(
                f"{self.name}: a scalar has no dimension to shard, and FSDP2 refuses it too; "
                "make it 1-D (shape (1,)) or ignore it"
            )
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.shape):
            raise InputError(f"{self.name}: shape {self.shape} must be whole numbers of at least 0")
        if not 0 <= self.dim < len(self.shape):
            raise InputError(
                f"{self.name}: cannot shard dim {self.dim} of shape {self.shape}; "
                f"dim must be in 0..{len(self.shape) - 1}"
            )
        widest = max(itemsize(self.dtype, self.name), itemsize(self.shard_dtype, self.name))
        if max(self.numel, *self.shape) * widest > LARGEST:  # one without elements can have a dimension that large
            raise InputError(
                f"{self.name}: shape {self.shape} takes more than {LARGEST >> 40} TiB, the largest parameter that a "
                "plan can hold; check the shape"
            )
        for role, dtype in (("gradient", self.grad_dtype), ("reduced gradient", self.out_dtype)):
            if self.grad_dtype is not None and dtype not in GRADIENT_DTYPES:
                raise InputError(
                    f"{self.name}: {role} dtype {dtype} is not supported; "
                    f"supported are {', '.join(GRADIENT_DTYPES)}. Freeze the parameter or cast it"
                )

    @property
    def trainable(self) -> bool:
        """Whether a gradient is reduced for it."""
        return self.grad_dtype is not None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter in storage."""
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The shard axis: disjoint groups of world ranks, each of which holds one copy of the unit.

    Parameters
    ----------
    groups : tuple of tuple of int
        World ranks of each group in order of their shard index. One group for plain FSDP; several
        for HSDP (one a replica), tensor parallelism (one a TP rank) and expert meshes.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for group in self.groups for rank in group]
        if not ranks or any(not group for group in self.groups):
            raise InputError("Mesh: a shard group without ranks")
        if len(set(ranks)) != len(ranks):
            raise InputError(f"Mesh: a rank stands in two shard groups: {self.groups}")
        if len({len(group) for group in self.groups}) != 1:
            raise InputError(f"Mesh: shard groups differ in size: {[len(g) for g in self.groups]}")

    @property
    def size(self) -> int:
        """Ranks in a group, i.e. the number of shards."""
        return len(self.groups[0])

    def locate(self, rank: int) -> tuple[tuple[int, ...], int] | None:
        """The group that holds world rank ``rank`` and its position there, or None."""
        for group in self.groups:
            if rank in group:
                return group, group.index(rank)
        return None


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters that travel together: one FSDP2 parameter group.

    Parameters
    ----------
    name : str
        Name of the wrapped module; the root's is ``""`` in FSDP2 and shown as ``root``.
    parameters : tuple of Parameter
        In FSDP2's order.
    mesh : Mesh
        The ranks that shard them.
    stays_whole : bool
        Not resharded between forward and backward, or whole for as long otherwise (see
        :func:`tide.compiler.read.nesting.nest`): it then owns its storage instead of sharing a slot.
    lives_with : int
        Units with the same number belong to one module and are whole at the same time (two
        parameter groups on different meshes in one block). Each unit has a number of its own otherwise.
    depth : int
        How many units' modules this one runs inside of: the last unit of lesser depth before it, and so on.
    tail : tuple of int
        Of a unit that others run inside of: indices of its parameters that come after the first of those. Backward
        makes their gradients first, and keeps them until the unit's own end.
    """

    name: str
    parameters: tuple[Parameter, ...]
    mesh: Mesh
    stays_whole: bool = False
    lives_with: int = -1
    depth: int = 0
    tail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.parameters:
            raise InputError(f"unit {self.name!r}: no parameters")

    @property
    def nbytes(self) -> int:
        """Bytes of all whole parameters in storage."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the compiler sees it.

    Parameters
    ----------
    units : tuple of Unit
        In the order in which the forward pass is expected to use them.
    source : str
        Where it was read from, for reports.
    skipped : tuple of (str, str)
        Parameters left out of the plan, with the reason.
    apart : tuple of (str, str)
        Units that were seen to be whole at the same time, though the order of the units does not say so.
    """

    units: tuple[Unit, ...]
    source: str = ""
    skipped: tuple[tuple[str, str], ...] = field(default=())
    apart: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.units:
            raise InputError(
                f"{self.source or 'model'}: no parameters to plan; "
                "pass a model with parameters, or check that ignored_params does not hold all of them"
            )
        names: dict[str, str] = {}
        for unit in self.units:
            if unit.name in names:
                raise InputError(f"two units are named {unit.name!r}; give each a name of its own")
            names[unit.name] = unit.name
        owners: dict[str, str] = {}
        for unit in self.units:
            for parameter in unit.parameters:
                if parameter.name in owners:
                    raise InputError(
                        f"{parameter.name}: in unit {owners[parameter.name]!r} and again in {unit.name!r}; "
                        "a tied parameter belongs to one unit (list its other names as aliases)"
                    )
                owners[parameter.name] = unit.name
        for pair in self.apart:
            if len(set(pair)) != 2 or not set(pair) <= set(names):
                raise InputError(f"apart: {pair} are not two of the units")

    def unit(self, name: str) -> Unit:
        """The unit called ``name``."""
        for unit in self.units:
            if unit.name == name:
                return unit
        known = ", ".join(repr(unit.name) for unit in self.units[:8])
        raise InputError(f"no unit {name!r}; units are {known}{', …' if len(self.units) > 8 else ''}")

    @property
    def world_size(self) -> int:
        """One more than the largest rank in any mesh."""
        return 1 + max(rank for unit in self.units for group in unit.mesh.groups for rank in group)
