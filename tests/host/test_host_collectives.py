"""Collectives between real processes, compared bit by bit with what must come out."""

from __future__ import annotations

import pytest
import torch
from host_cases import CASES, Case, block, values
from host_jobs import run_cases, stress

from ranks import run_ranks
from tide.compiler.model import Mesh
from tide.compiler.options import PlanOptions
from tide.compiler.steps import (
    Buffer,
    Cast,
    Lane,
    Multicast,
    Place,
    Program,
    Region,
    Signal,
    Stream,
    Sum,
    SwitchReduce,
    Transfer,
    Wait,
)
from tide.errors import CapabilityError, TransportError
from tide.topology import Topology
from tide.transport.base import Binding
from tide.transport.host import HostTransport
from tide.transport.host.signals import membarrier_fence


@pytest.mark.parametrize(("nodes", "world"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (2, 2), (3, 3)])
def test_every_layout(nodes: int, world: int) -> None:
    """All cases at small world sizes, on one node and on several."""
    assert run_ranks(run_cases, world, nodes, tuple(CASES)) == [len(CASES)] * world


@pytest.mark.parametrize(("nodes", "world"), [(2, 6), (3, 6), (4, 8), (1, 5), (7, 7)])
def test_more_ranks(nodes: int, world: int) -> None:
    """Node counts that are powers of two and that are not, with several ranks a node."""
    run_ranks(run_cases, world, nodes, ("uneven, tight", "mixed", "dims"))


REPLICAS = Mesh(((0, 1), (2, 3)))
ACROSS = Mesh(((0, 2), (1, 3)))
WHOLE = Mesh(((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("nodes", "meshes"),
    [
        pytest.param(1, (REPLICAS,), id="replicas"),
        pytest.param(2, (REPLICAS,), id="a replica a node"),
        pytest.param(2, (ACROSS,), id="replicas across nodes"),
        pytest.param(1, (WHOLE, ACROSS), id="two meshes"),
        pytest.param(2, (REPLICAS, WHOLE, ACROSS), id="three meshes, two nodes"),
        pytest.param(1, (Mesh(((0, 1, 2),)), Mesh(((3, 1),))), id="groups of some ranks, in another order"),
        pytest.param(2, (Mesh(((0, 1, 2),)),), id="a group that sits unevenly on its nodes"),
    ],
)
def test_meshes(nodes: int, meshes: tuple[Mesh, ...]) -> None:
    """Shard groups of some of the ranks: replicas, two parameter groups, ranks without a shard."""
    run_ranks(run_cases, 4, nodes, ("dense, tight", "dims", "frozen"), meshes)


@pytest.mark.parametrize("variant", ["polling", "membarrier"])
def test_other_machines(variant: str) -> None:
    """Without futex(2), and with the fence of other architectures."""
    if variant == "membarrier":
        try:
            membarrier_fence()
        except CapabilityError as error:
            pytest.skip(str(error))
    run_ranks(run_cases, 4, 2, ("dense, tight", "mixed"), (), variant)


@pytest.mark.parametrize("reuse", [False, True], ids=["areas", "slots"])
@pytest.mark.parametrize(("nodes", "seed"), [(1, 1), (2, 2), (4, 3)])
def test_many_collectives_with_random_delays(nodes: int, seed: int, reuse: bool) -> None:
    """200 collectives in a row over shared slots, each rank late at its own times."""
    assert run_ranks(stress, 4, nodes, 200, seed, reuse) == [200] * 4


@pytest.mark.parametrize(("nodes", "world"), [(1, 2), (1, 3), (2, 4), (2, 6), (3, 6)])
def test_gradients_through_slots(nodes: int, world: int) -> None:
    """Every piece in its own place, rings in a slot, calls that find the slot held, and a slot shared by all."""
    names = ("slots", "slots, tight", "slots, rings")
    assert run_ranks(run_cases, world, nodes, names) == [len(names)] * world


# Steps that no schedule for the host emits --------------------------------------------------------


def switch_job(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One write that all receive, and a sum of all ranks' partials, scaled."""
    compiled = Case((block("b", 16, 16),)).compile(Topology(nodes=2, gpus_per_node=1, virtual=True))
    transport = HostTransport.open(compiled, rank, timeout=20)
    count, both = 8, (0, 1)

    def partial(offset: int = 0) -> Region:
        return Region(Buffer.PARTIAL, 0, offset)

    sync = tuple(Signal(p, Lane.FREE) for p in both) + tuple(Wait(p, Lane.FREE) for p in both)
    mine = Cast(Region(Buffer.SHARD, 0, 0), partial(rank * 4 * count), 1, count, "float32", "float32")
    total = Sum((partial(),), "float32", None, Region(Buffer.OUT, 0, 0), "float32", 1, 2 * count)
    steps = (
        Place((mine,)),
        Multicast(both, (Transfer(partial(rank * 4 * count), partial(rank * 4 * count), 1, 4 * count),)),
        *sync,
        SwitchReduce(both, both, (total,), True),
        *sync,
    )
    shard, out = values((count,), "float32", rank), torch.empty(2 * count)
    tensors = {(Buffer.SHARD, 0): shard, (Buffer.OUT, 0): out}
    program = Program("all_gather", rank, (Stream("all", steps),))
    transport.run(program, Binding("b", 0, both, tensors, scale=3.0, divisor=2.0))
    transport.close()
    return shard, out


def test_multicast_and_switch_reduce() -> None:
    """Both ranks hold both pieces after the multicast, so each sum is twice a piece."""
    results = run_ranks(switch_job, 2)
    pieces = torch.cat([shard for shard, _ in results])
    for _, out in results:
        assert torch.equal(out, (pieces + pieces) * 3.0 / 2.0)


def test_a_region_outside_its_area_is_refused() -> None:
    """A damaged plan does not write into another slot."""
    compiled = Case((block("b", 16, 16),), PlanOptions(slots=1)).compile(Topology(1, 1))
    transport = HostTransport.open(compiled)
    size = compiled.arena.slots[0].size
    cast = Cast(Region(Buffer.SHARD, 0, 0), Region(Buffer.STORAGE, 0, size - 16), 1, 16, "float32", "bfloat16")
    program = Program("all_gather", 0, (Stream("all", (Place((cast,)),)),))
    with pytest.raises(TransportError, match=f"outside the storage area of {size} bytes"):
        transport.run(program, Binding("b", 0, (0,)))
    transport.close()
