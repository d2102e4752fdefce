"""What the CUDA transport found and chose, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

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
    rows.append(("multicast", "off: not used by this transport"))
    rows.append(("network", "off: virtual nodes only" if compiled.topology.nodes > 1 else "off: one node"))
    rows.append(("place", f"Triton, at most {transport.settings.place_ctas} CTAs"))
    rows.append(("accumulate", f"Triton, at most {transport.settings.accumulate_ctas} CTAs"))
    rows.append(("deadline", f"{transport.watchdog.timeout:g} s"))
    rows.append(("driver", f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"))
    if transport.device.type == "cuda":
        rows.append(("device", torch.cuda.get_device_name(transport.device)))
    return rows


def _why_copies(transport: CudaTransport) -> str:
    from tide.transport.cuda.transport import NO_PEER_WRITES

    if transport.settings.signals == "copy":
        return "asked for"
    return f"a driver of CUDA {NO_PEER_WRITES // 1000}.{NO_PEER_WRITES % 1000 // 10} or later writes to no peer"
