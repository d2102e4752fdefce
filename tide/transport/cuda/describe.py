"""What the CUDA transport found and chose, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tide.transport.cuda.multicast import unavailable

if TYPE_CHECKING:
    from tide.transport.cuda.transport import CudaTransport


def describe(transport: CudaTransport) -> Sequence[tuple[str, str]]:
    """Rows of ``(capability, answer with reason)``."""
    driver, compiled = transport.driver, transport.compiled
    arena = transport.arena
    rows = [("arena", f"{arena.provider}, {compiled.arena.size} bytes, registered in {arena.seconds:.3f} s")]
    rows += arena.notes
    peers = sorted(rank for rank in arena.addresses if rank != transport.rank)
    rows += [(f"peer access {transport.rank} → {rank}", "mapped") for rank in peers]
    missing = [rank for rank in range(compiled.arena.world_size) if rank not in arena.addresses]
    rows += [(f"peer access {transport.rank} → {rank}", "none") for rank in missing]
    rows.append(
        ("copies", "cuMemcpyBatchAsync")
        if driver.copy_batch is not None
        else ("copies", "one by one: this driver has no cuMemcpyBatchAsync (570 or later has)")
    )
    rows.append(
        ("signals", "stream writes to the peer's flag word")
        if transport.write_to_peers
        else ("signals", f"copies of four bytes: {_why_copies(transport)}; they queue behind payload copies")
    )
    rows.append(("multicast", _multicast(transport)))
    rows.append(("network", _network(transport)))
    launches = "all pieces of a shard" if transport.settings.fused_casts else "each piece of a shard"
    rows.append(("place", f"Triton, at most {transport.settings.place_ctas} CTAs; one launch for {launches}"))
    rows.append(("accumulate", f"Triton, at most {transport.settings.accumulate_ctas} CTAs"))
    rows.append(("deadline", f"{transport.watchdog.timeout:g} s"))
    rows.append(("driver", f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"))
    if transport.device.type == "cuda":
        rows.append(("device", torch.cuda.get_device_name(transport.device)))
    return rows


def _network(transport: CudaTransport) -> str:
    topology = transport.compiled.topology
    if topology.nodes == 1:
        return "off: one node"
    if transport.wire is None:
        return "off: virtual nodes, by copies and flag words"
    signals = "signals" if transport.wire.words is None else "flag words"
    if topology.virtual:
        return f"NCCL puts and {signals} between virtual nodes; no network is crossed"
    return f"NCCL puts and {signals} between nodes"


def _multicast(transport: CudaTransport) -> str:
    if transport.settings.multicast == "standin":
        return "off: stand-in, copies to each peer"
    if transport.arena.multicast is not None:
        return "on: address from NCCL" + (", of its own in each node" if transport.compiled.topology.nodes > 1 else "")
    reason = unavailable(transport.compiled.topology, transport.device)
    return f"off: {reason}" if reason is not None else "off: no program of the plan goes through the switch"


def _why_copies(transport: CudaTransport) -> str:
    from tide.transport.cuda.transport import NO_PEER_WRITES

    if transport.settings.signals == "copy":
        return "asked for"
    return f"a driver of CUDA {NO_PEER_WRITES // 1000}.{NO_PEER_WRITES % 1000 // 10} or later writes to no peer"
