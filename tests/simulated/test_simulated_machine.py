"""What the simulator itself promises: its steps, its errors, its traces, its transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from simulated_models import BY_ROUTE, TINY, block, blocks, first_error, world

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import ROUTES, PlanOptions
from tide.compiler.steps import (
    Accumulate,
    Buffer,
    Copy,
    Lane,
    Multicast,
    Place,
    Program,
    Put,
    Region,
    Signal,
    Step,
    Stream,
    Sum,
    SwitchReduce,
    Transfer,
    Wait,
)
from tide.errors import InputError, PlanError, SlotError
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.simulated import (
    FAMILIES,
    Operation,
    SimulatedTransport,
    SimulatedWorld,
    Simulation,
    chrome_trace,
    explore,
    training_sequence,
)

GATHERED: list[Operation] = [("all_gather", "u"), ("use", "u"), ("release", "u")]


def _one(
    parameter: Parameter, topology: Topology, mesh: Mesh | None = None, *others: Unit, route: str = "push"
) -> Compiled:
    unit = Unit("u", (parameter,), mesh or world(topology.world_size))
    return compile_spec(ModelSpec((unit, *others), "one"), topology, PlanOptions(bundle_bytes=0, route=route))


def _with(compiled: Compiled, collective: str, steps: dict[int, list[Step]], release: bool = False) -> Compiled:
    for rank, row in steps.items():
        _, position = compiled.group("u", rank)
        name = "ag.node" if collective == "all_gather" else "rs.sum"
        streams = (Stream(name, tuple(row)),)
        program = Program(collective, position, streams, (name,) if release else ())
        compiled = compiled.with_program("u", rank, program)
    return compiled


# Steps that no schedule emits yet -----------------------------------------------------------------


def test_multicast_reaches_every_rank_of_the_node() -> None:
    """Every rank pushes its shard once, when all say that their storage is free."""
    topology = Topology(1, 3)
    compiled = _one(Parameter("w", (6, 4)), topology)
    rank_steps: dict[int, list[Step]] = {}
    for rank in range(3):
        place = compiled.program("u", "all_gather", rank).streams[0].steps
        own = next(step for step in place if isinstance(step, Place))
        mine = Region(Buffer.STORAGE, 0, rank * 16)
        others = [peer for peer in range(3) if peer != rank]
        rank_steps[rank] = [
            *(Signal(peer, Lane.FREE) for peer in others),
            own,
            *(Wait(peer, Lane.FREE) for peer in others),
            Multicast(tuple(others), (Transfer(mine, mine, 1, 16),)),
            *(Signal(peer, Lane.READY) for peer in others),
            *(Wait(peer, Lane.READY) for peer in others),
        ]
    sound = _with(compiled, "all_gather", rank_steps)
    explore(sound, GATHERED * 3, range(20), FAMILIES)
    for lane in (Lane.FREE, Lane.READY):  # without either, some interleaving shows it
        rank_steps_bad = dict(rank_steps)
        rank_steps_bad[1] = [step for step in rank_steps[1] if not (isinstance(step, Wait) and step.lane is lane)]
        assert first_error(_with(compiled, "all_gather", rank_steps_bad), GATHERED * 3)


def test_switch_reduce_sums_the_partials_of_all_ranks_in_order() -> None:
    """Each rank lays its gradient out in float32; each owner lets the switch sum its part of all of them."""
    topology = Topology(2, 3)
    node_wise = Mesh(((0, 1, 2), (3, 4, 5)))
    # The other unit crosses nodes, so that there is a partial area.
    other = Unit("v", (Parameter("v", (6, 64)),), world(6))
    for out_dtype in ("float32", "bfloat16"):
        compiled = _one(Parameter("w", (6, 5), out_dtype=out_dtype), topology, node_wise, other)
        steps: dict[int, list[Step]] = {}
        for rank in range(6):
            me = rank % 3
            peers = [peer for peer in range(3) if peer != me]
            whole = Sum(
                *((Region(Buffer.GRAD, 0, 0),), "bfloat16", None, Region(Buffer.PARTIAL, 0, 0), "float32", 1, 30)
            )
            out = Region(Buffer.OUT, 0, 0)
            own = Sum((Region(Buffer.PARTIAL, 0, me * 40),), "float32", None, out, out_dtype, 1, 10)
            steps[rank] = [
                Accumulate((whole,), False),
                *(Signal(peer, Lane.PUSHED) for peer in peers),
                *(Wait(peer, Lane.PUSHED) for peer in peers),
                SwitchReduce((0, 1, 2), (0, 1, 2), (own,), True),
                *(Signal(peer, Lane.CREDIT) for peer in peers),
                *(Wait(peer, Lane.CREDIT) for peer in peers),
            ]
        sound = _with(compiled, "reduce_scatter", steps, release=True)
        explore(sound, [("reduce_scatter", "u")] * 2, range(20), FAMILIES)
        steps[4] = [step for step in steps[4] if not (isinstance(step, Wait) and step.lane is Lane.PUSHED)]
        error = first_error(_with(compiled, "reduce_scatter", steps), [("reduce_scatter", "u")] * 2)
        assert error is not None
        assert "partial area" in error, error


# Puts ---------------------------------------------------------------------------------------------


def _put_plan(readers_wait: bool) -> Compiled:
    """Two nodes of one: both place, put their shard over, and wait for the other's, or do not."""
    topology = Topology(2, 1)
    compiled = _one(Parameter("w", (4, 8)), topology)
    steps: dict[int, list[Step]] = {}
    for rank in range(2):
        own = next(s for s in compiled.program("u", "all_gather", rank).streams[0].steps if isinstance(s, Place))
        mine = Region(Buffer.STORAGE, 0, rank * 32)
        wait: list[Step] = [Wait(1 - rank, Lane.WIRE)] if readers_wait else []
        steps[rank] = [
            *(Signal(1 - rank, Lane.FREE), own, Wait(1 - rank, Lane.FREE)),
            Put(1 - rank, (Transfer(mine, mine, 1, 32),), Lane.WIRE),
            *wait,
        ]
    return _with(compiled, "all_gather", steps)


