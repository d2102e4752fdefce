"""Dispatchers in the place of FSDP2's collective functions.

FSDP2 calls ``foreach_all_gather``, ``foreach_all_gather_copy_out`` and ``foreach_reduce`` as globals of one
module. The first `install` puts dispatchers there and the last `uninstall` takes them out again. A call for
parameters of an attached unit goes to the unit; any other goes to the function that was there before, with
the arguments as they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tide.errors import TideError
from tide.fsdp import versions
from tide.fsdp.virtual import FlatGradients

if TYPE_CHECKING:
    from tide.fsdp.unit import AttachedUnit
    from tide.transport.base import Ticket

#: Attribute of an ``FSDPParam`` that leads to its unit; it goes with the parameter, unlike a table of ids.
UNIT = "_tide_unit"

_lock = threading.Lock()
_users = 0
_stock: dict[str, Any] = {}
_covered: set[str] = set()


class _Calling(threading.local):
    """Whether this thread is inside of a prefetch; ranks may be threads in tests."""

    prefetch = False


_calling = _Calling()


class Delivered:
    """In the place of an all-gather's flat output: the parameters are, or will be, in their own storage.

    Parameters
    ----------
    ticket : Ticket
        The collective under way.
    kept : object
        What must live until the collective has ended.
    """

    __slots__ = ("kept", "ticket")

    def __init__(self, ticket: Ticket, kept: object = None) -> None:
        self.ticket, self.kept = ticket, kept


def unit_of(params: Any) -> AttachedUnit | None:
    """The attached unit that these ``FSDPParam`` objects belong to."""
    return params[0].__dict__.get(UNIT) if params else None


@torch.no_grad()
def _all_gather(
    fsdp_params: Any,
    group: Any,
    async_op: Any,
    all_gather_copy_in_stream: Any,
    all_gather_stream: Any,
    device: Any,
    all_gather_comm: Any,
    **kwargs: Any,
) -> Any:
    streams = all_gather_copy_in_stream, all_gather_stream
    stock = partial(
        _stock["foreach_all_gather"], fsdp_params, group, async_op, *streams, device, all_gather_comm, **kwargs
    )
    unit = unit_of(fsdp_params)
    if unit is None:
        return stock()
    return _noting_errors(unit, partial(unit.all_gather, stock, *streams, prefetch=_calling.prefetch))


def _copy_out(all_gather_result: Any, fsdp_params: Any, group: Any, **kwargs: Any) -> None:
    marker = all_gather_result.all_gather_output
    if type(marker) is Delivered:
        marker.ticket.wait()
        return
    stock = partial(_stock["foreach_all_gather_copy_out"], all_gather_result, fsdp_params, group, **kwargs)
    unit = unit_of(fsdp_params)
    with torch.no_grad():
        if unit is None:
            stock()
        else:
            unit.copy_out(stock)


def _reduce(
    fsdp_params: Any,
    unsharded_grads: Any,
    reduce_scatter_group: Any,
    reduce_scatter_stream: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    stock = partial(
        _stock["foreach_reduce"],
        fsdp_params,
        unsharded_grads,
        reduce_scatter_group,
        reduce_scatter_stream,
        *args,
        **kwargs,
    )
    unit = unit_of(fsdp_params)
    if unit is None:
        return stock()
    return _noting_errors(unit, partial(unit.reduce, stock, fsdp_params, unsharded_grads, reduce_scatter_stream))


def _noting_errors(unit: AttachedUnit, call: Callable[[], Any]) -> Any:
    """What the call returns. An error of TIDE's ends the step: the model can be detached in the middle of it."""
    try:
        return call()
    except TideError as error:
        unit.attachment.failed(error)
        raise


def _copy_in(unsharded_grads: Any, reduce_scatter_input: Any, world_size: int) -> None:
    if isinstance(reduce_scatter_input, FlatGradients):
        reduce_scatter_input.capture(unsharded_grads)
    else:
        _stock["foreach_reduce_scatter_copy_in"](unsharded_grads, reduce_scatter_input, world_size)


def _prefetch_unshard(*args: Any, **kwargs: Any) -> None:
    before, _calling.prefetch = _calling.prefetch, True
    try:
        _stock["_prefetch_unshard"](*args, **kwargs)
    finally:
        _calling.prefetch = before


#: (who holds it, its name, what takes its place, how it is put there).
_PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (versions.param_group, "foreach_all_gather", _all_gather),
    (versions.param_group, "foreach_all_gather_copy_out", _copy_out),
    (versions.param_group, "foreach_reduce", _reduce),
    (versions.collectives, "foreach_reduce_scatter_copy_in", _copy_in),
    (versions.param_group.FSDPParamGroup, "_prefetch_unshard", _prefetch_unshard),
)


def install() -> None:
    """Puts the dispatchers in place, or counts one more user of them."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for holder, name, dispatcher in _PLACES:
            present = getattr(holder, name, None)
            if present is None or present is dispatcher:  # newer versions may do without
                continue
            if name not in _covered:
                _stock[name] = present
            setattr(holder, name, _wrapped(holder, dispatcher))


def uninstall() -> None:
    """Puts the functions back that were there before, when nobody uses the dispatchers any more."""
    global _users
    with _lock:
        _users -= 1
        if _users > 0:
            return
        for holder, name, dispatcher in _PLACES:
            # Where somebody has put a function of his own on top, ours stays below it and passes calls on.
            # His may call ours: never take it for the stock one.
            if getattr(holder, name, None) is dispatcher:
                setattr(holder, name, _wrapped(holder, _stock[name]))
                _covered.discard(name)
            elif name in _stock:
                _covered.add(name)


def installed() -> bool:
    """Whether FSDP2 now calls the dispatchers."""
    return getattr(versions.param_group, "foreach_all_gather", None) is _all_gather


def _wrapped(holder: Any, function: Callable[..., Any]) -> Any:
    return staticmethod(function) if isinstance(holder, type) else function
