"""FSDP2 on TIDE's collectives: ``attach`` and ``detach``; only this package knows FSDP2's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide.fsdp.attachment import Attachment, attach, detach

__all__ = ["Attachment", "attach", "detach"]


def __getattr__(name: str) -> Any:
    # Reading a sharded module needs `introspect` only; what attach brings along is imported when it is used.
    if name in __all__:
        import tide.fsdp.attachment as module

        return getattr(module, name)
    raise AttributeError(f"module 'tide.fsdp' has no attribute {name!r}")
