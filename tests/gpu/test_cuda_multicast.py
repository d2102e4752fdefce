"""Steps that need the switch, without one: the stand-in, and the refusals."""

from __future__ import annotations

import pytest
import torch
from cuda_support import MULTICAST, Cluster, Machine, cluster

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.errors import CapabilityError, InputError
from tide.topology import Topology
from tide.transport.cuda import Settings
from tide.transport.cuda.describe import describe
from tide.transport.simulated import reference_reduce_scatter

OPTIONS = PlanOptions(
    switch_reduce="on",
    chunk_bytes=512,
    put_bytes=4096,
    bundle_bytes=64,
    min_run_bytes=16,
    piece_bytes=512,
    multicast="on",
)
SHAPES = {"a": (48, 48), "b": (37, 50), "c": (5,), "d": (3,)}
OUT_DTYPES = {"b": "bfloat16"}
#: The nodes of the last ones are real: puts are NCCL's, and nothing else reaches another node.
NODES = [Topology(2, 2, virtual=True), Topology(3, 2, virtual=True), Topology(2, 2), Topology(2, 4)]
TOPOLOGIES = [Topology(1, 2), Topology(1, 4), *NODES]


def settings_for(topology: Topology, multicast: str) -> Settings:
    real = topology.nodes > 1 and not topology.virtual
    return Settings(4, 4, puts="nccl" if real else "copy", multicast=multicast)


def compiled_for(topology: Topology) -> Compiled:
    rows = tuple(Parameter(name, shape, out_dtype=OUT_DTYPES.get(name, "float32")) for name, shape in SHAPES.items())
    return compile_spec(ModelSpec((Unit("u", rows, Mesh((tuple(range(topology.world_size)),))),)), topology, OPTIONS)


def gather(made: Cluster, turn: int) -> None:
    """Gathers new values on all ranks and compares them, bit by bit."""
    world = made.compiled.topology.world_size
    wholes = [
        torch.randn(shape, generator=torch.Generator().manual_seed(100 * turn + i))
        for i, shape in enumerate(SHAPES.values())
    ]
    for session in made.sessions:
        shards = [torch.chunk(whole, world) for whole in wholes]
        empty = [whole.new_empty((0, *whole.shape[1:])) for whole in wholes]
        own = [
            (s[session.rank] if session.rank < len(s) else e).contiguous() for s, e in zip(shards, empty, strict=True)
        ]
        session.all_gather("u", own).wait()
    made.machine.finish()
    for session in made.sessions:
        for whole, found in zip(wholes, session.whole("u").values(), strict=True):
            assert torch.equal(found.view(torch.int16), whole.bfloat16().view(torch.int16)), f"rank {session.rank}"
        session.release("u")
    made.machine.finish()


def reduce(made: Cluster, turn: int) -> None:
    """Reduces new gradients on all ranks and compares them, bit by bit, with what the simulator's reference says."""
    compiled, made_out = made.compiled, []
    unit, world = compiled.spec.unit("u"), compiled.topology.world_size
    grads = [
        [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * turn + 10 * rank + i)).bfloat16()
            for i, p in enumerate(unit.parameters)
        ]
        for rank in range(world)
    ]
    made.kept.append(grads)
    for session in made.sessions:
        outs = session.new_outs("u", range(len(SHAPES)), "cpu")
        session.reduce_scatter("u", dict(enumerate(grads[session.rank])), outs, 0.5, float(world)).wait()
        made_out.append(outs)
    made.machine.finish()
    team, switched = compiled.context("u", 0).team, "u" in compiled.spread
    for i, p in enumerate(unit.parameters):
        expected = reference_reduce_scatter([row[i] for row in grads], p, team, 0.5, float(world), "float32", switched)
        for rank, outs in enumerate(made_out):
            assert torch.equal(outs[i].flatten(), expected[rank].flatten()), f"rank {rank}, {p.name}"


@pytest.mark.parametrize("topology", NODES, ids=str)
@pytest.mark.parametrize("multicast", ["switch", "standin"])
@pytest.mark.parametrize("seed", range(2))
def test_sums_through_address_and_stand_in(topology: Topology, multicast: str, seed: int) -> None:
    """The sum kernel reads the multicast address of the fake machine, or the accumulate kernel all peers' memory."""
    compiled = compiled_for(topology)
    assert compiled.spread == {"u"}
    with cluster(compiled, Machine(seed), settings=settings_for(topology, multicast)) as made:
        for turn in range(3):
            reduce(made, turn)
        kernels = {
            launch.job.variant(0).kernel.__name__
            for session in made.sessions
            for lowered in session.transport._lowered.values()  # type: ignore[attr-defined]
            for launches in lowered.sets["rs.fold"].launches
            for launch in launches
        }
        assert kernels == {"switch_reduce_kernel" if multicast == "switch" else "accumulate_kernel"}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("multicast", ["switch", "standin"])
@pytest.mark.parametrize("seed", range(3))
def test_gathers_through_address_and_stand_in(topology: Topology, multicast: str, seed: int) -> None:
    """The multicast address of the fake machine writes to every rank of the node, the sender too."""
    with cluster(compiled_for(topology), Machine(seed), settings=settings_for(topology, multicast)) as made:
        for turn in range(3):
            gather(made, turn)
        written = {
            address >= MULTICAST
            for session in made.sessions
            for lowered in session.transport._lowered.values()  # type: ignore[attr-defined]
            if lowered.program.collective == "all_gather"
            for address in lowered.copies.destinations.tolist()
        }
        assert (True in written) == (multicast == "switch")


def test_a_transport_without_an_address_refuses() -> None:
    with cluster(compiled_for(Topology(1, 2)), Machine()) as made:
        for session in made.sessions:
            session.transport._device.multicast = None  # type: ignore[attr-defined]
        with pytest.raises(CapabilityError, match=r"unit 'u': the program uses Multicast, but the transport was"):
            gather(made, 0)


def test_describe_says_what_carries_multicasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    with cluster(compiled_for(Topology(1, 2)), Machine(), settings=Settings(multicast="standin")) as made:
        rows = dict(describe(made.sessions[0].transport))  # type: ignore[arg-type]
        assert rows["multicast"].startswith("off: stand-in")
    with cluster(compiled_for(Topology(1, 2)), Machine()) as made:
        assert dict(describe(made.sessions[0].transport))["multicast"] == "on: address from NCCL"  # type: ignore[arg-type]
        made.sessions[0].transport.arena.multicast = None  # type: ignore[attr-defined]
        rows = dict(describe(made.sessions[0].transport))  # type: ignore[arg-type]
        assert rows["multicast"] == "off: NVSHMEM_DISABLE_NVLS=1 turns multicast off"


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="multicast must be 'switch' or 'standin', got 'on'"):
        Settings(multicast="on")
