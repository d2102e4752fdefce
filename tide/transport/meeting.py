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
    from collections.abc import Sequence

#: Seconds between two looks at the store: at first, and at most.
PAUSES = 2e-4, 0.05

_ALL, _LATE = b"all", b"late"


def meet(ranks: Sequence[int], timeout: float, what: str) -> list[int]:
    """Waits until all of the ranks have come here, or the deadline of one of them has passed.

    Parameters
    ----------
    ranks : sequence of int
        World ranks, this one among them, in the same order on each. There need not be a process group of them.
    timeout : float
        Seconds to wait.
    what : str
        What it is about: only who comes for the same is counted.

    Returns
    -------
    list of int
        World ranks that did not come: empty when all are here.

    Raises
    ------
    RuntimeError
        If the store cannot be reached any more, as its process has ended.
    """
    store, ranks = _get_default_store(), tuple(ranks)
    own = ranks.index(dist.get_rank())
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
        late = [rank for place, rank in enumerate(ranks) if not store.check([f"{meeting}/{place}"])]
        return late or [ranks[own]]
    if number:  # nobody looks at the last one any more, as all have come to this
        names = [str(own)] + (["count", "verdict"] if own == 0 else [])
        for name in names:
            store.delete_key(f"{topic}/{number - 1}/{name}")
    return []


def _verdict(store: dist.Store, meeting: str) -> bytes | None:
    """What has been said of a meeting; None while nothing has."""
    name = f"{meeting}/verdict"
    return bytes(store.get(name)) if store.check([name]) else None
