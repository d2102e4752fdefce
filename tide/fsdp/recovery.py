"""Clears what a step that a failure has ended leaves behind in FSDP2, so that the next one starts afresh.

FSDP2 takes its iteration state back at the end of a backward pass only. From torch 2.13 on it does so when it is
asked to (``reset_iter_state``), but for whole gradients that were not reduced any more: they would be added to those
of the next step. Older ones have no such call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tide.fsdp.introspect import Wrapped, state_groups, states_of_step


def give_up_step(wrapped: Sequence[Wrapped]) -> None:
    """Ends a forward or backward pass for good. Nothing is communicated, and every group is resharded.

    The pass is that of the whole model, of which only a part may be attached: what is left of it outside of that part
    would have FSDP2 take the next step for a piece of this one.

    Gradients that have not been reduced are dropped, also those accumulated in earlier passes, as FSDP2 does it.
    So are those that have been reduced: they are of some parameters only.

    Parameters
    ----------
    wrapped : sequence of Wrapped
        All of the attached model.
    """
    states = states_of_step(wrapped)
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            with suppress(RuntimeError):  # of a collective that failed; the rest is cleared below
                state._reset_iter_state()  # knows what is new in its torch
    for state in states:
        _clear_state(state)
        for group in state_groups(state):
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
        with suppress(RuntimeError):  # it has failed, and so has ended too
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
        param.sharded_param.grad = None


def _wait(holder: Any, events: Sequence[Any]) -> None:
    """Memory that is freed now must not be used again before what is under way has ended."""
    for event in events:
        if event is not None:
            handle = getattr(holder, "device_handle", None) or holder._device_handle
            handle.current_stream().wait_event(event)
