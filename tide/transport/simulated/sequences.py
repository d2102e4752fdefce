"""The order in which FSDP2 issues collectives during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tide.compiler.compile import Compiled
from tide.compiler.model import Unit


@dataclass(eq=False, slots=True)
class _Module:
    """A wrapped module: its units, and the wrapped modules that run inside of it."""

    units: list[Unit]
    inner: list[_Module] = field(default_factory=list)


def _modules(units: Sequence[Unit]) -> list[_Module]:
    """Outermost modules; a unit of greater depth runs inside of the last one of lesser depth."""
    outermost: list[_Module] = []
    open_modules: list[tuple[int, _Module]] = []
    together: dict[int, _Module] = {}
    for unit in units:
        if unit.lives_with >= 0 and unit.lives_with in together:
            together[unit.lives_with].units.append(unit)
            continue
        module = together[unit.lives_with] = _Module([unit])
        while open_modules and open_modules[-1][0] >= unit.depth:
            open_modules.pop()
        (open_modules[-1][1].inner if open_modules else outermost).append(module)
        open_modules.append((unit.depth, module))
    return outermost


def _in_order(modules: Sequence[_Module], backward: bool) -> Iterator[_Module]:
    """Modules in the order in which they are gathered."""
    for module in reversed(modules) if backward else modules:
        yield module
        yield from _in_order(module.inner, backward)


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
    outermost = _modules(compiled.spec.units)
    sequence: list[tuple[str, str]] = []
    held: dict[int, str] = {}

    def gather(module: _Module, ahead: bool) -> None:
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

    def walk(modules: Sequence[_Module], backward: bool, order: list[_Module]) -> None:
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
            walk(outermost, backward, list(_in_order(outermost, backward)))
    return sequence
