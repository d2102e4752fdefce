"""Simulated transport: the programs of all ranks in one process, on real bytes, in any legal order.

It is an independent check of what the compiler proves: it shares no code with the proof, the kernels or
the other transports, only the steps' meaning.
"""

from tide.transport.simulated.explore import Exploration, explore
from tide.transport.simulated.families import FAMILIES
from tide.transport.simulated.reference import error_bound, reference_reduce_scatter
from tide.transport.simulated.sequences import training_sequence
from tide.transport.simulated.simulation import Operation, Result, Simulation
from tide.transport.simulated.trace import chrome_trace
from tide.transport.simulated.transport import SimulatedTransport, SimulatedWorld

__all__ = [
    "FAMILIES",
    "Exploration",
    "Operation",
    "Result",
    "SimulatedTransport",
    "SimulatedWorld",
    "Simulation",
    "chrome_trace",
    "error_bound",
    "explore",
    "reference_reduce_scatter",
    "training_sequence",
]
