"""Ranks come together before they talk, with a deadline on each of them.

Through the store that they were started with, not through their process group: in ``monitored_barrier`` all ranks but
the first wait as long as the group allows, half an hour by default, and a barrier that is given up leaves messages
behind, which the group's next collective takes for its own. Nobody touches the group here before all have come, so
that it is as good as before when they have not.

A meeting has one verdict, whoever is first: the last rank to come says that all are there, a rank whose deadline
passes that they are not. Who comes after that belongs to a later meeting.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds between two looks at the store: at first, and at most.
PAUSES = 2e-4, 0.05

_ALL, _LATE = b"all", b"late"


def meet(group: ProcessGroup | None, timeout: float, what: str) -> list[int]:
    """Waits until all ranks of the group have come here, or the deadline of one of them has passed.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks; the default group if None.
    timeout : float
        Seconds to wait.
    what : str
        What it is about: only who comes for the same is counted.

    Returns
    -------
    list of int
        Places in the group of the ranks that did not come: empty when all are here.

    Raises
    ------
    RuntimeError
        If the store cannot be reached any more, as its process has ended.
    """
    store, own = _get_default_store(), dist.get_rank(group)
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    topic = f"tide/{hashlib.sha256(repr((what, ranks)).encode()).hexdigest()[:16]}"
    # Kept in the store too: a process that takes the place of another goes on where that one was.
    own_next = f"{topic}/next/{own}"
    number = int(store.get(own_next)) if store.check([own_next]) else 0
    while _verdict(store, f"{topic}/{number}") == _LATE:  # the others had given up before this rank came
        number += 1
    meeting = f"{topic}/{number}"
    store.set(f"{meeting}/{own}", "")
    if store.add(f"{meeting}/count", 1) == len(ranks):
        store.compare_set(f"{meeting}/verdict", "", _ALL.decode())
    end, (pause, longest) = time.monotonic() + timeout, PAUSES
    while (verdict := _verdict(store, meeting)) is None:
        if time.monotonic() >= end:
            verdict = store.compare_set(f"{meeting}/verdict", "", _LATE.decode())
            break
        time.sleep(pause)
        pause = min(2 * pause, longest)
    store.set(own_next, str(number + 1))
    if verdict == _LATE:
        return [place for place in range(len(ranks)) if not store.check([f"{meeting}/{place}"])] or [own]
    if number:  # nobody looks at the last one any more, as all have come to this
        names = [str(own)] + (["count", "verdict"] if own == 0 else [])
        for name in names:
            store.delete_key(f"{topic}/{number - 1}/{name}")
    return []


def _verdict(store: dist.Store, meeting: str) -> bytes | None:
    """What has been said of a meeting; None while nothing has."""
    name = f"{meeting}/verdict"
    return bytes(store.get(name)) if store.check([name]) else None
