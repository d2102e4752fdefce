"""Reduce-scatter across nodes with partial sums summed in the switch.

The partial sums for one owner are not all put to the owner. They are spread over the ranks of the owner's node, at
the same offset of each rank's *spread area*, so that the owner gets the sum of up to ``P`` of them by one read of
the multicast address. Which rank of a node reduces for an owner is free, so a partial sum is made where it has to
leave: on node ``n - 1 - j``, the one for local rank ``l`` of node ``n`` is summed by local rank ``(l + j) mod P`` and
put on that rank's own rail. No put crosses rails, nothing is pushed on within the node, and each rank sends and hosts
as many as any other::

    stream rs.push, rs.sum   as without the switch, but for who reduces what
    stream rs.wire   SUMMED? SPREAD_CREDIT? put ─▶ SENT!
    stream rs.hold   SPREAD? HELD!                          … a partial sum for you is in my area
    stream rs.free   SPREAD_CREDIT!  TAKEN? SPREAD_CREDIT!  … its place is free for the next one
    stream rs.fold   BEGUN? HELD? running += sum in the switch ─▶ TAKEN!

Nodes ``n - 1, n - 2, …`` come in groups of ``P``; a smaller last group has places of its own: ranks that hold no
partial sum of it hold zeros there, as at the start, since nobody ever writes them. Within a group the switch decides
on the order of summation, so the bits of a result depend on the switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tide.compiler.columns import DTYPE, SPREAD, Rows
from tide.compiler.schedule.reduce_scatter import Builder, Destinations, Turns
from tide.compiler.shard import Int64
from tide.compiler.steps import Lane, Signal, Step, Stream, Sum, SwitchReduce, Wait


def group_sizes(nodes: int, per_node: int) -> tuple[int, ...]:
    """Other nodes whose partial sums are summed at a time, group by group."""
    full, rest = divmod(nodes - 1, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def spread_places(nodes: int, per_node: int, depth: int) -> int:
    """Places of a rank's spread area: a ring for each owner of the node, and for each size of group."""
    return len(set(group_sizes(nodes, per_node))) * depth * per_node


class Held(NamedTuple):
    """A partial sum that a rank hosts: of which group, chunk and node (counted back), and for which local rank."""

    group: int
    number: int
    back: int
    local: int


