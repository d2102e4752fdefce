"""Why the plan of a unit is what it is: counts, route, bundle and slot, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tide.compiler.compile import Compiled
from tide.compiler.dtypes import itemsize
from tide.compiler.model import Unit
from tide.compiler.place import least_run
from tide.compiler.scatter import descriptor_count
from tide.compiler.schedule.routes import why_no_multicast, why_no_switch
from tide.compiler.schedule.switch import group_sizes
from tide.compiler.shard import shard
from tide.compiler.steps import Multicast, Place, Program, SwitchReduce
from tide.topology import Team, team_of


def show_name(unit: str) -> str:
    """A unit's name for people: the root's is empty in FSDP2."""
    return unit or "root"


def show_bytes(nbytes: float) -> str:
    """Bytes with a binary unit and three digits or so, such as ``1.59 GiB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1023.5 or unit == "PiB":
            break
        value /= 1024
    if unit == "B":
        return f"{int(nbytes)} B"
    return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.{1 if abs(value) >= 9.995 else 2}f} {unit}"


def show_time(seconds: float) -> str:
    """Seconds as µs, ms or s."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        value = seconds * scale
        if value >= 0.9995 or unit == "µs":
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.{1 if value >= 9.995 else 2}f} {unit}"
    return "0 s"


def label(names: Sequence[str]) -> str:
    """Name of a row: one unit's, or those of the first and the last of many alike, with their number."""
    if len(names) == 1:
        return show_name(names[0])
    parts = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    found = [part for part in parts if part is not None]
    if len(found) == len(names) and len({part[1] for part in found}) == 1:
        numbers = [int(part[2]) for part in found]
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{names[0]} … {numbers[-1]} ×{len(names)}"
        return f"{names[0]}, {numbers[1]} … {numbers[-1]} ×{len(names)}"
    return f"{show_name(names[0])} … {show_name(names[-1])} ×{len(names)}"


def kinds(compiled: Compiled, rank: int) -> list[tuple[Unit, ...]]:
    """Units of ``rank`` in groups of those that have layout, ranks and programs in common."""
    found: dict[object, list[Unit]] = {}
    for unit in compiled.spec.units:
        if unit.mesh.locate(rank) is None:
            continue
        parameters = tuple((p.shape, p.dim, p.dtype, p.shard_dtype, p.grad_dtype, p.out_dtype) for p in unit.parameters)
        found.setdefault((parameters, unit.mesh, unit.stays_whole, unit.depth), []).append(unit)
    return [tuple(units) for units in found.values()]


def descriptors(compiled: Compiled, unit: Unit, rank: int) -> int:
    """Descriptors into the storage of one rank."""
    return descriptor_count(compiled, unit.name, rank=rank)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _spread(compiled: Compiled, unit: Unit, rank: int, team: Team) -> str:
    """How the shard group sits on nodes; empty where it does so evenly."""
    group, _ = compiled.group(unit.name, rank)
    real = len({compiled.topology.node_of(member) for member in group})
    if real != team.nodes:
        return f"the group of {len(group)} ranks does not sit evenly on its {real} nodes: every rank its own node"
    return ""


def all_gather_route(compiled: Compiled, unit: Unit, rank: int) -> tuple[str, str]:
    """Route and engine of the all-gather in a word, and in a sentence with the reason."""
    team = compiled.context(unit.name, rank).team
    program = compiled.program(unit.name, "all_gather", rank)
    place = "local shards placed by a kernel"
    if team.size == 1:
        return "place", f"{place}; nothing to gather: one rank holds the unit"
    inside, engine = compiled.options.route, "copy engine"
    verb = "pushed to" if inside == "push" else "pulled by"
    reason = f"{verb} the peers by copy engine: {team.per_node} ranks on one node"
    if any(isinstance(step, Multicast) for _, _, step in program.steps()):
        inside, engine = "multicast", "multicast"
        reason = f"written once to the switch, for {team.per_node} ranks of one node"
    why = why_no_multicast(compiled.context(unit.name, rank)) if compiled.options.multicast != "off" else None
    if why is not None:
        reason, engine = f"{reason}; {why}", f"{engine} ({why})"
    if team.nodes == 1:
        return f"{inside}, {'multicast' if inside == 'multicast' else 'copy engine'}", f"{reason}; {place}"
    steps = (team.nodes - 1).bit_length()
    if team.nodes & (team.nodes - 1) == 0:
        name, rail = "doubling", f"put on rails by recursive doubling, {_plural(steps, 'step')}: {team.nodes} nodes"
    else:
        name = "dissemination"
        rail = f"put on rails by dissemination, {_plural(steps, 'step')}: {team.nodes} nodes is no power of two"
    uneven = _spread(compiled, unit, rank, team)
    if uneven:
        return f"{name}, puts", f"{rail.replace('on rails ', '').replace('nodes', 'ranks')}; {uneven}"
    virtual = " (virtual nodes)" if compiled.topology.virtual else ""
    if team.per_node == 1:
        return f"{name}, puts", f"{rail}{virtual}; one rank a node, nothing to spread"
    return (
        f"{name} + {inside}",
        f"{rail}{virtual}; each step's arrivals spread in the node by {engine}, {team.per_node} ranks",
    )