def test_the_signal_of_a_put_comes_after_its_data() -> None:
    explore(_put_plan(True), GATHERED * 3, range(30), FAMILIES)


def test_the_end_of_a_put_does_not_mean_that_it_has_arrived() -> None:
    """Locally it ends when the source has been read; only its signal tells of the rest."""
    error = first_error(_put_plan(False), GATHERED)
    assert error is not None
    assert "which are not written yet" in error, error


# Errors -------------------------------------------------------------------------------------------

#: The shard of rank 1 in the storage of `w`.
OTHERS = Region(Buffer.STORAGE, 0, 32)


#: The shard of rank 0.
OWN = Region(Buffer.STORAGE, 0, 0)


def _changed(compiled: Compiled, rank: int, change: Callable[[Step], Step | None]) -> Compiled:
    """The plan with another step for the first one in the all-gather of a rank for which ``change`` has one."""
    program = compiled.program("u", "all_gather", rank)
    for number, stream in enumerate(program.streams):
        for index, step in enumerate(stream.steps):
            if (other := change(step)) is not None:
                steps = (*stream.steps[:index], other, *stream.steps[index + 1 :])
                streams = list(program.streams)
                streams[number] = replace(stream, steps=steps)
                return compiled.with_program("u", rank, replace(program, streams=tuple(streams)))
    raise AssertionError("no step to change")


