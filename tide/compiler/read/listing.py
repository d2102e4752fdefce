"""Reads a bare parameter list: a mapping, a JSON file, or the headers of safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide.compiler.model import Mesh, ModelSpec, Unit
from tide.compiler.read.nesting import nest
from tide.compiler.read.policy import Policy, ShardDim, dtype_name, shard_dim_of, shard_mesh
from tide.errors import CapabilityError, InputError
from tide.topology import Topology

#: Index file of a checkpoint in several safetensors files.
INDEX = "model.safetensors.index.json"
#: A checkpoint in one file.
SINGLE = "model.safetensors"

_Entries = dict[str, tuple[tuple[int, ...], str]]


def read_listing(
    listing: Mapping[str, Any],
    *,
    topology: Topology | None,
    mesh: Mesh | None = None,
    wrap: Callable[[str], str] | Iterable[str] | None = None,
    policy: Any = None,
    shard_dim: ShardDim | None = None,
    ignored_params: Collection[str] = (),
    reshard_after_forward: bool = True,
    source: str = "parameter list",
) -> ModelSpec:
    """Model from names, shapes and element types alone.

    Names are grouped by their outermost number: ``model.layers.3.mlp.up.weight`` belongs to unit
    ``model.layers.3``, and what has no number before its last part belongs to the root. The root
    comes first; then each list of blocks where its first parameter stands, by number.

    Parameters
    ----------
    listing : mapping
        Name to ``(shape, dtype)``, to ``{"shape": …, "dtype": …}``, to a tensor, or to a bare shape,
        which then is float32 as torch would create it.
    topology, mesh, policy, shard_dim, ignored_params, reshard_after_forward
        As for a module. Types without gradients (integers, fp8 that the policy does not cast) are frozen.
    wrap : callable or iterable of str, optional
        A callable answers a parameter's name with its unit's; an iterable names the units, each of
        which takes the parameters below its name, the innermost first.
    source : str
        Names the list in reports and errors.

    Raises
    ------
    InputError
        For an entry without shape, a type that no plan can carry, or a unit without parameters.
    """
    groups = shard_mesh(topology, mesh, source)
    rules = Policy.of(policy)
    if odd := [name for name in listing if not isinstance(name, str)]:
        raise InputError(f"{source}: parameter names must be strings, got {odd[0]!r}")
    entries = {str(name): _entry(str(name), value) for name, value in listing.items()}
    ignored = dict.fromkeys(ignored_params)
    for name in ignored:
        if name not in entries:
            raise InputError(f"ignored_params: {source} has no parameter {name!r}")
    unit_of = _unit_rule(wrap, [name for name in entries if name not in ignored])
    members: dict[str, list[str]] = {}
    for name in entries:
        if name not in ignored:
            members.setdefault(unit_of(name), []).append(name)
    units = []
    homes: dict[int, tuple[str]] = {}
    for number, unit_name in enumerate(_order(members) if wrap is None else _outer_first(members)):
        homes[number] = (unit_name,)
        units.append(
            Unit(
                name=unit_name,
                parameters=tuple(
                    rules.parameter(
                        name,
                        entries[name][0],
                        entries[name][1],
                        dim=shard_dim_of(shard_dim, name, entries[name][0]),
                    )
                    for name in members[unit_name]
                ),
                mesh=groups,
                stays_whole=not unit_name or not reshard_after_forward,
                lives_with=number,
            )
        )
    order = {name: index for index, name in enumerate(entries)}
    skipped = tuple((name, "in ignored_params") for name in ignored)
    return ModelSpec(nest(units, homes, order), source=source, skipped=skipped)


def read_file(path: str | os.PathLike[str], **options: Any) -> ModelSpec:
    """Model from a file: a ``.json`` list, ``.safetensors``, its index, or the folder of a checkpoint.

    Only headers of safetensors files are read. Options are those of `read_listing`.
    """
    return read_listing(load_listing(path), source=str(path), **options)


def load_listing(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The parameter list that a file holds, see `read_file`."""
    file = Path(path)
    if file.is_dir():
        candidates = [file / INDEX, file / SINGLE]
        file = next((candidate for candidate in candidates if candidate.is_file()), file)
        if file.is_dir():
            raise InputError(f"{file}: the folder has neither {INDEX} nor {SINGLE}; pass the file itself")
    if not file.is_file():
        raise InputError(f"{file}: no such file; pass a .json list, a .safetensors file or a {INDEX}")
    if file.suffix == ".safetensors":
        return _safetensors_header(file)
    if file.suffix != ".json":
        raise InputError(f"{file}: expected a .json list, a .safetensors file or a {INDEX}")
    content = _json(file)
    if isinstance(content.get("weight_map"), dict):
        return _safetensors_index(file, content["weight_map"])
    return content


