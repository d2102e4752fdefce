"""TIDE: zero-copy, layout-aware collectives for FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tide.compiler.options import PlanOptions
from tide.errors import TideError
from tide.nccl_library import use_nccl
from tide.plan import Plan
from tide.planning import compile_plan, load_plan
from tide.topology import Topology

if TYPE_CHECKING:
    from tide.fsdp import attach, detach

__version__ = "0.1.0.dev0"

__all__ = [
    "Plan",
    "PlanOptions",
    "TideError",
    "Topology",
    "attach",
    "compile_plan",
    "detach",
    "load_plan",
    "use_nccl",
]


def __getattr__(name: str) -> Any:
    # attach and detach need torch; planning does not, so torch is imported when they are first used.
    if name in ("attach", "detach"):
        import tide.fsdp

        return getattr(tide.fsdp, name)
    raise AttributeError(f"module 'tide' has no attribute {name!r}")
