"""What a rank has to know of its peers' programs: the order of issue that fits theirs, and how they signal puts.

Where all ranks hold equal shards, their programs are equal but for the names of the peers, and a rank finds both in
its own. A rank of a thousand would otherwise make a thousand programs for each of its units.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tide.compiler.clock import GROUP_RANKS, clock
from tide.compiler.compile import COLLECTIVES, Compiled, Programs
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import Buffer, Lane, Program
from tide.torch_types import from_torch
from tide.transport.base import Binding
from tide.transport.cuda.order import in_time, issue_order
from tide.transport.cuda.wire import signals_given


class Peers:
    """One rank's view of a collective.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        A unit with this program.
    rank : int
        This rank.
    program : Program
        Its program.
    programs : Programs or None
        Those of all positions; None for a program that concerns nobody else.

    Attributes
    ----------
    order : list of (int, int)
        Stream and step, in the order of issue.
    """

    def __init__(self, compiled: Compiled, unit: str, rank: int, program: Program, programs: Programs | None) -> None:
        self.program, self._programs = program, programs
        #: Whether the own program stands for all others; small groups are looked at as they are.
        self.alike = programs is not None and len(programs) > GROUP_RANKS and even(programs.context)
        self.order = self._order(compiled, unit, rank)
        self._given: dict[int, Mapping[Lane, list[int]]] = {}

    def _order(self, compiled: Compiled, unit: str, rank: int) -> list[tuple[int, int]]:
        if self._programs is None:
            return issue_order({self.program.position: self.program}, self.program.position)
        if self._programs.context.team.nodes == 1:
            return issue_order(self._programs, self.program.position)
        course = clock(compiled, unit, self.program.collective, rank, "rank" if self.alike else "group", self._programs)
        if course.assumed:  # not so alike after all
            self.alike = False
            course = clock(compiled, unit, self.program.collective, rank, "group", self._programs)
        return in_time(self.program, course.events[rank], compiled.topology.links.network_latency)

    def given(self, peer: int) -> Mapping[Lane, list[int]]:
        """NCCL signals behind each signal that a position of another node gives to this one; see `signals_given`."""
        if peer not in self._given:
            own = self.program.position
            assert self._programs is not None, "a claim waits for nobody on another node"
            if self.alike and self.program.collective == "reduce_scatter" and not self._programs.context.by_switch:
                self._given[peer] = signals_given(self.program, self._mirror(peer))
            else:
                self._given[peer] = signals_given(self._programs[peer], own)
        return self._given[peer]

    def _mirror(self, peer: int) -> int:
        """To whom this position is what ``peer`` is to it: as many nodes on as that one is behind, on the same rail."""
        assert self._programs is not None
        team = self._programs.context.team
        (node, local), (far, there) = team.seat(self.program.position), team.seat(peer)
        assert local == there, "partial sums stay on their rail"
        return team.grid[(2 * node - far) % team.nodes][local]


class PeersByProgram:
    """What fits the programs of the others, by a rank's own; units with one program share it.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    rank : int
        This rank.
    most : int
        Programs that are kept: those used last.
    """

    def __init__(self, compiled: Compiled, rank: int, most: int) -> None:
        self._compiled, self._rank, self._most = compiled, rank, most
        self._kept: dict[int, Peers] = {}  # by the id of their program, which they hold

    def of(self, program: Program, binding: Binding) -> Peers:
        """Peers in the collective that ``program`` is this rank's part of."""
        peers = self._kept.pop(id(program), None)
        if peers is None:
            programs = None
            if program.collective in COLLECTIVES:  # and no claim, which waits on credits only
                chosen = self._chosen(program, binding)
                programs = self._compiled.programs(
                    binding.unit, program.collective, self._rank, *chosen, program.in_slot
                )
            peers = Peers(self._compiled, binding.unit, self._rank, program, programs)
        self._kept[id(program)] = peers
        if len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)))
        return peers

    def _chosen(self, program: Program, binding: Binding) -> tuple[list[int] | None, dict[int, str]]:
        """Which gradients a program reduces, and their types, where these are not the plan's."""
        compiled, unit = self._compiled, binding.unit
        if program is compiled.program(unit, program.collective, self._rank, in_slot=program.in_slot):
            return None, {}
        parameters = compiled.spec.unit(unit).parameters
        grads = {i: from_torch(t.dtype) for (buffer, i), t in binding.tensors.items() if buffer is Buffer.GRAD}
        outs = sorted(i for buffer, i in binding.tensors if buffer is Buffer.OUT)
        return outs, {i: dtype for i, dtype in grads.items() if dtype != parameters[i].grad_dtype}


def even(context: UnitContext) -> bool:
    """Whether all positions of a unit's team hold equal shards of every parameter."""
    tables = (context.table(index) for index in range(len(context.unit.parameters)))
    return all(bool(np.all(table.run == table.run[0])) for table in tables)
