"""Modules that FSDP2 has sharded, compared with FSDP2's own metadata on meshes of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tide.compiler.model import ModelSpec
from tide.compiler.read import Policy, read
from tide.errors import CapabilityError, InputError
from tide.fsdp import introspect
from tide.fsdp.scope import scope_of
from tide.topology import Topology

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x * self.scale))


class Model(nn.Module):
    def __init__(self, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: Any, **options: Any) -> Any:
    """As users do: each block, then the root."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def check_against_fsdp(spec: ModelSpec, model: nn.Module, rank: int) -> None:
    """Each parameter's whole shape, dim and this rank's rows are what FSDP2 itself has."""
    by_name = {p.name: (unit, p) for unit in spec.units for p in unit.parameters}
    names = introspect.parameter_names(model)
    shards = introspect.local_shards(model)
    params = [param for w in introspect.wrapped_modules(model) for g in w.groups for param in g.fsdp_params]
    scope = scope_of(model)
    assert scope.ranks[scope.rank] == rank
    assert {names[id(param)][0] for param in params} == set(by_name) == set(shards)
    assert set(by_name) <= {name for name, _ in model.named_parameters()}
    for param in params:
        unit, parameter = by_name[names[id(param)][0]]
        found = unit.mesh.locate(scope.rank)
        assert found is not None
        group, position = found
        ranks = torch.distributed.get_process_group_ranks(param.mesh_info.shard_process_group)
        assert [scope.ranks[place] for place in group] == ranks
        assert position == param.mesh_info.shard_mesh_rank
        chunk = -(-parameter.shape[parameter.dim] // unit.mesh.size)
        rows = min(max(parameter.shape[parameter.dim] - position * chunk, 0), chunk)
        expected = list(parameter.shape)
        expected[parameter.dim] = rows
        assert tuple(expected) == tuple(param.sharded_size) == tuple(shards[parameter.name].shape)
        assert parameter.shape == tuple(param._orig_size)
        assert shards[parameter.name].dtype == getattr(torch, parameter.shard_dtype)


def units(spec: ModelSpec) -> dict[str, list[str]]:
    return {unit.name: [p.name for p in unit.parameters] for unit in spec.units}


def whole(spec: ModelSpec) -> dict[str, bool]:
    return {unit.name: unit.stays_whole for unit in spec.units}


def nesting(spec: ModelSpec) -> dict[str, object]:
    return {unit.name: (unit.stays_whole, unit.depth, unit.tail) for unit in spec.units}


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (3, 2), (4, 0), (8, 7), (16, 5)])
def test_same_as_the_plain_module_and_as_fsdp(fake_world: Callable, size: int, rank: int) -> None:
    plain = read(Model(), topology=Topology(1, size), policy=Policy())
    with fake_world(size, rank):
        model = shard(Model(), mp_policy=BF16)
        spec = read(model, topology=Topology(1, size))
        check_against_fsdp(spec, model, rank)
    assert spec.units == plain.units
    assert spec.source == "fully_shard-ed Model"
    assert whole(spec) == {"": True, "layers.0": False, "layers.1": False}


def test_topology_is_optional_but_must_agree(fake_world: Callable) -> None:
    with fake_world(4):
        model = shard(Model())
        assert read(model).units == read(model, topology=Topology(2, 2)).units
        with pytest.raises(InputError, match=r"topology of 8 nodes × 8 GPUs has 64 ranks, but the process group has 4"):
            read(model, topology=Topology(8, 8))


def test_process_group_missing(fake_world: Callable) -> None:
    with fake_world(4):
        model = shard(Model())
    with pytest.raises(InputError, match=r"fully_shard-ed Model: its process group is gone; read the model before"):
        read(model)


def test_options_of_plain_modules_are_refused(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model())
        with pytest.raises(InputError, match=r"wrap, reshard_after_forward: a fully_shard-ed module already says so"):
            read(model, wrap={Block}, reshard_after_forward=False)


# Meshes --------------------------------------------------------------------------------------------