def _copied(compiled: Compiled, transfer: Transfer, peer: int = 1) -> Compiled:
    return _changed(compiled, 0, lambda step: Copy(peer, step.pull, (transfer,)) if isinstance(step, Copy) else None)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (
            Transfer(Region(Buffer.STORAGE, 0, 500), OWN, 1, 64),
            r"unit 'u', all_gather, rank 0, stream ag.node, step 2 \(Copy to rank 1\): .* out of bounds",
        ),
        (Transfer(OWN, Region(Buffer.SHARD, 0, 0), 1, 32), r"'w' \(shard\) is not in the arena"),
        (Transfer(OWN, OWN._replace(pitch=8), 2, 16), r"its runs overlap \(pitch 8\)"),
        (Transfer(Region(Buffer.GRAD, 0, 0), OWN, 1, 32), r"there is no buffer grad\[0\]"),
        (Transfer(OWN, OTHERS, 1, 32), r"writes bytes 32\.\.63 of 'w'"),
        (Transfer(OWN._replace(offset=64), OWN, 1, 32), r"bytes 64\.\.95 of storage between two parameters"),
        (Transfer(OWN, OWN, 1, 24), r"\(use\): reads bytes 24\.\.31"),
    ],
)
def test_errors_of_pushes_name_step_and_bytes(transfer: Transfer, message: str) -> None:
    compiled = _one(Parameter("w", (4, 8)), Topology(1, 2), route="push")
    with pytest.raises(PlanError, match=message):
        Simulation(_copied(compiled, transfer), pieces=1).run(GATHERED)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (
            Transfer(Region(Buffer.STORAGE, 0, 500), Region(Buffer.STORAGE, 0, 32), 1, 64),
            r"unit 'u', all_gather, rank 0, stream ag.node, step 4 \(Copy from rank 1\): .* out of bounds",
        ),
        (Transfer(Region(Buffer.SHARD, 0, 0), OTHERS, 1, 32), r"'w' \(shard\) is not in the arena"),
        (Transfer(OTHERS, OTHERS._replace(pitch=8), 2, 16), r"its runs overlap \(pitch 8\)"),
        (Transfer(OTHERS, Region(Buffer.GRAD, 0, 0), 1, 32), r"there is no buffer grad\[0\]"),
        (Transfer(OTHERS, Region(Buffer.STORAGE, 0, 0), 1, 32), r"writes bytes 0\.\.31 of 'w'"),
        (Transfer(OTHERS._replace(offset=64), OTHERS, 1, 32), r"bytes 64\.\.95 of storage between two parameters"),
        (Transfer(OTHERS, OTHERS, 1, 24), r"\(use\): reads bytes 56\.\.63"),
    ],
)
def test_errors_of_pulls_name_step_and_bytes(transfer: Transfer, message: str) -> None:
    compiled = _one(Parameter("w", (4, 8)), Topology(1, 2), route="pull")
    with pytest.raises(PlanError, match=message):
        Simulation(_copied(compiled, transfer), pieces=1).run(GATHERED)


