"""Which units run inside of which, from the names of modules and the order of parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tide.compiler.model import Parameter, Unit


def nest(
    units: Sequence[Unit], homes: Mapping[int, Sequence[str]], order: Mapping[str, int], indices: Container[int] = ()
) -> tuple[Unit, ...]:
    """The units with depth and tail, and with those that stay whole for what they are.

    That are units of modules that others run between, and units of modules that take indices: FSDP2 learns of the end
    of their backward only at the end of all of it, which matters unless they are the first and so end last anyway.
    The order in which a model registers its parameters stands for the order in which it uses them.

    Parameters
    ----------
    units : sequence of Unit
        Outer ones before those inside of them; each has the number of its module in ``lives_with``.
    homes : mapping of int to sequence of str
        Names of the modules of each number: one, or those that are wrapped together.
    order : mapping of str to int
        Place of the parameters, also under their other names.
    indices : container of int
        Numbers of the modules whose inputs need no gradient.
    """
    inside = {number: _inside(number, homes) for number in {unit.lives_with for unit in units}}

    def places(parameter: Parameter) -> list[int]:
        return [order[name] for name in (parameter.name, *parameter.aliases) if name in order] or [len(order)]

    spans: dict[int, tuple[int, int]] = {}  # of modules
    first: dict[int, int] = {}  # parameter of a module that runs inside
    for unit in units:
        number = unit.lives_with
        found = [place for parameter in unit.parameters for place in places(parameter)]
        low, high = spans.get(number, (len(order), 0))
        spans[number] = min(low, *found), max(high, *found)
        for outer in inside[number]:
            first[outer] = min(first.get(outer, len(order)), min(found))
    nested = []
    begun: set[int] = set()
    for unit in units:
        number = unit.lives_with
        tail = tuple(i for i, p in enumerate(unit.parameters) if max(places(p)) > first.get(number, len(order)))
        whole = unit.stays_whole or (number in indices and bool(begun - inside[number] - {number}))
        if len(homes[number]) > 1:
            low, high = spans[number]
            whole |= any(
                low < start < high and other != number and other not in inside[number] and number not in inside[other]
                for other, (start, _) in spans.items()
            )
        begun.add(number)
        nested.append(replace(unit, depth=len(inside[number]), tail=tail, stays_whole=whole))
    return tuple(nested)


def _inside(number: int, homes: Mapping[int, Sequence[str]]) -> set[int]:
    """Numbers of the modules that a module runs inside of."""
    by_name = {name: other for other, names in homes.items() for name in names}
    parts = homes[number][0].split(".") if homes[number][0] else []
    return {by_name[outer] for end in range(len(parts)) if (outer := ".".join(parts[:end])) in by_name} - {number}


def takes_indices(modules: Iterable[Any]) -> bool:
    """Whether the first module of a unit is an embedding, whose input has no gradient."""
    from torch import nn

    return isinstance(next(iter(modules)), nn.Embedding | nn.EmbeddingBag)
