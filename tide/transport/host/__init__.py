"""Host transport: ranks are processes of one machine, the arena is shared memory."""

from tide.transport.host.transport import HostTransport

__all__ = ["HostTransport"]
