"""Reduce-scatters whose partial sums are summed in the switch: proof, planted faults, and runs on bytes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "verify"))

from verify_executor import Execution
from verify_planting import RS, Spot, edit, pick, spots, substitute, where

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule.switch import group_sizes, spread_places
from tide.compiler.signals import lay_out_signals
from tide.compiler.steps import Buffer, Lane, Put, Signal, SwitchReduce, Wait
from tide.compiler.verify import verify
from tide.errors import InputError, PlanError
from tide.topology import Topology
from tide.transport.simulated import FAMILIES, explore

OPTIONS = PlanOptions(slots=1, bundle_bytes=16, chunk_bytes=256, put_bytes=4096, switch_reduce="on")


def compiled_for(nodes: int, ranks: int, options: PlanOptions = OPTIONS) -> Compiled:
    """Two units in one slot; outputs of both types, strided and uneven shards."""
    mesh = Mesh((tuple(range(nodes * ranks)),))

    def rows(unit: str) -> tuple[Parameter, ...]:
        return (
            Parameter(f"{unit}.w", (5 * nodes * ranks + 3, 13)),
            Parameter(f"{unit}.v", (3, 8 * nodes * ranks), 1, out_dtype="bfloat16"),
            Parameter(f"{unit}.b", (5,)),
        )

    units = (Unit("first", rows("first"), mesh), Unit("second", rows("second")[:2], mesh))
    compiled = compile_spec(ModelSpec(units), Topology(nodes, ranks), options)
    assert compiled.spread == {"first", "second"}
    return compiled


#: Groups with zeros (2×2, 2×3), full ones (3×2), full ones and a rest with places of its own (4×2, 6×2, 5×3).
SHAPES = [(2, 2), (2, 3), (3, 2), (4, 2), (6, 2), (5, 3)]
TWICE = [(RS, "first"), (RS, "second"), (RS, "first")]
shapes = pytest.mark.parametrize(("nodes", "ranks"), SHAPES)


def test_groups_and_places() -> None:
    assert group_sizes(8, 8) == (7,)
    assert group_sizes(3, 2) == (2,)
    assert group_sizes(6, 2) == (2, 2, 1)
    assert spread_places(8, 8, 2) == 16
    assert spread_places(6, 2, 2) == 8


@shapes
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("reuse", [False, True], ids=["areas", "slots"])
def test_it_proves_and_runs(nodes: int, ranks: int, depth: int, reuse: bool) -> None:
    compiled = compiled_for(nodes, ranks, replace(OPTIONS, receive_depth=depth, slot_reuse=reuse))
    assert verify(compiled).programs
    verify(compiled, ranks=[nodes * ranks - 1])
    explore(compiled, TWICE, range(2), FAMILIES[:3], pieces=2)
    if nodes * ranks <= 6:
        for seed in range(3):
            Execution(compiled, "first", RS, 0, 2, seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_interleavings(family: str) -> None:
    for nodes, ranks in ((2, 2), (4, 2)):
        explore(compiled_for(nodes, ranks), TWICE, range(12), family, pieces=2)


@shapes
def test_puts_stay_on_their_rails_and_are_even(nodes: int, ranks: int) -> None:
    """No put crosses rails, and every rank sends as many partial sums as it owns chunks of, times the other nodes."""
    compiled = compiled_for(nodes, ranks)
    team = compiled.context("first", 0).team
    sent = []
    for rank in range(nodes * ranks):
        puts = [s for _, _, s in compiled.program("first", RS, rank).steps() if isinstance(s, Put)]
        assert {team.seat(put.peer)[1] for put in puts} == {team.seat(rank)[1]}
        sent.append(sum(t.nbytes for put in puts for t in put.transfers))
    assert max(sent) <= 2 * min(sent)


def test_classic_units_share_the_plan() -> None:
    """Units that are not sharded over all ranks fold one by one, in areas and on lanes of their own."""
    meshes = {"whole": Mesh(((0, 1, 2, 3),)), "halves": Mesh(((0, 2), (1, 3))), "turned": Mesh(((1, 0, 3, 2),))}
    units = tuple(Unit(name, (Parameter(f"{name}.w", (40, 13)),), mesh) for name, mesh in meshes.items())
    compiled = compile_spec(ModelSpec(units), Topology(2, 2), OPTIONS)
    assert compiled.spread == {"whole"}
    verify(compiled)
    sequence = [(RS, "whole"), (RS, "halves"), (RS, "turned"), (RS, "whole")]
    explore(compiled, sequence, range(3), FAMILIES, pieces=2)
    # A unit whose ranks sit in another order takes other places for zeros.
    spread, slots = frozenset({"whole", "turned"}), [slot.units for slot in compiled.arena.slots]
    words = lay_out_signals(
        units, slots, lambda unit: [compiled.context(unit.name, 0).team], {unit.name for unit in units}, spread, False
    )
    both = replace(compiled, arena=replace(compiled.arena, words=words), spread=spread, _programs={})
    with pytest.raises(PlanError, match=r"spread area of rank \d, place \d+: unit .* takes it for zeros"):
        verify(both)


def test_narrow_gradients_keep_to_their_places() -> None:
    compiled = compiled_for(2, 2, replace(OPTIONS, slot_reuse=True, chunk_bytes=None))
    program = compiled.program("first", RS, 0, None, {0: "float32", 1: "float32", 2: "float32"})
    assert any(isinstance(s, SwitchReduce) for _, _, s in program.steps())
    for _, _, step in program.steps():
        if isinstance(step, SwitchReduce):
            last = max(t.srcs[0].offset + t.count * 4 for t in step.sums)
            assert last <= compiled.arena.receive.spread_size


# Options ------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="switch_reduce must be one of off, on, auto, got 'yes'"):
        PlanOptions(switch_reduce="yes")
    with pytest.raises(InputError, match="switch_reduce='on' needs wire_dtype='float32'"):
        PlanOptions(switch_reduce="on", wire_dtype="bfloat16")


def test_auto_takes_the_switch_for_small_units_only() -> None:
    def spread(rows: int, **options: str) -> bool:
        unit = Unit("u", (Parameter("w", (rows, 1024)),), Mesh((tuple(range(64)),)))
        plan = compile_spec(ModelSpec((unit,)), Topology(8, 8), PlanOptions(**options))  # type: ignore[arg-type]
        return bool(plan.spread)

    assert spread(64, switch_reduce="auto")
    assert not spread(1 << 18, switch_reduce="auto")
    assert spread(1 << 18, switch_reduce="on")
    assert not spread(64, switch_reduce="auto", wire_dtype="bfloat16")
    assert not spread(64)


# Planted faults -----------------------------------------------------------------------------------

Plant = Callable[[Compiled, random.Random], tuple[Compiled, str]]


def _pick(compiled: Compiled, rng: random.Random, kind: type, lane: Lane | None = None) -> Spot:
    return pick(
        compiled,
        rng,
        RS,
        lambda s: isinstance(s.step, kind) and (lane is None or getattr(s.step, "lane", None) == lane),
    )


def _moved(lane: Lane, kind: type) -> Plant:
    """The signals of a stream come one step of a kind too early: counts still match."""

    def plant(compiled: Compiled, rng: random.Random) -> tuple[Compiled, str]:
        def late(spot: Spot) -> bool:
            if not isinstance(spot.step, Signal) or spot.step.lane != lane:
                return False
            steps = compiled.program(spot.unit, RS, spot.rank).streams[spot.stream].steps
            return any(isinstance(step, kind) for step in steps[: spot.index])

        spot = pick(compiled, rng, RS, late)
        steps = compiled.program(spot.unit, RS, spot.rank).streams[spot.stream].steps
        before = max(i for i in range(spot.index) if isinstance(steps[i], kind))
        while isinstance(steps[before - 1], kind):
            before -= 1

        def change(old: list) -> list:  # type: ignore[type-arg]
            return [*old[:before], old[spot.index], *old[before : spot.index], *old[spot.index + 1 :]]

        return edit(compiled, spot, RS, change), f"{where(compiled, spot, RS)} before step {before}"

    return plant


def _changed(change: Callable[[SwitchReduce, Compiled], SwitchReduce]) -> Plant:
    def plant(compiled: Compiled, rng: random.Random) -> tuple[Compiled, str]:
        spot = _pick(compiled, rng, SwitchReduce)
        assert isinstance(spot.step, SwitchReduce)
        return substitute(compiled, spot, RS, change(spot.step, compiled)), where(compiled, spot, RS)

    return plant


def _with_source(step: SwitchReduce, **fields: object) -> SwitchReduce:
    first = step.sums[0]
    return replace(step, sums=(first._replace(srcs=(first.srcs[0]._replace(**fields),)), *step.sums[1:]))  # type: ignore[arg-type]


def _put_elsewhere(compiled: Compiled, rng: random.Random) -> tuple[Compiled, str]:
    spot = _pick(compiled, rng, Put)
    assert isinstance(spot.step, Put)
    area = compiled.arena.receive
    moved = [
        t._replace(dst=t.dst._replace(offset=(t.dst.offset + area.spread_chunk) % area.spread_size))
        for t in spot.step.transfers
    ]
    return substitute(compiled, spot, RS, replace(spot.step, transfers=tuple(moved))), where(compiled, spot, RS)


def _unordered_wait(compiled: Compiled, rng: random.Random) -> tuple[Compiled, str]:
    """All waits for HELD of a sum come after it."""
    spot = _pick(compiled, rng, SwitchReduce)

    def change(old: list) -> list:  # type: ignore[type-arg]
        first = spot.index
        while isinstance(old[first - 1], Wait) and old[first - 1].lane == Lane.HELD:
            first -= 1
        return [*old[:first], spot.step, *old[first : spot.index], *old[spot.index + 1 :]]

    return edit(compiled, spot, RS, change), where(compiled, spot, RS)


#: Name, planter, what the proof says, and whether a run shows it (a run reads all peers, whatever a step names).
FAULTS = {
    "held before it arrives": (_moved(Lane.HELD, Wait), "spread area.*(certain|before anything)", True),
    "sum before it is held": (_unordered_wait, "spread area.*(certain|before anything)", True),
    "taken before it is summed": (_moved(Lane.TAKEN, SwitchReduce), "certain to be read|may still be read", True),
    "credit before it is taken": (_moved(Lane.SPREAD_CREDIT, Wait), "certain to be read|may still be read", True),
    "put to another place": (_put_elsewhere, "", True),
    "peer left out": (_changed(lambda s, c: replace(s, peers=s.peers[1:])), "sums over all ranks of the node", False),
    "holder left out": (
        _changed(lambda s, c: replace(s, holders=s.holders[1:])),
        "never read|adds zeros only|without those before|put there is read",
        True,
    ),
    "zeros taken for a sum": (
        _changed(lambda s, c: replace(s, holders=s.peers)),
        "reads it before anything|nothing writes it|other bytes|is read|sum of node",
        True,
    ),
    "another place": (
        _changed(lambda s, c: _with_source(s, offset=(s.sums[0].srcs[0].offset + 4) % c.arena.receive.spread_chunk)),
        "",
        True,
    ),
    "of bfloat16": (
        _changed(lambda s, c: replace(s, sums=(s.sums[0]._replace(src_dtype="bfloat16"), *s.sums[1:]))),
        "another type than float32",
        True,
    ),
    "of the wire area": (
        _changed(lambda s, c: _with_source(s, buffer=Buffer.WIRE)),
        "something else in the switch|wire area",
        True,
    ),
    "without base": (
        _changed(lambda s, c: replace(s, sums=(s.sums[0]._replace(base=None), *s.sums[1:]))),
        "drops the running sum",
        True,
    ),
    "final too early or late": (_changed(lambda s, c: replace(s, final=not s.final)), "final", True),
    "doubled": (
        lambda c, rng: (lambda spot: (substitute(c, spot, RS, spot.step, spot.step), where(c, spot, RS)))(
            _pick(c, rng, SwitchReduce)
        ),
        "",
        True,
    ),
    "missing": (
        lambda c, rng: (lambda spot: (substitute(c, spot, RS), where(c, spot, RS)))(_pick(c, rng, SwitchReduce)),
        "never read|is missing|put there is read",
        True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    plant, says, shows = FAULTS[name]
    for nodes, ranks in ((2, 2), (4, 2)):
        sound = compiled_for(nodes, ranks, replace(OPTIONS, receive_depth=1))
        for seed in range(2):
            damaged, what = plant(sound, random.Random(seed))
            if name == "zeros taken for a sum" and not damaged.overrides:
                continue
            same = all(damaged.overrides[key] == sound.program(key[0], key[1], key[2]) for key in damaged.overrides)
            if same:  # a full group has no zeros
                continue
            with pytest.raises(PlanError, match=says or "unit"):
                verify(damaged, collectives=(RS,))
            if shows and seed == 0:
                assert _error(damaged) is not None, f"no run shows: {what}"


def _error(compiled: Compiled) -> str | None:
    try:
        explore(compiled, TWICE, range(12), FAMILIES, pieces=2)
    except PlanError as error:
        return str(error)
    return None


def test_every_signal_is_needed() -> None:
    """Whichever wait or signal of the new lanes is dropped, the proof says so."""
    sound = compiled_for(2, 2)
    lanes = {Lane.SPREAD, Lane.SPREAD_CREDIT, Lane.HELD, Lane.TAKEN}
    found = [s for s in spots(sound, RS) if isinstance(s.step, Wait | Signal) and s.step.lane in lanes]
    assert {s.step.lane for s in found} == lanes  # type: ignore[union-attr]
    for spot in random.Random(0).sample(found, 24):
        with pytest.raises(PlanError):
            verify(substitute(sound, spot, RS), collectives=(RS,))
