"""Bare parameter lists: mappings, JSON, safetensors headers, grouping, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tide.compiler.model import Mesh
from tide.compiler.read import Policy, read
from tide.errors import InputError
from tide.topology import Topology

FOUR = Topology(nodes=1, gpus_per_node=4)

LIST = {
    "embed.weight": ((10, 4), "bfloat16"),
    "layers.0.up.weight": ((8, 4), "bfloat16"),
    "layers.0.mlp.3.weight": ((2, 4), "bfloat16"),
    "layers.10.up.weight": ((8, 4), "bfloat16"),
    "layers.9.up.weight": ((8, 4), "bfloat16"),
    "head.weight": ((10, 4), "bfloat16"),
}


def units(spec: object) -> dict[str, list[str]]:
    return {unit.name: [p.name for p in unit.parameters] for unit in spec.units}  # type: ignore[attr-defined]


def test_reading_a_list_imports_no_torch() -> None:
    code = (
        "import sys; from tide.compiler.read import read; from tide.topology import Topology; "
        "read({'a.0.w': ((4, 2), 'bfloat16')}, topology=Topology(1, 2)); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_outermost_number_makes_the_unit_and_units_are_in_numeric_order() -> None:
    spec = read(LIST, topology=FOUR)
    assert units(spec) == {
        "": ["embed.weight", "head.weight"],
        "layers.0": ["layers.0.up.weight", "layers.0.mlp.3.weight"],
        "layers.9": ["layers.9.up.weight"],
        "layers.10": ["layers.10.up.weight"],
    }
    assert [unit.stays_whole for unit in spec.units] == [True, False, False, False]
    assert len({unit.lives_with for unit in spec.units}) == 4
    assert spec.units[1].mesh == Mesh(((0, 1, 2, 3),))
    assert spec.source == "parameter list"


def test_lists_follow_each_other_as_they_appear() -> None:
    names = ["encoder.1.w", "encoder.0.w", "decoder.1.w", "decoder.0.w", "scales.0"]
    spec = read({name: (4,) for name in names}, topology=FOUR)
    assert list(units(spec)) == ["", "encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert units(spec)[""] == ["scales.0"]  # the last part is a parameter's, not a block's


@pytest.mark.parametrize(
    "entry",
    [
        ((8, 4), "bfloat16"),
        [[8, 4], "torch.bfloat16"],
        ([8, 4], "BF16"),
        {"shape": [8, 4], "dtype": "bfloat16"},
    ],
)
def test_ways_to_write_an_entry(entry: object) -> None:
    parameter = read({"w": entry}, topology=FOUR).units[0].parameters[0]
    assert parameter.shape == (8, 4)
    assert parameter.dtype == parameter.shard_dtype == parameter.grad_dtype == parameter.out_dtype == "bfloat16"


def test_bare_shape_is_float32_and_tensors_do_too() -> None:
    spec = read({"a": (8, 4), "b": np.zeros((3, 2), np.float16)}, topology=FOUR)
    assert [(p.shape, p.dtype) for p in spec.units[0].parameters] == [((8, 4), "float32"), ((3, 2), "float16")]


def test_policy_and_types_without_gradients() -> None:
    spec = read(
        {"w": ((8, 4), "bfloat16"), "q": ((8, 4), "F8_E4M3"), "ids": ((8,), "int64")},
        topology=FOUR,
        policy=Policy(shard_dtype="float32"),
    )
    by_name = {p.name: (p.shard_dtype, p.dtype, p.grad_dtype, p.out_dtype) for p in spec.units[0].parameters}
    assert by_name["w"] == ("float32", "bfloat16", "bfloat16", "float32")
    assert by_name["ids"][:3] == ("int64", "int64", None)
    stored = read({"q": ((8, 4), "F8_E4M3")}, topology=FOUR).units[0].parameters[0]
    assert (stored.dtype, stored.grad_dtype) == ("float8_e4m3fn", None)


def test_shard_dim_and_mesh() -> None:
    halves = Mesh(((0, 2), (1, 3)))
    spec = read(
        {"a.w": ((8, 4), "bfloat16"), "b.w": (6, 4), "c": (3,)},
        topology=FOUR,
        mesh=halves,
        shard_dim=lambda name, shape: {"a.w": 1, "b.w": -1}.get(name),
    )
    assert [p.dim for p in spec.units[0].parameters] == [1, 1, 0]
    assert spec.units[0].mesh is halves


def test_wrap_by_callable() -> None:
    spec = read(LIST, topology=FOUR, wrap=lambda name: "edges" if "layers" not in name else "middle")
    assert list(units(spec)) == ["edges", "middle"]


def test_wrap_by_names_takes_the_innermost() -> None:
    spec = read(LIST, topology=FOUR, wrap=["layers.0", "layers.0.mlp", "head"])
    assert units(spec) == {
        "": ["embed.weight", "layers.10.up.weight", "layers.9.up.weight"],
        "layers.0": ["layers.0.up.weight"],
        "layers.0.mlp": ["layers.0.mlp.3.weight"],
        "head": ["head.weight"],
    }
    assert {unit.name: (unit.stays_whole, unit.depth) for unit in spec.units} == {
        "": (True, 0),
        "layers.0": (False, 1),
        "layers.0.mlp": (False, 2),
        "head": (False, 1),
    }
    assert [unit.tail for unit in spec.units] == [(1, 2), (), (), ()]


def test_outer_units_come_first() -> None:
    spec = read({"a.b.w": (4,), "a.v": (4,), "u": (4,)}, topology=FOUR, wrap=["a.b", "a"])
    assert list(units(spec)) == ["", "a", "a.b"]
    assert [unit.tail for unit in spec.units] == [(0,), (0,), ()]


def test_no_reshard_after_forward_keeps_every_unit_whole() -> None:
    spec = read(LIST, topology=FOUR, reshard_after_forward=False)
    assert all(unit.stays_whole for unit in spec.units)


def test_ignored_names_are_skipped() -> None:
    spec = read(LIST | {"step": ((), "int64")}, topology=FOUR, ignored_params=["step", "head.weight"])
    assert spec.skipped == (("step", "in ignored_params"), ("head.weight", "in ignored_params"))
    assert units(spec)[""] == ["embed.weight"]


@given(
    names=st.lists(
        st.lists(st.sampled_from(["a", "b", "0", "1", "12"]), min_size=1, max_size=4).map(".".join),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
def test_every_parameter_is_in_exactly_one_unit_below_its_name(names: list[str]) -> None:
    spec = read({name: (4, 2) for name in names}, topology=FOUR)
    found = [p.name for unit in spec.units for p in unit.parameters]
    assert sorted(found) == sorted(names)
    for unit in spec.units:
        parts = unit.name.split(".") if unit.name else []
        assert [part for part in parts[:-1] if part.isdecimal()] == []
        for parameter in unit.parameters:
            assert parameter.name.split(".")[: len(parts)] == parts


# Files ---------------------------------------------------------------------------------------------


def test_json_list(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"layers.0.w": [[8, 4], "bfloat16"], "b": {"shape": [4]}}))
    spec = read(file, topology=FOUR)
    assert units(spec) == {"": ["b"], "layers.0": ["layers.0.w"]}
    assert spec.source == str(file)


def test_safetensors_file_index_and_folder_agree(tmp_path: Path) -> None:
    first = {"embed": np.zeros((10, 4), np.float32), "layers.0.w": np.zeros((8, 4), np.float16)}
    second = {"layers.1.w": np.zeros((6, 4), np.int8)}
    save_file(first, tmp_path / "one.safetensors")
    save_file(second, tmp_path / "two.safetensors")
    save_file(first | second, tmp_path / "all.safetensors")
    weight_map = dict.fromkeys(first, "one.safetensors") | dict.fromkeys(second, "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole = read(str(tmp_path / "all.safetensors"), topology=FOUR)
    assert read(index, topology=FOUR).units == whole.units == read(tmp_path, topology=FOUR).units
    assert {p.name: (p.shape, p.dtype) for unit in whole.units for p in unit.parameters} == {
        "embed": ((10, 4), "float32"),
        "layers.0.w": ((8, 4), "float16"),
        "layers.1.w": ((6, 4), "int8"),
    }


def test_only_the_header_is_read(tmp_path: Path) -> None:
    # 2 TB of weights that are not there: a sparse file of the right length behind a real header
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 41]}}).encode()
    file = tmp_path / "huge.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        try:
            out.truncate(8 + len(header) + (1 << 41))
        except OSError:
            pytest.skip("the file system takes no sparse file of 2 TB")
    parameter = read(file, topology=FOUR).units[0].parameters[0]
    assert (parameter.shape, parameter.dtype) == ((1 << 20, 1 << 20), "bfloat16")


def test_index_with_a_missing_file(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(InputError, match=r"gone\.safetensors: missing, though .*index\.json names it for w"):
        read(index, topology=FOUR)


def test_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"^b: .* says that it is in one\.safetensors, which does not hold it"):
        read(index, topology=FOUR)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.safetensors", "not a header", r"cut\.safetensors: not a readable safetensors file"),
        ("bad.json", "{", r"bad\.json: not valid JSON"),
        ("list.json", "[]", r"list\.json: expected an object of name → \[shape, dtype\], got a list"),
        ("twice.json", '{"w": [4], "w": [5]}', r"twice\.json: 'w' stands in it twice"),
        ("model.bin", "", r"model\.bin: expected a \.json list, a \.safetensors file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read(file, topology=FOUR)


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: no such file; pass a \.json list"):
        read(tmp_path / "nowhere.json", topology=FOUR)
    with pytest.raises(InputError, match=r"the folder has neither model\.safetensors\.index\.json nor"):
        read(tmp_path, topology=FOUR)


# Refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ({"w": ()}, r"^w: a scalar has no dimension to shard.*make it 1-D"),
        ({"w": ((4,), "complex64")}, r"^w: dtype complex64 is not supported.*Cast the tensor"),
        ({"w": "4,2"}, r"^w: expected a shape of whole numbers"),
        ({"w": (4, 2.0)}, r"^w: expected a shape of whole numbers"),
        ({"w": {"shap": [4]}}, r"^w: expected the keys shape and dtype, got 'shap'"),
        ({"w": {"shape": [4], "stride": [1]}}, r"^w: expected the keys shape and dtype"),
        ({"w": (-4, 2)}, r"^w: shape \(-4, 2\) must be whole numbers"),
        ({"w": ((4, 2), "float64")}, r"^w: gradient dtype float64 is not supported.*Freeze the parameter or cast"),
        ({}, r"parameter list: no parameters to plan"),
    ],
)
def test_entries_that_are_refused(listing: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(listing, topology=FOUR)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": [int]}, r"wrap: .*int.* cannot cut a bare list of parameters.*names of the units"),
        ({"wrap": ["layers.7"]}, r"wrap: no parameter's name starts with 'layers\.7\.'"),
        ({"wrap": lambda name: 3}, r"wrap: answered 3 for embed\.weight"),
        ({"policy": "bf16"}, r"policy: expected tide's Policy or FSDP2's MixedPrecisionPolicy, got str"),
        ({"shard_dim": 1}, r"shard_dim: expected a callable \(name, shape\) -> dim, got int"),
        ({"shard_dim": lambda name, shape: "1"}, r"embed\.weight: shard_dim answered '1'"),
        ({"shard_dim": lambda name, shape: 2}, r"embed\.weight: cannot shard dim 2 of shape \(10, 4\)"),
        ({"ignored_params": ["nope"]}, r"ignored_params: parameter list has no parameter 'nope'"),
        ({"mesh": 4}, r"mesh: expected tide's Mesh of shard groups for parameter list, got int"),
        ({"mesh": Mesh(((0, 4),))}, r"unit 'root': its mesh names rank 4, but the topology of 1 nodes × 4 GPUs"),
        ({"mesh": Mesh(((-1, 0),))}, r"unit 'root': its mesh names rank -1, .* has ranks 0\.\.3"),
        ({"topology": None}, r"parameter list: says nothing of ranks; pass topology=tide\.Topology"),
        ({"topology": 8}, r"topology: expected tide\.Topology, got int"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(LIST, **({"topology": FOUR} | options))


def test_unknown_policy_type() -> None:
    with pytest.raises(InputError, match=r"Policy\.param_dtype: dtype int3 is not supported"):
        Policy("int3")


def test_unreadable_model() -> None:
    with pytest.raises(InputError, match=r"cannot read a model from a int; pass a torch module, a mapping"):
        read(3, topology=FOUR)


def test_a_spec_is_checked_and_passed_through() -> None:
    spec = read(LIST, topology=FOUR)
    assert read(spec, topology=FOUR) is spec
    with pytest.raises(InputError, match=r"its mesh names rank 3, but the topology of 1 nodes × 2 GPUs"):
        read(spec, topology=Topology(1, 2))
    with pytest.raises(InputError, match=r"wrap, policy: a ModelSpec already says so itself"):
        read(spec, topology=FOUR, wrap=["a"], policy=Policy())
