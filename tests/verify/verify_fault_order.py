"""Faults in signals and waits: what is missing, early, or in a circle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from verify_planting import (
    AG,
    RS,
    NoPlaceError,
    Spot,
    copies_before,
    edit,
    fault,
    pick,
    spots,
    substitute,
    where,
    world_rank,
)

from tide.compiler.compile import Compiled
from tide.compiler.steps import Accumulate, Copy, Lane, Put, Signal, Step, Stream, Wait

# Signals and waits -------------------------------------------------------------------------------


@fault("dropped-wait", AG, RS)
def dropped_wait(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A wait is missing; its signal stays over."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Wait))
    return substitute(compiled, spot, collective), f"{where(compiled, spot, collective)} {spot.step} removed"


@fault("dropped-signal", AG, RS)
def dropped_signal(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A signal is missing; somebody waits for it forever."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Signal))
    return substitute(compiled, spot, collective), f"{where(compiled, spot, collective)} {spot.step} removed"


def _drop_pair(
    compiled: Compiled,
    rng: random.Random,
    collective: str,
    fits: Callable[[Spot], bool],
    after: tuple[type, ...] = (),
) -> tuple[Compiled, str]:
    """Removes a wait for one signal, and that signal, so that counts still match and only the order is lost.

    With ``after``, only signals that follow a step of such a kind: the others say no more than that the rank
    has begun, which other signals may say too.
    """
    found = [
        spot
        for spot in spots(compiled, collective)
        if isinstance(spot.step, Wait) and spot.step.count == 1 and fits(spot)
    ]
    rng.shuffle(found)
    for spot in found:
        twin = _twin(compiled, spot, collective)
        sender = compiled.program(spot.unit, collective, twin.rank).streams[twin.stream].steps
        if after and not any(isinstance(step, after) for step in sender[: twin.index]):
            continue
        assert isinstance(twin.step, Signal)
        damaged = substitute(compiled, spot, collective)
        fewer = [replace(twin.step, count=twin.step.count - 1)] if twin.step.count > 1 else []
        text = f"{where(compiled, spot, collective)} {spot.step} and its signal removed"
        return substitute(damaged, twin, collective, *fewer), text
    raise NoPlaceError


def _twin(compiled: Compiled, spot: Spot, collective: str) -> Spot:
    """The signal step that the wait at ``spot`` is for."""
    assert isinstance(spot.step, Wait)
    peer, lane = spot.step.peer, spot.step.lane
    sender, mine = world_rank(compiled, spot, peer), compiled.group(spot.unit, spot.rank)[1]
    steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
    left = sum(s.count for s in steps[: spot.index] if isinstance(s, Wait) and (s.peer, s.lane) == (peer, lane))
    for number, stream in enumerate(compiled.program(spot.unit, collective, sender).streams):
        for index, step in enumerate(stream.steps):
            if isinstance(step, Signal) and (step.peer, step.lane) == (mine, lane):
                if left < step.count:
                    return Spot(spot.unit, sender, number, index, step)
                left -= step.count
    raise NoPlaceError


def _followed_by(
    compiled: Compiled, collective: str, lane: Lane, guarded: Callable[[Step], bool]
) -> Callable[[Spot], bool]:
    """Waits on ``lane`` after which the next step is ``guarded``, waits on other lanes left aside."""

    def fits(spot: Spot) -> bool:
        if spot.step.lane != lane:  # type: ignore[union-attr]
            return False
        steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
        rest = steps[spot.index + 1 :]
        after = next((step for step in rest if not isinstance(step, Wait) or step.lane == lane), None)
        return after is not None and guarded(after)

    return fits


def _copies(step: Step) -> bool:
    return isinstance(step, Copy)


def _sums(step: Step) -> bool:
    return isinstance(step, Accumulate)


def _puts(step: Step) -> bool:
    return isinstance(step, Put)


@fault("early-pull", AG, shows="race")
def early_pull(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Pull route: a rank pulls a peer's shard without waiting until it is placed."""

    def guarded(step: Step) -> bool:
        return isinstance(step, Copy) and step.pull

    def fits(spot: Spot) -> bool:
        assert isinstance(spot.step, Wait)
        steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
        after = steps[spot.index + 1] if spot.index + 1 < len(steps) else None
        return spot.step.lane == Lane.READY and after is not None and guarded(after)

    return _drop_pair(compiled, rng, collective, fits)


