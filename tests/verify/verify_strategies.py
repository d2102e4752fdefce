"""Random small plans that reach the corners: uneven and empty shards, strided runs, bundles, full rings."""

from __future__ import annotations

from hypothesis import strategies as st

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.topology import Topology

TOPOLOGIES = [*((1, p) for p in range(1, 10)), *((n, 1) for n in range(2, 6)), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2)]
DTYPES = ("bfloat16", "float32", "float16", "uint8")
GRADIENTS = ("bfloat16", "float32", "float16", None)


@st.composite
def parameters(draw: st.DrawFn, name: str, largest: int = 12) -> Parameter:
    """A parameter of up to three dims."""
    shape = tuple(draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, largest), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    return Parameter(
        name,
        shape,
        draw(st.integers(0, len(shape) - 1)),
        dtype,
        draw(st.sampled_from(("float32", dtype))),
        draw(st.sampled_from(GRADIENTS)),
        draw(st.sampled_from(("float32", "float32", "bfloat16"))),
    )


@st.composite
def options(draw: st.DrawFn) -> PlanOptions:
    """Small limits, so that small parameters exercise batches, bundles and rings."""
    route, multicast = draw(st.sampled_from((("push", "off"), ("push", "on"), ("push", "auto"), ("pull", "off"))))
    switch_reduce = draw(st.sampled_from(("off", "on", "auto")))
    return PlanOptions(
        slots=draw(st.sampled_from((None, 1, 2))),
        alignment=draw(st.sampled_from((16, 64, 512))),
        bundle_bytes=draw(st.sampled_from((0, 16, 64, 1 << 15))),
        min_run_bytes=draw(st.sampled_from((0, 8, 512))),
        put_bytes=4096,
        route=route,
        slot_reuse=route == "push" and draw(st.booleans()),
        wire_dtype="float32" if switch_reduce == "on" else draw(st.sampled_from(("float32", "bfloat16"))),
        switch_reduce=switch_reduce,
        multicast=multicast,
        piece_bytes=draw(st.sampled_from((512, 4096))),
        chunk_bytes=draw(st.sampled_from((256, 256, 512, None))),
        receive_depth=draw(st.integers(1, 3)),
        padded_storage=draw(st.booleans()),
    )


@st.composite
def plans(
    draw: st.DrawFn, largest: int = 12, most: int = 4, topologies: list[tuple[int, int]] = TOPOLOGIES
) -> Compiled:
    """A compiled plan of one to three units, all of them small."""
    nodes, local = draw(st.sampled_from(topologies))
    mesh = Mesh((tuple(range(nodes * local)),))
    units = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, most))
        rows = tuple(draw(parameters(f"u{number}.p{i}", largest)) for i in range(count))
        units.append(Unit(f"u{number}", rows, mesh, draw(st.booleans())))
    return compile_spec(ModelSpec(tuple(units), "random"), Topology(nodes, local), draw(options()))
