"""The ranks that hold a model, found from its meshes, and where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tide
from tide.errors import InputError
from tide.fsdp.scope import scope_of
from tide.topology import Topology

PARALLEL = {"0": ColwiseParallel(), "1": RowwiseParallel()}


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))


def sharded(mesh: Any, tp: Any = None) -> Any:
    model = blocks()
    if tp is not None:
        parallelize_module(model, tp, PARALLEL)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("rank", range(16))
def test_a_stage_is_closed_under_shards_replicas_and_tensor_parallelism_only(fake_world: Callable, rank: int) -> None:
    with fake_world(16, rank):
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "replicate", "shard", "tp"))
        first = 8 * (rank // 8)  # of the stage's ranks
        hsdp = mesh["replicate", "shard"]
        assert scope_of(sharded(hsdp, mesh["tp"])).ranks == tuple(range(first, first + 8))
        replicas = scope_of(sharded(hsdp))
        assert replicas.ranks == tuple(range(first + rank % 2, first + 8, 2))
        assert replicas.rank == (rank - first) // 2
        assert scope_of(sharded(mesh["shard"])).ranks == (rank & ~2, rank | 2)
        assert scope_of(sharded(mesh["pp", "replicate"])).everywhere is False
        assert scope_of(sharded(DeviceMesh("cpu", range(16)))).everywhere


def test_every_rank_of_a_stage_reads_the_same_plan(fake_world: Callable) -> None:
    digests: dict[int, set[str]] = {0: set(), 1: set()}
    for rank in range(8):
        with fake_world(8, rank):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("shard", "pp", "tp"))
            plan = tide.compile_plan(sharded(mesh["shard"], mesh["tp"]))
            stage = rank // 2 % 2
            assert plan.scope is not None
            assert plan.scope.ranks == (2 * stage, 2 * stage + 1, 2 * stage + 4, 2 * stage + 5)
            assert plan.rank == rank % 2 + 2 * (rank // 4)
            assert {unit.mesh.groups for unit in plan.units} == {((0, 2), (1, 3))}
            assert plan.topology.world_size == 4
            digests[stage].add(plan.digest)
            if rank == 6:
                assert "ranks 2–3, 6–7 of 8" in repr(plan)
    assert len(digests[0]) == len(digests[1]) == 1


def test_groups_on_meshes_of_their_own_join_the_ranks(fake_world: Callable) -> None:
    """Experts over a smaller mesh, the rest over a larger one, in the second of two stages."""
    with fake_world(8, rank=6):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "efsdp", "ep"))
        dense = mesh["efsdp", "ep"]._flatten("fsdp")
        model = blocks()
        fully_shard(model[0], mesh=mesh["efsdp"])
        fully_shard(model, mesh=dense)
        plan = tide.compile_plan(model)
        assert plan.scope is not None
        assert plan.scope.ranks == (4, 5, 6, 7)
        assert plan.spec.unit("0").mesh.groups == ((0, 2), (1, 3))
        assert plan.spec.unit("").mesh.groups == ((0, 1, 2, 3),)
        assert scope_of(model[0]).ranks == (4, 6)


def test_meshes_that_do_not_tell(fake_world: Callable) -> None:
    with fake_world(4, rank=0):
        model = blocks()
        fully_shard(model[0], mesh=DeviceMesh("cpu", [0, 2]))  # rank 1 has another one
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        with pytest.raises(InputError, match=r"meshes \(ranks 0, 2 on this rank\) does not say with whom rank [13] "):
            scope_of(model)
        assert scope_of(model, range(4)).everywhere


def test_ranks_that_are_given(fake_world: Callable) -> None:
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh)
        assert scope_of(model).everywhere
        plan = tide.compile_plan(model, ranks=[7, 6, 5, 4])  # the replica: its shard groups are whole
        assert plan.rank == 1
        assert plan.units[0].mesh.groups == ((0, 1, 2, 3),)
        assert tide.compile_plan(model, ranks=mesh.get_group("shard")).digest == plan.digest
        for ranks, told in (
            ([4, 5, 6], r"is sharded over ranks \(4, 5, 6, 7\), but rank 7 is not among .* \(ranks 4–6 of 8\)"),
            ([0, 1], r"this is rank 5, which is not among \(0, 1\)"),
            ([5, 8], "8 is no rank of this job, which has 8"),
            (["5", 4], "expected world ranks"),
            (5, "expected world ranks, such as .* got int 5"),
            (mesh, "expected world ranks, .* got DeviceMesh"),
            ([5, 5], "a rank stands there twice"),
        ):
            with pytest.raises(InputError, match=told):
                tide.compile_plan(model, ranks=ranks)
        with pytest.raises(InputError, match="but the model is on ranks 4–7 of 8, which are 4"):
            tide.compile_plan(model, ranks=range(4, 8), topology=Topology(1, 8))
        with pytest.raises(InputError, match="only a fully_shard-ed module is on ranks of a job"):
            tide.compile_plan(blocks(), ranks=range(8), topology=Topology(1, 8))


@pytest.mark.parametrize(
    ("local", "ranks", "nodes", "each"),
    [
        (8, (2, 3, 4, 5), 1, 4),
        (4, (2, 3, 4, 5), 2, 2),
        (2, (0, 4, 8, 12), 4, 1),
        (8, tuple(range(16)), 2, 8),
        (4, (0, 1, 4, 5, 6, 7), 3, 2),  # two of one node and four of another
        (4, (3, 4, 5), 3, 1),
    ],
)
def test_topology_of_a_part_of_the_world(
    fake_world: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: int,
    ranks: tuple[int, ...],
    nodes: int,
    each: int,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    with fake_world(16, rank=ranks[0]), caplog.at_level(logging.WARNING, "tide"):
        assert scope_of(sharded(DeviceMesh("cpu", ranks))).topology() == Topology(nodes, each)
    uneven = len({rank // local for rank in ranks}) != nodes
    assert ("goes over the network, also within a node" in caplog.text) == uneven