@fault("early-end", AG, shows="race")
def early_end(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Push route: a rank does not wait until a peer has pushed all it pushes."""

    def fits(spot: Spot) -> bool:
        assert isinstance(spot.step, Wait)
        if spot.step.lane != Lane.READY:
            return False
        mine, peer = compiled.group(spot.unit, spot.rank)[1], world_rank(compiled, spot, spot.step.peer)
        steps = [step for _, _, step in compiled.program(spot.unit, collective, peer).steps()]
        return any(isinstance(step, Copy) and not step.pull and step.peer == mine for step in steps)

    return _drop_pair(compiled, rng, collective, fits)


@fault("early-piece", AG, shows="race")
def early_piece(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Push route: a rank pushes a piece of its shard without waiting until it is placed."""
    return _drop_pair(compiled, rng, collective, _followed_by(compiled, collective, Lane.PLACED, _copies))


@fault("early-store", AG, shows="reuse")
def early_store(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Push route: a rank pushes into a peer's storage without its leave."""
    return _drop_pair(compiled, rng, collective, _followed_by(compiled, collective, Lane.FREE, _copies))


@fault("early-spread", AG, shows="race")
def early_spread(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank pulls what came from another node without waiting until it is there."""
    return _drop_pair(compiled, rng, collective, _followed_by(compiled, collective, Lane.ARRIVED, _copies))


@fault("early-sum", RS, shows="race")
def early_sum(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank sums a piece without waiting until it is there."""
    return _drop_pair(compiled, rng, collective, _followed_by(compiled, collective, Lane.PUSHED, _sums))


@fault("early-fold", RS, shows="always")
def early_fold(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank adds a partial sum without waiting for it; the put's signal stays over."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Wait) and s.step.lane == Lane.PARTIAL)
    return substitute(compiled, spot, collective), f"{where(compiled, spot, collective)} {spot.step} removed"


@fault("early-push", RS, shows="race")
def early_push(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank pushes without the credit for the ring position."""
    fits = _followed_by(compiled, collective, Lane.CREDIT, _copies)
    return _drop_pair(compiled, rng, collective, fits, after=(Accumulate,))


@fault("early-slot", RS, shows="reuse")
def early_slot(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank pushes into a peer's slot without its word that the slot has been vacated."""
    fits = _followed_by(compiled, collective, Lane.CREDIT, _copies)

    def first(spot: Spot) -> bool:
        program = compiled.program(spot.unit, collective, spot.rank)
        earlier = program.streams[spot.stream].steps[: spot.index]
        return program.in_slot and fits(spot) and spot.step not in earlier

    return _drop_pair(compiled, rng, collective, first)


@fault("early-begin", RS, shows="race")
def early_begin(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank adds another node's sum before its own node's is in the running sum."""
    return _drop_pair(compiled, rng, collective, _followed_by(compiled, collective, Lane.BEGUN, _sums))


@fault("early-wire", RS, shows="race")
def early_wire(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank puts a partial sum without the credit for the ring position."""
    fits = _followed_by(compiled, collective, Lane.WIRE_CREDIT, _puts)
    return _drop_pair(compiled, rng, collective, fits, after=(Accumulate,))


@fault("early-put", AG, shows="reuse")
def early_put(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank puts into another's storage without its leave."""
    follows = _followed_by(compiled, collective, Lane.FREE, _puts)

    def fits(spot: Spot) -> bool:
        # Later on, what came from other nodes may imply the leave.
        steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
        return follows(spot) and not any(isinstance(step, Put) for step in steps[: spot.index])

    return _drop_pair(compiled, rng, collective, fits)


@fault("early-leave", AG, shows="reuse")
def early_leave(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank says that it has pulled all it needs before it has."""

    def fits(spot: Spot) -> bool:
        if not (isinstance(spot.step, Signal) and spot.step.lane == Lane.DONE):
            return False
        return bool(copies_before(compiled, spot, collective, spot.step.peer))

    spot = pick(compiled, rng, collective, fits)
    assert isinstance(spot.step, Signal)
    at = copies_before(compiled, spot, collective, spot.step.peer)[-1]

    def change(steps: list[Step]) -> list[Step]:
        kept = steps[: spot.index] + steps[spot.index + 1 :]
        return [*kept[:at], spot.step, *kept[at:]]

    return edit(compiled, spot, collective, change), f"{where(compiled, spot, collective)} {spot.step} moved up"


@fault("early-free", AG, shows="reuse")
def early_free(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank lets another node put into its storage before its peers have left it."""

    def fits(spot: Spot) -> bool:
        if not (isinstance(spot.step, Signal) and spot.step.lane == Lane.FREE):
            return False
        steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
        before = [step for step in steps[: spot.index] if isinstance(step, Signal | Wait)]
        # The leave for later exchanges may follow from what came in the first.
        first = not any(isinstance(step, Signal) and step.lane == Lane.FREE for step in before)
        return first and any(step.lane == Lane.DONE for step in before) and _filled(compiled, spot)

    spot = pick(compiled, rng, collective, fits)

    def change(steps: list[Step]) -> list[Step]:
        return [spot.step, *steps[: spot.index], *steps[spot.index + 1 :]]

    return edit(
        compiled, spot, collective, change
    ), f"{where(compiled, spot, collective)} {spot.step} moved to the start"


def _filled(compiled: Compiled, spot: Spot) -> bool:
    """Whether the rank that gets the spot's FREE signal puts anything."""
    assert isinstance(spot.step, Signal)
    sender = world_rank(compiled, spot, spot.step.peer)
    mine = compiled.group(spot.unit, spot.rank)[1]
    program = compiled.program(spot.unit, AG, sender)
    return any(isinstance(step, Put) and step.peer == mine for _, _, step in program.steps())


@fault("cycle", AG)
def cycle(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Two ranks each wait for the other's shard before they say that their own is placed."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Wait) and s.step.lane == Lane.READY)
    assert isinstance(spot.step, Wait)
    mine, theirs = compiled.group(spot.unit, spot.rank)[1], spot.step.peer
    other = world_rank(compiled, spot, theirs)
    damaged = compiled
    for rank, peer in ((spot.rank, theirs), (other, mine)):
        damaged = _swap_signal(damaged, spot.unit, collective, rank, Signal(peer, Lane.READY), Wait(peer, Lane.READY))
    return damaged, f"unit {spot.unit!r} ranks {spot.rank} and {other} wait for READY of each other first"


@fault("cycle", RS)
def credit_cycle(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank gives credit for pieces only after it has waited for the first of them."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Signal) and s.step.lane == Lane.CREDIT)
    assert isinstance(spot.step, Signal)
    peer = spot.step.peer
    steps = compiled.program(spot.unit, collective, spot.rank).streams[spot.stream].steps
    credit = next(s for s in steps if isinstance(s, Signal) and (s.peer, s.lane) == (peer, Lane.CREDIT))
    damaged = _swap_signal(compiled, spot.unit, collective, spot.rank, credit, Wait(peer, Lane.PUSHED))
    return damaged, f"unit {spot.unit!r} rank {spot.rank} waits for a piece of position {peer} before it gives credit"


def _swap_signal(compiled: Compiled, unit: str, collective: str, rank: int, signal: Signal, wait: Wait) -> Compiled:
    """``rank`` gives its first such signal only after the first such wait, both in one stream."""
    program = compiled.program(unit, collective, rank)
    streams = list(program.streams)
    for number, stream in enumerate(streams):
        steps = list(stream.steps)
        if signal in steps and wait in steps and steps.index(signal) < steps.index(wait):
            after = steps.index(wait)
            steps.insert(after, steps.pop(steps.index(signal)))
            streams[number] = Stream(stream.name, tuple(steps))
            return compiled.with_program(unit, rank, replace(program, streams=tuple(streams)))
    raise NoPlaceError
