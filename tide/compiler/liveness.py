"""When units are whole, from the order in which FSDP2 gathers and reshards them.

A module's units are gathered before it runs and resharded after it, and so it is in the backward pass, in which
modules end in the order in which they began in forward::

    forward     O ─────────────┐   A        backward    A ┐   O ─────────────┐
                  I1 ┐  I2 ┐   │                          │     I2 ┐  I1 ┐   │
    in use      O   O I1  O I2     A                      A   O   O I2  O I1

What is gathered ahead are the next modules in the order of that pass: at the depth of prefetching ``d``, the ``d``
modules that begin after the one in use. FSDP2 does this on the host in backward and where it is told to, and on
the device's streams in forward, where the host runs ahead; the modules it means are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tide.compiler.model import Unit


@dataclass(eq=False, slots=True)
class Module:
    """A wrapped module: its units, and the wrapped modules that run inside of it."""

    units: list[Unit]
    inner: list[Module] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its first unit, for messages."""
        return self.units[0].name or "root"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a training step at which a module has begun.

    Attributes
    ----------
    backward : bool
        In which pass.
    order : int
        The module's place among those of the pass.
    module : Module
        The module.
    enclosing : tuple of Module
        Modules that it runs inside of, outermost first.
    ahead : tuple of Module
        Modules that are gathered ahead.
    """

    backward: bool
    order: int
    module: Module
    enclosing: tuple[Module, ...]
    ahead: tuple[Module, ...]

    @property
    def live(self) -> Iterator[Unit]:
        """Units that are whole, or are being made so; those that always are left aside."""
        for module in (*self.enclosing, self.module, *self.ahead):
            yield from module.units

    def __str__(self) -> str:
        return f"the {'backward' if self.backward else 'forward'} of {self.module.name}"


@dataclass(frozen=True, slots=True)
class Interval:
    """Moments from ``start`` to ``stop``, both included, in which a unit is whole."""

    start: int
    stop: int

    def meets(self, other: Interval) -> bool:
        """Whether both hold at some moment."""
        return self.start <= other.stop and other.start <= self.stop


def module_tree(units: Sequence[Unit]) -> list[Module]:
    """Outermost modules; a unit of greater depth runs inside of the last one of lesser depth."""
    outermost: list[Module] = []
    opened: list[tuple[int, Module]] = []
    together: dict[int, Module] = {}
    for unit in units:
        if unit.lives_with >= 0 and unit.lives_with in together:
            together[unit.lives_with].units.append(unit)
            continue
        module = Module([unit])
        if unit.lives_with >= 0:
            together[unit.lives_with] = module
        while opened and opened[-1][0] >= unit.depth:
            opened.pop()
        (opened[-1][1].inner if opened else outermost).append(module)
        opened.append((unit.depth, module))
    return outermost


def in_order(modules: Sequence[Module], backward: bool) -> Iterator[tuple[Module, tuple[Module, ...]]]:
    """Modules in the order in which they begin, each with those that it runs inside of."""
    for module in reversed(modules) if backward else modules:
        yield module, ()
        for inner, enclosing in in_order(module.inner, backward):
            yield inner, (module, *enclosing)


def moments(units: Sequence[Unit], prefetch: int) -> list[Moment]:
    """Every moment of a training step at which a module begins, forward and then backward.

    Parameters
    ----------
    units : sequence of Unit
        In the order of the forward pass.
    prefetch : int
        Modules that are gathered ahead.
    """
    tree = module_tree(units)
    found = []
    for backward in (False, True):
        order = list(in_order(tree, backward))
        for place, (module, enclosing) in enumerate(order):
            ahead = tuple(later for later, _ in order[place + 1 : place + 1 + prefetch])
            found.append(Moment(backward, place, module, enclosing, ahead))
    return found


def live_intervals(units: Sequence[Unit], step: Sequence[Moment]) -> dict[str, tuple[Interval, Interval]]:
    """When each unit is whole: an interval of the forward pass and one of the backward pass.

    ``step`` is what :func:`moments` found; intervals count its moments from the start. A unit that stays whole is so
    at all of them: it is not resharded between the passes, and in evaluation, which has no backward pass, not at all.
    """
    half = len(step) // 2
    found: dict[str, tuple[Interval, Interval]] = {}
    spans: dict[tuple[str, bool], Interval] = {}
    for place, moment in enumerate(step):
        for unit in moment.live:
            key = unit.name, moment.backward
            spans[key] = Interval(spans[key].start if key in spans else place, place)
    for unit in units:
        if unit.stays_whole:
            found[unit.name] = Interval(0, half - 1), Interval(half, len(step) - 1)
        else:
            found[unit.name] = spans[unit.name, False], spans[unit.name, True]
    return found
