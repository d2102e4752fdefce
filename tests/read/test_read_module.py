"""Plain modules: wrapping rules, order, policies, ties, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tide.compiler.model import Mesh, ModelSpec
from tide.compiler.read import Policy, read
from tide.errors import InputError
from tide.topology import Topology

FOUR = Topology(nodes=1, gpus_per_node=4)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width)
        self.experts = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(2))


class Model(nn.Module):
    """Embedding, blocks, head, and what must not become a unit: a list without parameters, a buffer."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.dropouts = nn.ModuleList(nn.Dropout() for _ in range(depth))
        self.register_buffer("positions", torch.arange(4))
        self.head = nn.Linear(8, 10, bias=False)


def units(spec: ModelSpec) -> dict[str, list[str]]:
    return {unit.name: [p.name for p in unit.parameters] for unit in spec.units}


def test_default_wraps_each_block_of_the_outermost_lists() -> None:
    spec = read(Model(), topology=FOUR)
    block = ["up.weight", "up.bias", "experts.0.weight", "experts.1.weight", "scale"]  # children first, as in FSDP2
    assert units(spec) == {
        "": ["embed.weight", "head.weight"],
        "layers.0": [f"layers.0.{name}" for name in block],
        "layers.1": [f"layers.1.{name}" for name in block],
    }
    assert [unit.stays_whole for unit in spec.units] == [True, False, False]
    assert spec.source == "Model"
    assert {unit.mesh for unit in spec.units} == {Mesh(((0, 1, 2, 3),))}


def test_meta_device_gives_the_same() -> None:
    with torch.device("meta"):
        model = Model()
    assert read(model, topology=FOUR) == read(Model(), topology=FOUR)


def test_lists_of_lists_and_numbered_dictionaries_are_lists_of_blocks() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    model.layers = nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})
    model.heads = nn.ModuleDict({"text": nn.Linear(4, 4)})
    assert list(units(read(model, topology=FOUR))) == [
        "",
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
        "layers.0",
        "layers.1",
    ]


def test_model_without_lists_is_one_unit() -> None:
    spec = read(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), topology=FOUR)
    assert units(spec) == {"": ["0.weight", "0.bias", "1.weight", "1.bias"]}


@pytest.mark.parametrize(
    "wrap",
    [
        {Block},
        Block,
        lambda name, module: isinstance(module, Block),
        ["layers.0", "layers.1"],
        ["layers.1", "layers.0", ""],
    ],
    ids=["classes", "class", "callable", "names", "unordered names and the root"],
)
def test_ways_to_say_the_default(wrap: object) -> None:
    model = Model()
    assert read(model, topology=FOUR, wrap=wrap).units == read(model, topology=FOUR).units


def test_nested_units_know_how_deep_they_are() -> None:
    spec = read(Model(1), topology=FOUR, wrap=["layers.0", "layers.0.up"])
    assert units(spec)["layers.0"] == ["layers.0.experts.0.weight", "layers.0.experts.1.weight", "layers.0.scale"]
    assert units(spec)["layers.0.up"] == ["layers.0.up.weight", "layers.0.up.bias"]
    assert {unit.name: unit.depth for unit in spec.units} == {"": 0, "layers.0": 1, "layers.0.up": 2}
    assert [unit.stays_whole for unit in spec.units] == [True, False, False]


def test_two_modules_in_one_unit() -> None:
    spec = read(Model(1), topology=FOUR, wrap=[("head", "embed"), "layers.0"])
    assert list(units(spec)) == ["embed, head", "layers.0"]
    assert spec.unit("embed, head").stays_whole, "the block runs between them"
    assert not read(Model(1), topology=FOUR, wrap=[("layers.0", "head")]).unit("layers.0, head").stays_whole


