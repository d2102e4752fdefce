"""Optimizer steps of an attached model: refused once a collective has failed, otherwise noted.

Hosts run ahead of GPUs: an optimizer step may have been issued when the collective turns out to have failed whose
gradients it reads. The transport then has to be able to say so.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tide.errors import PeerError
from tide.fsdp import introspect

if TYPE_CHECKING:
    from torch import nn

    from tide.fsdp.attachment import Attachment


def watch(attachment: Attachment, model: nn.Module) -> None:
    """Has the optimizers of a model's parameters ask before their steps, as long as the attachment lives."""
    this, whole = weakref.ref(attachment), weakref.ref(model)
    ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def before(optimizer: Optimizer, *_: Any) -> None:
        found = this()
        if found is None or not found.attached:
            return
        if optimizer not in ours and (owner := whole()) is not None:
            held = introspect.resident_ids(owner)
            ours[optimizer] = any(id(p) in held for group in optimizer.param_groups for p in group["params"])
        if ours.get(optimizer) and (transport := found.transport) is not None:
            if (failure := found.failure) is not None:
                raise PeerError(f"the optimizer step is not taken, as its gradients are worthless: {failure}")
            transport.updating()

    def after(*_: Any) -> None:
        if (found := this()) is not None:
            found.steps += 1

    weakref.finalize(attachment, register_optimizer_step_pre_hook(before).remove)
    if attachment.reuse_forward:  # whatever any optimizer did: the version numbers do not tell
        weakref.finalize(attachment, register_optimizer_step_post_hook(after).remove)