def test_hsdp_knows_all_replicas(fake_world: Callable) -> None:
    with fake_world(6, rank=4):
        model = shard(Model(), mesh=init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard")))
        spec = read(model, topology=Topology(2, 3))
        check_against_fsdp(spec, model, rank=4)
    assert {unit.mesh.groups for unit in spec.units} == {((0, 1, 2), (3, 4, 5))}
    assert all(unit.mesh is spec.units[0].mesh for unit in spec.units)


PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_tensor_parallel_replicas_and_shards(fake_world: Callable, rank: int) -> None:
    with fake_world(16, rank):
        mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        model = Model()
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], PARALLEL)
        shard(model, mesh=mesh["replicate", "shard"])
        spec = read(model)
        check_against_fsdp(spec, model, rank)
    local = {p.name: p.shape for p in spec.unit("layers.0").parameters}
    assert local == {
        "layers.0.up.weight": (12, 8),  # half of 24 rows
        "layers.0.down.weight": (8, 12),
        "layers.0.down.bias": (8,),
        "layers.0.scale": (8,),
    }
    # rank = 8 replicate + 2 shard + tp: the same on every rank, so that all ranks plan alike
    assert spec.units[0].mesh.groups == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))


def test_every_rank_reads_the_same(fake_world: Callable) -> None:
    found = []
    for rank in range(8):
        with fake_world(8, rank):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            model = Model()
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], PARALLEL)
            found.append(read(shard(model, mesh=mesh["dp"], mp_policy=BF16)))
    assert all(spec == found[0] for spec in found)


def test_uneven_tensor_parallelism_speaks_of_its_own_group_only(fake_world: Callable) -> None:
    with fake_world(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
        spec = read(fully_shard(model, mesh=mesh["dp"]))
        check_against_fsdp(spec, model, rank=3)
    assert spec.unit("0").parameters[0].shape == (2, 4)  # rank 2 has three rows
    assert spec.unit("0").mesh.groups == ((1, 3),)
    assert spec.unit("1").mesh.groups == ((0, 2), (1, 3))


def test_flattened_dimensions_of_a_full_mesh(fake_world: Callable) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    dims = getattr(fsdp, "DataParallelMeshDims", None)
    if dims is None:
        pytest.skip("torch 2.11 has no dp_mesh_dims")
    with fake_world(16, rank=6):
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("replicate", "shard", "context", "tp"))
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        split = [Replicate(), Replicate(), Replicate(), Shard(0)]
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, split))
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims(shard=("shard", "context"), replicate="replicate"))
        spec = read(model)
        check_against_fsdp(spec, model, rank=6)
    assert spec.units[0].parameters[0].shape == (4, 8)
    assert spec.units[0].mesh.groups == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(2, 8, 12))


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Experts over a smaller mesh, along dim 1, in the same ``fully_shard`` call as the router."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.11 has one mesh per fully_shard call")
    expert_mesh = common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    flat_mesh = mesh["efsdp", "ep"]._flatten("fsdp")
    dense_mesh = common.FSDPMeshInfo(flat_mesh, shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        if param.ndim == 3:
            return common.ShardPlacementResult(Shard(1), expert_mesh)
        return common.ShardPlacementResult(Shard(0), dense_mesh)

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=flat_mesh, shard_placement_fn=place)
    fully_shard(model, mesh=flat_mesh)


def test_two_meshes_in_one_block_live_together(fake_world: Callable) -> None:
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep"))
        model = nn.Module()
        model.embed = nn.Embedding(10, 8)
        model.layers = nn.ModuleList(Expert() for _ in range(2))
        shard_experts(model, mesh)
        spec = read(model)
        check_against_fsdp(spec, model, rank=5)
    assert units(spec) == {
        "": ["embed.weight"],
        "layers.0": ["layers.0.router.weight"],
        "layers.0#1": ["layers.0.experts"],
        "layers.1": ["layers.1.router.weight"],
        "layers.1#1": ["layers.1.experts"],
    }
    assert [unit.lives_with for unit in spec.units] == [0, 1, 1, 2, 2]
    assert spec.unit("layers.0").mesh.groups == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert spec.unit("layers.0#1").mesh.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert spec.unit("layers.0#1").parameters[0].dim == 1


def test_mesh_made_by_hand_knows_its_own_group(fake_world: Callable) -> None:
    with fake_world(8, rank=6):
        model = fully_shard(nn.Linear(6, 6), mesh=DeviceMesh("cpu", [4, 5, 6, 7]))
        spec = read(model)
        check_against_fsdp(spec, model, rank=6)
    assert spec.units[0].mesh.groups == ((0, 1, 2, 3),)  # the plan is of ranks 4 to 7 only


