"""Where ranks sit: nodes, GPUs per node, and what the links between them cost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tide.errors import InputError


@dataclass(frozen=True, slots=True)
class Links:
    """Rates and fixed costs of one kind of machine, as the cost model uses them.

    Parameters
    ----------
    copy_engine : float
        Peer copies by copy engine, bytes per second and direction.
    network : float
        One rank's network port, bytes per second and direction.
    memory : float
        Device memory, bytes per second, reads plus writes.
    copy_latency : float
        Fixed cost of one copy in a batch, seconds.
    signal_latency : float
        From a signal's issue to the end of the matching wait on a peer, seconds.
    network_latency : float
        Fixed cost of one put to another node, seconds.
    kernel_latency : float
        Fixed cost of one kernel, seconds.
    switch_latency : float
        What a write or a read through a multicast address costs on top of the others, seconds; an estimate.
    multicast : bool
        Whether the switch between a node's GPUs multicasts writes and sums reads.
    """

    copy_engine: float = 388e9
    network: float = 48e9
    memory: float = 4.2e12
    copy_latency: float = 1.1e-6
    signal_latency: float = 6e-6
    network_latency: float = 12e-6
    kernel_latency: float = 4e-6
    switch_latency: float = 2e-6
    multicast: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.multicast, bool):
            raise InputError(f"Links: multicast must be True or False, got {self.multicast!r}")
        for name in self.__slots__:
            if name == "multicast":
                continue
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InputError(f"Links: {name} must be a number above 0, got {value!r}")


#: Link figures by name. ``h200`` was measured between two GPUs of one host (network: data sheet only; switch: not
#: measured).
PRESETS: Mapping[str, Links] = {
    "h200": Links(),
    "h100": Links(memory=2.9e12),
    "host": Links(
        copy_engine=8e9,
        network=8e9,
        memory=1.2e10,
        signal_latency=3e-5,
        network_latency=3e-5,
        kernel_latency=1e-5,
        multicast=False,
    ),
}


#: Most ranks of a topology; more are mistakes.
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks on nodes: ``rank = node * gpus_per_node + local rank``.

    Parameters
    ----------
    nodes : int
        Number of nodes (NVLink domains).
    gpus_per_node : int
        Ranks that share one node.
    links : Links or str
        Link figures, or the name of a preset.
    virtual : bool
        True when ranks of one machine are grouped into nodes for tests: steps across nodes then
        really go through put and signal, but no network is crossed.

    Raises
    ------
    InputError
        If a count is below one or the preset is unknown.

    Examples
    --------
    >>> Topology(nodes=8, gpus_per_node=8).world_size
    64
    """

    nodes: int
    gpus_per_node: int
    links: Links = field(default_factory=Links)
    virtual: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"Topology: {name} must be a whole number of at least 1, got {value!r}")
        if self.nodes * self.gpus_per_node > MOST_RANKS:
            raise InputError(
                f"Topology: {self.nodes} nodes × {self.gpus_per_node} GPUs are more than {MOST_RANKS:,} ranks; "
                "check the counts"
            )
        if isinstance(self.links, str):
            if self.links not in PRESETS:
                raise InputError(
                    f"Topology: no links preset {self.links!r}; known presets are {', '.join(sorted(PRESETS))}"
                )
            object.__setattr__(self, "links", PRESETS[self.links])
        if not isinstance(self.virtual, bool):
            raise InputError(f"Topology: virtual must be True or False, got {self.virtual!r}")
        if not isinstance(self.links, Links):
            raise InputError(f"Topology: links must be Links or a preset's name, got {self.links!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """Node that holds ``rank``."""
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank {rank} is outside {self} with {self.world_size} ranks")
        return rank // self.gpus_per_node

    def __str__(self) -> str:
        suffix = " (virtual)" if self.virtual else ""
        return f"{self.nodes} nodes × {self.gpus_per_node} GPUs{suffix}"

    @classmethod
    def discover(cls, world_size: int, env: Mapping[str, str] | None = None) -> Topology:
        """Topology of the running job, from the launcher's ``LOCAL_WORLD_SIZE``.

        Parameters
        ----------
        world_size : int
            Number of ranks of the job.
        env : mapping, optional
            Environment to read, ``os.environ`` by default.
        """
        env = os.environ if env is None else env
        local = whole_number("LOCAL_WORLD_SIZE", world_size, env)
        if local < 1 or world_size % local:
            raise InputError(
                f"LOCAL_WORLD_SIZE={local} does not divide the world size {world_size}; pass topology= explicitly"
            )
        return cls(nodes=world_size // local, gpus_per_node=local)


def whole_number(name: str, default: int, env: Mapping[str, str] | None = None) -> int:
    """A variable that launchers set, such as ``RANK``.

    Raises
    ------
    InputError
        If it is set to something else.
    """
    text = (os.environ if env is None else env).get(name)
    try:
        return default if text is None else int(text)
    except ValueError:
        raise InputError(f"environment variable {name} must be a whole number, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that shard one unit, seen as nodes × locals of positions.

    A *position* is a rank's index within its shard group: position ``g`` owns shard ``g``. Programs
    speak of positions only, so that every replica and every unit with the same team shares them.

    Parameters
    ----------
    grid : tuple of tuple of int
        ``grid[node][local]`` is a position; every position of ``0 .. size-1`` occurs once.
    """

    grid: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        positions = sorted(position for row in self.grid for position in row)
        if positions != list(range(len(positions))) or not positions:
            raise InputError(f"Team: grid must hold each position 0..n-1 once, got {self.grid}")
        if len({len(row) for row in self.grid}) != 1:
            raise InputError("Team: every node must hold the same number of positions")

    @property
    def nodes(self) -> int:
        """Number of nodes the team spans."""
        return len(self.grid)

    @property
    def per_node(self) -> int:
        """Positions on each node."""
        return len(self.grid[0])

    @property
    def size(self) -> int:
        """Number of positions (shards)."""
        return self.nodes * self.per_node

    def seat(self, position: int) -> tuple[int, int]:
        """``(node, local)`` of a position."""
        guess_node, guess_local = divmod(position, self.per_node)
        if self.grid[guess_node][guess_local] == position:  # the usual, node-major order
            return guess_node, guess_local
        for node, row in enumerate(self.grid):
            if position in row:
                return node, row.index(position)
        raise InputError(f"Team of {self.size}: no position {position}")


def team_of(ranks: Sequence[int], topology: Topology) -> Team:
    """Team of a shard group: its positions grouped by the node of their rank.

    A group that does not sit evenly on its nodes (say three ranks of one node and one of another)
    has no rails; each rank then counts as a node of its own, and every transfer is a put.

    Parameters
    ----------
    ranks : sequence of int
        World ranks in order of their shard index.
    topology : Topology
        Where the ranks are.
    """
    by_node: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        by_node.setdefault(topology.node_of(rank), []).append(position)
    rows = [tuple(by_node[node]) for node in sorted(by_node)]
    if len({len(row) for row in rows}) != 1:
        rows = [(position,) for position in range(len(ranks))]
    return Team(tuple(rows))
