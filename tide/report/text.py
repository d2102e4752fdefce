"""A plan's report as aligned text, at most 120 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from tide.report.memory import COLUMNS, EXCLUDED
from tide.report.plan_report import Cost, PlanReport, UnitRow
from tide.report.units import show_bytes, show_name, show_time

#: Columns that every line fits.
WIDTH = 120
_GAP = "  "


def table(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Lines of a table whose first row is the heading.

    Columns in ``left`` are left-aligned, the others right-aligned. The first column is cut in its middle
    where the lines would be too long.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rest = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    widths[0] = max(min(widths[0], WIDTH - rest), 8)
    lefts = set(left)
    lines = []
    for row in rows:
        cells = [shorten(row[0], widths[0]), *row[1:]]
        padded = [
            cell.ljust(width) if column in lefts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(_GAP.join(padded).rstrip())
    lines.insert(1, "─" * min(sum(widths) + len(_GAP) * (len(widths) - 1), WIDTH))
    return lines


def shorten(text: str, width: int) -> str:
    """Cuts the middle of a text that is longer than ``width``."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3  # the end of a parameter's or unit's name tells more than its start
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def wrap(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of a paragraph."""
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=True, break_on_hyphens=False
    )


def render(report: PlanReport) -> str:
    """The whole report."""
    blocks = [
        _title(report),
        _units(report),
        _collectives(report),
        _reasons(report),
        _memory(report),
        _rest(report),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def changed_options(report: PlanReport) -> str:
    """Options that are not the defaults."""
    from tide.compiler.options import PlanOptions

    defaults = PlanOptions().to_dict()
    changed = [f"{name}={value}" for name, value in report.options.items() if defaults.get(name) != value]
    return ", ".join(changed) or "defaults"


def _title(report: PlanReport) -> list[str]:
    line = f"TIDE plan of {report.source}: {report.topology}, rank {report.rank}"
    return [
        *wrap(line, rest="  "),
        *wrap(
            f"options: {changed_options(report)}; digest {report.digest[:12]}; arena {show_bytes(report.arena_nbytes)}"
        ),
    ]


def slot_range(slots: Sequence[int]) -> str:
    """Slot numbers, shortened: ``0``, ``1, 2``, ``1–80``."""
    if len(slots) > 2:
        together = list(slots) == list(range(slots[0], slots[-1] + 1))
        return f"{slots[0]}–{slots[-1]}" if together else f"{slots[0]}, {slots[1]}, …"
    return ", ".join(map(str, slots))


def padding(nbytes: int, percent: float) -> str:
    """Padding avoided in bytes and per cent."""
    return f"{show_bytes(nbytes)} ({percent:.2f} %)" if nbytes else "none"


def _units(report: PlanReport) -> list[str]:
    rows = [["units", "params", "storage", "padding avoided", "descriptors", "transfers", "bundle", "slot"]]
    for row in report.rows:
        rows.append(
            [
                row.label,
                str(row.parameters),
                show_bytes(row.nbytes),
                padding(row.padding_avoided, row.padding_percent),
                f"{row.descriptors:,}",
                f"{row.transfers:,}",
                f"{row.bundled} of {show_bytes(row.bundle_nbytes)}" if row.bundled else "–",
                slot_range(row.slots),
            ]
        )
    sums = report.totals
    rows.append(
        [
            f"all {sums['units']:.0f} units",
            f"{sums['parameters']:.0f}",
            show_bytes(sums["nbytes"]),
            padding(int(sums["padding_avoided"]), sums["padding_percent"]),
            f"{sums['descriptors']:,.0f}",
            f"{sums['transfers']:,.0f}",
            "",
            "",
        ]
    )
    return table(rows)


def reasons(report: PlanReport) -> dict[str, int]:
    """Sentences that explain routes, bundles and slots, numbered in the order in which rows need them."""
    found: dict[str, int] = {}
    for row in report.rows:
        for text in (row.all_gather_reason, row.reduce_scatter_reason, row.bundle_reason, row.slot_reason):
            if text and not text.startswith("no reduce-scatter"):
                found.setdefault(text, len(found) + 1)
    return found


def _collectives(report: PlanReport) -> list[str]:
    numbers = reasons(report)
    head = ["collectives", "", "predicted", "SM time", "transfers", "NVLink", "network", "bound by", "route"]
    rows = [head]

    def add(name: str, which: str, cost: Cost, route: str, why: str) -> None:
        rows.append(
            [
                name,
                which,
                show_time(cost.seconds) + ("*" if cost.assumed else ""),
                show_time(cost.sm_seconds),
                f"{cost.transfers:,}",
                show_bytes(cost.nvlink_bytes) if cost.nvlink_bytes else "–",
                show_bytes(cost.network_bytes) if cost.network_bytes else "–",
                cost.bound,
                f"{route} [{numbers[why]}]",
            ]
        )

    for row in report.rows:
        add(row.label, "gather", row.all_gather, row.all_gather_route, row.all_gather_reason)
        if row.reduce_scatter is not None:
            add("", "reduce", row.reduce_scatter, row.reduce_scatter_route, row.reduce_scatter_reason)
        else:
            rows.append(["", "reduce", "none", "", "", "", "", "", "all parameters are frozen"])
    sums = report.totals
    for name, which in (("all, one after the other", "all_gather"), ("", "reduce_scatter")):
        seconds, busy = sums[f"{which}_seconds"], sums[f"{which}_sm_seconds"]
        short = "gather" if which == "all_gather" else "reduce"
        rows.append([name, short, show_time(seconds), show_time(busy), "", "", "", "", ""])
    return table(rows, left=(0, 1, 7, 8))


def prediction_note(report: PlanReport) -> str:
    """What the predictions rest on."""
    links = report.links
    note = (
        "Times are predictions from stated rates, not measurements: "
        f"copy engine {links['copy_engine'] / 1e9:.0f} GB/s, network {links['network'] / 1e9:.0f} GB/s a rank, "
        f"memory {links['memory'] / 1e12:.2f} TB/s. "
        "SM time: bytes that kernels read and write over the memory rate."
    )
    costs = [cost for row in report.rows for cost in (row.all_gather, row.reduce_scatter) if cost is not None]
    if any(cost.assumed for cost in costs):
        note += " *: shards differ so much between nodes that other nodes' lateness was left out."
    return note


def _reasons(report: PlanReport) -> list[str]:
    lines: list[str] = []
    where: dict[str, list[str]] = {}
    for row in report.rows:
        for text in (row.bundle_reason, row.slot_reason):
            if text:
                where.setdefault(text, []).append(row.label)
    for text, number in reasons(report).items():
        suffix = f" ({'; '.join(where[text])})" if text in where else ""
        lines += wrap(text + suffix, first=f"[{number}] ")
    lines += wrap(prediction_note(report), rest="")
    return lines


def memory_rows(report: PlanReport) -> list[list[str]]:
    """Heading, composition and sums of the memory's columns, as text."""
    found = report.memory
    columns = [column for column in COLUMNS if column in found.peaks]
    rows = [[f"memory of rank {report.rank} at its peak", *(COLUMNS[column] for column in columns), ""]]
    for row in found.rows:
        values = [getattr(row, column) for column in columns]
        if any(values):
            rows.append([row.name, *(show_bytes(value) if value else "–" for value in values), row.note])
    totals = [show_bytes(found.total(column)) for column in columns]
    return [*rows, ["together", *totals, saving(found.tide, found.stock)]]


def memory_note(report: PlanReport) -> str:
    """What is not counted, and when the peaks are."""
    columns = [column for column in COLUMNS if column in report.memory.peaks]
    peaks = ", ".join(f"{COLUMNS[column]} in {report.memory.peaks[column]}" for column in columns)
    return f"Not counted anywhere: {EXCLUDED}. Peaks: {peaks}."


def _memory(report: PlanReport) -> list[str]:
    rows = memory_rows(report)
    return [*table(rows, left=(0, len(rows[0]) - 1)), *wrap(memory_note(report))]


def saving(tide: int, stock: int) -> str:
    """The difference in words."""
    if not stock:
        return ""
    word = "less" if tide <= stock else "more"
    return f"TIDE needs {show_bytes(abs(stock - tide))} {word} than stock ({100 * abs(stock - tide) / stock:.1f} %)"


def notes(report: PlanReport) -> list[str]:
    """What else a reader must know: skipped parameters, units elsewhere, what stock refuses."""
    out = [f"to fit the memory limit: {remark}" for remark in report.remarks]
    out += [f"open: {transport}" for transport in report.opened]
    for row in report.rows:
        if row.stock_refuses:
            some = ", ".join(row.stock_refuses[:3]) + (", …" if len(row.stock_refuses) > 3 else "")
            out.append(f"{row.label}: stock FSDP2 refuses uneven shards of a dim other than 0: {some}")
    if report.elsewhere:
        some = ", ".join(map(show_name, report.elsewhere[:4])) + (", …" if len(report.elsewhere) > 4 else "")
        out.append(f"rank {report.rank} holds no shard of {len(report.elsewhere)} units: {some}")
    return out


def _rest(report: PlanReport) -> list[str]:
    lines = [line for note in notes(report) for line in wrap(note, rest="  ")]
    if report.skipped:
        lines.append("not in the plan:")
        for name, reason in report.skipped:
            lines += wrap(f"{name}: {reason}", first="  ", rest="    ")
    return lines


def row_of(report: PlanReport, unit: str) -> UnitRow:
    """The row that a unit is in."""
    return next(row for row in report.rows if unit in row.units)
