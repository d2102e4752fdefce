"""Clears what a step that a failure has ended leaves behind in FSDP2, so that the next one starts afresh.

FSDP2 takes its iteration state back at the end of a backward pass only. From torch 2.13 on it does so when it is
asked to (``reset_iter_state``), but for whole gradients that were not reduced any more: they would be added to those
of the next step. Older ones have no such call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tide.fsdp.introspect import Wrapped


def give_up_step(wrapped: Sequence[Wrapped]) -> None:
    """Ends a forward or backward pass for good. Nothing is communicated, and every group is resharded.

    Gradients that have not been reduced are dropped, also those accumulated in earlier passes, as FSDP2 does it.
    Reduced ones stay with the parameters.

    Parameters
    ----------
    wrapped : sequence of Wrapped
        All of the model.
    """
    for found in wrapped:
        if found.state._is_root and hasattr(found.state, "_reset_iter_state"):
            found.state._reset_iter_state()  # knows what is new in its torch
    for found in wrapped:
        _clear_state(found.state)
        for group in found.groups:
            _clear_group(group)


def _clear_state(state: Any) -> None:
    state._training_state = type(state._training_state).IDLE
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    # The engine has dropped the callback; nobody would queue it again.
    state._state_ctx.post_backward_final_callback_queued = False
    comm = state._comm_ctx
    if not hasattr(comm, "all_gather_state"):
        return  # no forward pass yet
    under_way = [comm.all_gather_state, getattr(comm, "reduce_scatter_state", None)]  # one of them up to torch 2.12
    under_way += getattr(comm, "reduce_scatter_states", [])
    events = [of.event for of in under_way if of is not None]
    _wait(state, [*events, *getattr(comm, "_last_post_reduce_events", {}).values()])
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_state"):
        comm.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        getattr(comm, name, []).clear()


def _clear_group(group: Any) -> None:
    gathered, reduced = group._all_gather_result, group._all_reduce_state
    if gathered is not None and hasattr(gathered.all_gather_work, "wait"):
        gathered.all_gather_work.wait()
    events = [of and getattr(of, name) for of, name in ((gathered, "all_gather_event"), (reduced, "event"))]
    _wait(group, [*events, group._post_reduce_event, group._reshard_after_forward_event])
    group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
    group._post_reduce_event = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def _wait(holder: Any, events: Sequence[Any]) -> None:
    """Memory that is freed now must not be used again before what is under way has ended."""
    for event in events:
        if event is not None:
            handle = getattr(holder, "device_handle", None) or holder._device_handle
            handle.current_stream().wait_event(event)