def test_without_policy_nothing_is_cast() -> None:
    model = Model(1).to(torch.bfloat16)
    model.head.weight.requires_grad_(False)
    model.register_parameter("ids", nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False))
    by_name = {p.name: p for unit in read(model, topology=FOUR).units for p in unit.parameters}
    embed = by_name["embed.weight"]
    assert (embed.shard_dtype, embed.dtype, embed.grad_dtype, embed.out_dtype) == ("bfloat16",) * 4
    assert not by_name["head.weight"].trainable
    assert (by_name["ids"].dtype, by_name["ids"].grad_dtype) == ("int64", None)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(torch.bfloat16, torch.float32),  # type: ignore[arg-type]
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ],
)
def test_policy_in_any_form(policy: object) -> None:
    parameter = read(Model(), topology=FOUR, policy=policy).units[0].parameters[0]
    assert parameter.shard_dtype == parameter.out_dtype == "float32"
    assert parameter.dtype == parameter.grad_dtype == "bfloat16"


def test_shard_dim_takes_numbers_none_and_placements() -> None:
    from torch.distributed.tensor import Shard

    def choose(name: str, shape: tuple[int, ...]) -> object:
        return {"embed.weight": Shard(1), "head.weight": -1}.get(name)

    spec = read(Model(1), topology=FOUR, shard_dim=choose)
    assert {p.name: p.dim for unit in spec.units for p in unit.parameters if p.dim} == {
        "embed.weight": 1,
        "head.weight": 1,
    }


def test_ties_within_a_unit_travel_once() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    spec = read(model, topology=FOUR)
    assert [(p.name, p.aliases) for p in spec.units[0].parameters] == [("embed.weight", ("head.weight",))]


def test_a_block_used_twice_is_one_unit() -> None:
    model = nn.Module()
    block = nn.Linear(4, 4)
    model.layers = nn.ModuleList([block, block])
    spec = read(model, topology=FOUR)
    assert [(p.name, p.aliases) for p in spec.units[0].parameters] == [
        ("layers.0.weight", ("layers.1.weight",)),
        ("layers.0.bias", ("layers.1.bias",)),
    ]


def test_a_block_in_two_lists_is_one_unit_under_its_first_name() -> None:
    model = nn.Module()
    block = nn.Linear(4, 4, bias=False)
    model.first = nn.ModuleList([block, nn.Linear(4, 4, bias=False)])
    model.second = nn.ModuleList([block, nn.Linear(4, 4, bias=False)])
    spec = read(model, topology=FOUR)
    assert list(units(spec)) == ["first.0", "first.1", "second.1"]
    assert spec.unit("first.0").parameters[0].aliases == ("second.0.weight",)


def test_ties_across_units_are_refused_and_one_unit_mends_it() -> None:
    model = Model()
    model.layers[1].up.weight = model.layers[0].up.weight
    with pytest.raises(
        InputError,
        match=r"layers\.1\.up\.weight in unit 'layers\.1' is tied to layers\.0\.up\.weight in unit 'layers\.0'.*"
        r"put both modules into one unit",
    ):
        read(model, topology=FOUR)
    spec = read(model, topology=FOUR, wrap=[("layers.0", "layers.1")])
    assert spec.unit("layers.0, layers.1").parameters[0].aliases == ("layers.1.up.weight",)


def test_ignored_parameters_by_name_and_by_object() -> None:
    model = Model(1)
    spec = read(model, topology=FOUR, ignored_params=["embed.weight", model.head.weight])
    assert list(units(spec)) == ["layers.0"]
    assert spec.skipped == (("embed.weight", "in ignored_params"), ("head.weight", "in ignored_params"))


def test_no_reshard_after_forward() -> None:
    assert all(unit.stays_whole for unit in read(Model(), topology=FOUR, reshard_after_forward=False).units)


def test_replicas_by_mesh() -> None:
    replicas = Mesh(((0, 1), (2, 3)))
    assert all(unit.mesh is replicas for unit in read(Model(), topology=FOUR, mesh=replicas).units)


def test_tensor_parallel_module_needs_a_mesh(fake_world: Callable) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with fake_world(4):
        model = nn.Sequential(nn.Linear(6, 8))
        parallelize_module(
            model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], {"0": ColwiseParallel()}
        )
        with pytest.raises(InputError, match=r"^0\.weight: is a DTensor on .*pass mesh=Mesh\(groups\)"):
            read(model, topology=FOUR)
        spec = read(model, topology=FOUR, mesh=Mesh(((0, 2), (1, 3))))
    assert [p.shape for p in spec.units[0].parameters] == [(4, 6), (4,)]


