"""The ranks that hold one model: all of the world, or a part of it, as under pipeline parallelism.

A plan speaks of ranks 0 to n-1. Where a model is on a part of the world, these are the places of its ranks in
ascending order, and whatever is collective is so over them alone: nobody else has to call anything.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tide.errors import InputError
from tide.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("tide")


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks of the world that hold a model, seen from one of them.

    Parameters
    ----------
    ranks : tuple of int
        World ranks, ascending. A rank's place among them is its rank in the plan.
    world : int
        Ranks of the world.
    rank : int
        Place of this process.
    """

    ranks: tuple[int, ...]
    world: int
    rank: int

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Scope:
        """The scope of these world ranks in the running job, this one among them.

        Raises
        ------
        InputError
            If they are no ranks of the job, or this one is not among them.
        """
        import torch.distributed as dist

        world, own = dist.get_world_size(), dist.get_rank()
        ranks = list(ranks)
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
                raise InputError(f"ranks: {rank!r} is no rank of this job, which has {world}")
        found = tuple(sorted(ranks))
        if len(set(found)) != len(found):
            raise InputError(f"ranks: a rank stands there twice: {found}")
        if own not in found:
            raise InputError(f"ranks: this is rank {own}, which is not among {found}; only those hold the model")
        return cls(found, world, found.index(own))

    @property
    def everywhere(self) -> bool:
        """Whether it is the whole world."""
        return len(self.ranks) == self.world

    def __str__(self) -> str:
        from tide.transport.agreement import ranks_text

        return f"{ranks_text(self.ranks)} of {self.world}"

    def places(self, rows: Iterable[tuple[int, ...]], what: str) -> tuple[tuple[int, ...], ...]:
        """Places of the rows of world ranks that lie in the scope; the others are left out.

        Raises
        ------
        InputError
            If a row lies in it in part.
        """
        rows = tuple(rows)
        if self.everywhere:
            return rows
        place = {rank: index for index, rank in enumerate(self.ranks)}
        inside = [row for row in rows if any(rank in place for rank in row)]
        for row in inside:
            if missing := [rank for rank in row if rank not in place]:
                raise InputError(
                    f"{what} is sharded over ranks {row}, but rank {missing[0]} is not among the ranks that hold the "
                    f"model ({self}); pass ranks= with all of them, or leave it out"
                )
        return tuple(tuple(place[rank] for rank in row) for row in inside)

    def topology(self, given: Topology | None = None, env: Mapping[str, str] | None = None) -> Topology:
        """Where the ranks are: as given, or by the launcher's ``LOCAL_WORLD_SIZE``, on nodes of equally many of them.

        Where real nodes hold different numbers, they are cut into parts of the largest size that divides all of
        them, which the plan takes for nodes: what crosses between parts goes over the network. A warning says so.
        """
        self.check(given)
        if given is not None or self.everywhere:
            return given or Topology.discover(self.world, env)
        local = Topology.discover(self.world, env).gpus_per_node
        counts = Counter(rank // local for rank in self.ranks)
        each = math.gcd(*counts.values())
        found = Topology(len(self.ranks) // each, each)
        if found.nodes > len(counts) and self.rank == 0:
            logger.warning(
                "%s are on %d nodes that hold %s of them: the plan takes them for %s, and what goes between those goes "
                "over the network, also within a node. Equal numbers on each node avoid it, or topology= where you "
                "know better",
                self,
                len(counts),
                " and ".join(str(count) for count in sorted(set(counts.values()))),
                found,
            )
        return found

    def check(self, topology: Topology | None) -> None:
        """Refuses a topology of another number of ranks.

        Raises
        ------
        InputError
            With both numbers.
        """
        if topology is None or topology.world_size == len(self.ranks):
            return
        holder = "the process group has" if self.everywhere else f"the model is on {self}, which are"
        raise InputError(
            f"topology of {topology} has {topology.world_size} ranks, but {holder} {len(self.ranks)}; "
            f"leave topology out, or pass one of {len(self.ranks)} ranks"
        )

    def group(self, timeout: float | None = None) -> ProcessGroup | None:
        """A process group of exactly these ranks: the default group, or one of gloo that is made at the first need."""
        import torch.distributed as dist

        from tide.transport.agreement import gloo_group, resolve_timeout

        return dist.group.WORLD if self.everywhere else gloo_group(self.ranks, resolve_timeout(timeout))

    def settings(self) -> dict[str, Any]:
        """What a transport has to be opened with, beside the plan; collective over a part of the world."""
        return {} if self.everywhere else {"group": self.group()}

    def barrier(self) -> None:
        """Waits until all ranks of the scope have come here.

        Raises
        ------
        PeerError
            If one does not come within the deadline; the whole world has that of its process group instead.
        """
        import torch.distributed as dist

        from tide.transport.agreement import exchange, resolve_timeout

        if self.everywhere:
            dist.barrier()
        else:
            timeout = resolve_timeout()
            exchange(None, self.group(timeout), timeout, "ends of use")
