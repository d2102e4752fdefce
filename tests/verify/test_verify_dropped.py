"""A step that one rank leaves out is found: of every kind, of every stream, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.steps import Program, Stream
from tide.compiler.verify import verify
from tide.errors import PlanError
from tide.topology import Topology


def plan(nodes: int, local: int, **options: object) -> Compiled:
    """Whole, partial and empty shards, strided ones, and small ones that travel in the bundle."""
    ranks = nodes * local
    rows = (
        Parameter("wide", (5 * ranks - 2, 24)),
        Parameter("strided", (3, 4 * ranks, 2), 1),
        Parameter("few", (ranks - 1, 8)),
        Parameter("norm", (ranks,)),
        Parameter("bias", (2 * ranks,)),
    )
    more = {"chunk_bytes": 512, "bundle_bytes": 64, "min_run_bytes": 0, "min_put_run_bytes": 0, **options}
    unit = Unit("u", rows, Mesh((tuple(range(ranks)),)))
    return compile_spec(ModelSpec((unit,)), Topology(nodes, local), PlanOptions(**more))  # type: ignore[arg-type]


def dropped(program: Program) -> Iterator[tuple[str, str, Program]]:
    """For each stream, and each kind and lane of step to the rank itself or to others: the first or last left out."""
    for number, stream in enumerate(program.streams):
        forms: dict[tuple[str, object, bool], list[int]] = {}
        for index, step in enumerate(stream.steps):
            lane, peer = getattr(step, "lane", None), getattr(step, "peer", None)
            forms.setdefault((type(step).__name__, lane, peer == program.position), []).append(index)
        for which, ((kind, lane, _), at) in enumerate(forms.items()):
            index = at[-1 if (program.position + which) % 2 else 0]
            steps = (*stream.steps[:index], *stream.steps[index + 1 :])
            streams = list(program.streams)
            streams[number] = Stream(stream.name, steps, stream.released and min(stream.released, len(steps)))
            yield kind, f"{stream.name}[{index}] {kind} {lane}", replace(program, streams=tuple(streams))


GATHERS = {
    "pushed": (plan(3, 2), {"Copy"}),
    "pulled": (plan(4, 2, route="pull"), {"Copy"}),
    "multicast": (plan(2, 3, multicast="on"), {"Multicast"}),
}
REDUCES = {
    "ring": (plan(3, 2), {"Accumulate"}),
    "slot": (plan(3, 2, slot_reuse=True), {"Accumulate"}),
    "switch": (plan(4, 2, switch_reduce="on"), {"Accumulate", "SwitchReduce"}),
}
CASES = [
    *(pytest.param("all_gather", *case, id=f"gather-{name}") for name, case in GATHERS.items()),
    *(pytest.param("reduce_scatter", *case, id=f"reduce-{name}") for name, case in REDUCES.items()),
]


@pytest.mark.parametrize(("collective", "compiled", "kinds"), CASES)
def test_a_dropped_step_is_found(collective: str, compiled: Compiled, kinds: set[str]) -> None:
    seen: set[str] = set()
    for rank in range(compiled.topology.world_size):
        for kind, what, program in dropped(compiled.program("u", collective, rank)):
            seen.add(kind)
            damaged = compiled.with_program("u", rank, program)
            try:
                verify(damaged, collectives=[collective])
            except PlanError as error:
                said = str(error)
            else:
                said = f"nothing, of rank {rank} without {what}"
            assert "of unit 'u'" in said
    assert seen >= {"Put", "Signal", "Wait", *kinds} | ({"Place"} if collective == "all_gather" else set())
