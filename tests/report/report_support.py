"""Plans for the tests of reports, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.read import Policy, read
from tide.compiler.shapes import model_parameters
from tide.topology import Links, Topology

#: Round figures, so that times can be worked out by hand.
LINKS = Links(
    copy_engine=1e9,
    network=1e8,
    memory=1e10,
    copy_latency=1e-6,
    signal_latency=1e-5,
    network_latency=1e-4,
    kernel_latency=1e-7,
)


def public(name: str, nodes: int, gpus: int, slots: int | None = 2) -> Compiled:
    """A public model: float32 shards, bfloat16 storage, float32 reduction."""
    topology = Topology(nodes, gpus)
    spec = read(model_parameters(name), topology=topology, policy=Policy())
    return compile_spec(replace(spec, source=name), topology, PlanOptions(slots=slots))


def tiny(
    shapes: Mapping[str, tuple[int, ...]],
    nodes: int = 1,
    gpus: int = 2,
    *,
    dims: Mapping[str, int] | None = None,
    groups: tuple[tuple[int, ...], ...] | None = None,
    topology: Topology | None = None,
    parameter: Mapping[str, object] | None = None,
    **options: object,
) -> Compiled:
    """One unit named ``block``."""
    topology = topology or Topology(nodes, gpus, LINKS)
    mesh = Mesh(groups or (tuple(range(topology.world_size)),))
    dims, extra = dims or {}, dict(parameter or {})
    parameters = tuple(
        Parameter(f"block.{name}", shape, dims.get(name, 0), **extra)  # type: ignore[arg-type]
        for name, shape in shapes.items()
    )
    spec = ModelSpec((Unit("block", parameters, mesh),), "tiny")
    return compile_spec(spec, topology, PlanOptions(**options))  # type: ignore[arg-type]
