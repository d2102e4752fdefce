"""Proof of the signal words: each stands for one unit, lane, form and source.

Two halves. The layout gives different words to different sources, for all that may signal; and programs signal from
such sources only. Both are needed for a wait to be answered by nothing but what it waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from tide.compiler.columns import Bools
from tide.compiler.compile import Compiled
from tide.compiler.model import Unit
from tide.compiler.schedule.rails import rail_steps
from tide.compiler.shard import Int64
from tide.compiler.signals import GATHER_FAR, NEAR, OWN, SCATTER_FAR, SLOT_LANES, UnitSignals
from tide.compiler.steps import Lane
from tide.errors import PlanError
from tide.topology import Team, team_of

#: Lanes of a reduce-scatter: through the switch only, without it only, and all.
SWITCHED = (Lane.SPREAD, Lane.SPREAD_CREDIT, Lane.HELD, Lane.TAKEN)
UNSWITCHED = (Lane.PARTIAL, Lane.WIRE_CREDIT)
SCATTER = (Lane.PUSHED, Lane.CREDIT, Lane.SUMMED, Lane.SENT, Lane.BEGUN, *SWITCHED, *UNSWITCHED)


#: Signals that are looked at at a time.
_PART = 1 << 16


def _table(lanes: Collection[Lane]) -> Bools:
    """Whether a lane, by its number, is one of these."""
    return np.array([lane in lanes for lane in Lane])


_OWN, _WITHIN, _GATHERED, _SCATTERED = map(_table, (OWN, NEAR, GATHER_FAR, SCATTER_FAR))


def check_words(compiled: Compiled) -> None:
    """Raises :class:`PlanError` unless units, and the lanes of each, have words of their own."""
    words, arena = compiled.arena.words, compiled.arena
    if len(words.slots) != len(arena.slots):
        raise PlanError(f"arena: {len(arena.slots)} slots, but signal words for {len(words.slots)}")
    spans = [(row.first, row.first + row.count, f"slot {number}") for number, row in enumerate(words.slots)]
    seen: set[tuple[Team, UnitSignals, tuple[Lane, ...]]] = set()
    teams: dict[int, set[Team]] = {}
    for unit in compiled.spec.units:
        found = words.units.get(unit.name)
        if found is None:
            raise PlanError(f"unit {unit.name!r} has no signal words")
        slot = words.slots[arena.slot_of[unit.name]]
        if found.slot != slot.first:
            raise PlanError(
                f"unit {unit.name!r}: its signals of the slot are counted from word {found.slot} on, not {slot.first}"
            )
        spans.append((found.first, found.first + found.size, f"unit {unit.name!r}"))
        if id(unit.mesh) not in teams:
            teams[id(unit.mesh)] = {team_of(group, compiled.topology) for group in unit.mesh.groups}
        alike = UnitSignals(0, found.size, -slot.count, found.forms, found.switch)
        lanes = _lanes(compiled, unit)
        for team in teams[id(unit.mesh)]:
            if (team, alike, lanes) not in seen:
                seen.add((team, alike, lanes))
                _check_rows(unit.name, team, alike, lanes, compiled.options.slot_reuse)
    spans.sort()
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if stop > start:
            raise PlanError(f"arena: {name} and {other} share signal word {start}")
    if spans and (spans[0][0] < 0 or max(stop for _, stop, _ in spans) > words.count):
        raise PlanError(f"arena: states {words.count} signal words, but more are used")


def _lanes(compiled: Compiled, unit: Unit) -> tuple[Lane, ...]:
    """Lanes that programs of the unit may use."""
    unused: tuple[Lane, ...] = SCATTER
    if any(p.trainable and p.numel for p in unit.parameters):
        unused = UNSWITCHED if unit.name in compiled.spread else SWITCHED
    return tuple(lane for lane in Lane if lane not in unused)


def _check_rows(unit: str, team: Team, signals: UnitSignals, lanes: tuple[Lane, ...], slot_reuse: bool) -> None:
    """All sources that one position may have, lane by lane: each has a word, and no other one's.

    Words are laid out by the places of receiver and source in the team, so the first position stands for all.
    """
    me, taken = team.grid[0][0], dict[int, str]()
    rail = rail_steps(team.nodes, 0)
    partners = {Lane.FREE: [step.to for step in rail], Lane.WIRE: [step.source for step in rail]}
    for lane in lanes:
        sources = {me} if lane in OWN else set[int]()
        if lane in NEAR:
            sources |= set(team.grid[0])
        if lane in GATHER_FAR or lane in SCATTER_FAR:
            sources |= {team.grid[node][0] for node in partners.get(lane, range(1, team.nodes))}
        for in_slot in (True, False) if slot_reuse and lane in SCATTER else (False,):
            for source in sorted(sources):
                what = f"{lane.name} of position {source}" + (" in the slot" if in_slot else "")
                try:
                    word = signals.word(team, lane, me, source, in_slot)
                except PlanError as error:
                    raise PlanError(f"unit {unit!r}: {error}") from None
                start, stop = (signals.slot, 0) if lane in SLOT_LANES else (0, signals.size)
                if not start <= word < stop:
                    raise PlanError(f"unit {unit!r}: signals {what} are counted in a word that is not the unit's")
                if word in taken:
                    raise PlanError(f"unit {unit!r}: signals {what} and {taken[word]} share a word")
                taken[word] = what


def strangers(team: Team, receiver: Int64, source: Int64, lane: Int64) -> Bools:
    """Which signals have no word of their own, since the layout expects none of that lane from there.

    Parameters
    ----------
    team : Team
        Of the positions.
    receiver, source, lane : ndarray of int64, shape (n,)
        Who counts whose signals.
    """
    seats = np.zeros((team.size, 2), dtype=np.int64)
    grid = np.asarray(team.grid, dtype=np.int64)
    seats[grid.ravel(), 0] = np.repeat(np.arange(team.nodes), team.per_node)
    seats[grid.ravel(), 1] = np.tile(np.arange(team.per_node), team.nodes)
    wrong: Bools = np.ones(len(lane), dtype=bool)
    for start in range(0, len(lane), _PART):
        part = slice(start, start + _PART)
        to, giver, row = seats[receiver[part]], seats[source[part]], lane[part]
        near, rail = to[:, 0] == giver[:, 0], to[:, 1] == giver[:, 1]
        if team.nodes & (team.nodes - 1) == 0:
            apart = to[:, 0] ^ giver[:, 0]
        else:
            apart = np.where(row == Lane.FREE, 1, -1) * (giver[:, 0] - to[:, 0]) % team.nodes
        far = _SCATTERED[row] | (_GATHERED[row] & ((apart & (apart - 1)) == 0))
        wrong[part] = ~np.where(near, _WITHIN[row] | (_OWN[row] & rail), far & rail)
    return wrong
