"""What a step costs, at first order: a fixed latency plus bytes over a rate. See :mod:`tide.compiler.clock`.

A write through a multicast address leaves the sender once, but reaches every rank of the node, the sender
included. When all ranks write at a time, as they do in an all-gather, each rank's port takes in what all of them
send: as many bytes a write as there are ranks. So multicast saves copies, not time on the port: it wins where a
copy's fixed cost counts and loses on large units, as measured elsewhere too (pytorch/pytorch#191407, 8 H100s).
An in-switch sum likewise brings the reader one word for each sum, but every rank's port sends one word to each
reader of the node.
"""

from __future__ import annotations

from tide.topology import Links


def copy_seconds(links: Links, copies: int, nbytes: int) -> float:
    """A batch of copies to one peer."""
    return copies * links.copy_latency + nbytes / links.copy_engine


def switch_seconds(links: Links, ranks: int, nbytes: int) -> float:
    """Sums of ``nbytes`` over all ``ranks`` of a node, read at once, while each of the others does so too."""
    return links.kernel_latency + links.switch_latency + ranks * nbytes / links.copy_engine


def multicast_seconds(links: Links, ranks: int, copies: int, nbytes: int) -> float:
    """The same copies to all ``ranks`` of a node at once, while each of the others does so too."""
    return links.switch_latency + copies * links.copy_latency + ranks * nbytes / links.copy_engine
