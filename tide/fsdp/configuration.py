"""What of a sharded model concerns attaching only: reasons against it, prefetching, and changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tide.compiler.read.fsdp import Reading
from tide.fsdp import introspect, versions
from tide.scope import Scope
from tide.transport.agreement import agree, control_group, resolve_timeout

#: Slots at least: one unit is computed with while the next is gathered.
FEWEST_SLOTS = 2


def why_not(group: Any) -> str | None:
    """Reasons that concern attaching only, not planning."""
    if group.mesh_info.shard_mesh_size == 1:
        return "sharded over one rank only; nothing is sent"
    if not introspect.mesh_key(group)[2]:
        return "tensor parallelism cut a parameter unevenly, so that the ranks' plans would differ"
    if not versions.own_comm(group._all_gather_comm):
        return f"has an all-gather of its own ({type(group._all_gather_comm).__name__})"
    if introspect.reshards_smaller(group) and any(introspect.shard_dim(param) for param in group.fsdp_params):
        return "reshard_after_forward is a number of ranks and a parameter is not sharded on dim 0"
    return None


def slots_for(readings: Iterable[Reading]) -> int:
    """Slots that the model's prefetching fills: the unit in use and those gathered ahead."""
    depths = [introspect.prefetches(reading.wrapped.state) for reading in readings]
    return max(FEWEST_SLOTS, 1 + max(depths, default=0))


def fingerprint(readings: Sequence[Reading]) -> tuple[object, ...]:
    """Cheap to compare, and different whenever reading again may give another plan."""
    rows: list[object] = []
    for reading in readings:
        group, state = reading.group, reading.wrapped.state
        rows.append(
            (
                introspect.prefetches(state),
                state._is_root,
                state._auto_reshard_after_forward,
                group.post_forward_mesh_info is None,
                introspect.reshards_smaller(group),
                group.reshard_after_backward,
                type(group._all_gather_comm),
                [(p.sharded_param.requires_grad, p._sharded_param_data.dtype) for p in group.fsdp_params],
            )
        )
    return tuple(rows)


def agree_on(readings: Sequence[Reading], scope: Scope) -> None:
    """Has all ranks come here where the model has changed and its plan has not: opening one would compare them.

    A rank that is alone with a change, such as a frozen unit, would reduce other units than its peers from then on.
    """
    rows = zip(readings, fingerprint(readings), strict=True)
    same = {f"configuration of {reading.name or 'root'!r}": str(row) for reading, row in rows}
    agree_within(scope, same, "configurations of the model")


def agree_within(scope: Scope, same: Mapping[str, object], what: str) -> None:
    """Compares what must be equal on all ranks that hold the model.

    Raises
    ------
    PeerError
        If it is not.
    """
    timeout = resolve_timeout()
    with control_group(scope.group(timeout), timeout) as control:
        agree(same, None, control, timeout, what)