@pytest.mark.parametrize("route", ROUTES)
def test_copies_stay_on_their_node_and_within_the_group(route: str) -> None:
    across = Transfer(Region(Buffer.STORAGE, 0, 32), Region(Buffer.STORAGE, 0, 32), 1, 32)
    compiled = _one(Parameter("w", (4, 8)), Topology(2, 2), route=route)
    with pytest.raises(PlanError, match="rank 2 is on another node, which only a put can reach"):
        Simulation(_copied(compiled, across, 2)).run(GATHERED)
    with pytest.raises(PlanError, match="no position 4 in a group of 4"):
        Simulation(_copied(compiled, across, 4)).run(GATHERED)


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_values_are_found_by_the_user(route: str) -> None:
    """Bytes of this very collective in the wrong place: no mark shows them, the values do."""
    compiled = _one(Parameter("w", (4, 8)), Topology(1, 2), route=route)

    def swapped(step: Step) -> Step | None:
        if not isinstance(step, Place):
            return None
        (cast,) = step.casts
        half = cast._replace(count=cast.count // 2)
        return Place(
            (
                half._replace(dst=half.dst._replace(offset=half.dst.offset + 16)),
                half._replace(src=half.src._replace(offset=half.src.offset + 32)),
            )
        )

    with pytest.raises(
        PlanError, match=r"rank ., stream compute.*bytes 32\.\.\d+ of 'w' \(storage\).* hold wrong values"
    ):
        Simulation(_changed(compiled, 1, swapped), pieces=1).run(GATHERED)


def test_gradients_are_not_read_after_their_release() -> None:
    """A program that promises too early when it has read the gradients."""
    compiled = blocks(Topology(1, 3), 1)
    for rank in range(3):
        program = compiled.program("layers.0", "reduce_scatter", rank)
        compiled = compiled.with_program("layers.0", rank, replace(program, release=("rs.push",)))
    error = first_error(compiled, [("reduce_scatter", "layers.0")])
    assert error is not None
    assert "(grad) on rank" in error, error
    assert "which were released" in error, error


def test_slots_hold_one_unit_at_a_time() -> None:
    compiled = blocks(Topology(1, 2), 3)  # layers.0 and layers.2 share a slot
    with pytest.raises(SlotError, match=r"'layers\.2' needs slot 0, which unit 'layers\.0' still"):
        Simulation(compiled).run([("all_gather", "layers.0"), ("all_gather", "layers.2")])
    with pytest.raises(SlotError, match=r"'layers\.1' is used on rank 0 without"):
        Simulation(compiled).run([("all_gather", "layers.0"), ("use", "layers.1")])
    with pytest.raises(InputError, match="no operation 'reshard'"):
        Simulation(compiled).run([("reshard", "layers.0")])


def test_given_tensors_are_checked() -> None:
    compiled = _one(Parameter("w", (4, 8)), Topology(1, 2))
    simulation, shard, grad = Simulation(compiled), torch.zeros(2, 8), torch.zeros(4, 8, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="'u': nothing given for rank 1"):
        simulation.all_gather("u", {0: [shard]})
    with pytest.raises(InputError, match="w: the shard of rank 1 is missing"):
        simulation.all_gather("u", {0: [shard], 1: {}})
    with pytest.raises(InputError, match="shard of rank 1 has 8 elements of float32, the plan expects 16 of float32"):
        simulation.all_gather("u", {0: [shard], 1: [shard[:1]]})
    with pytest.raises(InputError, match="gradient of rank 0 has 32 elements of float32, the plan expects 32 of bfl"):
        simulation.reduce_scatter("u", {0: [grad.float()], 1: [grad]})
    with pytest.raises(InputError, match="gradients of different parameters"):
        simulation.reduce_scatter("u", {0: [grad], 1: []})
    assert simulation.reduce_scatter("u", {0: [grad], 1: [grad]})[1][0].shape == (2, 8)
    assert simulation.reduce_scatter("u", {0: [], 1: []}) == {}


# Runs, traces, the transport ----------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_runs_follow_each_other_on_one_arena(route: str) -> None:
    compiled = blocks(Topology(2, 2), 3, BY_ROUTE[route])
    simulation = Simulation(compiled, seed=5, family="priority")
    simulation.run([("all_gather", "layers.0")])
    result = simulation.run([("all_gather", "layers.1"), ("use", "layers.0"), ("release", "layers.0")])
    assert {unit for unit, _ in result.wholes} == {"layers.1"}
    result = simulation.run([("all_gather", "layers.2"), ("reduce_scatter", "layers.0"), ("use", "layers.2")])
    assert {unit for unit, _ in result.wholes} == {"layers.1", "layers.2"}
    whole = result.wholes["layers.2", 3]["layers.2.w"]
    assert whole.shape == (7, 12)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole, result.wholes["layers.2", 0]["layers.2.w"])
    assert result.shards["layers.0", 0][0].shape == (2, 12)
    assert result.operations > 0


