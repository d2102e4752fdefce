"""Reads a plain module, also on the meta device, cut into units as FSDP2 users would wrap it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.read.nesting import nest, takes_indices
from tide.compiler.read.policy import Policy, ShardDim, label, shard_dim_of, shard_mesh
from tide.errors import InputError
from tide.topology import Topology

#: Modules that ``fully_shard`` would take in one call, with their names.
_Call = tuple[tuple[str, Any], ...]


def read_module(
    model: Any,
    *,
    topology: Topology | None,
    mesh: Mesh | None = None,
    wrap: Any = None,
    policy: Any = None,
    shard_dim: ShardDim | None = None,
    ignored_params: Collection[Any] = (),
    reshard_after_forward: bool = True,
) -> ModelSpec:
    """Model as FSDP2 would shard it, without a process group and without touching it.

    Units, their order and the order of their parameters are those of ``fully_shard`` applied to the
    wrapped modules and then to the model; the root unit, named ``""``, has what no wrapped module has.

    Parameters
    ----------
    model : torch.nn.Module
        Any module; parameters on the meta device do.
    topology : Topology
        The ranks; all of them are one shard group unless ``mesh`` says otherwise.
    mesh : Mesh, optional
        Shard groups, e.g. one a replica for HSDP.
    wrap : None, collection of types, callable or iterable of names
        None: each block of each outermost ``ModuleList`` (or ``ModuleDict`` with numbers for keys)
        that has parameters. Types: each module that is an instance of one. A callable
        ``(name, module) -> bool``: each module that it answers True for. Names: each module named; a
        tuple of names is one unit, as in ``fully_shard([a, b])``.
    policy : Policy or MixedPrecisionPolicy, optional
        Mixed precision; without one nothing is cast, as with ``fully_shard``.
    shard_dim : callable, optional
        ``(name, shape) -> dim``; dim 0 by default. None as the answer means 0, too.
    ignored_params : collection of parameters or names
        Left out of the plan.
    reshard_after_forward : bool
        As for ``fully_shard``; the root stays whole anyway.

    Raises
    ------
    InputError
        For what FSDP2 refuses: parameters that are scalar, not contiguous, uninitialised, or tied
        across units; and for a wrapping rule that names or matches nothing.
    """
    source = type(model).__name__
    _check_wrapper(model)
    groups = shard_mesh(topology, mesh, source)
    rules = Policy.of(policy)
    aliases = _aliases(model)
    ignored = _ignored(model, ignored_params, aliases)
    calls = [call for call in _calls(model, wrap) if _has_parameters(call)]
    wrapped = {id(module) for call in calls for _, module in call}
    first_name = {id(module): name for name, module in model.named_modules()}
    owners: dict[int, tuple[str, str]] = {}
    units: list[Unit] = []
    homes: dict[int, tuple[str, ...]] = {}
    indices: set[int] = set()
    for number, call in enumerate([(("", model),), *calls]):
        unit_name = ", ".join(name for name, _ in call)
        parameters = []
        for module in _managed(call, wrapped):
            prefix = first_name[id(module)]
            for attribute, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{attribute}" if prefix else attribute
                if id(parameter) in ignored:
                    continue
                if id(parameter) in owners:
                    _check_tie(name, unit_name, *owners[id(parameter)])
                    continue
                owners[id(parameter)] = name, unit_name
                parameters.append(_parameter(aliases[id(parameter)], parameter, rules, shard_dim, mesh))
        if parameters:
            whole = not call[0][0] or not reshard_after_forward
            homes[number] = tuple(name for name, _ in call)
            if takes_indices([module for _, module in call]):
                indices.add(number)
            units.append(Unit(unit_name, tuple(parameters), groups, stays_whole=whole, lives_with=number))
    skipped = tuple((aliases[key][0], "in ignored_params") for key in ignored)
    order = {name: index for index, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return ModelSpec(nest(units, homes, order, indices), source=source, skipped=skipped)


def _calls(model: Any, wrap: Any) -> list[_Call]:
    """The ``fully_shard`` calls that ``wrap`` stands for, less the root's, as ``named_modules`` orders them."""
    if wrap is None:
        blocks: dict[int, _Call] = {}
        for name, module in _blocks(model, ""):
            blocks.setdefault(id(module), ((name, module),))  # standing in two lists, it is still one unit
        return list(blocks.values())
    if isinstance(wrap, str | bytes) or not (callable(wrap) or isinstance(wrap, Iterable)):
        raise InputError(
            f"wrap: expected None, a set of module classes, a callable (name, module) -> bool, "
            f"or a list of module names, got {wrap!r}"
        )
    named = dict(model.named_modules())
    if isinstance(wrap, type):
        wrap = {wrap}
    if callable(wrap):
        chosen: list[_Call] = [((name, module),) for name, module in named.items() if name and wrap(name, module)]
        meant = getattr(wrap, "__name__", repr(wrap))
    else:
        rules = list(wrap)
        if rules and all(isinstance(rule, type) for rule in rules):
            chosen = [((n, m),) for n, m in named.items() if n and isinstance(m, tuple(rules))]
            meant = ", ".join(sorted(rule.__name__ for rule in rules))
        else:
            return _named_calls(named, rules)
    if not chosen:
        raise InputError(
            f"wrap: {meant} matches no module inside of {type(model).__name__}; "
            "leave wrap out for each block of each ModuleList, or name the modules to wrap"
        )
    for call in chosen:
        _check_forward(*call[0])
    return chosen


