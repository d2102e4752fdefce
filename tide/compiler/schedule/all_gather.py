"""All-gather: every rank's shards into every rank's storage (TIDE-AG).

Within a node shards spread by copy engine, pushed or pulled (``PlanOptions.route``). Across nodes the same
local rank of every node forms a rail; on the rail, blocks travel by recursive doubling (dissemination where
the node count is no power of two), from storage to the same place in storage. Every byte crosses each rail
once: a rank sends and receives ``(nodes - 1) / nodes`` of its rail's share.
"""

from __future__ import annotations

from tide.compiler.schedule.gather_pull import pull_program
from tide.compiler.schedule.gather_push import push_program
from tide.compiler.schedule.unit import UnitContext
from tide.compiler.steps import Program


def all_gather_program(context: UnitContext, position: int) -> Program:
    """Program of one position.

    Parameters
    ----------
    context : UnitContext
        Unit, storage and team.
    position : int
        Whose program.
    """
    return (push_program if context.options.route == "push" else pull_program)(context, position)
