"""Whether the environment lets a process use the switch's multicast addresses; looked at before each use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tide.errors import CapabilityError

#: Variables that turn multicast off, for NCCL, torch and NVSHMEM, and the values that do.
OFF: Mapping[str, tuple[str, ...]] = {
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("1",),
    "NVSHMEM_DISABLE_NVLS": ("1",),
}


def refusal(environment: Mapping[str, str] | None = None) -> str | None:
    """Why the environment forbids multicast, with the variable's name; None if it does not."""
    environment = os.environ if environment is None else environment
    for name, values in OFF.items():
        if environment.get(name, "").strip() in values:
            return f"{name}={environment[name]} turns multicast off"
    return None


def require(what: str, environment: Mapping[str, str] | None = None) -> None:
    """Refuses to go on where the environment forbids multicast.

    Parameters
    ----------
    what : str
        What would have used it, for the message.

    Raises
    ------
    CapabilityError
        Names the variable.
    """
    reason = refusal(environment)
    if reason is not None:
        raise CapabilityError(
            f"{what}: {reason}. Unset it where the machine has NVSwitch multicast, or compile the plan without "
            "(PlanOptions: multicast='off', switch_reduce='off')"
        )
