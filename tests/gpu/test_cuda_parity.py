"""Everything that FSDP2 offers at two ranks, on two GPUs; see `parity_ranks`."""

from __future__ import annotations

from typing import Any

import pytest
from parity_ranks import options, start

from tide.transport.cuda import nccl


def failures(rows: list[dict[str, Any]]) -> str:
    return "\n".join(f"{row['name']}: {row['why']}" for row in rows if row.get("outcome") == "failed")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["plain", "poisoned"])
@pytest.mark.parametrize("part", range(2))
def test_parity(part: int, debug: list[str]) -> None:
    rows = start(options(["parity", "--part", str(part), "--parts", "2", *debug]))
    assert sum(row.get("outcome") == "passed" for row in rows) > 20
    assert not failures(rows)


@pytest.mark.multi_gpu
@pytest.mark.skipif(nccl.unusable() is not None, reason=f"puts between nodes: {nccl.unusable()}")
@pytest.mark.parametrize("signals", ["nccl", "word"])
def test_between_virtual_nodes(signals: str) -> None:
    wire = ["--nodes", "2", "--puts", "nccl", "--signals", signals, "--steps", "100"]
    rows = start(options(["stress", "parity", "--parts", "2", *wire]))
    assert sum(row.get("outcome") == "passed" for row in rows) > 20
    assert not failures(rows)


@pytest.mark.multi_gpu
def test_stress() -> None:
    rows = start(options(["stress"]))
    assert sum(row.get("collectives", 0) for row in rows) >= 5000
    assert not failures(rows)


@pytest.mark.multi_gpu
def test_memory_stays() -> None:
    assert not failures(start(options(["memory"])))


@pytest.mark.slow
def test_on_a_cpu() -> None:
    """The same script, briefly, between CPU ranks."""
    few = ["--device", "cpu", "--steps", "3", "--only", "float32", "--only", "dim 1 and 2"]
    rows = start(options(["stress", "parity", "--debug", *few]))
    assert sum(row.get("outcome") == "passed" for row in rows) == 5 + 2, rows
    assert not failures(rows)
