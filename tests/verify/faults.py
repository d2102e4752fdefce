"""Planted faults: each takes a plan and a seed, and gives a damaged plan with a description of the damage.

Every fault breaks the plan: no damaged plan may pass ``verify``. Whether a run shows it depends: see
:attr:`Fault.shows`::

    for fault in FAULTS:
        damaged, what = fault(compiled, seed)   # or NoPlaceError
"""

from __future__ import annotations

import verify_fault_data  # noqa: F401  # fills FAULTS
import verify_fault_order  # noqa: F401
from verify_planting import FAULTS, Fault, NoPlaceError

__all__ = ["FAULTS", "Fault", "NoPlaceError"]