def test_mesh_in_another_order_of_ranks(fake_world: Callable) -> None:
    with fake_world(4, rank=1):
        model = fully_shard(nn.Linear(6, 6), mesh=DeviceMesh("cpu", [3, 1, 0, 2]))
        spec = read(model)
        check_against_fsdp(spec, model, rank=1)
    assert spec.units[0].mesh.groups == ((0, 1, 2, 3),)  # FSDP2 shards by place in the process group


# Lifetimes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "blocks"), [(None, False), (True, False), (False, True), (2, False), (1, True), (4, False)]
)
def test_reshard_after_forward(fake_world: Callable, option: Any, blocks: bool) -> None:
    with fake_world(4):
        spec = read(shard(Model(), reshard_after_forward=option))
    assert whole(spec) == {"": option is None or blocks, "layers.0": blocks, "layers.1": blocks}
    assert [unit.depth for unit in spec.units] == [0, 1, 1]


def test_root_without_nested_units(fake_world: Callable) -> None:
    with fake_world(2):
        assert whole(read(fully_shard(Block()))) == {"": True}  # FSDP2 keeps the root after forward
        assert whole(read(fully_shard(Block(), reshard_after_forward=True))) == {"": False}
        model = Model()  # no root: each block is one of its own
        for layer in model.layers:
            fully_shard(layer)
        assert whole(read(model)) == {"layers.0": True, "layers.1": True}


def test_settings_made_after_sharding(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model())
        model.layers[0].set_reshard_after_forward(False)
        model.layers[1].set_reshard_after_backward(False)
        assert whole(read(model)) == {"": True, "layers.0": True, "layers.1": True}


def test_nested_units_know_how_deep_they_are(fake_world: Callable) -> None:
    with fake_world(2):
        model = Model(1)
        fully_shard(model.layers[0].up)
        spec = read(shard(model))
    assert nesting(spec) == {"": (True, 0, (1,)), "layers.0": (False, 1, (0, 1)), "layers.0.up": (False, 2, ())}
    assert spec.unit("layers.0.up").lives_with != spec.unit("layers.0").lives_with


def test_reading_does_not_depend_on_when(fake_world: Callable) -> None:
    """Before the first forward, after it, and while parameters are whole."""
    with fake_world(2, rank=1):
        model = shard(Model(), mp_policy=BF16)
        before = read(model)
        model.layers[0].unshard()
        during = read(model)
        during_shards = introspect.local_shards(model)
        model.layers[0].reshard()
        model(torch.zeros(3, dtype=torch.int64))
        after = read(model)
        check_against_fsdp(after, model, rank=1)
    assert before == during == after
    assert during_shards["layers.0.scale"].shape == (4,)


def test_meta_device_and_after_to_empty(fake_world: Callable) -> None:
    with fake_world(3, rank=2):
        with torch.device("meta"):
            model = Model()
        shard(model, mp_policy=BF16)
        on_meta = read(model)
        check_against_fsdp(on_meta, model, rank=2)
        model.to_empty(device="cpu")
        filled = read(model)
        check_against_fsdp(filled, model, rank=2)
        assert all(not shard.is_meta for shard in introspect.local_shards(model).values())
    assert on_meta == filled


