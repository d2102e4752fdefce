"""Plans for the host transport's tests, their data, and what a collective must deliver, by other means."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.topology import Team, Topology, team_of
from tide.torch_types import to_torch

P = Parameter


def mesh_of(world: int) -> Mesh:
    """All ranks in one group."""
    return Mesh((tuple(range(world)),))


@dataclass(frozen=True)
class Case:
    """Parameters of units, and the options to compile them with."""

    units: tuple[tuple[str, tuple[Parameter, ...]], ...]
    options: PlanOptions = field(default_factory=PlanOptions)

    def compile(self, topology: Topology, meshes: tuple[Mesh, ...] = ()) -> Compiled:
        """The plan; unit ``i`` on mesh ``i mod len(meshes)``, by default on all ranks."""
        meshes = meshes or (mesh_of(topology.world_size),)
        units = [Unit(name, rows, meshes[i % len(meshes)]) for i, (name, rows) in enumerate(self.units)]
        return compile_spec(ModelSpec(tuple(units), "case"), topology, self.options)


def block(name: str, width: int = 48, hidden: int = 80, **kinds: str | None) -> tuple[str, tuple[Parameter, ...]]:
    """A transformer block in small: matrices, norms and biases."""
    shapes = {
        "q": (width, width),
        "kv": (width // 4, width),
        "up": (hidden, width),
        "down": (width, hidden),
        "norm": (width,),
        "bias": (hidden,),
    }
    return name, tuple(P(f"{name}.{key}", shape, **kinds) for key, shape in shapes.items())  # type: ignore[arg-type]


UNEVEN = (
    "uneven",
    (
        P("uneven.a", (13, 7)),
        P("uneven.b", (3, 50)),
        P("uneven.c", (1,)),
        P("uneven.d", (5, 129)),
        P("uneven.e", (1, 2, 3)),
        P("uneven.f", (0, 4)),
        P("uneven.g", (2, 300)),
    ),
)
DIMS = (
    "dims",
    (
        P("dims.a", (6, 16, 10), 1),
        P("dims.b", (4, 6, 24), 2),
        P("dims.c", (3, 11), 1),
        P("dims.d", (9, 2, 400), 1),
        P("dims.e", (200, 9), 1),
        P("dims.f", (2, 1, 8), 1),
    ),
)
MIXED = (
    "mixed",
    (
        P("mixed.a", (10, 30), 0, "float32", "float32", "float32"),
        P("mixed.b", (9, 31), 0, "bfloat16", "float32", "bfloat16"),
        P("mixed.c", (64, 3), 1, "float16", "float32", "float16"),
        P("mixed.d", (17,), 0, "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
        P("mixed.e", (21, 5), 0, "float16", "float16", "float32", "float16"),
        P("mixed.f", (33, 4), 1, "float32", "float32", "bfloat16", "bfloat16"),
        P("mixed.g", (8, 8), 0, "float64", "float64", None),
        P("mixed.h", (40, 7), 0, "float8_e4m3fn", "float32", None),
        P("mixed.i", (11, 3), 0, "int64", "int64", None),
        P("mixed.j", (19,), 0, "bool", "bool", None),
        P("mixed.k", (5, 6), 1, "uint8", "uint8", None),
    ),
)
FROZEN = ("frozen", tuple(P(f"frozen.{i}", (12 + i, 20), 0, "bfloat16", "bfloat16", None) for i in range(3)))

#: A mixture-of-experts block: many experts, few rows each.
EXPERTS = (
    "experts",
    (
        P("experts.router", (16, 64)),
        P("experts.router_bias", (16,)),
        P("experts.w1", (16, 24, 64)),
        P("experts.w1_bias", (16, 24)),
        P("experts.w2", (16, 64, 12), 1),
        P("experts.sinks", (6,)),
        P("experts.q_norm", (8,)),
    ),
)
#: A diffusion transformer's block: a table of shape (1, …), and every matrix with a bias.
DIFFUSION = (
    "diffusion",
    (
        P("diffusion.table", (1, 6, 40)),
        P("diffusion.q", (40, 40)),
        P("diffusion.q_bias", (40,)),
        P("diffusion.norm", (40,)),
        P("diffusion.up", (108, 40)),
        P("diffusion.up_bias", (108,)),
        P("diffusion.down", (40, 108)),
    ),
)

#: Small areas and rings, so that a few kilobytes make many chunks, puts and credits.
TIGHT = {"chunk_bytes": 512, "put_bytes": 4096, "bundle_bytes": 64, "min_run_bytes": 16}

CASES = {
    "dense": Case((block("dense.0"), block("dense.1"), block("dense.2")), PlanOptions(slots=2)),
    "dense, tight": Case((block("dense.0"), block("dense.1")), PlanOptions(slots=1, receive_depth=1, **TIGHT)),
    "experts": Case((EXPERTS, DIFFUSION), PlanOptions(slots=1)),
    "experts, tight": Case((EXPERTS, DIFFUSION), PlanOptions(**TIGHT)),
    "uneven": Case((UNEVEN,)),
    "uneven, tight": Case((UNEVEN,), PlanOptions(receive_depth=3, **TIGHT)),
    "dims": Case((DIMS, UNEVEN), PlanOptions(slots=1)),
    "dims, unbundled": Case((DIMS,), PlanOptions(bundle_bytes=0, min_run_bytes=0, chunk_bytes=1024, put_bytes=4096)),
    "mixed": Case((MIXED,)),
    "mixed, tight": Case((MIXED,), PlanOptions(receive_depth=2, **TIGHT)),
    "dense, multicast": Case((block("dense.0"), UNEVEN), PlanOptions(slots=1, multicast="on", **TIGHT)),
    "mixed, switch": Case((MIXED, UNEVEN), PlanOptions(receive_depth=2, switch_reduce="on", **TIGHT)),
    "dense, switch in slots": Case(
        (block("dense.0"), block("dense.1")),
        PlanOptions(slots=1, slot_reuse=True, switch_reduce="on", multicast="on", **TIGHT),
    ),
    "frozen": Case((FROZEN, block("dense", grad_dtype=None), UNEVEN), PlanOptions(slots=2)),
    "slots": Case((block("dense.0"), DIMS, block("dense.2")), PlanOptions(slots=1, slot_reuse=True)),
    "slots, tight": Case((block("dense.0"), EXPERTS), PlanOptions(slots=2, slot_reuse=True, **TIGHT)),
    "slots, rings": Case((UNEVEN, MIXED), PlanOptions(slots=1, slot_reuse=True, receive_depth=2, **TIGHT)),
    "padded": Case((UNEVEN, block("dense")), PlanOptions(padded_storage=True)),
}


def values(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Reproducible data: any bits for integers, moderate numbers otherwise."""
    made = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=made).to(torch.bool)
    if dtype.startswith(("int", "uint")):
        return torch.randint(0, 100, shape, generator=made).to(to_torch(dtype))
    return torch.randn(shape, generator=made, dtype=torch.float64).to(to_torch(dtype))


