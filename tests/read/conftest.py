"""A process group of any size in one process: collectives do nothing, meshes and shards are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def _world(size: int, rank: int = 0) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def fake_world() -> Callable[..., AbstractContextManager[None]]:
    """``with fake_world(size, rank=0):`` opens the group and closes it at the end."""
    return _world