def test_conversion_before_the_first_forward_counts(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        model.to(torch.bfloat16)
        parameter = read(model).units[0].parameters[0]
    assert (parameter.shard_dtype, parameter.dtype, parameter.out_dtype) == ("bfloat16", "bfloat16", "float32")


# Parameters ----------------------------------------------------------------------------------------


def test_frozen_ignored_and_unsharded(fake_world: Callable) -> None:
    with fake_world(2):
        model = Model(1)
        model.layers[0].up.weight.requires_grad_(False)
        fully_shard(model.layers[0], ignored_params={model.layers[0].scale})
        spec = read(model)
    by_name = {p.name: p for unit in spec.units for p in unit.parameters}
    assert not by_name["layers.0.up.weight"].trainable
    assert by_name["layers.0.down.weight"].grad_dtype == "float32"
    assert [name for name, _ in spec.skipped] == ["embed.weight", "layers.0.scale", "head.weight"]
    assert all("in ignored_params or outside every fully_shard-ed module" in reason for _, reason in spec.skipped)


def test_integer_parameters_are_never_cast(fake_world: Callable) -> None:
    if introspect.torch_version() < (2, 12):
        pytest.skip("torch 2.11 shards no integers")
    with fake_world(2):
        model = Block()
        model.ids = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        spec = read(fully_shard(model, mp_policy=BF16))
    by_name = {p.name: p.dtype for p in spec.units[0].parameters}
    assert by_name["ids"] == "int64"
    assert by_name["scale"] == "bfloat16"


def test_ties_within_a_group_travel_once(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model(tied=True))
        root = read(model).units[0]
        check_against_fsdp(read(model), model, rank=0)
    assert [(p.name, p.aliases) for p in root.parameters] == [("embed.weight", ("head.weight",))]


def test_ties_across_groups_are_refused(fake_world: Callable) -> None:
    with fake_world(2):
        model = Model(tied=True)
        fully_shard(model.embed)
        shard(model)
        if introspect.torch_version() < (2, 12):
            pytest.skip("torch 2.11 does not keep what was tied")
        with pytest.raises(
            InputError,
            match=r"head\.weight in unit 'root' is tied to embed\.weight in unit 'embed'|"
            r"embed\.weight in unit 'embed' is tied to head\.weight in unit 'root'",
        ):
            read(model)


def test_grouped_modules_are_one_unit(fake_world: Callable) -> None:
    with fake_world(2):
        model = Model(tied=True)
        fully_shard([model.embed, model.head])
        spec = read(shard(model))
    assert units(spec)["embed, head"] == ["embed.weight"]
    assert spec.unit("embed, head").parameters[0].aliases == ("head.weight",)


def test_offloaded_shards(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
        check_against_fsdp(read(model), model, rank=0)


def test_unsupported_dtype_names_the_parameter(fake_world: Callable) -> None:
    with fake_world(2):
        model = Block()
        model.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        with pytest.raises(InputError, match=r"^phase: dtype complex64 is not supported.*ignored_params"):
            read(fully_shard(model))


class Quantised(torch.Tensor):
    """A subclass that takes part in the all-gather itself."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_extensions_run_stock(fake_world: Callable) -> None:
    with fake_world(2):
        model = shard(Model(1))
        local = model.layers[0].up.weight._local_tensor
        model.layers[0].up.weight._local_tensor = local.as_subclass(Quantised)
        spec = read(model)
        assert set(introspect.local_shards(model)) == {"embed.weight", "head.weight"}
        with pytest.raises(InputError, match=r"no parameters to plan; all are left to FSDP2, up\.weight since"):
            read(model.layers[0])
    assert list(units(spec)) == [""]
    skipped = dict(spec.skipped)
    assert len(skipped) == 4
    assert "weight is a Quantised with an all-gather extension" in skipped["layers.0.scale"]


def test_every_parameter_ignored(fake_world: Callable) -> None:
    with fake_world(2):
        model = nn.Linear(4, 4)
        fully_shard(model, ignored_params=set(model.parameters()))
        with pytest.raises(InputError, match=r"Linear: no parameters to plan.*ignored_params"):
            read(model)


def test_unknown_version_of_fsdp() -> None:
    class Later:
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.raises(CapabilityError, match=r"keeps its parameter groups where TIDE does not know them"):
        introspect.groups_of(Later())


# Properties ----------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=60)
@given(
    stored=st.sampled_from(DTYPES),
    param=st.sampled_from([None, *DTYPES]),
    reduce=st.sampled_from([None, *DTYPES]),
    trainable=st.booleans(),
)
def test_dtypes_are_those_that_fsdp_settles(
    fake_world: Callable, stored: torch.dtype, param: Any, reduce: Any, trainable: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    with fake_world(2):
        model = nn.Linear(3, 3, dtype=stored).requires_grad_(trainable)
        plain = read(model, topology=Topology(1, 2), policy=policy)
        fully_shard(model, mp_policy=policy)
        spec = read(model)
        group = introspect.groups_of(model)[0]
        group.lazy_init()
        assert read(model) == spec
    for parameter, settled in zip(spec.units[0].parameters, group.fsdp_params, strict=True):
        assert parameter.shard_dtype == str(settled.orig_dtype).removeprefix("torch.")
        storage = settled.param_dtype or settled.orig_dtype
        assert parameter.dtype == str(storage).removeprefix("torch.")
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        smaller = sizes[parameter.out_dtype] < sizes[parameter.dtype]
        assert parameter.grad_dtype == ((parameter.out_dtype if smaller else parameter.dtype) if trainable else None)
        if introspect.torch_version() < (2, 15):
            assert parameter.out_dtype == str(settled.reduce_dtype or storage).removeprefix("torch.")
    if introspect.torch_version() < (2, 15):
        assert spec.units == plain.units


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_and_placement(fake_world: Callable, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9), label="world")
    rank = data.draw(st.integers(0, size - 1), label="rank")
    shapes = data.draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=4))
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    # FSDP2 takes any extent along dim 0, and multiples of the world size along others
    dims = {
        id(p): data.draw(st.sampled_from([d for d, n in enumerate(p.shape) if d == 0 or n % size == 0])) for p in model
    }
    by_name = {name: dims[id(p)] for name, p in model.named_parameters()}
    plain = read(model, topology=Topology(1, size), shard_dim=lambda name, shape: by_name[name])
    with fake_world(size, rank):
        fully_shard(model, shard_placement_fn=lambda p: Shard(dims[id(p)]), reshard_after_forward=False)
        spec = read(model)
        check_against_fsdp(spec, model, rank)
    assert spec.units == plain.units


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A random tree of modules, with parameters in any place."""
    module = nn.Sequential()
    for index in range(draw(st.integers(0, 2))):
        module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(draw(st.integers(1, 5)), 2)))
    if depth:
        for index in range(draw(st.integers(0, 3))):
            module.add_module(f"m{index}", draw(trees(depth=depth - 1)))
    return module