# Refusals ------------------------------------------------------------------------------------------


def with_parameter(value: torch.Tensor, requires_grad: bool = True) -> nn.Module:
    model = Model(1)
    model.layers[0].odd = nn.Parameter(value, requires_grad=requires_grad)
    return model


def fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = nn.Linear(2, 2)
    module.__class__ = type("Wrapped", (FullyShardedDataParallel,), {})
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_parameter(torch.tensor(1.0)), r"^layers\.0\.odd: a scalar .*make it 1-D"),
        (
            lambda: with_parameter(torch.zeros(4, 6).t()),
            r"^layers\.0\.odd: shape \(6, 4\) with strides \(1, 6\) is not contiguous.*contiguous\(\)",
        ),
        (
            lambda: with_parameter(torch.zeros(4, 6, device="meta").t()),
            r"^layers\.0\.odd: shape \(6, 4\) .* is not contiguous",
        ),
        (lambda: with_parameter(torch.zeros(4, dtype=torch.complex64)), r"^layers\.0\.odd: dtype complex64 is not"),
        (lambda: with_parameter(torch.zeros(4, dtype=torch.float64)), r"^layers\.0\.odd: gradient dtype float64"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"^0\.weight: has no shape yet \(lazy module\); run one forward"),
        (lambda: nn.Sequential(nn.ReLU()), r"Sequential: no parameters to plan"),
        (fsdp1, r"^0: is sharded by FSDP1.*shard the model with fully_shard"),
    ],
    ids=["scalar", "strided", "strided meta", "complex", "float64", "lazy", "empty", "FSDP1"],
)
def test_modules_that_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(make(), topology=FOUR)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": None}, r"Model: says nothing of ranks; pass topology=tide\.Topology"),
        ({"wrap": {nn.Conv2d}}, r"wrap: Conv2d matches no module inside of Model"),
        ({"wrap": lambda name, module: False}, r"wrap: <lambda> matches no module inside of Model"),
        ({"wrap": "layers.0"}, r"wrap: expected None, a set of module classes, .* got 'layers\.0'"),
        ({"wrap": 3}, r"wrap: expected None, a set of module classes, .* got 3"),
        ({"wrap": ["layer.0"]}, r"wrap: the model has no module named 'layer\.0'; did you mean 'layers\.0'"),
        ({"wrap": ["zzz"]}, r"wrap: the model has no module named 'zzz'; see model\.named_modules"),
        ({"wrap": ["head", ("embed", "head")]}, r"wrap: 'head' is named twice"),
        ({"wrap": ["layers"]}, r"wrap: 'layers' is a ModuleList without a forward.*wrap its elements \(layers\.0"),
        ({"wrap": {nn.ModuleList}}, r"wrap: 'layers' is a ModuleList without a forward"),
        ({"ignored_params": ["nope"]}, r"ignored_params: 'nope' is no parameter of Model"),
        ({"ignored_params": [nn.Parameter(torch.zeros(1))]}, r"ignored_params: a Parameter is no parameter of Model"),
        ({"shard_dim": lambda name, shape: -3}, r"embed\.weight: cannot shard dim -3 of shape \(10, 8\)"),
        ({"mesh": Mesh(((0, 7),))}, r"unit 'root': its mesh names rank 7, but the topology of 1 nodes × 4 GPUs"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(Model(), **({"topology": FOUR} | options))


def test_policy_with_overrides_belongs_to_a_sharded_model() -> None:
    class Overriding:
        param_dtype = reduce_dtype = None
        param_dtype_override_fn = staticmethod(lambda parameter: None)

    with pytest.raises(InputError, match=r"policy: param_dtype_override_fn is resolved by fully_shard"):
        read(Model(), topology=FOUR, policy=Overriding())
