"""What a plan and its settings ask of the arena, the network and the switch."""

from __future__ import annotations

import torch

from tide.compiler.compile import Compiled
from tide.compiler.place import AREA_ALIGNMENT, align
from tide.errors import CapabilityError
from tide.transport.cuda.arena import Arena, Request
from tide.transport.cuda.multicast import unavailable
from tide.transport.cuda.ticket import Settings
from tide.transport.cuda.wire import Wire, crossing_units, needs_of
from tide.transport.cuda.words import COUNTERS, VALUES, Words


def arena_request(compiled: Compiled, rank: int, settings: Settings, multicast: bool = False) -> Request:
    """What the arena has to offer for a plan.

    Raises
    ------
    CapabilityError
        If copies are asked for between real nodes.
    """
    topology = compiled.topology
    switched = topology.nodes if multicast else 0
    node = topology.node_of(rank)
    real = topology.nodes > 1 and not topology.virtual
    reachable = [r for r in range(topology.world_size) if not real or topology.node_of(r) == node]
    if not crossing_units([unit.mesh.groups for unit in compiled.spec.units], topology):
        return Request(reachable, multicast=switched)
    if settings.puts == "copy":
        if real:
            raise CapabilityError(
                f"puts='copy' reaches ranks of one machine only, and the plan is for {topology}; use puts='nccl', or "
                "Topology(..., virtual=True) where all ranks are on one machine"
            )
        return Request(reachable, multicast=switched)
    needs = needs_of(compiled.arena, settings.communicators, settings.wire_signals == "word")
    return Request(reachable, needs, required=real or settings.puts == "nccl", multicast=switched)


def arena_bytes(compiled: Compiled) -> tuple[int, int]:
    """Bytes of the arena with abort words, counter values and own counters, and where the last two begin."""
    table = compiled.arena.size + align(4 * compiled.arena.world_size, AREA_ALIGNMENT)
    return table + align(4 * (VALUES + COUNTERS), AREA_ALIGNMENT), table


def wire_of(arena: Arena, compiled: Compiled, words: Words, values: int, settings: Settings) -> Wire | None:
    """What carries the steps between nodes, where the arena has a window for it."""
    window = arena.window
    if window is None:
        return None
    return Wire(
        window.library,
        window.communicators,
        window.windows,
        compiled.arena,
        compiled.topology,
        words.rank,
        window.abort,
        words if settings.wire_signals == "word" else None,
        values,
    )


def why_no_switch(wanted: str, compiled: Compiled, device: torch.device) -> str | None:
    """Why this rank cannot use the switch as the plan wants it, or None if it can."""
    reason = unavailable(compiled.topology, device)
    if reason is None:
        return None
    return (
        f"the plan was compiled with {wanted}, but {reason}. Compile it with multicast='off' and switch_reduce='off', "
        "or open it with Settings(multicast='standin') for a test without the switch"
    )
