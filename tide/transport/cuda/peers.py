"""What a rank has to know of its peers' programs: the order of issue that fits theirs, and how they signal puts.

A rank of a thousand must not make a thousand programs for each of its units. Where all ranks hold equal shards, their
programs are equal but for the names of the peers, and its own tells the order. Where shards differ, the order of a
reduce-scatter is found on columns of all programs, without making their steps. All sources of partial sums put an
owner's chunks in the same pieces, so one of them tells how all signal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tide.compiler.clock import GROUP_RANKS, clock
from tide.compiler.compile import COLLECTIVES, Compiled, Programs
from tide.compiler.nominal import nominal_times
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import Buffer, Lane, Program, Wait
from tide.torch_types import from_torch
from tide.transport.base import Binding
from tide.transport.cuda.order import in_time, issue_order, merged
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
        self._many = programs is not None and len(programs) > GROUP_RANKS  # small groups are looked at as they are
        self.order = self._order(compiled, unit, rank)

    def _order(self, compiled: Compiled, unit: str, rank: int) -> list[tuple[int, int]]:
        program, programs = self.program, self._programs
        if programs is None:
            return issue_order({program.position: program}, program.position)
        if programs.context.team.nodes == 1:
            return issue_order(programs, program.position)
        alone = self._many and even(programs.context)
        if self._many and not alone and program.collective == "reduce_scatter":
            return merged(program, nominal_times(programs.rows(), program.position))
        course = clock(compiled, unit, program.collective, rank, "rank" if alone else "group", programs)
        assert not (alone and course.assumed), "equal shards make programs of one form"
        return in_time(program, course.events[rank], compiled.topology.links.network_latency)

    def given(self, peer: int) -> Mapping[Lane, list[int]]:
        """NCCL signals behind each signal that a position of another node gives to this one; see `signals_given`."""
        assert self._programs is not None, "a claim waits for nobody on another node"
        if not self._many or self.program.collective != "reduce_scatter" or self._programs.context.by_switch:
            return signals_given(self._programs[peer], self.program.position)
        return {Lane.PARTIAL: self._pieces, Lane.WIRE_CREDIT: [1] * self._credits[peer]}

    @cached_property
    def _pieces(self) -> list[int]:
        """NCCL signals behind each partial sum that a source puts to this position; the same for all of them."""
        assert self._programs is not None
        team, position = self._programs.context.team, self.program.position
        node, local = team.seat(position)
        source = team.grid[node - 1][local]
        return signals_given(self._programs[source], position).get(Lane.PARTIAL, [])

    @cached_property
    def _credits(self) -> Counter[int]:
        """Credits of each peer that this position's puts wait for."""
        credits = Counter[int]()
        for _, _, step in self.program.steps():
            if isinstance(step, Wait) and step.lane == Lane.WIRE_CREDIT:
                credits[step.peer] += step.count
        return credits


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
