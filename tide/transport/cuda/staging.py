"""Pinned host buffers from which tables travel to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tide.transport.cuda.bases import Int64s

if TYPE_CHECKING:
    from tide.transport.cuda.ticket import CudaTicket

#: Buffers of one table at most; with all of them on their way, the host waits for the oldest.
MOST = 8


class Staging:
    """Copies of a table on their way to the device.

    The host runs far ahead of the device, so a table may change again before its last copy has left: each change
    takes a buffer that is free.

    Parameters
    ----------
    driver : Driver
        Driver calls.
    device : torch.device
        Where the table goes.
    """

    def __init__(self, driver: Any, device: torch.device) -> None:
        self._driver, self._pinned = driver, device.type == "cuda"
        #: Each with its memory as an array of numpy's, and the collective with which its last copy left.
        self._buffers: list[tuple[torch.Tensor, Int64s, CudaTicket | None]] = []
        self._turn = self._size = 0
        self.dirty = False

    def fill(self, words: Int64s) -> None:
        """Takes a copy of the table; :meth:`send` brings it to the device."""
        if not self.dirty:  # otherwise the buffer of the last fill never left
            self._turn = self._free()
        self._size = len(words)
        _, array, ticket = self._buffers[self._turn]
        if len(array) < self._size:
            buffer = torch.empty(self._size, dtype=torch.int64, pin_memory=self._pinned)
            array = buffer.numpy()
            self._buffers[self._turn] = buffer, array, ticket
        array[: self._size] = words
        self.dirty = True

    def _free(self) -> int:
        """A buffer whose last copy has left: the collective that it was made for has ended."""
        for step in range(1, len(self._buffers) + 1):
            turn = (self._turn + step) % len(self._buffers)
            ticket = self._buffers[turn][2]
            if ticket is None or ticket.finished:
                return turn
        if len(self._buffers) < MOST:
            buffer = torch.empty(0, dtype=torch.int64)
            self._buffers.append((buffer, buffer.numpy(), None))
            return len(self._buffers) - 1
        turn = (self._turn + 1) % len(self._buffers)
        ticket = self._buffers[turn][2]
        for event in [] if ticket is None else list(ticket.ends):
            self._driver.synchronize_event(event)
        return turn

    def send(self, memory: int, stream: int, ticket: CudaTicket) -> None:
        """Issues the copy to device memory, as part of a collective."""
        buffer, array, _ = self._buffers[self._turn]
        if self._size:
            self._driver.check(
                self._driver.upload(memory, buffer.data_ptr(), 8 * self._size, stream), "upload of a table"
            )
        self._buffers[self._turn] = buffer, array, ticket
        self.dirty = False

    def close(self) -> None:
        """Gives the buffers back, once all copies have left."""
        self._buffers.clear()
