"""What an attachment is told of: forward passes before they begin, and optimizer steps.

Optimizer steps are refused once a collective has failed, otherwise noted.

Hosts run ahead of GPUs: an optimizer step may have been issued when the collective turns out to have failed whose
gradients it reads. The transport then has to be able to say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tide.errors import PeerError
from tide.fsdp import introspect

if TYPE_CHECKING:
    from tide.fsdp.attachment import Attachment


def watch(attachment: Attachment) -> None:
    """Has the optimizers of a model's parameters ask before their steps, as long as the attachment lives."""
    this = weakref.ref(attachment)
    ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @torch._dynamo.disable  # a compiled step would be compiled anew for whatever the hook looks at
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        found = this()
        if found is None or not found.attached:
            return None
        if optimizer not in ours:
            held = introspect.resident_ids(found.groups)
            if any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
                ours.add(optimizer)  # only then: it may be given some of them later
        if optimizer not in ours:
            return None
        _ask(found)
        return _asking_again(args, kwargs, this)

    @torch._dynamo.disable
    def after(*_: Any) -> None:
        if (found := this()) is not None:
            found.steps += 1

    weakref.finalize(attachment, register_optimizer_step_pre_hook(before).remove)
    if attachment.reuse_forward:  # whatever any optimizer did: the version numbers do not tell
        weakref.finalize(attachment, register_optimizer_step_post_hook(after).remove)


def _ask(attachment: Attachment) -> None:
    """Refuses an optimizer step after a failure, and notes it otherwise."""
    if (transport := attachment.transport) is not None:
        transport.updating()  # first, so that a failure in between knows of it
        if (failure := attachment.failure) is not None:
            raise PeerError(f"the optimizer step is not taken, as its gradients are worthless: {failure}")


def _asking_again(args: Any, kwargs: Any, attachment: weakref.ref[Attachment]) -> Any:
    """The arguments of ``step`` with a closure that asks once it is through; None if there is no closure.

    A closure gathers and reduces after the step has been asked for.
    """
    place = 1 if len(args) > 1 and callable(args[1]) else None  # behind the optimizer itself
    closure = kwargs.get("closure") if place is None else args[place]
    if not callable(closure):
        return None

    def asking() -> Any:
        value = closure()
        if (found := attachment()) is not None:
            _ask(found)
        return value

    if place is None:
        return args, {**kwargs, "closure": asking}
    return (*args[:place], asking, *args[place + 1 :]), kwargs


def before_forward(state: Any, attachment: weakref.ref[Attachment]) -> Callable[..., Any]:
    """Has the attachment look, before a forward pass of a root, whether its plan still fits the model."""
    stock = state._root_pre_forward

    def root_pre_forward(*args: Any, **kwargs: Any) -> Any:
        state._lazy_init()  # which settles who is the root and what the parameters' types are
        found = attachment()
        if found is not None and state._state_ctx.iter_forward_root is None:
            try:
                found.refresh()
            except BaseException:
                state._training_state = type(state._training_state).IDLE  # the step has not begun: none is under way
                raise
        return stock(*args, **kwargs)

    return root_pre_forward
