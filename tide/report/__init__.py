"""Reading a plan: report, pictures, traces. Nothing here is needed to run one."""

from tide.report.arena_picture import arena_svg
from tide.report.memory import Memory, MemoryRow, memory
from tide.report.parameter_picture import parameter_svg
from tide.report.plan_report import Cost, PlanReport, UnitRow, plan_report
from tide.report.receive import ReceiveRow, receive_table
from tide.report.schedule_picture import schedule_svg
from tide.report.svg import Svg
from tide.report.trace import chrome_trace

__all__ = [
    "Cost",
    "Memory",
    "MemoryRow",
    "PlanReport",
    "ReceiveRow",
    "Svg",
    "UnitRow",
    "arena_svg",
    "chrome_trace",
    "memory",
    "parameter_svg",
    "plan_report",
    "receive_table",
    "schedule_svg",
]
