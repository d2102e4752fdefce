"""Signal words: in which word of the arena each signal is counted.

A word belongs to one unit, one lane and one source, so a signal says of which unit it is. Ranks that issue different
collectives, for one of them has skipped a unit, then wait for words that never come, until a deadline names unit and
peer, and take nothing that belongs to another unit:

- A rank's n-th all-gather of a unit is answered by its peers' n-th of that unit, and by nothing else; the same holds
  for its reduce-scatters. They may come at other places in the order of the peers' collectives.
- If they do, nobody gets beyond the first all-gather that differs: a stream gives what others wait for in an
  all-gather only after its own waits in the one before, so each of two ranks would have to be through first.
- Memory is not written for another unit either: what gives room (FREE, CREDIT, …) is counted for the unit as well.
  A reduce-scatter in the unit's slot and one beside it, in the areas of the arena, have words of their own, since
  room in one place is none in the other.

What words do not tell apart are reductions of one unit of which ranks give other gradients, or of other types:
:mod:`tide.fsdp.gradients` compares those, and whoever calls a session has to give the same on every rank.

DONE alone is kept per slot, as it allows the next unit of the slot, whichever it is. It moves no data: who waits for
it has a shard to place in its own slot, and a peer pulls that only when it is READY, for the unit.

Sources are counted by where they are seen from: ranks of the node by their place in it; ranks of other nodes, which
are those of the own rail, by their node in a reduce-scatter and by the step of the exchange in an all-gather. So the
words of a unit grow with ranks of a node and nodes, not with the world::

    words ├─ slot 0: DONE ─┤ … ├─ unit a: READY │ FREE │ … ┤─ unit b: READY │ … ┤ …
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tide.compiler.model import Unit
from tide.compiler.steps import Lane
from tide.errors import PlanError
from tide.topology import Team

#: Bytes of one word.
SIGNAL_BYTES = 8

#: Lanes that are kept per slot; the others are kept per unit.
SLOT_LANES = frozenset({Lane.DONE})
#: Lanes to oneself only.
OWN = frozenset({Lane.PLACED, Lane.GATHERED, Lane.SHARDED, Lane.SUMMED, Lane.SENT, Lane.BEGUN})
#: Lanes from ranks of the node, the own one included.
NEAR = frozenset({Lane.READY, Lane.DONE, Lane.FREE, Lane.ARRIVED, Lane.PUSHED, Lane.CREDIT, Lane.HELD, Lane.TAKEN})
#: Lanes of an all-gather, and of a reduce-scatter, from the own rail in other nodes.
GATHER_FAR = (Lane.FREE, Lane.WIRE)
SCATTER_FAR = (Lane.PARTIAL, Lane.WIRE_CREDIT, Lane.SPREAD, Lane.SPREAD_CREDIT)

_GATHER_NEAR = (Lane.READY, Lane.FREE, Lane.ARRIVED)
_GATHER_OWN = (Lane.PLACED, Lane.GATHERED, Lane.SHARDED)
_SCATTER_NEAR = (Lane.PUSHED, Lane.CREDIT)
_SCATTER_OWN = (Lane.SUMMED, Lane.SENT, Lane.BEGUN)
_SWITCH_NEAR = (Lane.HELD, Lane.TAKEN)
#: How a reduce-scatter may run: in the slot, or beside it.
_FORMS = 2


class Shape(NamedTuple):
    """What decides on the words of a unit for the ranks of one team.

    ``forms`` is how many ways a reduce-scatter may run (0: no gradients), ``switch`` whether the switch sums.
    """

    per_node: int
    nodes: int
    forms: int
    switch: bool


class Row(NamedTuple):
    """Words of one lane, relative to the unit's first."""

    first: int
    count: int  # type: ignore[assignment]


#: Rows by lane, whether they come from other nodes, and form.
Rows = Mapping[tuple[Lane, bool, int], Row]


@lru_cache(maxsize=256)
def rows_of(shape: Shape) -> tuple[Rows, int]:
    """Rows of a unit's words, and how many words they are."""
    rows: dict[tuple[Lane, bool, int], Row] = {}
    cursor = 0

    def add(lanes: Sequence[Lane], count: int, far: bool = False, form: int = 0) -> None:
        nonlocal cursor
        for lane in lanes if count else ():
            rows[lane, far, form] = Row(cursor, count)
            cursor += count

    add(_GATHER_NEAR, shape.per_node)
    add(_GATHER_OWN, 1)
    add(GATHER_FAR, (shape.nodes - 1).bit_length(), far=True)
    for form in range(shape.forms):
        add((*_SCATTER_NEAR, *(_SWITCH_NEAR if shape.switch else ())), shape.per_node, form=form)
        add(_SCATTER_OWN, 1, form=form)
        far = SCATTER_FAR[2:] if shape.switch else SCATTER_FAR[:2]
        add(far, shape.nodes if shape.nodes > 1 else 0, far=True, form=form)
    return rows, cursor


