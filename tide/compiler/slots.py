"""Slots from liveness: units that are whole at the same time never share one, and all of them take little room.

Each unit has one slot for good, so that forward and backward meet the same addresses, and a slot serves one mesh,
since its signals are counted among one shard group. What remains is to colour the graph of units that are whole
at the same time, where a colour costs the largest of its units: max-colouring (Pemmaraju, Raman and Varadarajan,
"Buffer minimization using max-coloring", SODA 2004). That is hard in general even for interval graphs, so several
sound orders are tried and the smallest result is taken:

* by the start of each interval, which needs the fewest slots there can be (optimal for units of one size); the
  slot that fits best;
* by size, the largest first, into the first slot that is free (first fit decreasing): no slot ever grows;
* by the start, with slots of the sizes that are the least there can be (`least_bytes`) to begin with;
* by the start within classes of size, each within a factor of two.

In each of them the units of two slots are then divided anew where that makes the smaller one smaller still, pair by
pair. Of 2,000 random sequences of up to 14 units, all but four then take the least room there is (by exhaustive
search).

Of the k-th largest units that are whole at once, the largest over all moments is the least that the k-th largest
slot can be; their sum is a bound from below. Over 40,000 such sequences, nested up to three deep, and 9,000 of up to
30 units, nested up to six deep, the result was never more than one largest slot above it. One largest slot above
what is whole at once is not always to be had: with three modules gathered ahead or more, about one of 20,000 of the
former takes more, for some even at the best, as a slot for good has to serve the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from tide.compiler.liveness import Interval, Moment, live_intervals, moments
from tide.compiler.model import Mesh, ModelSpec, Unit
from tide.compiler.options import PlanOptions

_Slots = list[list[Unit]]
#: Passes over all pairs of slots.
ROUNDS = 8


def assign_slots(spec: ModelSpec, sizes: Mapping[str, int], options: PlanOptions) -> list[tuple[str, ...]]:
    """Units of each slot, in the order of their first units.

    Parameters
    ----------
    spec : ModelSpec
        Units in the order of the forward pass, with nesting, and what was seen to be whole at once.
    sizes : mapping of str to int
        Bytes of each unit's storage.
    options : PlanOptions
        ``slots`` is the number of modules that may be whole one after the other: the one in use and those that
        are gathered ahead. None gives every unit a slot of its own, as have units that stay whole.
    """
    owned = [(unit.name,) for unit in spec.units if options.slots is None or unit.stays_whole]
    shared: list[tuple[str, ...]] = []
    if options.slots is not None:
        units = [unit for unit in spec.units if not unit.stays_whole]
        step = moments(spec.units, options.slots - 1)
        apart = _apart(live_intervals(spec.units, step), spec.apart)
        for alike in _by_mesh(units):
            least = _least(alike, sizes, step)
            found = [_improved(slots, sizes, apart, sum(least)) for slots in _candidates(alike, sizes, least, apart)]
            best = min(found, key=lambda slots: (_total(slots, sizes), len(slots)))
            shared += [tuple(unit.name for unit in slot) for slot in best]
    place = {unit.name: order for order, unit in enumerate(spec.units)}
    slots = [tuple(sorted(names, key=place.__getitem__)) for names in owned + shared]
    return sorted(slots, key=lambda names: place[names[0]])


def _apart(live: Mapping[str, tuple[Interval, Interval]], seen: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """For each unit those that may not share its slot: live at the same time, or seen to be."""
    apart: dict[str, set[str]] = {name: set() for name in live}
    pairs = list(seen)
    for half in (0, 1):
        active: list[str] = []
        for name in sorted(live, key=lambda name: live[name][half].start):
            active = [other for other in active if live[other][half].meets(live[name][half])]
            pairs += [(name, other) for other in active]
            active.append(name)
    for first, second in pairs:
        apart[first].add(second)
        apart[second].add(first)
    return apart


def least_bytes(spec: ModelSpec, sizes: Mapping[str, int], options: PlanOptions) -> int:
    """Bytes that no assignment of slots can go below.

    At any moment, the k largest units of a mesh that are whole then need k slots, the smallest of which holds the
    k-th: over all moments, the k-th largest slot of a mesh is at least the largest of these.
    """
    if options.slots is None:
        return sum(sizes[unit.name] for unit in spec.units)
    total = sum(sizes[unit.name] for unit in spec.units if unit.stays_whole)
    step = moments(spec.units, options.slots - 1)
    return total + sum(
        sum(_least(units, sizes, step)) for units in _by_mesh(unit for unit in spec.units if not unit.stays_whole)
    )


def _least(units: Sequence[Unit], sizes: Mapping[str, int], step: Sequence[Moment]) -> list[int]:
    """Least sizes of the slots of a mesh, largest first."""
    names, least = {unit.name for unit in units}, [0]
    for moment in step:
        found = {unit.name: sizes[unit.name] for unit in moment.live if unit.name in names}
        largest = sorted(found.values(), reverse=True)
        least += [0] * (len(largest) - len(least))
        for k, size in enumerate(largest):
            least[k] = max(least[k], size)
    return least


def _by_mesh(units: Iterable[Unit]) -> list[list[Unit]]:
    together: dict[Mesh, list[Unit]] = {}
    for unit in units:
        together.setdefault(unit.mesh, []).append(unit)
    return list(together.values())


def _total(slots: _Slots, sizes: Mapping[str, int]) -> int:
    return sum(max(sizes[unit.name] for unit in slot) for slot in slots)


def _candidates(
    units: Sequence[Unit], sizes: Mapping[str, int], least: Sequence[int], apart: Mapping[str, set[str]]
) -> list[_Slots]:
    """Sound assignments of units in the order of their starts; no slot has two that are whole at the same time."""
    by_size = sorted(units, key=lambda unit: -sizes[unit.name])
    classes: dict[int, list[Unit]] = {}
    for unit in units:
        classes.setdefault(sizes[unit.name].bit_length(), []).append(unit)
    by_class = [slot for alike in classes.values() for slot in _fit(alike, sizes, apart)]
    return [_fit(units, sizes, apart), _fit(by_size, sizes, apart), _fit(units, sizes, apart, least), by_class]


def _improved(slots: _Slots, sizes: Mapping[str, int], apart: Mapping[str, set[str]], least: int) -> _Slots:
    """Divides the units of two slots anew, pair after pair, as long as it helps; at most `ROUNDS` times over all."""
    total = _total(slots, sizes)
    for _ in range(ROUNDS):
        before = total
        if before == least:
            break
        slots = sorted(slots, key=lambda slot: -max(sizes[unit.name] for unit in slot))
        for first, second in combinations(range(len(slots)), 2):
            slots[first], slots[second] = _divided(slots[first], slots[second], sizes, apart)
        slots = [slot for slot in slots if slot]
        total = _total(slots, sizes)
        if total == before:
            break
    return slots


def _divided(
    one: list[Unit], other: list[Unit], sizes: Mapping[str, int], apart: Mapping[str, set[str]]
) -> tuple[list[Unit], list[Unit]]:
    """The units of two slots so that the larger slot is as large as it has to be, and the other as small as it can be.

    Units that are tied by being whole at the same time, directly or through others, are of two kinds, those of each
    slot; which kind goes where is free for every such set.
    """
    larger: list[Unit] = []
    smaller: list[Unit] = []
    left = {unit.name: (unit, side) for side, slot in enumerate((one, other)) for unit in slot}
    while left:
        name, found = next(iter(left)), []
        reached = [left.pop(name)]
        while reached:
            unit, side = reached.pop()
            found.append((unit, side))
            reached += [left.pop(near) for near in sorted(apart[unit.name] & left.keys())]
        kinds = [[unit for unit, side in found if side == of] for of in (0, 1)]
        kinds.sort(key=lambda kind: max((sizes[unit.name] for unit in kind), default=0))
        smaller += kinds[0]
        larger += kinds[1]
    return larger, smaller


def _fit(
    units: Sequence[Unit], sizes: Mapping[str, int], apart: Mapping[str, set[str]], least: Sequence[int] = ()
) -> _Slots:
    """Each unit into the free slot that has to grow least, of those the smallest; a new one if none is free."""
    slots: _Slots = [[] for _ in least]
    names: list[set[str]] = [set() for _ in least]
    room = list(least)
    for unit in units:
        size = sizes[unit.name]
        free = [k for k, held in enumerate(names) if held.isdisjoint(apart[unit.name])]
        if free:
            chosen = min(free, key=lambda k: (max(0, size - room[k]), room[k], k))
            room[chosen] = max(room[chosen], size)
        else:
            chosen = len(slots)
            slots.append([])
            names.append(set())
            room.append(size)
        slots[chosen].append(unit)
        names[chosen].add(unit.name)
    return [slot for slot in slots if slot]
