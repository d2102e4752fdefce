"""Triton kernels for the little arithmetic that is left: place, accumulate and switch reduce.

Each has a reference in PyTorch (:mod:`tide.kernels.reference`), which is also the arithmetic of the host
transport. The names below load Triton when they are first used; the references do not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tide.kernels.reference import accumulate_reference, place_reference, switch_reduce_reference

if TYPE_CHECKING:
    from tide.kernels.accumulate import AccumulateTable, SumItem
    from tide.kernels.launch import Tuning
    from tide.kernels.place import PlaceItem, PlaceTable
    from tide.kernels.switch_reduce import SwitchItem, SwitchReduceTable

__all__ = [
    "AccumulateTable",
    "PlaceItem",
    "PlaceTable",
    "SumItem",
    "SwitchItem",
    "SwitchReduceTable",
    "Tuning",
    "accumulate_reference",
    "place_reference",
    "switch_reduce_reference",
]

_MODULES = {
    "AccumulateTable": "accumulate",
    "SumItem": "accumulate",
    "PlaceItem": "place",
    "PlaceTable": "place",
    "SwitchItem": "switch_reduce",
    "SwitchReduceTable": "switch_reduce",
    "Tuning": "launch",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
