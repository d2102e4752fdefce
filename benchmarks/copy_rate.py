"""What copy engines reach between the GPUs of this machine: the ceiling that figures are compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tide.transport.agreement import control_group
from tide.transport.cuda.arena import open_arena
from tide.transport.cuda.driver import Driver

#: Stream, destination, source and bytes of a copy; addresses, as torch knows no tensors in a peer's memory.
Copy = tuple[torch.cuda.Stream, int, int, int]


def copy_engine_rate(nbytes: int = 1 << 30, provider: str | None = None) -> dict[str, float]:
    """Copies to and from peers by copy engine on this machine, all ranks at once, in GB/s of the slowest rank.

    ``pull`` from and ``push`` to the next rank. With more than two ranks also ``push to all``, the peers in turn,
    each rank beginning with the one after it, as TIDE's programs do; and ``push to all at once``, on a stream each.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.Stream() for _ in range(world - 1)]
    local = torch.ones(nbytes, dtype=torch.uint8, device=device)
    driver = Driver(device.index)
    with control_group(dist.group.WORLD, 60.0) as control:
        arena = open_arena(nbytes, rank, device, dist.group.WORLD, control, 60.0, provider)
        jobs = copy_jobs(rank, world, nbytes, arena.addresses, local.data_ptr(), streams)
        rates = {name: _copy_rate(driver, job) for name, job in jobs.items()}
        torch.cuda.synchronize()
        dist.barrier()
        arena.close()
        arena.owner = None
    driver.close()
    return rates


def copy_jobs(
    rank: int, world: int, nbytes: int, addresses: dict[int, int], local: int, streams: list[torch.cuda.Stream]
) -> dict[str, list[Copy]]:
    """The copies of each measurement; each rank has a part of its own in every peer's memory."""
    peers = [(rank + 1 + turn) % world for turn in range(world - 1)]
    following = addresses[peers[0]]
    jobs = {"pull": [(streams[0], local, following, nbytes)], "push": [(streams[0], following, local, nbytes)]}
    if world > 2:
        part = nbytes // len(peers) // 4096 * 4096
        pairs = [(addresses[p] + ((rank - p) % world - 1) * part, local + i * part) for i, p in enumerate(peers)]
        jobs["push to all"] = [(streams[0], *pair, part) for pair in pairs]
        jobs["push to all at once"] = [(stream, *pair, part) for stream, pair in zip(streams, pairs, strict=True)]
    return jobs


def _copy_rate(driver: Driver, job: list[Copy], repeats: int = 8) -> float:
    """GB/s of copies on their streams, from the first's begin to the last's end; the slowest rank's best."""
    times = []
    first, others = job[0][0], list(dict.fromkeys(stream for stream, *_ in job[1:] if stream is not job[0][0]))
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000)  # the host issues all of them meanwhile
            begin.record()
        for stream in others:
            stream.wait_event(begin)
        for stream, destination, source, size in job:
            driver.check(driver.copy(destination, source, size, stream.cuda_stream), "copy")
        for stream in others:
            first.wait_stream(stream)
        end.record(first)
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    rate = torch.tensor(sum(size for *_, size in job) / min(times) / 1e6, device="cuda")
    dist.all_reduce(rate, dist.ReduceOp.MIN)
    return float(rate)
