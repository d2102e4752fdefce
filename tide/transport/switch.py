"""Settles "auto" before a plan of the running job is compiled: all ranks must compile the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from tide.compiler.options import PlanOptions
from tide.topology import Topology
from tide.transport.agreement import control_group, exchange, resolve_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def settled(options: PlanOptions, topology: Topology, group: ProcessGroup | None = None) -> PlanOptions:
    """The options with "auto" turned off unless every rank of the group (by default, of the job) can use the switch.

    What stays "auto" is decided unit by unit, by the cost model. Without a process group of the topology's size the
    plan is made for another machine: "auto" then stays, and the topology's links say what its switch can do.
    Collective over its ranks if an option is "auto".
    """
    wanted = [name for name in ("multicast", "switch_reduce") if getattr(options, name) == "auto"]
    if not wanted:
        return options
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) != topology.world_size:
        return options
    timeout = resolve_timeout()
    with control_group(group, timeout) as control:
        answers = exchange(_unavailable(topology), control, timeout, "ability to multicast")
    if any(answer is not None for answer in answers):
        return replace(options, **dict.fromkeys(wanted, "off"))  # type: ignore[arg-type]
    return options


def _unavailable(topology: Topology) -> str | None:
    from tide.transport.cuda.multicast import unavailable

    return unavailable(topology)
