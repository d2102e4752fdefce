"""What a caller gives to the CUDA transport and gets from it: settings and tickets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tide.compiler.steps import Buffer
from tide.errors import InputError, PeerError
from tide.transport.base import Binding, Ticket
from tide.transport.cuda.lowered import Awaited, Crossing, Lowered
from tide.transport.cuda.wire import COMMUNICATORS

if TYPE_CHECKING:
    import torch

    from tide.transport.cuda.transport import CudaTransport

#: How steps between nodes are carried.
PUTS = ("auto", "nccl", "copy")
#: CTAs of the kernels, by measurement (benchmarks/cuda_check.py): as few as keep up with the copy engines.
PLACE_CTAS = 32
ACCUMULATE_CTAS = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of the transport; they must be the same on every rank.

    Parameters
    ----------
    place_ctas, accumulate_ctas : int
        CTAs of a launch at most.
    signals : str
        ``"write"``: the stream writes the peer's flag word; ``"copy"``: a copy of four bytes does; ``"auto"``:
        by what the driver supports.
    puts : str
        Steps between nodes: ``"nccl"``: NCCL's one-sided calls; ``"copy"``: copies and flag words, which reach
        virtual nodes only; ``"auto"``: NCCL, or copies between virtual nodes where it cannot put.
    wire_signals : str
        How a put is told and awaited: ``"nccl"``: by NCCL's signals; ``"word"``: by flag words that are put after
        the data, and awaited as within a node. NCCL holds everything on a communicator back behind a wait of its
        own, and nobody can set one free whose peer is gone: the process then ends itself.
    communicators : int
        NCCL communicators that those steps are spread over: 1, 2 (one for each collective) or 4 (one for each kind
        of signal). NCCL runs what is issued to one of them in order, over all streams.
    multicast : str
        How steps that need the switch are carried out: ``"switch"``, or ``"standin"``, by copies to each peer and by
        sums over the peers' memory in rank order: the same programs on GPUs without multicast, for tests.
    fused_casts : bool
        Cast all pieces of a shard in one launch, which counts in words of this rank's own what it has done, instead
        of by one launch and event each.
    """

    place_ctas: int = PLACE_CTAS
    accumulate_ctas: int = ACCUMULATE_CTAS
    signals: str = "auto"
    puts: str = "auto"
    wire_signals: str = "nccl"
    communicators: int = 4
    multicast: str = "switch"
    fused_casts: bool = True

    def __post_init__(self) -> None:
        if self.signals not in ("auto", "write", "copy"):
            raise InputError(f"signals must be 'auto', 'write' or 'copy', got {self.signals!r}")
        if self.puts not in PUTS:
            raise InputError(f"puts must be {', '.join(map(repr, PUTS[:-1]))} or {PUTS[-1]!r}, got {self.puts!r}")
        if self.wire_signals not in ("nccl", "word"):
            raise InputError(f"wire_signals must be 'nccl' or 'word', got {self.wire_signals!r}")
        if self.communicators not in COMMUNICATORS:
            raise InputError(f"communicators must be one of {COMMUNICATORS}, got {self.communicators!r}")
        if self.multicast not in ("switch", "standin"):
            raise InputError(f"multicast must be 'switch' or 'standin', got {self.multicast!r}")
        for name in ("place_ctas", "accumulate_ctas"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


class CudaTicket(Ticket):
    """A collective on the device's streams.

    The transport holds the call's tensors until the collective has ended; gradients only until
    :meth:`wait_released` or :meth:`wait`, and what they are reduced into only until :meth:`wait`: tickets are
    looked through when the next collective of their kind comes, so a step's reduced gradients would live until
    the next backward. Running sums, which nobody else has, it holds to the end. A caller that waits on another
    stream than the one the tensors' memory belongs to has to keep them until that stream is ordered after the
    wait, too.
    """

    def __init__(
        self, transport: CudaTransport, number: int, binding: Binding, lowered: Lowered, behind: list[CudaTicket]
    ) -> None:
        self.transport, self.number = transport, number
        self.unit, self.collective = binding.unit, lowered.program.collective
        self.awaited: Sequence[Awaited] = lowered.awaited
        self.crossings: Sequence[Crossing] = lowered.crossings
        self.puts = lowered.puts
        self.marks: list[int] = []
        self.indices = lowered.indices
        consumed = transport.words.consumed
        self.base = [consumed[index] for index in lowered.indices]
        self.entry = 0
        self.gate = 0  # the slot's last readers
        #: Collectives of the slot whose ends this one begins after.
        self.behind: list[CudaTicket] = behind
        self.ends: list[int] = []
        self.released: list[int] = []
        self.midway: list[int] = []  # those of the released events that are no ends
        self.gradients: object = None
        self.outputs: object = None
        self.tensors: object = None
        self.finished = self.awaited_for = False

    def hold(self, lowered: Lowered, tensors: list[torch.Tensor]) -> None:
        """Takes what the device may read and write from now on, however far the host comes."""
        if self.collective == "reduce_scatter":
            self.gradients = lowered.of(Buffer.GRAD, tensors)
            self.outputs = lowered.of(Buffer.OUT, tensors)
            # Nobody but the ticket holds the running sums: they stay, whichever stream waits for it.
            self.tensors = lowered.of(Buffer.RUNNING, tensors), lowered.keep_alive()
        else:
            self.tensors = tensors, lowered.keep_alive()

    def wait(self) -> None:
        """Orders what the caller's current stream does next after the whole collective."""
        self.transport.order_after(self, self.ends)
        self.outputs, self.awaited_for = None, True

    def wait_released(self) -> bool:
        """Orders what the caller's current stream does next after the last read of the gradients.

        Returns
        -------
        bool
            Whether nothing comes after that: :meth:`wait` has been done, too.
        """
        if self.released == self.ends:
            self.wait()
            return True
        self.transport.order_after(self, self.released)
        return False

    def synchronize(self) -> None:
        """Blocks the host until the collective has ended.

        Raises
        ------
        PeerError
            If a peer did not answer within the deadline.
        """
        while not self.transport.books.is_finished(self):
            time.sleep(5e-5)
        if self.transport.broken is not None:
            raise PeerError(self.transport.broken)
