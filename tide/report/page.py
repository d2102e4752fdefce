"""A plan's report as HTML for notebooks: self-contained, escaped, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tide.report.plan_report import PlanReport
from tide.report.text import (
    changed_options,
    memory_note,
    memory_rows,
    notes,
    padding,
    prediction_note,
    reasons,
    slot_range,
)
from tide.report.units import show_bytes, show_time

# Styles stand in the tags: notebook viewers drop style sheets. Colours are left to the viewer's theme.
_CELL = "padding:2px 8px;text-align:{align};white-space:nowrap"
_HEAD = _CELL + ";font-weight:600;border-bottom:1px solid #8888"


def _row(cells: Sequence[str], left: Sequence[int], style: str = _CELL, titles: Sequence[str] = ()) -> str:
    tag = "th" if style is _HEAD else "td"
    out = []
    for column, cell in enumerate(cells):
        css = style.format(align="left" if column in left else "right")
        title = f' title="{escape(titles[column])}"' if column < len(titles) and titles[column] else ""
        out.append(f'<{tag} style="{css}"{title}>{escape(cell)}</{tag}>')
    return f"<tr>{''.join(out)}</tr>"


def _table(rows: Sequence[str]) -> str:
    return f'<table style="border-collapse:collapse;margin:4px 0">{"".join(rows)}</table>'


def _paragraph(text: str) -> str:
    return f'<p style="margin:2px 0;max-width:75em">{escape(text)}</p>'


def render(report: PlanReport) -> str:
    """The whole report."""
    parts = [
        f"<p style='margin:2px 0'><b>TIDE plan of {escape(report.source)}</b>: {escape(report.topology)}, "
        f"rank {report.rank}; options: {escape(changed_options(report))}; digest <code>{report.digest[:12]}</code></p>",
        _units(report),
        _why(report),
        _paragraph(prediction_note(report)),
        _memory(report),
        _paragraph(memory_note(report)),
    ]
    parts += [_paragraph(note) for note in notes(report)]
    if report.skipped:
        items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in report.skipped)
        parts.append(f"<p style='margin:2px 0'>Not in the plan:</p><ul style='margin:2px 0'>{items}</ul>")
    return f'<div class="tide-report">{"".join(parts)}</div>'


_COLUMNS = (
    "units",
    "params",
    "storage",
    "padding avoided",
    "descriptors",
    "transfers",
    "bundle",
    "slot",
    "all-gather",
    "time",
    "SM time",
    "reduce-scatter",
    "time",
    "SM time",
)
_LEFT = (0, 8, 11)


def _units(report: PlanReport) -> str:
    rows = [_row(_COLUMNS, _LEFT, _HEAD)]
    for row in report.rows:
        gather, reduce = row.all_gather, row.reduce_scatter
        cells = (
            row.label,
            str(row.parameters),
            show_bytes(row.nbytes),
            padding(row.padding_avoided, row.padding_percent),
            f"{row.descriptors:,}",
            f"{row.transfers:,}",
            f"{row.bundled} of {show_bytes(row.bundle_nbytes)}" if row.bundled else "–",
            slot_range(row.slots),
            row.all_gather_route,
            show_time(gather.seconds),
            show_time(gather.sm_seconds),
            row.reduce_scatter_route,
            "–" if reduce is None else show_time(reduce.seconds),
            "–" if reduce is None else show_time(reduce.sm_seconds),
        )
        titles = [""] * len(cells)
        titles[6], titles[7] = row.bundle_reason, row.slot_reason
        titles[8], titles[11] = row.all_gather_reason, row.reduce_scatter_reason
        rows.append(_row(cells, _LEFT, titles=titles))
    sums = report.totals
    rows.append(
        _row(
            (
                f"all {sums['units']:.0f} units",
                f"{sums['parameters']:.0f}",
                show_bytes(sums["nbytes"]),
                padding(int(sums["padding_avoided"]), sums["padding_percent"]),
                f"{sums['descriptors']:,.0f}",
                f"{sums['transfers']:,.0f}",
                "",
                "",
                "one after the other",
                show_time(sums["all_gather_seconds"]),
                show_time(sums["all_gather_sm_seconds"]),
                "one after the other",
                show_time(sums["reduce_scatter_seconds"]),
                show_time(sums["reduce_scatter_sm_seconds"]),
            ),
            _LEFT,
            _CELL + ";border-top:1px solid #8888",
        )
    )
    return _table(rows)


def _why(report: PlanReport) -> str:
    """Reasons of routes, bundles and slots, folded away; the table shows them as tooltips, too."""
    items = "".join(f"<li>{escape(text)}</li>" for text in reasons(report))
    return f"<details style='margin:2px 0'><summary>reasons</summary><ul style='margin:2px 0'>{items}</ul></details>"


def _memory(report: PlanReport) -> str:
    head, *rows, together = memory_rows(report)
    left = (0, len(head) - 1)
    lines = [_row(head, left, _HEAD), *(_row(row, left) for row in rows)]
    return _table([*lines, _row(together, left, _CELL + ";border-top:1px solid #8888")])
