"""Where FSDP2's whole parameters lie: pointed into a slot, taken out again, withheld while resharded.

FSDP2 makes a parameter's tensor and storage objects once and never replaces them, as autograd, compiled code
and the user may hold views of them. So they are not replaced here either: the storage object is pointed at
other memory, which all views of it follow. torch 2.11 cannot do that; there the tensors are made anew when a
model is attached or detached, and nothing is withheld.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tide.errors import AttachError
from tide.fsdp import introspect, versions


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of allocating or freeing: the memory is the arena's."""


class ParamStorage:
    """The storage of one whole parameter.

    Parameters
    ----------
    param : FSDPParam
        Resharded.
    group : FSDPParamGroup
        Its group.

    Attributes
    ----------
    flat : Tensor
        1-D, over the slot; its storage object is the one that the parameter lives on.
    """

    def __init__(self, param: Any, group: Any) -> None:
        self.param, self.group = param, group
        self.flat = torch.empty(0)
        self._storage = self._nowhere = self.flat.untyped_storage()
        self._withheld = False
        self._slot: torch.Tensor | None = None  # holds the slot's memory while `flat` is on memory of its own

    def point(self, memory: torch.Tensor, freed: Callable[[], None] | None) -> None:
        """Lays the parameter on ``memory`` from now on; ``freed`` is called whenever it is resharded.

        Parameters
        ----------
        memory : Tensor
            1-D, with a storage object of its own; not to be used by the caller any more.
        freed : callable or None
            None if another parameter of the group takes the call.
        """
        param, outputs = self.param, self.param.all_gather_outputs
        kept = len(outputs) == 1 and outputs[0].dtype == memory.dtype and hasattr(param, "_unsharded_param")
        if kept and versions.can_swap():
            versions.swap(outputs[0], memory)
            self.flat = _over(outputs[0], memory.numel())
            param.all_gather_outputs = [self.flat]
        else:
            self.flat = memory
            self._renew()
        self._storage = self.flat.untyped_storage()
        self._nowhere = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device).untyped_storage()
        for name in versions.storage_methods():
            setattr(param, name, _nothing)
        param.free_unsharded_param = freed or _nothing

    def unpoint(self) -> None:
        """Gives the parameter back to FSDP2: no memory while it is resharded, and memory of its own afterwards."""
        self.home()
        self.grant()
        param = self.param
        for name in (*versions.storage_methods(), "free_unsharded_param"):
            param.__dict__.pop(name, None)
        if hasattr(param, "_unsharded_param") and versions.can_swap():
            none = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            versions.swap(self.flat, none)
            param.all_gather_outputs = [_over(self.flat, self.padded)]
            self.flat.untyped_storage().resize_(0)
        else:
            self._renew(empty=True)
        self.flat = torch.empty(0)
        self._storage = self._nowhere = self.flat.untyped_storage()

    @property
    def padded(self) -> int:
        """Elements that FSDP2 itself gives the storage: every shard padded to the largest."""
        return int(self.param._sharded_param_data.numel()) * int(self.group.mesh_info.shard_mesh_size)

    def withhold(self) -> None:
        """Takes the memory away: who uses the parameter now gets the error that stock FSDP2 gives."""
        if not self._withheld and versions.can_swap():
            self._storage._swap_data_ptr_(self._nowhere)  # type: ignore[attr-defined]
            self._withheld = True

    def grant(self) -> None:
        """The memory is there again."""
        if self._withheld:
            self._storage._swap_data_ptr_(self._nowhere)  # type: ignore[attr-defined]
            self._withheld = False

    def leave(self) -> None:
        """Lays the parameter on memory of its own, as large as FSDP2's; not while it is withheld."""
        self._slot = torch.empty(self.padded, dtype=self.flat.dtype, device=self.flat.device)
        versions.swap(self.flat, self._slot)
        self.param.all_gather_outputs = [_over(self.flat, self.padded)]

    def home(self) -> None:
        """Back on the slot after `leave`, whose memory is freed."""
        if self._slot is not None:
            versions.swap(self.flat, self._slot)
            self._slot = None
            self.param.all_gather_outputs = [self.flat]

    def check_movable(self) -> None:
        """Refuses to replace a tensor that a backward pass will need, where its storage cannot be moved instead.

        Raises
        ------
        AttachError
            On torch 2.11, between a forward pass and its backward pass.
        """
        old = self.param.__dict__.get("_unsharded_param")
        if versions.can_swap() or old is None or not introspect.awaits_backward(self.group):
            return
        if old._use_count() > 1:  # a graph holds it
            raise AttachError(
                f"parameter {self.param._module_info.param_name!r} is part of a forward pass whose backward pass is "
                f"still to come, and torch {torch.__version__} cannot move it; attach and detach between steps"
            )

    def _renew(self, empty: bool = False) -> None:
        """Makes FSDP2 build the whole parameter again; a gradient that it has accumulated so far moves over."""
        param = self.param
        old = param.__dict__.pop("_unsharded_param", None)
        param.all_gather_outputs = [] if empty else [self.flat]
        if old is None or old.grad is None:
            return
        if empty:
            # FSDP2 allocates at the next gather; until then the tensor needs something to be a view of.
            param.all_gather_outputs = [torch.empty(self.padded, dtype=old.dtype, device=old.device)]
        param.init_unsharded_param()
        param._unsharded_param.grad = old.grad.to(param._unsharded_param.dtype)
        if empty:
            param.all_gather_outputs[0].untyped_storage().resize_(0)


def _over(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """1-D tensor of ``numel`` elements on the storage of ``tensor``; an empty one grows to hold it."""
    if tensor.numel() == numel:
        return tensor
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            tensor.untyped_storage(), 0, (numel,), (1,)
        )