def cut(tensor: torch.Tensor, dim: int, owners: int, position: int) -> torch.Tensor:
    """The shard of a position, as ``torch.chunk`` cuts: what FSDP2 does."""
    extent = tensor.shape[dim]
    rows = -(-extent // owners)
    start = min(position * rows, extent)
    return tensor.narrow(dim, start, min(rows, extent - start)).contiguous()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def reference_sum(pieces: list[torch.Tensor], team: Team, owner: int, by_switch: bool = False) -> torch.Tensor:
    """Float32 sum of one owner's pieces (by position) in the order that a plan promises.

    Within a node rank by rank; the own node's sum, then the other nodes', nearest predecessor first. By the switch,
    as the host transport stands in for it, these come in groups, each summed over the ranks that hold them.
    """

    def node_sum(node: int) -> torch.Tensor:
        total = None
        for position in team.grid[node]:
            piece = pieces[position].float()
            total = piece if total is None else total + piece
        assert total is not None
        return total

    own, local = team.seat(owner)
    total, others = node_sum(own), [node_sum((own - j) % team.nodes) for j in range(1, team.nodes)]
    if by_switch:
        groups = [others[first : first + team.per_node] for first in range(0, len(others), team.per_node)]
        others = []
        for group in groups:
            places = group + [torch.zeros_like(total)] * (team.per_node - len(group))
            turned = [places[(rank - local) % team.per_node] for rank in range(team.per_node)]
            others.append(sum(turned[1:], start=turned[0]))
    for other in others:
        total = total + other
    return total


def team(compiled: Compiled, unit: str, rank: int) -> tuple[Team, tuple[int, ...], int]:
    """Team, world ranks and position of a rank for a unit."""
    group, position = compiled.group(unit, rank)
    return team_of(group, compiled.topology), group, position
