"""Small models for the simulator, and hypothesis strategies for all kinds of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import ROUTES, PlanOptions
from tide.errors import PlanError
from tide.topology import Topology
from tide.transport.simulated import Operation, explore

#: (nodes, GPUs per node): worlds of 1 to 9 ranks, in one node, one rank a node, and mixed.
TOPOLOGIES = (
    *((1, ranks) for ranks in range(1, 10)),
    *((nodes, 1) for nodes in range(2, 10)),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 3),
    (4, 2),
    (2, 4),
)

FLOATS = ("bfloat16", "float16", "float32")

#: Everything small, so that tiny parameters are chunked, bundled and copied as large ones are.
TINY = PlanOptions(
    slots=2,
    alignment=64,
    bundle_bytes=16,
    min_run_bytes=4,
    min_put_run_bytes=4,
    put_bytes=4096,
    chunk_bytes=256,
    piece_bytes=64,
)
#: The same for each route of the all-gather.
BY_ROUTE = {route: replace(TINY, route=route) for route in ROUTES}
#: Gradients are received in vacated slots.
REUSE = replace(TINY, slot_reuse=True)


def world(ranks: int) -> Mesh:
    """Plain FSDP over all ranks."""
    return Mesh((tuple(range(ranks)),))


def block(
    name: str,
    mesh: Mesh,
    rows: int = 7,
    lives_with: int = -1,
    stays_whole: bool = False,
    long: bool = False,
    narrow: bool = False,
) -> Unit:
    """A unit with an uneven Shard(0), a Shard(1), a pair small enough for the bundle, mixed types.

    With ``long``, two frozen parameters make every shard long enough for three pieces: the push route cuts one
    between its runs, the other within its only run. With ``narrow``, no gradient is wider than the parameters, so
    that every piece has its own place in a slot.
    """
    parameters = [
        Parameter(f"{name}.w", (rows, 12)),
        Parameter(f"{name}.v", (3, 2 * rows), 1, grad_dtype="float32"),
        Parameter(f"{name}.norm", (5,), 0, "float32", grad_dtype="float16", out_dtype="bfloat16"),
        Parameter(f"{name}.bias", (4,), 0, "bfloat16", "bfloat16"),
    ]
    if narrow:
        parameters = [replace(p, grad_dtype="bfloat16") for p in parameters]
        parameters.append(Parameter(f"{name}.large", (40 * mesh.size - 7, 24)))
    if long:
        parameters += [
            Parameter(f"{name}.runs", (5, 64 * mesh.size), 1, grad_dtype=None),
            Parameter(f"{name}.run", (900 * mesh.size - 5,), grad_dtype=None),
        ]
    return Unit(name, tuple(parameters), mesh, stays_whole, lives_with)


def blocks(
    topology: Topology,
    count: int = 3,
    options: PlanOptions = TINY,
    rows: int = 7,
    long: bool = False,
    narrow: bool = False,
) -> Compiled:
    """``count`` equal units over all ranks."""
    mesh = world(topology.world_size)
    units = tuple(block(f"layers.{number}", mesh, rows, long=long, narrow=narrow) for number in range(count))
    return compile_spec(ModelSpec(units, "blocks"), topology, options)


#: The most effective families first.
EFFECTIVE = ("priority", "lone_stream", "slow_rank", "burst", "starved_stream", "uniform", "reverse")


def first_error(compiled: Compiled, sequence: Sequence[Operation], seeds: int = 25, pieces: int = 2) -> str | None:
    """The error of the first interleaving that fails, family by family, or None."""
    try:
        explore(compiled, sequence, range(seeds), EFFECTIVE, pieces)
    except PlanError as error:
        return str(error)
    return None


@st.composite
def parameters(draw: st.DrawFn, name: str) -> Parameter:
    """A parameter of any rank, dim and mixture of types; extents of zero and one included."""
    extents = st.sampled_from((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 130))
    shape = tuple(draw(st.lists(extents, min_size=1, max_size=4)))
    while math.prod(shape) > 2000:
        shape = tuple(-(-extent // 2) for extent in shape)
    return Parameter(
        name,
        shape,
        draw(st.integers(0, len(shape) - 1)),
        draw(st.sampled_from(FLOATS)),
        draw(st.sampled_from((*FLOATS, "float64"))),
        draw(st.sampled_from((*FLOATS, None))),
        draw(st.sampled_from(FLOATS)),
    )


@st.composite
def meshes(draw: st.DrawFn, ranks: int) -> Mesh:
    """All ranks; or, as for HSDP and tensor parallelism, groups of neighbours or of strides."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    size = draw(st.sampled_from((*divisors, ranks, ranks)))
    if draw(st.booleans()):
        return Mesh(tuple(tuple(range(first, first + size)) for first in range(0, ranks, size)))
    return Mesh(tuple(tuple(range(first, ranks, ranks // size)) for first in range(ranks // size)))


@st.composite
def plans(draw: st.DrawFn) -> Compiled:
    """A model of one to three units on any topology, with any options."""
    topology = Topology(*draw(st.sampled_from(TOPOLOGIES)))
    ranks, units = topology.world_size, []
    shared_mesh = draw(meshes(ranks))
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 4))
        names = [f"u{number}.p{index}" for index in range(count)]
        own_mesh = draw(st.booleans())
        units.append(
            Unit(
                f"u{number}",
                tuple(draw(parameters(name)) for name in names),
                draw(meshes(ranks)) if own_mesh else shared_mesh,
                stays_whole=draw(st.sampled_from((False, False, True))),
            )
        )
    route, multicast = draw(st.sampled_from((*((route, "off") for route in ROUTES), ("push", "on"))))
    switch_reduce = draw(st.sampled_from(("off", "on", "auto")))
    options = PlanOptions(
        slots=draw(st.sampled_from((None, 1, 2))),
        alignment=draw(st.sampled_from((16, 512))),
        bundle_bytes=draw(st.sampled_from((0, 16, 256, 32 << 10))),
        min_run_bytes=draw(st.sampled_from((0, 8, 512))),
        min_put_run_bytes=draw(st.sampled_from((0, 64))),
        put_bytes=4096,
        route=route,
        slot_reuse=route == "push" and draw(st.booleans()),
        wire_dtype="float32" if switch_reduce == "on" else draw(st.sampled_from(("float32", "bfloat16"))),
        switch_reduce=switch_reduce,
        multicast=multicast,
        piece_bytes=draw(st.sampled_from((512, 512, 4096))),
        chunk_bytes=draw(st.sampled_from((None, 256, 256, 320, 1024))),
        receive_depth=draw(st.sampled_from((1, 2, 3))),
        padded_storage=draw(st.booleans()),
    )
    return compile_spec(ModelSpec(tuple(units), "drawn"), topology, options)
