"""Faults in what steps move and add: wrong, missing and doubled transfers, casts and sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from verify_planting import AG, RS, NoPlaceError, Spot, fault, moves, pick, substitute, where

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.steps import Accumulate, Buffer, Copy, Place, Put, Region, Step, Sum, Transfer

# Transfers ---------------------------------------------------------------------------------------


def _with_moves(step: Step, transfers: Sequence[Transfer]) -> Step:
    assert isinstance(step, Copy | Put)
    return replace(step, transfers=tuple(transfers))


@fault("missing-transfer", AG, RS)
def missing_transfer(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """One transfer is left out."""
    spot = pick(compiled, rng, collective, lambda s: bool(moves(s.step)))
    transfers = list(moves(spot.step))
    lost = transfers.pop(rng.randrange(len(transfers)))
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, transfers)),
        f"{where(compiled, spot, collective)} without {lost}",
    )


@fault("missing-step", AG, RS)
def missing_step(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A whole copy, place or sum is left out."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Copy | Place | Accumulate))
    return substitute(compiled, spot, collective), f"{where(compiled, spot, collective)} removed"


@fault("doubled-transfer", AG, RS, shows="never")
def doubled_transfer(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """One transfer is done twice: equal bytes, moved for nothing."""
    spot = pick(compiled, rng, collective, lambda s: bool(moves(s.step)))
    transfers = list(moves(spot.step))
    twice = rng.choice(transfers)
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, [*transfers, twice])),
        f"{where(compiled, spot, collective)} does {twice} twice",
    )


@fault("doubled-sum", RS)
def doubled_sum(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A partial sum is added twice."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Accumulate) and _has_base(s.step))
    return (
        substitute(compiled, spot, collective, spot.step, spot.step),
        f"{where(compiled, spot, collective)} done twice",
    )


def _has_base(step: Accumulate) -> bool:
    """Whether a sum of the step adds to its own output."""
    return any(s.base is not None and s.base.buffer is s.dst.buffer for s in step.sums)


@fault("wrong-offset", AG, RS)
def wrong_offset(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A transfer reads from another place than it should."""

    def room(t: Transfer) -> bool:
        return t.src.offset >= 4

    spot = pick(compiled, rng, collective, lambda s: any(room(t) for t in moves(s.step)))
    transfers = list(moves(spot.step))
    at = rng.choice([i for i, t in enumerate(transfers) if room(t)])
    old = transfers[at]
    transfers[at] = old._replace(src=old.src._replace(offset=old.src.offset - 4))
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, transfers)),
        f"{where(compiled, spot, collective)} reads from {transfers[at].src} instead of {old.src}",
    )


@fault("overlap", AG, RS)
def overlapping_run(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A transfer writes over the place of another."""

    def room(t: Transfer) -> bool:
        return t.dst.offset >= 4

    spot = pick(compiled, rng, collective, lambda s: any(room(t) for t in moves(s.step)))
    transfers = list(moves(spot.step))
    at = rng.choice([i for i, t in enumerate(transfers) if room(t)])
    old = transfers[at]
    transfers[at] = old._replace(dst=old.dst._replace(offset=old.dst.offset - 4))
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, transfers)),
        f"{where(compiled, spot, collective)} writes to {transfers[at].dst} instead of {old.dst}",
    )


@fault("swapped-places", AG, RS)
def swapped_places(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Two transfers of one step write to each other's place."""

    def pairs(step: Step) -> list[tuple[int, int]]:
        t = moves(step)
        return [(i, j) for i in range(len(t)) for j in range(i) if t[i].dst != t[j].dst and t[i].src != t[j].src]

    spot = pick(compiled, rng, collective, lambda s: bool(pairs(s.step)))
    transfers = list(moves(spot.step))
    i, j = rng.choice(pairs(spot.step))
    first, second = transfers[i], transfers[j]
    transfers[i], transfers[j] = first._replace(dst=second.dst), second._replace(dst=first.dst)
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, transfers)),
        f"{where(compiled, spot, collective)} swaps {first.dst} and {second.dst}",
    )


