"""Proof that slots hold one unit at a time: a training step is gone through, gather by gather.

It starts from depths and the order of the units alone, not from the intervals by which slots were assigned.
"""

from __future__ import annotations

from collections.abc import Iterator

from tide.compiler.compile import Compiled
from tide.compiler.model import Unit
from tide.errors import PlanError

_Module = tuple[int, list[Unit]]  # depth, units


def check_liveness(compiled: Compiled) -> None:
    """Raises :class:`PlanError` if a unit has to be gathered into a slot in which another is still whole.

    Parameters
    ----------
    compiled : Compiled
        The plan; its options say how many modules are gathered ahead.
    """
    slot_of, slots = compiled.arena.slot_of, compiled.options.slots
    if slots is None:
        for number, slot in enumerate(compiled.arena.slots):
            if len(slot.units) > 1:
                raise PlanError(
                    f"slot {number}: units {slot.units[0]!r} and {slot.units[1]!r} share it, yet the option slots is "
                    "None, which gives every unit its own"
                )
        return
    for first, second in compiled.spec.apart:
        if slot_of[first] == slot_of[second]:
            raise PlanError(
                f"slot {slot_of[first]}: units {first!r} and {second!r} were seen whole at the same time, yet share it"
            )
    modules = _modules(compiled)
    always = {slot_of[unit.name]: unit for _, units in modules for unit in units if unit.stays_whole}
    for backward in (False, True):
        held = dict(always)
        events = list(_events(modules, 0, len(modules), backward))
        order = [module for begins, module in events if begins]
        begun = 0
        for begins, module in events:
            if not begins:
                for unit in modules[module][1]:
                    if not unit.stays_whole:
                        del held[slot_of[unit.name]]
                continue
            for target in order[begun : begun + slots]:
                for unit in modules[target][1]:
                    holder = held.setdefault(slot_of[unit.name], unit)
                    if holder is not unit:
                        raise PlanError(_clash(slot_of[unit.name], holder, unit, modules[module][1][0], backward))
            begun += 1


def _clash(slot: int, holder: Unit, unit: Unit, now: Unit, backward: bool) -> str:
    when = f"in the {'backward' if backward else 'forward'} of {now.name or 'root'!r}"
    return f"slot {slot}: units {holder.name!r} and {unit.name!r} are whole at the same time, {when}, yet share it"


def _modules(compiled: Compiled) -> list[_Module]:
    found: list[_Module] = []
    places: dict[int, int] = {}
    for unit in compiled.spec.units:
        if unit.lives_with >= 0 and unit.lives_with in places:
            found[places[unit.lives_with]][1].append(unit)
            continue
        places[unit.lives_with] = len(found)
        found.append((unit.depth, [unit]))
    return found


def _events(modules: list[_Module], start: int, stop: int, backward: bool) -> Iterator[tuple[bool, int]]:
    """Begins (True) and ends of modules ``start`` to ``stop``, which none of the others runs inside of."""
    spans = []
    while start < stop:
        after = start + 1
        while after < stop and modules[after][0] > modules[start][0]:
            after += 1
        spans.append((start, after))
        start = after
    for first, after in reversed(spans) if backward else spans:
        yield True, first
        yield from _events(modules, first + 1, after, backward)
        yield False, first
