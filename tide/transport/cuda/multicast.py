"""Whether the switch's multicast can be used: by the environment, the device, NCCL and the plan's topology.

A multicast address reaches the ranks of one NVLink domain, so it serves real nodes that are such domains. Whether
they are, NCCL tells only once it has a communicator (:meth:`tide.transport.cuda.window.Window.require_domains`).
Nothing here makes a multicast object or asks for a multicast address; only :meth:`tide.transport.cuda.window.Window.
multicast_address` does, at the transport's opening, after all ranks have found no reason against it.
"""

from __future__ import annotations

import torch

from tide.compiler.compile import Compiled
from tide.compiler.schedule.routes import by_multicast
from tide.multicast import refusal
from tide.topology import Topology
from tide.transport.cuda import nccl

#: Oldest compute capability with ``multimem`` instructions.
CAPABILITY = (9, 0)
#: ``CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED``
ATTRIBUTE_MULTICAST = 132


def demand(compiled: Compiled) -> str | None:
    """What of a plan needs the switch, in words; None if nothing does."""
    options = compiled.options
    if compiled.topology.gpus_per_node == 1:
        return None
    if options.multicast == "on":
        return "multicast='on'"
    if options.switch_reduce == "on" and compiled.topology.nodes > 1:
        return "switch_reduce='on'"
    if compiled.spread:
        return f"switch_reduce='auto', by which unit {min(compiled.spread)!r} is reduced through the switch"
    for unit in compiled.spec.units:
        if by_multicast(compiled.context(unit.name, unit.mesh.groups[0][0])):
            return f"multicast='auto', by which unit {unit.name!r} is gathered through the switch"
    return None


def unavailable(topology: Topology, device: torch.device | None = None) -> str | None:
    """Why this rank cannot use multicast; None if it can, as far as can be told without using it.

    Parameters
    ----------
    topology : Topology
        The plan's.
    device : torch.device, optional
        The current CUDA device by default.
    """
    if (reason := refusal()) is not None:
        return reason
    if topology.virtual:
        return "a multicast address reaches every rank of the machine, so it does not serve virtual nodes"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}, not 9.0"
    if (reason := nccl.unusable()) is not None:
        return reason
    if not nccl.load().has_multicast:
        return f"NCCL {nccl.load().version_text} lacks ncclGetLsaMultimemDevicePointer"
    from tide.transport.cuda.driver import Driver

    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    driver = Driver(index)
    try:
        supported = driver.attribute(ATTRIBUTE_MULTICAST)
    finally:
        driver.close()
    return None if supported else f"the driver says that {torch.cuda.get_device_name(device)} has no multicast"
