"""What ranks do in the host transport's tests: one collective after another, checked bit by bit."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence

import torch
from host_cases import CASES, TIGHT, UNEVEN, Case, bits, block, cut, reference_sum, team, values

from tide.compiler.compile import Compiled
from tide.compiler.model import Mesh, Unit
from tide.compiler.options import PlanOptions
from tide.session import Session
from tide.topology import Topology
from tide.torch_types import to_torch
from tide.transport.host import HostTransport
from tide.transport.host import transport as transport_module
from tide.transport.host.signals import membarrier_fence


def seed_of(*parts: object) -> int:
    """The same number on every rank."""
    return zlib.crc32(repr(parts).encode())


def check_all_gather(session: Session, unit: Unit, step: int) -> None:
    """Gathers fresh values and compares them with the whole that every rank can make for itself."""
    compiled, rank = session.compiled, session.rank
    _, group, position = team(compiled, unit.name, rank)
    replica = unit.mesh.groups.index(group)
    wholes = [values(p.shape, p.shard_dtype, seed_of(p.name, step, replica)) for p in unit.parameters]
    shards = [cut(whole, p.dim, len(group), position) for whole, p in zip(wholes, unit.parameters, strict=True)]
    session.all_gather(unit.name, shards).wait()
    for p, whole in zip(unit.parameters, wholes, strict=True):
        found = session.whole(unit.name)[p.name]
        assert found.shape == p.shape, f"{p.name}: {found.shape}"
        expected = whole.to(to_torch(p.dtype))
        assert torch.equal(bits(found), bits(expected)), f"rank {rank}, {p.name}, step {step}: gathered bits differ"


def check_reduce_scatter(
    session: Session, unit: Unit, step: int, subset: Sequence[int] | None = None, scale: float = 1.0
) -> None:
    """Reduces fresh gradients and compares with the fixed-order float32 sum, and that with float64."""
    compiled, rank = session.compiled, session.rank
    grid, group, position = team(compiled, unit.name, rank)
    indices = [i for i, p in enumerate(unit.parameters) if p.trainable] if subset is None else list(subset)
    grads = {}
    for i in indices:
        p = unit.parameters[i]
        grads[i] = [values(p.shape, p.grad_dtype or "", seed_of(p.name, step, r, "grad")) for r in group]
    divisor = float(len(group))
    outs = session.new_outs(unit.name, indices, "cpu")
    given = {i: grads[i][position] for i in indices}
    if step % 2:  # not contiguous
        given = {i: g.t().contiguous().t() if g.dim() == 2 else g for i, g in given.items()}
    session.reduce_scatter(unit.name, given, outs, scale=scale, divisor=divisor).wait()
    for i in indices:
        p = unit.parameters[i]
        pieces = [cut(g, p.dim, len(group), position) for g in grads[i]]
        expected = reference_sum(pieces, grid, position, unit.name in compiled.spread)
        if scale != 1.0:
            expected = expected * scale
        expected = (expected / divisor).to(to_torch(p.out_dtype))
        assert torch.equal(bits(outs[i]), bits(expected)), (
            f"rank {rank}, {p.name}, step {step}: reduced bits differ by "
            f"{(outs[i].double() - expected.double()).abs().max() if expected.numel() else 0}"
        )
        exact = torch.stack([piece.double() for piece in pieces]).sum(0) * scale / divisor
        bound = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[p.out_dtype]
        assert torch.allclose(outs[i].double(), exact, rtol=bound, atol=bound), f"{p.name}: far from the float64 sum"


def exercise(compiled: Compiled, rank: int, steps: int = 2) -> None:
    """Forward and backward over all units that the rank holds, ``steps`` times."""
    transport = HostTransport.open(compiled, rank, timeout=30)
    session = Session(compiled, transport, poison=True)
    units = [unit for unit in compiled.spec.units if unit.mesh.locate(rank) is not None]
    try:
        for step in range(steps):
            for unit in units:
                check_all_gather(session, unit, step)
                session.release(unit.name)
                assert is_poisoned(session, unit), f"{unit.name}: not poisoned"
            for unit in reversed(units):
                check_all_gather(session, unit, step + 1000)
                check_reduce_scatter(session, unit, step, scale=1.0 if step % 2 else 0.3)
                session.release(unit.name)
                trainable = [i for i, p in enumerate(unit.parameters) if p.trainable]
                if len(trainable) > 1:
                    check_reduce_scatter(session, unit, step + 7, trainable[step % 2 :: 2])
    finally:
        session.close()


def stress(rank: int, world: int, nodes: int, rounds: int, seed: int, reuse: bool = False) -> int:
    """Gathers and reduces over two shared slots while every rank dawdles at its own random moments."""
    options = PlanOptions(slots=2, receive_depth=2, slot_reuse=reuse, **TIGHT)
    case = Case((block("a"), block("b"), block("c"), UNEVEN), options)
    compiled = case.compile(Topology(nodes=nodes, gpus_per_node=world // nodes, virtual=True))
    session = Session(compiled, HostTransport.open(compiled, rank, timeout=30), poison=bool(seed % 2))
    own, shared = random.Random(f"{seed}, rank {rank}"), random.Random(seed)

    def dawdle() -> None:
        if own.random() < 0.4:
            time.sleep(own.random() * 0.003)

    for index in range(rounds):
        unit = shared.choice(compiled.spec.units)
        dawdle()
        if shared.random() < 0.5:
            check_all_gather(session, unit, index)
            dawdle()
            session.release(unit.name)
        else:
            check_reduce_scatter(session, unit, index)
    session.close()
    return rounds


def is_poisoned(session: Session, unit: Unit) -> bool:
    """Whether every byte of the unit's parameters is a one."""
    return all(bool((bits(t) == 255).all()) for t in session.storage(unit.name))


def run_cases(
    rank: int, world: int, nodes: int, names: Sequence[str], meshes: tuple[Mesh, ...] = (), variant: str = ""
) -> int:
    """Exercises the named cases; returns how many.

    The variants stand for other machines: one without futex(2), and one whose fence goes through the kernel.
    """
    if variant == "polling":
        transport_module.futex_works = lambda: False
    elif variant == "membarrier":
        transport_module.make_fence = lambda: membarrier_fence()
    topology = Topology(nodes=nodes, gpus_per_node=world // nodes, virtual=True)
    for name in names:
        try:
            exercise(CASES[name].compile(topology, meshes), rank)
        except Exception as error:
            raise AssertionError(f"case {name!r}, {topology}") from error
    return len(names)