@fault("out-of-bounds", AG, RS)
def out_of_bounds(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A transfer writes beyond the slot or the ring area."""
    spot = pick(compiled, rng, collective, lambda s: bool(moves(s.step)))
    transfers = list(moves(spot.step))
    at = rng.randrange(len(transfers))
    old, areas = transfers[at], compiled.arena.receive
    limit = {
        Buffer.STORAGE: compiled.layouts[spot.unit].size,
        Buffer.RECEIVE: areas.receive_size,
        Buffer.WIRE: areas.wire_size,
        Buffer.SPREAD: areas.spread_size,
    }[old.dst.buffer]
    in_slot = collective == RS and compiled.program(spot.unit, RS, spot.rank).in_slot
    if in_slot and old.dst.buffer is not Buffer.SPREAD:
        limit = compiled.layouts[spot.unit].size
    transfers[at] = old._replace(dst=old.dst._replace(offset=limit - old.length + 2))
    return (
        substitute(compiled, spot, collective, _with_moves(spot.step, transfers)),
        f"{where(compiled, spot, collective)} writes to {transfers[at].dst}, the area has {limit} bytes",
    )


@fault("wrong-owner", AG, shows="race")
def wrong_owner(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank pulls from a peer that does not own the bytes (nor has to hold them yet)."""

    def others(spot: Spot) -> list[int]:
        if not isinstance(spot.step, Copy):
            return []
        team = compiled.context(spot.unit, spot.rank).team
        mine = compiled.group(spot.unit, spot.rank)[1]
        row = team.grid[team.seat(mine)[0]]
        return [p for p in row if p not in (mine, spot.step.peer)]

    spot = pick(compiled, rng, collective, lambda s: bool(others(s)))
    peer = rng.choice(others(spot))
    assert isinstance(spot.step, Copy)
    return (
        substitute(compiled, spot, collective, replace(spot.step, peer=peer)),
        f"{where(compiled, spot, collective)} pulls from position {peer} instead of {spot.step.peer}",
    )


@fault("wrong-shard", AG)
def wrong_shard(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A rank places its shard where that of its neighbour belongs."""

    def fits(spot: Spot) -> bool:
        return isinstance(spot.step, Place) and any(_shifts(c) for c in spot.step.casts)

    spot = pick(compiled, rng, collective, fits)
    assert isinstance(spot.step, Place)
    casts = list(spot.step.casts)
    at = rng.choice([i for i, c in enumerate(casts) if _shifts(c)])
    old = casts[at]
    casts[at] = old._replace(dst=old.dst._replace(offset=old.dst.offset - itemsize(old.dst_dtype)))
    return (
        substitute(compiled, spot, collective, Place(tuple(casts))),
        f"{where(compiled, spot, collective)} places at {casts[at].dst} instead of {old.dst}",
    )


def _shifts(cast: object) -> bool:
    return cast.dst.offset >= 8  # type: ignore[attr-defined]


# Sums --------------------------------------------------------------------------------------------


def _change_sum(
    compiled: Compiled, rng: random.Random, fits: Callable[[Sum], bool], change: Callable[[Sum], Sum], what: str
) -> tuple[Compiled, str]:
    spot = pick(compiled, rng, RS, lambda s: isinstance(s.step, Accumulate) and any(fits(x) for x in s.step.sums))
    assert isinstance(spot.step, Accumulate)
    sums = list(spot.step.sums)
    at = rng.choice([i for i, s in enumerate(sums) if fits(s)])
    sums[at] = change(sums[at])
    return (
        substitute(compiled, spot, RS, replace(spot.step, sums=tuple(sums))),
        f"{where(compiled, spot, RS)} sum {at} {what}",
    )


@fault("sum-order", RS)
def sum_order(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """The pieces of a sum are added in another order."""
    del collective
    return _change_sum(
        compiled, rng, lambda s: len(s.srcs) > 1, lambda s: s._replace(srcs=s.srcs[::-1]), "in reverse order"
    )


@fault("lost-piece", RS)
def lost_piece(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A sum leaves one piece out."""
    del collective
    return _change_sum(
        compiled, rng, lambda s: len(s.srcs) > 1, lambda s: s._replace(srcs=s.srcs[:-1]), "without its last piece"
    )


@fault("lost-base", RS)
def lost_base(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A sum forgets the running sum."""
    del collective
    return _change_sum(compiled, rng, lambda s: s.base is not None, lambda s: s._replace(base=None), "without base")


@fault("swapped-ring", RS)
def swapped_ring(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A sum reads another position of the ring than its sender wrote to."""
    del collective
    areas = compiled.arena.receive
    if compiled.options.slot_reuse:
        raise NoPlaceError

    def step_of(region: Region) -> int:
        return {Buffer.RECEIVE: areas.peers * areas.piece, Buffer.WIRE: areas.chunk}.get(region.buffer, 0)

    def change(s: Sum) -> Sum:
        at = next(i for i, src in enumerate(s.srcs) if step_of(src))
        src = s.srcs[at]
        total = step_of(src) * areas.depth
        moved = src._replace(offset=(src.offset + step_of(src)) % total)
        return s._replace(srcs=(*s.srcs[:at], moved, *s.srcs[at + 1 :]))

    if areas.depth < 2:
        raise NoPlaceError
    return _change_sum(
        compiled, rng, lambda s: any(step_of(src) for src in s.srcs), change, "reads the next ring position"
    )


@fault("not-final", RS)
def not_final(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """The last sum does not apply scale and divisor."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Accumulate) and s.step.final)
    assert isinstance(spot.step, Accumulate)
    return (
        substitute(compiled, spot, collective, replace(spot.step, final=False)),
        f"{where(compiled, spot, collective)} not final",
    )


@fault("final-twice", RS)
def final_twice(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Scale and divisor are applied before the last sum too."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Accumulate) and not s.step.final)
    assert isinstance(spot.step, Accumulate)
    return (
        substitute(compiled, spot, collective, replace(spot.step, final=True)),
        f"{where(compiled, spot, collective)} final",
    )


@fault("wrong-gradient", RS)
def wrong_gradient(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A sum reads the rank's own gradient at another place."""
    del collective

    def own(s: Sum) -> int | None:
        size = itemsize(s.src_dtype)
        return next((i for i, x in enumerate(s.srcs) if x.buffer is Buffer.GRAD and x.offset >= size), None)

    def change(s: Sum) -> Sum:
        at = own(s)
        assert at is not None
        moved = s.srcs[at]._replace(offset=s.srcs[at].offset - itemsize(s.src_dtype))
        return s._replace(srcs=(*s.srcs[:at], moved, *s.srcs[at + 1 :]))

    return _change_sum(compiled, rng, lambda s: own(s) is not None, change, "reads its own gradient one element early")


@fault("early-release", RS, shows="never")
def early_release(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """Gradients are released while a stream still reads them."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Accumulate) and _reads_gradient(s.step))
    program = compiled.program(spot.unit, collective, spot.rank)
    name = program.streams[spot.stream].name
    kept = tuple(stream for stream in program.release if stream != name)
    damaged = compiled.with_program(spot.unit, spot.rank, replace(program, release=kept))
    return damaged, f"unit {spot.unit!r} rank {spot.rank} releases gradients without waiting for {name}"


def _reads_gradient(step: Accumulate) -> bool:
    return any(src.buffer is Buffer.GRAD for s in step.sums for src in s.srcs)


@fault("early-mark", RS, shows="never")
def early_mark(compiled: Compiled, rng: random.Random, collective: str) -> tuple[Compiled, str]:
    """A stream that goes on afterwards says that gradients are released one sum too early."""
    spot = pick(compiled, rng, collective, lambda s: isinstance(s.step, Accumulate) and _reads_gradient(s.step))
    program = compiled.program(spot.unit, collective, spot.rank)
    if program.streams[spot.stream].released is None:
        raise NoPlaceError
    streams = list(program.streams)
    streams[spot.stream] = replace(streams[spot.stream], released=spot.index)
    damaged = compiled.with_program(spot.unit, spot.rank, replace(program, streams=tuple(streams)))
    return damaged, f"{where(compiled, spot, collective)} comes after its stream's release of gradients"
