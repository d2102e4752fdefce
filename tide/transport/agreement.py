"""Before the first collective: all ranks compare their plans and abilities, and tell each other what they export.

Works on any ``torch.distributed`` process group, over gloo, and exchanges objects only. Every rank sees
the same answers, so a difference is the same error on every rank.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tide.compiler.compile import FORMAT, Compiled
from tide.errors import InputError, PeerError
from tide.transport.meeting import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that a rank waits for its peers where nobody says otherwise.
DEFAULT_TIMEOUT = 60.0
#: Most seconds that it may wait: a year. The process group's own deadlines overflow not far beyond.
MOST_SECONDS = 366 * 86400.0
#: Environment variable that says otherwise.
TIMEOUT_VARIABLE = "TIDE_TIMEOUT"
#: Differences told in one message; a model that differs altogether would name every unit.
MOST_DIFFERENCES = 6

_T = TypeVar("_T")


def resolve_timeout(timeout: float | None = None) -> float:
    """Seconds that waits may take: the argument, else ``TIDE_TIMEOUT``, else 60.

    Raises
    ------
    InputError
        If it is not a positive number, of a year at most.
    """
    given: float | str = os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT) if timeout is None else timeout
    origin = TIMEOUT_VARIABLE if timeout is None else "timeout"
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (0 < seconds <= MOST_SECONDS):
        raise InputError(
            f"{origin} must be a positive number of seconds, of a year ({MOST_SECONDS:.0f}) at most, got {given!r}"
        )
    return seconds


def resolve_group(world_size: int, rank: int | None, group: ProcessGroup | None) -> tuple[ProcessGroup | None, int]:
    """The process group of a plan's ranks and this rank in it; no group for a single rank without one.

    Parameters
    ----------
    world_size : int
        Ranks of the plan's topology.
    rank : int or None
        What the caller takes this rank to be.
    group : ProcessGroup or None
        The caller's group; the default group if None.

    Raises
    ------
    InputError
        If there is no process group, or it does not have the plan's ranks.
    """
    if group is None and not dist.is_initialized():
        if world_size > 1:
            raise InputError(
                f"the plan has {world_size} ranks, but there is no process group; start the ranks with torchrun "
                "and call torch.distributed.init_process_group('gloo') before"
            )
        if rank not in (None, 0):
            raise InputError(f"rank {rank} is outside a plan of 1 rank")
        return None, 0
    size, own = dist.get_world_size(group), dist.get_rank(group)
    if size != world_size:
        raise InputError(
            f"the plan was compiled for {world_size} ranks, but the process group has {size}; "
            "compile it with the topology of the job, or pass the group it is meant for"
        )
    if rank is not None and rank != own:
        raise InputError(f"rank {rank} was asked for, but this process is rank {own} of its process group")
    return group, own


#: Control groups that were made, with the default group of their time, by ranks. They live as long as that: the
#: name of a group made again would lead to the old one's addresses in the store.
_made: dict[tuple[int, ...], tuple[object, ProcessGroup]] = {}


@contextmanager
def control_group(group: ProcessGroup | None, timeout: float) -> Iterator[ProcessGroup | None]:
    """A gloo group with the ranks of ``group``: itself if it is gloo, otherwise one made at the first need."""
    yield group if dist.get_backend(group) == "gloo" else gloo_group(world_ranks(group), timeout)


def world_ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    """World rank of each place in a group; of the default group if None."""
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def gloo_group(ranks: tuple[int, ...], timeout: float) -> ProcessGroup:
    """The gloo group of these ranks, made at the first need: only they call this.

    Parameters
    ----------
    ranks : tuple of int
        World ranks, this one among them, in the same order on each.
    timeout : float
        Seconds to wait for the others.

    Raises
    ------
    PeerError
        If one of them does not come within the deadline.
    """
    default = dist.group.WORLD
    known = _made.get(ranks)
    if known is None or known[0] is not default:
        known = _made[ranks] = default, _new_group(ranks, timeout)
    return known[1]


def _new_group(ranks: tuple[int, ...], timeout: float) -> ProcessGroup:
    deadline = timedelta(seconds=timeout)
    if len(ranks) == dist.get_world_size():
        return dist.new_group(list(ranks), timeout=deadline, backend="gloo")
    store = c10d._get_default_store()
    store.set(f"tide/with/{dist.get_rank()}", ranks_text(ranks))
    # A group that a rank has waited for in vain leaves its address in the store, and cannot be made again.
    if missing := meet(ranks, timeout, "process group"):
        raise PeerError(
            f"{ranks_text(ranks)} could not make a process group within {timeout:g} s: {ranks_text(missing)} did not "
            f"come{_elsewhere(store, ranks, missing)} (all of them must do the same, and no other ranks; a slow one "
            f"may need a larger {TIMEOUT_VARIABLE})"
        )
    # Not `new_group(use_local_synchronization=True)`: it names the group by how many groups the process has, which
    # need not be the same for ranks that are in different models too.
    name: Any = f"tide/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    place, backend = ranks.index(dist.get_rank()), c10d.Backend("gloo")
    made, _ = c10d._new_process_group_helper(
        len(ranks), place, list(ranks), backend, store, name, timeout=deadline, group_desc="tide"
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
    return made


def _elsewhere(store: dist.Store, ranks: Sequence[int], missing: Sequence[int]) -> str:
    """With which ranks those that did not come have wanted a group last, if it is known and with others."""
    keys = {rank: f"tide/with/{rank}" for rank in missing}
    told = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    others = {rank: text for rank, text in told.items() if text != ranks_text(ranks)}
    apart = [f"rank {rank} has last wanted one of {text}" for rank, text in others.items()]
    return f"; {', '.join(apart[:2])}" if apart else ""


def exchange(value: _T, group: ProcessGroup | None, timeout: float, what: str) -> list[_T]:
    """Every rank's value, in order of rank.

    Parameters
    ----------
    value : object
        Picklable.
    group : ProcessGroup or None
        A gloo group.
    timeout : float
        Seconds to wait for all ranks to come here.
    what : str
        What is exchanged, for the message.

    Raises
    ------
    PeerError
        If a rank does not come within the deadline, or dies on the way.
    """
    out: list[_T] = [value] * dist.get_world_size(group)
    cause: RuntimeError | None = None
    try:
        # all_gather_object knows no deadline but the group's, which is half an hour by default.
        if missing := meet(world_ranks(group), timeout, what):
            told = f"{ranks_text(missing)} did not come"
        else:
            dist.all_gather_object(out, value, group=group)
            return out
    except RuntimeError as error:
        cause, told = error, str(error).strip()
    raise PeerError(
        f"the ranks could not exchange their {what} within {timeout:g} s: {told} "
        f"(every rank must do the same; a slow one may need a larger {TIMEOUT_VARIABLE})"
    ) from cause


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2–5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def differences(facts: Sequence[Mapping[str, object]], ranks: Sequence[int] | None = None) -> list[str]:
    """One line for each name whose value is not the same on all ranks; they are called by ``ranks`` if given."""
    ranks = range(len(facts)) if ranks is None else ranks
    lines = []
    names = {name: None for mapping in facts for name in mapping}  # a set that keeps the order
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, mapping in zip(ranks, facts, strict=True):
            holders.setdefault(str(mapping[name]) if name in mapping else "absent", []).append(rank)
        if len(holders) > 1:
            told = "; ".join(f"{value} on {ranks_text(those)}" for value, those in holders.items())
            lines.append(f"{name}: {told}")
    return lines


def plan_facts(compiled: Compiled) -> dict[str, object]:
    """What must be equal for two ranks to hold the same plan, fine enough to say where they part."""
    facts: dict[str, object] = {"torch version": torch.__version__, "plan format": FORMAT}
    facts["topology"] = f"{compiled.topology.nodes} × {compiled.topology.gpus_per_node}"
    facts.update((f"option {name}", value) for name, value in compiled.options.to_dict().items())
    facts["units"] = len(compiled.spec.units)
    for unit in compiled.spec.units:
        facts[f"unit {unit.name!r} (parameters, dtypes, mesh)"] = hashlib.sha256(repr(unit).encode()).hexdigest()[:12]
    facts["plan digest"] = compiled.digest[:16]
    return facts


def agree(
    same: Mapping[str, object],
    own: _T,
    group: ProcessGroup | None,
    timeout: float,
    what: str = "plans",
) -> list[_T]:
    """Compares what must be equal and tells what each rank has of its own.

    Parameters
    ----------
    same : mapping of str to object
        Must be equal on all ranks, as text: :func:`plan_facts`, capabilities, sizes.
    own : object
        What this rank exports: names, handles, addresses.
    group : ProcessGroup or None
        A gloo group of all ranks of the plan; see :func:`control_group`.
    timeout : float
        Seconds to wait for all ranks.
    what : str
        What is compared, for the message.

    Returns
    -------
    list
        ``own`` of every rank, in order of rank.

    Raises
    ------
    PeerError
        On every rank, if anything differs; the message says what, and on which ranks.
    """
    answers = exchange((dict(same), own), group, timeout, what)
    if lines := differences([facts for facts, _ in answers], world_ranks(group)):
        more = len(lines) - MOST_DIFFERENCES
        shown = lines[:MOST_DIFFERENCES] + ([f"… and {more} more"] if more > 0 else [])
        raise PeerError(
            f"the ranks hold different {what}:\n  "
            + "\n  ".join(shown)
            + "\nEvery rank must compile the same model with the same options and the same versions."
        )
    return [value for _, value in answers]


def settle(failure: str | None, group: ProcessGroup | None, timeout: float, kind: type[Exception]) -> None:
    """Makes one rank's failure every rank's error, so that nobody goes on alone.

    Parameters
    ----------
    failure : str or None
        What went wrong on this rank.
    group, timeout
        As for :func:`exchange`.
    kind : type
        Error to raise.
    """
    answers = exchange(failure, group, timeout, "state after set-up")
    raise_failures(answers, world_ranks(group), kind)


def raise_failures(answers: Sequence[str | None], ranks: Sequence[int], kind: type[Exception]) -> None:
    """Raises ``kind`` if any of the ranks told of a failure; the message has each with its ranks."""
    holders: dict[str, list[int]] = {}
    for rank, failure in zip(ranks, answers, strict=True):
        if failure is not None:
            holders.setdefault(failure, []).append(rank)
    if holders:
        raise kind("; ".join(f"{ranks_text(those)}: {failure}" for failure, those in holders.items()))
