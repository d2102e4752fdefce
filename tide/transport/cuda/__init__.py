"""Copy engines and Triton kernels on the GPUs of one NVLink node."""

from tide.transport.cuda.ticket import CudaTicket, Settings
from tide.transport.cuda.transport import CudaTransport

__all__ = ["CudaTicket", "CudaTransport", "Settings"]