def _exchange(lane: Lane, nodes: int, node: int, source: int) -> int:
    """Step of an all-gather's exchange between nodes in which ``source`` signals; -1 if there is none.

    See :func:`tide.compiler.schedule.rails.rail_steps`: in step ``k`` partners are ``2**k`` apart. FREE comes from
    whom this node sends to, WIRE from whom it receives from.
    """
    if nodes & (nodes - 1) == 0:
        distance = node ^ source
    else:
        distance = (source - node if lane == Lane.FREE else node - source) % nodes
    return distance.bit_length() - 1 if distance & (distance - 1) == 0 else -1


@dataclass(frozen=True, slots=True)
class UnitSignals:
    """Words of one unit.

    Attributes
    ----------
    first, size : int
        Its first word, and how many it has.
    slot : int
        First word of its slot.
    forms : int
        Ways in which its reduce-scatter may run.
    switch : bool
        Whether partial sums are summed in the switch.
    """

    first: int
    size: int
    slot: int
    forms: int
    switch: bool

    def word(self, team: Team, lane: Lane, receiver: int, source: int, in_slot: bool = False) -> int:
        """Number of the word in which position ``receiver`` counts signals of position ``source``.

        Raises
        ------
        PlanError
            If nobody there gives such signals.
        """
        (node, local), (from_node, from_local) = team.seat(receiver), team.seat(source)
        far = node != from_node
        if lane in SLOT_LANES:
            if not far:
                return self.slot + from_local
        else:
            rows, _ = rows_of(Shape(team.per_node, team.nodes, self.forms, self.switch))
            form = int(not in_slot) if self.forms == _FORMS else 0
            row = rows.get((lane, far, form)) or rows.get((lane, far, 0))
            index = from_local
            if lane in OWN:
                index = 0 if source == receiver else -1
            elif far:
                index = _exchange(lane, team.nodes, node, from_node) if lane in GATHER_FAR else from_node
                index = index if local == from_local else -1
            if row is not None and index >= 0:
                return self.first + row.first + index
        raise PlanError(
            f"position {receiver} has no word for signals {lane.name} of position {source}: they do not come "
            + ("from another node, or not from there" if far else "from a rank of the node, or not for this unit")
        )


@dataclass(frozen=True, eq=False, slots=True)
class SignalLayout:
    """All signal words, the same on every rank.

    Attributes
    ----------
    slots : tuple of Row
        Words of each slot.
    units : dict of str to UnitSignals
        Words of each unit.
    count : int
        Number of all words.
    """

    slots: tuple[Row, ...]
    units: dict[str, UnitSignals]
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return self.count * SIGNAL_BYTES


def lay_out_signals(
    units: Sequence[Unit],
    slots: Sequence[Sequence[str]],
    teams: Callable[[Unit], Sequence[Team]],
    reduced: Collection[str],
    switched: Collection[str],
    slot_reuse: bool,
) -> SignalLayout:
    """Words of all units.

    Parameters
    ----------
    units : sequence of Unit
        In the order of the model.
    slots : sequence of sequence of str
        Names of the units of each slot.
    teams : callable
        The distinct teams of a unit's shard groups.
    reduced, switched : collection of str
        Units that have gradients, and those whose partial sums are summed in the switch.
    slot_reuse : bool
        Whether reduce-scatters run in the slot or beside it.
    """
    by_name = {unit.name: unit for unit in units}
    cursor, rows = 0, []
    for names in slots:
        count = max((team.per_node for name in names for team in teams(by_name[name])), default=0)
        rows.append(Row(cursor, count))
        cursor += count
    slot_of = {name: rows[number].first for number, names in enumerate(slots) for name in names}
    found = {}
    for unit in units:
        forms = (_FORMS if slot_reuse else 1) if unit.name in reduced else 0
        switch = unit.name in switched
        size = max(rows_of(Shape(team.per_node, team.nodes, forms, switch))[1] for team in teams(unit))
        found[unit.name] = UnitSignals(cursor, size, slot_of[unit.name], forms, switch)
        cursor += size
    return SignalLayout(tuple(rows), found, cursor)