class SwitchBuilder(Builder):
    """Writes the streams of one position where partial sums are summed in the switch."""

    def streams(self) -> list[Rows | Stream]:
        """All streams of the position."""
        more = Stream("rs.hold", tuple(self.hold())), Stream("rs.free", tuple(self.free()))
        return [*super().streams(), *more]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each group."""
        return group_sizes(self.team.nodes, self.team.per_node)

    @property
    def ring(self) -> int:
        """Places of each owner that are used in turn."""
        return self.context.receive.depth

    # Work --------------------------------------------------------------------------------------

    def order(self, local: int) -> tuple[Int64, Int64]:
        """Chunks for all nodes of a group by turns; the own output begins beside the first group."""
        own = [(self.row[local], number) for number in range(self.chunks(self.row[local]))]
        items: list[tuple[int, int]] = []
        for held in self.held(local, ahead=True):
            items.append((self.owner(held, ahead=True), held.number))
            if own:
                items.append(own.pop(0))
        owner, number = np.array(items + own, dtype=np.int64).reshape(-1, 2).T
        return owner, number

    def chunks(self, owner: int) -> int:
        """Chunks of the owner's output."""
        return int(self.outputs.chunks[owner])

    def held(self, local: int, ahead: bool) -> Iterator[Held]:
        """What the rank with this local rank hosts, or (``ahead``) reduces for other nodes, in order."""
        ranks = self.team.per_node
        for group, size in enumerate(self.sizes):
            backs = [group * ranks + i for i in range(size)]
            rows = [Held(group, 0, back, (local - back) % ranks) for back in backs]
            chunks = [self.chunks(self.owner(row, ahead)) for row in rows]
            for number in range(max(chunks)):
                yield from (
                    row._replace(number=number) for row, most in zip(rows, chunks, strict=True) if number < most
                )

    def owner(self, held: Held, ahead: bool) -> int:
        """Whose partial sum it is: of this node, or of the node that is as far ahead as the sum's node is back."""
        node = (self.node + 1 + held.back) % self.team.nodes if ahead else self.node
        return self.team.grid[node][held.local]

    def source(self, back: int) -> int:
        """The rank of the own rail whose partial sums this rank hosts."""
        return self.team.grid[(self.node - 1 - back) % self.team.nodes][self.local]

    # Places ------------------------------------------------------------------------------------

    def turn(self, held: Held, chunks: int) -> tuple[int, int, int]:
        """Kind of the place, the turn in which it is used, and how many turns there are."""
        sizes = self.sizes
        if sizes[held.group] == sizes[0]:
            return 0, held.group * chunks + held.number, sizes.count(sizes[0]) * chunks
        return 1, held.number, chunks

    def place(self, held: Held, chunks: int) -> int:
        """Offset of the place in the spread area, on whichever rank."""
        kind, turn, _ = self.turn(held, chunks)
        index = (kind * self.ring + turn % self.ring) * self.team.per_node + held.local
        return index * self.context.receive.spread_chunk

    def destinations(self, turns: Turns) -> Destinations:
        """The ranks on the own rail that host the partial sums of some turns, and the places there."""
        peers, starts = [], []
        for owner, number in zip(turns.owner.tolist(), turns.number.tolist(), strict=True):
            node, local = self.team.seat(owner)
            back = (node - 1 - self.node) % self.team.nodes
            peers.append(self.team.grid[node][self.local])
            starts.append(self.place(Held(back // self.team.per_node, number, back, local), self.chunks(owner)))
        found = np.array(peers, dtype=np.int64), np.array(starts, dtype=np.int64)
        return Destinations(*found, SPREAD, Lane.SPREAD_CREDIT, Lane.SPREAD)

    # Streams -----------------------------------------------------------------------------------

    def hold(self) -> list[Step]:
        """Tells the owners of the node what has arrived for them."""
        steps: list[Step] = []
        for held in self.held(self.local, ahead=False):
            steps += (Wait(self.source(held.back), Lane.SPREAD), Signal(self.row[held.local], Lane.HELD))
        return steps

    def free(self) -> list[Step]:
        """Hands the places out, and again once the owners have taken what was there."""
        first: list[Step] = []
        again: list[Step] = []
        ranks = self.team.per_node
        for held in self.held(self.local, ahead=False):
            chunks = self.chunks(self.row[held.local])
            kind, turn, turns = self.turn(held, chunks)
            if turn < self.ring:
                first.append(Signal(self.source(held.back), Lane.SPREAD_CREDIT))
            again.append(Wait(self.row[held.local], Lane.TAKEN))
            if turn + self.ring < turns:
                later = (turn + self.ring) // chunks if kind == 0 else held.group
                again.append(Signal(self.source(later * ranks + held.back % ranks), Lane.SPREAD_CREDIT))
        return first + again

    def fold(self) -> Rows | Stream:
        """Adds the partial sums of other nodes to the running sum, a group at a time; the last are final."""
        steps: list[Step] = []
        chunks, ranks = self.chunks(self.position), self.team.per_node
        for group, size in enumerate(self.sizes):
            hosts = [self.row[(self.local + group * ranks + i) % ranks] for i in range(size)]
            held = [Wait(host, Lane.HELD) for host in hosts]
            taken = [Signal(host, Lane.TAKEN) for host in hosts]
            holders, last = tuple(rank for rank in self.row if rank in hosts), group == len(self.sizes) - 1
            for number in range(chunks):
                if group == 0:
                    steps.append(Wait(self.position, Lane.BEGUN))
                start = self.place(Held(group, number, group * ranks, self.local), chunks)
                reduce = SwitchReduce(tuple(self.row), holders, self.switch_sums(number, start, last), final=last)
                steps += [*held, reduce, *taken]
        return Stream("rs.fold", tuple(steps))

    def switch_sums(self, number: int, start: int, last: bool) -> tuple[Sum, ...]:
        """Adds a chunk of a group's partial sums to the running sum; the last additions make the output."""
        outputs, kind = self.outputs, int(self.outputs.first_kind[self.position]) + number
        row = np.arange(outputs.parts.first[kind], outputs.parts.first[kind + 1])
        src = outputs.placed(row, SPREAD, np.full(len(row), start), 4, 4)
        dtype = np.full(len(row), DTYPE["float32"])
        return tuple(self.continued(row, src, np.full(len(row), last), dtype).made())