def _check_wrapper(model: Any) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise InputError(
                f"{name or type(model).__name__}: is sharded by FSDP1, whose flat parameters have no layout of "
                "their own; shard the model with fully_shard (FSDP2)"
            )


def _named_calls(named: dict[str, Any], rules: list[Any]) -> list[_Call]:
    position = {name: index for index, name in enumerate(named)}
    taken: set[str] = set()
    calls = []
    for rule in rules:
        names = tuple(rule) if isinstance(rule, tuple | list) else (rule,)
        for name in names:
            if name not in position:
                close = difflib.get_close_matches(str(name), list(position), 3)
                hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; see model.named_modules()"
                raise InputError(f"wrap: the model has no module named {name!r}{hint}")
            if name in taken:
                raise InputError(f"wrap: {name!r} is named twice; a module belongs to one unit")
            taken.add(name)
            _check_forward(name, named[name])
        if names != ("",):  # the root is always wrapped
            calls.append(tuple((name, named[name]) for name in sorted(names, key=position.__getitem__)))
    return sorted(calls, key=lambda call: position[call[0][0]])


def _blocks(module: Any, prefix: str, *, in_list: bool = False) -> Iterator[tuple[str, Any]]:
    """Blocks of the outermost lists; a list within a list has no forward, so its own elements are blocks."""
    is_list = _is_block_list(module)
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if _is_container(child):
            yield from _blocks(child, f"{name}.", in_list=in_list or is_list)
        elif is_list or in_list:
            yield name, child
        else:
            yield from _blocks(child, f"{name}.")


def _is_block_list(module: Any) -> bool:
    from torch import nn

    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList)


def _is_container(module: Any) -> bool:
    """Whether a module is a list or dictionary that is never run itself, so that FSDP2 cannot hook it."""
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _check_forward(name: str, module: Any) -> None:
    if _is_container(module):
        raise InputError(
            f"wrap: {name!r} is a {type(module).__name__} without a forward, which fully_shard refuses; "
            f"wrap its elements ({name}.0, …)"
        )


def _has_parameters(call: _Call) -> bool:
    return any(next(module.parameters(), None) is not None for _, module in call)


def _managed(call: _Call, wrapped: set[int]) -> list[Any]:
    """Modules whose own parameters are the call's, in the order of FSDP2: children before parents."""
    roots = {id(module) for _, module in call}
    visited: set[int] = set()
    found: list[Any] = []

    def visit(module: Any) -> None:
        visited.add(id(module))
        for child in module.children():
            if id(child) not in visited and (id(child) not in wrapped or id(child) in roots):
                visit(child)
        found.append(module)

    for _, module in call:
        if id(module) not in visited:
            visit(module)
    return found


def _aliases(model: Any) -> dict[int, list[str]]:
    """All names of each parameter by its identity, the one that ``named_parameters`` reports first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _ignored(model: Any, ignored: Collection[Any], aliases: dict[int, list[str]]) -> dict[int, None]:
    by_name = {name: key for key, names in aliases.items() for name in names}
    found: dict[int, None] = {}
    for item in ignored:
        key = by_name.get(item) if isinstance(item, str) else id(item)
        if key not in aliases or key is None:
            what = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise InputError(
                f"ignored_params: {what} is no parameter of {type(model).__name__}; see model.named_parameters()"
            )
        found[key] = None
    return found


def _check_tie(name: str, unit: str, first: str, first_unit: str) -> None:
    if unit != first_unit:
        raise InputError(
            f"{name} in {label(unit)} is tied to {first} in {label(first_unit)}; FSDP2 refuses ties across units: "
            "put both modules into one unit, by their names: wrap=[…, (module_a, module_b)]"
        )


def _parameter(
    names: list[str], parameter: Any, rules: Policy, choose: ShardDim | None, mesh: Mesh | None
) -> Parameter:
    from torch.nn.parameter import is_lazy

    name = names[0]
    if is_lazy(parameter):
        raise InputError(f"{name}: has no shape yet (lazy module); run one forward on example input first")
    local = parameter
    distributed = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if distributed is not None and isinstance(parameter, distributed.DTensor):
        if mesh is None:
            raise InputError(
                f"{name}: is a DTensor on {parameter.device_mesh}, whose ranks do not shard it among each "
                "other; pass mesh=Mesh(groups) with one group of ranks for each tensor-parallel rank"
            )
        local = parameter.to_local()
    if not local.is_contiguous():
        raise InputError(
            f"{name}: shape {tuple(local.shape)} with strides {local.stride()} is not contiguous, and FSDP2 "
            "refuses it too; replace it by nn.Parameter(parameter.contiguous())"
        )
    shape = tuple(local.shape)
    return rules.parameter(
        name,
        shape,
        local.dtype,
        dim=shard_dim_of(choose, name, shape),
        trainable=parameter.requires_grad,
        aliases=names[1:],
    )
