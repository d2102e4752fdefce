"""The order in which FSDP2 issues collectives during training."""

from __future__ import annotations

from collections.abc import Sequence

from tide.compiler.compile import Compiled
from tide.compiler.liveness import Module, in_order, module_tree
from tide.compiler.model import Unit


def training_sequence(compiled: Compiled, steps: int = 1, prefetch: int = 1) -> list[tuple[str, str]]:
    """Operations of whole training steps: forward, backward with reduce-scatters, prefetching.

    Parameters
    ----------
    compiled : Compiled
        The plan; its slots bound what can be prefetched.
    steps : int
        Training steps.
    prefetch : int
        Modules gathered ahead of the one that computes.
    """
    slot_of = compiled.arena.slot_of
    outermost = module_tree(compiled.spec.units)
    sequence: list[tuple[str, str]] = []
    held: dict[int, str] = {}

    def gather(module: Module, ahead: bool) -> None:
        missing = [unit for unit in module.units if held.get(slot_of[unit.name]) != unit.name]
        if ahead and any(slot_of[unit.name] in held for unit in missing):
            return  # its slot is still in use: too early
        for unit in missing:
            held[slot_of[unit.name]] = unit.name
            sequence.append(("all_gather", unit.name))

    def release(units: Sequence[Unit]) -> None:
        for unit in units:
            del held[slot_of[unit.name]]
            sequence.append(("release", unit.name))

    def walk(modules: Sequence[Module], backward: bool, order: list[Module]) -> None:
        for module in reversed(modules) if backward else modules:
            gather(module, False)
            place = order.index(module)
            for later in order[place + 1 : place + 1 + prefetch]:
                gather(later, True)
            if not backward:
                sequence.extend(("use", unit.name) for unit in module.units)
            walk(module.inner, backward, order)
            if backward:
                sequence.extend(("use", unit.name) for unit in module.units)
            release([unit for unit in module.units if backward or not unit.stays_whole])
            if backward:
                trained = [unit for unit in module.units if any(p.trainable for p in unit.parameters)]
                sequence.extend(("reduce_scatter", unit.name) for unit in trained)

    for _ in range(steps):
        for backward in (False, True):
            walk(outermost, backward, [module for module, _ in in_order(outermost, backward)])
    return sequence
