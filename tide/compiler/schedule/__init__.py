"""Programs: which rank moves what, when, and after which signals."""

from tide.compiler.schedule.all_gather import all_gather_program
from tide.compiler.schedule.reduce_scatter import chunk_elements, reduce_scatter_program
from tide.compiler.schedule.unit import UnitContext

__all__ = ["UnitContext", "all_gather_program", "chunk_elements", "reduce_scatter_program"]