def _json(file: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{file}: {twice!r} stands in it twice; keep one")
        return content

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected an object of name → [shape, dtype], got a {type(content).__name__}")
    return content


def _safetensors_header(file: Path) -> _Entries:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CapabilityError(f"{file}: reading it needs the safetensors library; pip install safetensors") from None
    entries: _Entries = {}
    try:
        with safe_open(str(file), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                header = opened.get_slice(name)  # the slice reads bytes only when it is indexed
                entries[name] = tuple(header.get_shape()), str(header.get_dtype())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    return entries


def _safetensors_index(index: Path, weight_map: Mapping[str, str]) -> _Entries:
    headers: dict[str, _Entries] = {}
    entries: _Entries = {}
    for name, file_name in weight_map.items():
        if file_name not in headers:
            file = index.parent / file_name
            if not file.is_file():
                raise InputError(
                    f"{file}: missing, though {index} names it for {name}; put all of the checkpoint's files beside "
                    "the index"
                )
            headers[file_name] = _safetensors_header(file)
        if name not in headers[file_name]:
            raise InputError(
                f"{name}: {index} says that it is in {file_name}, which does not hold it; fetch both again"
            )
        entries[name] = headers[file_name][name]
    return entries


def _entry(name: str, value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of one entry, in whichever way it is written."""
    dtype: Any = "float32"
    shape: Any
    if isinstance(value, Mapping):
        unknown = set(value) - {"shape", "dtype"}
        if "shape" not in value or unknown:
            raise InputError(f"{name}: expected the keys shape and dtype, got {', '.join(map(repr, value)) or 'none'}")
        shape, dtype = value["shape"], value.get("dtype", dtype)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = value.shape, value.dtype
    elif _is_sequence(value) and len(value) == 2 and _is_sequence(value[0]):
        shape, dtype = value
    else:
        shape = value
    if not _is_sequence(shape) or not all(isinstance(extent, int) for extent in shape):
        raise InputError(f"{name}: expected a shape of whole numbers, or [shape, dtype], got {value!r}")
    return tuple(shape), dtype_name(dtype, name)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _by_block(name: str) -> str:
    """Unit by the outermost number in a name, the last part aside: that is a parameter's, not a block's."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return ""


def _unit_rule(wrap: Any, names: list[str]) -> Callable[[str], str]:
    if wrap is None:
        return _by_block
    if callable(wrap) and not isinstance(wrap, type):

        def by_callable(name: str) -> str:
            unit = wrap(name)
            if not isinstance(unit, str):
                raise InputError(f"wrap: answered {unit!r} for {name}; it must name the parameter's unit")
            return unit

        return by_callable
    prefixes = [wrap] if isinstance(wrap, str) or not isinstance(wrap, Iterable) else list(wrap)
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise InputError(
                f"wrap: {prefix!r} cannot cut a bare list of parameters, which has no modules; "
                "pass a callable name -> unit name, or the names of the units"
            )
        if not any(name.startswith(f"{prefix}.") for name in names):
            raise InputError(f"wrap: no parameter's name starts with {prefix + '.'!r}")
    innermost = sorted(prefixes, key=len, reverse=True)
    return lambda name: next((prefix for prefix in innermost if name.startswith(f"{prefix}.")), "")


def _order(members: Mapping[str, list[str]]) -> list[str]:
    """Units with the root first, then list by list as they appear, each by number."""
    lists: dict[str, int] = {}

    def place(unit: str) -> tuple[int, int]:
        if not unit:
            return -1, -1
        prefix, _, number = unit.rpartition(".")
        return lists.setdefault(prefix, len(lists)), int(number)

    return sorted(members, key=place)


def _outer_first(members: Mapping[str, list[str]]) -> list[str]:
    """Units as they appear, each after those that it runs inside of."""
    found: dict[str, None] = {}
    for unit in members:
        parts = unit.split(".")
        for outer in ("", *(".".join(parts[: end + 1]) for end in range(len(parts)))):
            if outer in members:
                found.setdefault(outer)
    return list(found)
