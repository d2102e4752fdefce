"""Tables over the number of GPUs: what was measured on each, beside what the cost model expects, also of eight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import CASES
from predict import GPUS, MODELS, rows_of
from records import RESULTS, Record, newest
from tables import cell, markdown, named

BASELINES = ("stock", "symm", "tide")


def _measured(benchmark: str, gpus: int, folder: Path) -> Record | None:
    return newest(benchmark, f"{gpus}xh200", folder)


def collectives(folder: Path = RESULTS) -> str:
    """All-gathers and reduce-scatters of the models' blocks."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for gpus in GPUS:
        if (record := _measured("collectives", gpus, folder)) is not None:
            found |= {(gpus, *key): row for key, row in record.rows_by("unit", "collective", "variant").items()}
    lines = []
    expected = [row for name in MODELS for gpus in GPUS for row in rows_of(CASES[name], gpus, folder)]
    for row in sorted(expected, key=lambda row: (row["unit"], row["collective"], row["gpus"])):
        stock, symm, tide = (found.get((row["gpus"], row["unit"], row["collective"], name)) for name in BASELINES)
        lines.append(
            [
                row["unit"],
                row["collective"],
                str(row["gpus"]),
                *(cell(one, "ms", ".2f") for one in (stock, symm, tide)),
                cell(row, "ms", ".2f"),
                cell(tide, "busbw", ".0f"),
                cell(row, "busbw", ".0f"),
                cell(tide, "share", ".1%"),
                *(cell(one, "sm_ms", ".0f") for one in (stock, symm)),
                cell(tide, "sm_ms", ".1f"),
                *(cell(one, "issue_us", ".0f") for one in (stock, symm, tide)),
            ]
        )
    headings = ["unit", "collective", "GPUs", "stock ms", "symm", "TIDE", "predicted", "TIDE busbw GB/s", "predicted"]
    headings += ["of ceiling", "SM ms stock", "symm", "TIDE", "issue µs stock", "symm", "TIDE"]
    return markdown(headings, lines)


def least(case: str, gpus: int, folder: Path = RESULTS) -> float:
    """Milliseconds that a step takes beyond its compute at least: the first all-gather and the last reduce-scatter."""
    return sum(float(row["ms"]) for row in rows_of(CASES[case], gpus, folder))


def steps(folder: Path = RESULTS) -> str:
    """Training steps that were measured on more than two GPUs, and what eight cannot beat."""
    records = {gpus: found for gpus in GPUS if (found := _measured("step", gpus, folder)) is not None}
    rows = {gpus: record.rows_by("model", "tokens", "variant") for gpus, record in records.items()}
    most = max(rows, default=2)
    cases = {f"{CASES[name].name} ×{CASES[name].count}": name for name in MODELS}
    keys = sorted({(model, tokens) for model, tokens, _ in rows.get(most, {}) if most > 2 and model in cases})
    lines = []
    for model, tokens in keys:
        for gpus in GPUS:
            at = {name: rows.get(gpus, {}).get((model, tokens, name)) for name in ("solo", *BASELINES, "tide-early")}
            solo = at["solo"] or rows[most].get((model, tokens, "solo"))
            floor = None if solo is None else solo["ms"] + least(cases[model], gpus, folder)
            lines.append(
                [
                    model,
                    f"{tokens:,}",
                    str(gpus),
                    *(cell(at[name], "ms", ".1f") for name in ("solo", *BASELINES, "tide-early")),
                    "–" if floor is None else f"{floor:.1f}",
                    *(cell(at["tide"], key, shape) for key, shape in (("off_stock", ".1f"), ("gap_closed", ".2f"))),
                ]
            )
    headings = ["model", "tokens/GPU", "GPUs", "solo ms", "stock", "symm", "TIDE", "early", "predicted at least"]
    return markdown([*headings, "off stock %", "gap closed"], lines)


def interference(folder: Path = RESULTS) -> str:
    """Slowdown of compute beside a collective."""
    records = {gpus: found for gpus in GPUS if (found := _measured("interference", gpus, folder)) is not None}
    rows = {gpus: record.rows_by("kernel", "collective", "variant") for gpus, record in records.items()}
    keys = sorted({key[:2] for found in rows.values() for key in found}, key=lambda key: (key[1], key[0]))
    columns = [(gpus, name) for gpus in rows for name in BASELINES]
    lines = []
    for kernel, collective in keys:
        found = (rows[gpus].get((kernel, collective, name)) for gpus, name in columns)
        lines.append([kernel, collective, *(cell(one, "slowdown", ".2f") for one in found)])
    return markdown(["kernel", "collective", *(f"{gpus} GPUs {named(name)}" for gpus, name in columns)], lines)


#: Tables by the name that the README gives them.
KINDS: dict[str, Callable[[Path], str]] = {
    "scaling-collectives": collectives,
    "scaling-steps": steps,
    "scaling-interference": interference,
}
