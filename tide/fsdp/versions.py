"""What the seam into FSDP2 relies on, and what differs between torch 2.11 and 2.15.

FSDP2 looks its collectives up as globals of one module, which makes them replaceable; its classes are
private. Whatever `attach` touches is listed here and checked before anything is touched, so that a torch
that has moved on is refused in plain words instead of failing in the middle of a step.

==============================  ======================  ================================================
what                            torch 2.11              from
==============================  ======================  ================================================
``foreach_all_gather``          one signature           2.15: the copy-out takes ``all_gather_output_fn``
``foreach_reduce`` gives        6 values                2.13: 7; the event of the inputs is second in both
reduce copy-in                  ``fsdp::chunk_cat``     2.15: ``fsdp::chunk_cat_mixed_dtype``
output of a gather is freed by  ``free_unsharded_param``  2.15: also ``free_all_gather_outputs``
re-pointing a storage           not offered             2.12: ``UntypedStorage._swap_data_ptr_``
factor of a pre-multiplied sum  opaque                  2.13: ``ReduceOp.factor``
==============================  ======================  ================================================
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as fsdp_state

from tide.errors import CapabilityError
from tide.fsdp import introspect

#: Oldest and newest torch that the seam was read against; those in between too.
KNOWN = ((2, 11), (2, 15))

#: Functions that are replaced, the module that looks them up, and the first of their parameters.
REPLACED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (
        param_group,
        "foreach_all_gather",
        (
            "fsdp_params",
            "group",
            "async_op",
            "all_gather_copy_in_stream",
            "all_gather_stream",
            "device",
            "all_gather_comm",
        ),
    ),
    (param_group, "foreach_all_gather_copy_out", ("all_gather_result", "fsdp_params", "group")),
    (
        param_group,
        "foreach_reduce",
        (
            "fsdp_params",
            "unsharded_grads",
            "reduce_scatter_group",
            "reduce_scatter_stream",
            "reduce_scatter_comm",
        ),
    ),
)

#: Functions that call them, as globals.
_CALLERS = (
    (param_group.FSDPParamGroup, "unshard", "foreach_all_gather"),
    (param_group.FSDPParamGroup, "wait_for_unshard", "foreach_all_gather_copy_out"),
    (param_group.FSDPParamGroup, "post_backward", "foreach_reduce"),
)

#: Methods that attach overrides on instances or calls.
_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (fsdp_param.FSDPParam, ("init_all_gather_outputs", "alloc_all_gather_outputs", "free_unsharded_param")),
    (fsdp_param.FSDPParam, ("init_unsharded_param", "to_sharded", "to_unsharded")),
    (param_group.FSDPParamGroup, ("_to_sharded", "_prefetch_unshard", "wait_for_unshard")),
    (fsdp_state.FSDPState, ("_root_pre_forward", "_lazy_init")),
)

#: Fields of the result of an all-gather, in order.
_RESULT = (
    "all_gather_output",
    "all_gather_event",
    "all_gather_work",
    "param_all_gather_input_dtypes",
    "param_all_gather_input_numels",
    "all_gather_input_split_sizes",
)

#: Comm objects that FSDP2 itself sets; anything else was set by the user and is left to him.
_OWN_COMMS = frozenset(
    {
        "DefaultAllGather",
        "DefaultReduceScatter",
        "ProcessGroupAllocAllGather",
        "ProcessGroupAllocReduceScatter",
        "SymmMemAllGather",
        "SymmMemReduceScatter",
    }
)


@cache
def problem() -> str | None:
    """What this torch lacks of what the seam relies on, or None."""
    for module, name, parameters in REPLACED:
        function = getattr(module, name, None)
        if function is None:
            return f"{module.__name__} has no {name}"
        found = tuple(inspect.signature(function).parameters)
        if found[: len(parameters)] != parameters:
            return f"{name} takes {found[: len(parameters)]}, expected {parameters}"
    for cls, method, name in _CALLERS:
        function = inspect.unwrap(getattr(cls, method, None) or (lambda: None))
        if name not in function.__code__.co_names:
            return f"{cls.__name__}.{method} does not call {name} as a global"
    for owner, methods in _METHODS:
        for method in methods:
            if not hasattr(owner, method):
                return f"{owner.__name__} has no {method}"
    if not isinstance(inspect.getattr_static(param_group.FSDPParamGroup, "_prefetch_unshard"), staticmethod):
        return "FSDPParamGroup._prefetch_unshard is no static method"
    if getattr(collectives.AllGatherResult, "_fields", None) != _RESULT:
        return f"AllGatherResult has other fields than {_RESULT}"
    if not copy_in_operators():
        return "neither fsdp::chunk_cat nor fsdp::chunk_cat_mixed_dtype is registered"
    return None


def check() -> None:
    """Refuses a torch whose FSDP2 the seam does not fit.

    Raises
    ------
    CapabilityError
        Naming what is missing or different.
    """
    if (found := problem()) is None:
        return
    low, high = (".".join(map(str, version)) for version in KNOWN)
    raise CapabilityError(
        f"tide.attach knows FSDP2 of torch {low} to {high}; torch {torch.__version__} differs where it matters: "
        f"{found}. Nothing was changed. Use one of those versions, or train without attach"
    )


def check_copy_in() -> None:
    """Tries the reduce-scatter's copy-in on a tensor without memory, as each step will do it.

    Raises
    ------
    CapabilityError
        If the gradients do not come through unread.
    """
    from tide.fsdp.virtual import FlatGradients

    grads = [torch.empty(3, 2), torch.empty(5)]
    flat = FlatGradients((4 * 2 + 6,), torch.float32, torch.device("cpu"))
    copy_in = getattr(collectives, "foreach_reduce_scatter_copy_in", None)
    if copy_in is None:
        return  # 2.15 may hide it behind a hook; the operators are then all there is to rely on
    try:
        copy_in(list(grads), flat, 2)
        flat.div_(2.0)
    except Exception as error:
        raise CapabilityError(
            f"torch {torch.__version__} copies gradients in another way than tide.attach knows: {error!r}. "
            "Nothing was changed"
        ) from error
    if [id(grad) for grad in flat.record.grads] != [id(grad) for grad in grads] or flat.record.divided != 2.0:
        raise CapabilityError(
            f"torch {torch.__version__} copies gradients in another way than tide.attach knows. Nothing was changed"
        )


@cache
def copy_in_operators() -> frozenset[Any]:
    """Operators that copy gradients into the flat input of the reduce-scatter."""
    found = set()
    for name in ("chunk_cat", "chunk_cat_mixed_dtype"):
        packet = getattr(torch.ops.fsdp, name, None)
        if packet is not None:
            found.add(packet.default)
    return frozenset(found)


def own_comm(comm: Any) -> bool:
    """Whether FSDP2 set this comm object, rather than the user."""
    return type(comm).__name__ in _OWN_COMMS and type(comm).__module__ == collectives.__name__


def storage_methods() -> tuple[str, ...]:
    """Methods of an ``FSDPParam`` that allocate or free what an all-gather delivers into."""
    names = ("init_all_gather_outputs", "alloc_all_gather_outputs", "free_all_gather_outputs")
    return tuple(name for name in names if hasattr(fsdp_param.FSDPParam, name))


@cache
def can_swap() -> bool:
    """Whether a storage object can be pointed at other memory."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the memory of two storage objects; all views of either follow."""
    one, two = tensor.untyped_storage(), other.untyped_storage()
    if one.nbytes() == two.nbytes() or not one.nbytes() or not two.nbytes():
        one._swap_data_ptr_(two)  # type: ignore[attr-defined]
        return
    # Sizes that differ are only exchanged with nothing: a b - / - b a / b - a / b a -
    spare = torch.empty(0, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    one._swap_data_ptr_(spare)  # type: ignore[attr-defined]
    one._swap_data_ptr_(two)  # type: ignore[attr-defined]
    two._swap_data_ptr_(spare)  # type: ignore[attr-defined]


def delivered(marker: Any) -> Any:
    """Result of an all-gather that has its own place in FSDP2's state, and no flat output."""
    return collectives.AllGatherResult(marker, None, None, [], [], [])


def scale_of(op: Any, group_size: int, divide_factor: float | None) -> tuple[float, float]:
    """``(scale, divisor)`` that the float32 sum gets for FSDP2's reduce operation.

    Parameters
    ----------
    op : ReduceOp
        ``AVG``, ``SUM``, or a sum of pre-multiplied gradients.
    group_size : int
        Ranks that are summed over.
    divide_factor : float or None
        The group's divide factor, where ``op`` does not tell.
    """
    if op == ReduceOp.AVG:
        return 1.0, float(group_size)
    if op == ReduceOp.SUM:
        return 1.0, 1.0
    if op == ReduceOp.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        if isinstance(factor, float):
            return factor, 1.0
        if divide_factor is not None:  # the op keeps it to itself; it is what FSDP2 made it from
            return 1.0 / divide_factor, 1.0
    raise CapabilityError(f"reduce operation {op} of FSDP2 in torch {torch.__version__} is not known to TIDE")


def with_inputs_event(result: Any, event: Any) -> Any:
    """``foreach_reduce``'s result with another event after which its inputs may be freed."""
    return (result[0], event, *result[2:])


def torch_name() -> str:
    """``torch 2.13``, for reports."""
    return "torch {}.{}".format(*introspect.torch_version())