def reduce_scatter_route(compiled: Compiled, unit: Unit, rank: int) -> tuple[str, str]:
    """Route and engine of the reduce-scatter in a word, and in a sentence with the reason."""
    trainable = [p for p in unit.parameters if p.trainable]
    if not trainable:
        return "none", "no reduce-scatter: every parameter of the unit is frozen"
    team = compiled.context(unit.name, rank).team
    wire = "/".join(sorted({str(p.grad_dtype) for p in trainable}))
    if team.size == 1:
        return "sum", f"one kernel scales the {wire} gradient into place: one rank holds the unit"
    program = compiled.program(unit.name, "reduce_scatter", rank)
    packed = sum(len({c.src.index for c in s.casts}) for _, _, s in program.steps() if isinstance(s, Place))
    push = f"{wire} pushed by copy engine{_where(compiled, unit, program)}, summed in rank order in float32"
    if packed:
        push = f"{_plural(packed, 'small gradient')} packed by a kernel, {push}"
    if team.nodes == 1:
        return "push, copy engine", f"{push} by the owner: {team.per_node} ranks on one node"
    switch = any(isinstance(step, SwitchReduce) for _, _, step in program.steps())
    fold = "summed node by node by the owner"
    if switch:
        sizes = group_sizes(team.nodes, team.per_node)
        fold = f"spread over the ranks of the owner's node and summed in the switch, up to {sizes[0]} at a time"
    elif compiled.options.switch_reduce != "off":
        fold += f" ({why_no_switch(unit, compiled.topology, compiled.options)})"
    far = f"{compiled.options.wire_dtype} partial sums put to their owners, {fold}: {team.nodes} nodes"
    uneven = _spread(compiled, unit, rank, team)
    if uneven:
        return "puts", f"{far.replace('nodes', 'ranks').replace('node by node', 'rank by rank')}; {uneven}"
    if team.per_node == 1:
        return "puts", f"{far}, one rank each"
    rail = "on the rail that it leaves by" if switch else "on the owner's rail"
    return f"push + put{' + switch' * switch}", f"{push} {rail} ({team.per_node} ranks a node); {far}"


def _where(compiled: Compiled, unit: Unit, program: Program) -> str:
    """Where a reduce-scatter receives, if the plan reuses slots."""
    if program.in_slot:
        return " into vacated slots"
    return " beside the slot, which is too small for the gradients" if unit.name in compiled.beside else ""


def bundle_reason(compiled: Compiled, unit: Unit) -> str:
    """Why some parameters travel together, or none."""
    options, bundle = compiled.options, compiled.layouts[unit.name].bundle
    if bundle is None:
        return ""
    short = sum(1 for index in bundle.members if not _small(compiled, unit, index))
    small, why = len(bundle.members) - short, []
    if small:
        why.append(f"{_plural(small, 'parameter')} with shards of at most {show_bytes(options.bundle_bytes)}")
    if short:
        least = least_run(options, any(team_of(g, compiled.topology).nodes > 1 for g in unit.mesh.groups))
        why.append(f"{_plural(short, 'parameter')} with runs shorter than {show_bytes(least)}")
    return f"one bundle: {' and '.join(why)}, scattered by a kernel on arrival"


def _small(compiled: Compiled, unit: Unit, index: int) -> bool:
    parameter = unit.parameters[index]
    largest = int(shard(parameter, unit.mesh.size).numel.max()) * itemsize(parameter.dtype)
    return largest <= compiled.options.bundle_bytes


def slot_reason(compiled: Compiled, alike: Sequence[Unit]) -> str:
    """Why the storage of units that are alike is where it is."""
    if alike[0].stays_whole:
        return "own slot: stays whole between forward and backward"
    count = compiled.options.slots
    if count is None:
        return "own slot: the option slots is None, which gives every unit one"
    slots = {compiled.arena.slots[compiled.arena.slot_of[unit.name]] for unit in alike}
    if all(len(slot.units) == 1 for slot in slots):
        return "own slot: no other unit of its mesh could take turns with it in less room"
    mine = {unit.name for unit in alike}
    others = [unit.name for unit in compiled.spec.units if any(unit.name in slot.units for slot in slots)]
    guests = [name for name in others if name not in mine]
    shared = f", in which {label(guests)} take turns too" if guests else ""
    if len(slots) == 1:
        when = "never whole at the same time" if count > 1 else "the next is gathered when the last has been released"
        return f"one slot for units of this kind{shared}: {when}"
    ahead = "the next is" if count == 2 else f"the next {count - 1} are"
    return f"{len(slots)} slots in turn for units of this kind{shared}: one computes while {ahead} gathered"


def refused_by_stock(unit: Unit) -> list[str]:
    """Parameters that FSDP2 cannot shard: a dim other than 0 that does not divide evenly."""
    return [p.name for p in unit.parameters if p.dim and p.shape[p.dim] % unit.mesh.size]
