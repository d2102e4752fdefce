"""Ranks that skip collectives: bytes and signals of other units would do, but none of them is taken."""

from __future__ import annotations

import time

import pytest
from host_cases import Case, block
from host_jobs import check_all_gather, check_reduce_scatter

from ranks import run_ranks
from tide.compiler.options import PlanOptions
from tide.errors import PeerError
from tide.session import Session
from tide.topology import Topology
from tide.transport.host import HostTransport, stamps

SLOTS = 3


def skip_job(rank: int, world: int, nodes: int, stamped: bool) -> list[tuple[str, str, int]]:
    """Rank 0 skips up to as many units as there are slots; collective, message and where it came, of each run."""
    if not stamped:
        stamps.MOST = 0  # as with more ranks on the machine than have room: only signals tell
    case = Case(tuple(block(f"u{number}") for number in range(5)), PlanOptions(slots=SLOTS))
    compiled = case.compile(Topology(nodes, world // nodes, virtual=True), ())
    found = []
    for collective in ("all_gather", "reduce_scatter"):
        for skipped in (1, 2, SLOTS):
            session = Session(compiled, HostTransport.open(compiled, timeout=0.5))
            units = [u for i, u in enumerate(compiled.spec.units) if rank or not 1 <= i <= skipped]
            for number, unit in enumerate(units):  # what goes through is checked, byte by byte
                try:
                    if collective == "all_gather":
                        check_all_gather(session, unit, 0)
                        session.release(unit.name)
                    else:
                        check_reduce_scatter(session, unit, 0)
                except PeerError as error:
                    found.append((collective, str(error), number))
                    break
            session.close()
    return found


@pytest.mark.parametrize("stamped", [True, False], ids=["stamps", "signals"])
@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (2, 2)])
def test_a_rank_skips_units(world: int, nodes: int, stamped: bool) -> None:
    """The very first that differs fails on each, and names the unit that each is at."""
    start = time.monotonic()
    results = run_ranks(skip_job, world, nodes, stamped)
    assert time.monotonic() - start < 30
    for rank, found in enumerate(results):
        assert len(found) == 6, f"rank {rank}: {found}"
        for (collective, message, number), skipped in zip(found, (1, 2, SLOTS) * 2, strict=True):
            assert number == 1
            assert f"unit 'u{1 if rank else 1 + skipped}', {collective}" in message
            told = "is in another collective" if stamped else "did not answer within 0.5 s"
            assert told in message or "gave up" in message