@settings(max_examples=60)
@given(data=st.data())
def test_any_wrapping_of_any_tree(fake_world: Callable, data: st.DataObject) -> None:
    """Units, order, nesting and lifetimes of the plain reader are those that fully_shard makes."""
    model = data.draw(trees())
    if not list(model.parameters()):
        return
    inner = [name for name, module in model.named_modules() if name and list(module.parameters())]
    chosen = data.draw(st.lists(st.sampled_from(inner), unique=True) if inner else st.just([]))
    plain = read(model, topology=Topology(1, 2), wrap=chosen)
    with fake_world(2):
        named = dict(model.named_modules())
        for name in sorted(chosen, key=lambda name: -name.count(".")):  # inner ones first, as users do
            fully_shard(named[name])
        fully_shard(model)
        spec = read(model)
    assert units(spec) == units(plain)
    assert nesting(spec) == nesting(plain)


class Two(nn.Module):
    """Encoder and decoder, each with an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_embed, self.encoder = nn.Embedding(10, 8), nn.ModuleList([Block()])
        self.decoder_embed, self.decoder = nn.Embedding(10, 8), nn.ModuleList([Block()])
        self.head = nn.Linear(8, 10)


def test_a_second_embedding_stays_whole(fake_world: Callable) -> None:
    """Its input has no gradient, so FSDP2 does not see its backward end before the encoder's has ended."""
    wrap = ["encoder_embed", "encoder.0", "decoder_embed", "decoder.0", "head"]
    plain = read(Two(), topology=Topology(1, 2), wrap=wrap)
    assert [unit.name for unit in plain.units if unit.stays_whole] == ["decoder_embed"]
    together = read(Two(), topology=Topology(1, 2), wrap=[("encoder_embed", "head"), *wrap[1:4]])
    assert [unit.name for unit in together.units if unit.stays_whole] == ["encoder_embed, head", "decoder_embed"]
    with fake_world(2):
        model = Two()
        for name in wrap:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        assert read(model).units == plain.units


def test_local_shards_hold_the_values(fake_world: Callable) -> None:
    with fake_world(4, rank=1):
        model = nn.Linear(3, 10, bias=False)
        full = model.weight.detach().clone()
        fully_shard(model)
        assert isinstance(model.weight, DTensor)
        assert torch.equal(introspect.local_shards(model)["weight"], full[3:6])
        assert introspect.local_shards(nn.Linear(2, 2)) == {}