@pytest.mark.parametrize(
    ("route", "own_streams", "copy"),
    [("push", ("ag.place",), "Copy to rank 1"), ("pull", (), "Copy from rank 1")],
    ids=ROUTES,
)
def test_trace_has_a_process_for_each_rank_and_a_thread_for_each_stream(
    route: str, own_streams: tuple[str, ...], copy: str
) -> None:
    compiled = blocks(Topology(2, 2), 2, BY_ROUTE[route])
    result = Simulation(compiled, trace=True).run(training_sequence(compiled))
    trace = json.loads(json.dumps(chrome_trace(result.trace)))
    rows = trace["traceEvents"]
    names = {(row["pid"], row["args"]["name"]) for row in rows if row["name"] == "thread_name"}
    streams = ("ag.node", "ag.wire", "rs.push", "rs.fold", "compute", *own_streams)
    assert {(rank, name) for rank in range(4) for name in streams} <= names
    assert (2, "put from rank 0") in names
    steps = [row for row in rows if row["ph"] == "X"]
    assert {"Place", "use", copy, "Put to rank 2", "Put to rank 2: arrival"} <= {row["name"] for row in steps}
    assert all(row["dur"] >= 0 and row["ts"] >= 0 for row in steps)
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in steps:
        by_thread.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["ts"] + row["dur"]))
    for spans in by_thread.values():  # steps of one stream follow each other
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sessions_run_on_simulated_ranks(family: str, route: str) -> None:
    """The transport behind the session that training uses, two units in one slot."""
    compiled = blocks(Topology(2, 2), 4, BY_ROUTE[route])
    world_ = SimulatedWorld(compiled, seed=1, family=family)
    sessions = [Session(compiled, world_.transport(rank)) for rank in range(4)]
    for turn, unit in enumerate(("layers.0", "layers.2", "layers.0")):
        torch.manual_seed(turn)
        parameters = compiled.spec.unit(unit).parameters
        masters = [torch.randn(p.shape).to(to_torch(p.shard_dtype)) for p in parameters]
        shards = []
        for master, p in zip(masters, parameters, strict=True):
            row = list(torch.chunk(master, 4, p.dim))
            shards.append(row + [master.narrow(p.dim, 0, 0)] * (4 - len(row)))
        tickets = [s.all_gather(unit, [row[s.rank].contiguous() for row in shards]) for s in sessions]
        for session, ticket in zip(reversed(sessions), reversed(tickets), strict=True):
            ticket.wait()
            for parameter, master in zip(parameters, masters, strict=True):
                assert torch.equal(session.whole(unit)[parameter.name], master.to(to_torch(parameter.dtype)))
            session.release(unit)
        grads = [{0: torch.randn(parameters[0].shape).to(torch.bfloat16)} for _ in sessions]
        outs = [session.new_outs(unit, [0], "cpu") for session in sessions]
        tickets = [s.reduce_scatter(unit, grads[s.rank], outs[s.rank], divisor=4.0) for s in sessions]
        for ticket in tickets:
            ticket.wait_released()
            ticket.wait()
        total = sum(grad[0].double() for grad in grads) / 4
        found = torch.cat([out[0] for out in outs])
        assert torch.allclose(found.double(), total, atol=1e-5)


def test_a_session_whose_peers_have_not_begun_is_told_so() -> None:
    compiled = _one(Parameter("w", (4, 8)), Topology(1, 2))
    world_ = SimulatedWorld(compiled)
    ticket = Session(compiled, world_.transport(0)).all_gather("u", [torch.zeros(2, 8)])
    with pytest.raises(PlanError, match=r"end of all_gather of 'u' on rank 0 \(have all ranks"):
        ticket.wait()


def test_a_world_of_one_needs_no_shared_world() -> None:
    compiled = compile_spec(ModelSpec((block("u", world(1)),), "one"), Topology(1, 1), TINY)
    transport = SimulatedTransport(compiled, 0)
    session = Session(compiled, transport, poison=True)
    shards = [torch.randn(p.shape).to(to_torch(p.shard_dtype)) for p in compiled.spec.unit("u").parameters]
    session.all_gather("u", shards).wait()
    assert torch.equal(session.whole("u")["u.w"], shards[0].to(torch.bfloat16))
    session.release("u")
    assert "one process" in dict(transport.describe())["simulated"]
    session.close()
