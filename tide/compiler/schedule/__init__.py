"""Programs: which rank moves what, when, and after which signals."""

from tide.compiler.schedule.all_gather import all_gather_program
from tide.compiler.schedule.areas import areas_of, arena_chunk, slot_areas
from tide.compiler.schedule.bundle import bundle_of
from tide.compiler.schedule.chunks import chunk_elements
from tide.compiler.schedule.scatter_routes import reduce_scatter_program, reduce_scatter_rows
from tide.compiler.schedule.unit import UnitContext

__all__ = [
    "UnitContext",
    "all_gather_program",
    "areas_of",
    "arena_chunk",
    "bundle_of",
    "chunk_elements",
    "reduce_scatter_program",
    "reduce_scatter_rows",
    "slot_areas",
]
