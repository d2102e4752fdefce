"""Markdown tables of the results, so that no figure is typed by hand.

usage: python benchmarks/tables.py            rewrites the tables in README.md from the newest results
       python benchmarks/tables.py --check    says whether they are as the results are
       python benchmarks/tables.py step 2xh200    prints one
       python benchmarks/tables.py --take OUT     takes the files of a session.sh run into results/ first

In the README a table stands between ``<!-- table: step 2xh200 -->`` and ``<!-- end -->``: that of the newest day, or of
the one that ``2xh200@2026-11-29`` names.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from records import RESULTS, SWEEP, Record, newest, take

README = Path(__file__).parent / "README.md"
BLOCK = re.compile(r"(<!-- table: (?P<kind>[a-z-]+) (?P<hardware>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {"tide": "TIDE"}
SCALING = ("scaling-collectives", "scaling-steps", "scaling-interference")
BLOCKS = ("Llama-3.1-70B block", "Qwen3-30B-A3B block", "Wan2.2-A14B block")


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(row: dict[str, Any] | None, key: str, shape: str = "") -> str:
    """One value as text; a dash where there is none."""
    if row is None or row.get(key) is None:
        return "–"
    value = row[key]
    return ("yes" if value else "no") if isinstance(value, bool) else format(value, shape)


def named(variant: str) -> str:
    """A variant as the tables call it."""
    return NAMES.get(variant, variant)


def machine(record: Record) -> str:
    """Where and with what the rows were measured."""
    facts = record.facts
    files = ", ".join(f"[{name}](results/{name})" for name in record.files)
    return (
        f"{facts['gpus']} × {facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, "
        f"NCCL {facts['nccl']}, triton {facts['triton']}, {facts['date'][:10]}, commit {facts['commit']}: {files}"
    )


def by_model(record: Record) -> list[tuple[str, int]]:
    """Models and sizes of a step record, in the order of the models' names."""
    return sorted(dict.fromkeys((row["model"], row["tokens"]) for row in record.rows))


def step(record: Record) -> str:
    """Training steps: a line a model and size."""
    names = ("solo", "free", "stock", "symm", "tide", "tide-early", "tide+slot_reuse")
    headings = ["model", "tokens/GPU", "solo", "free", "stock", "symm", "TIDE", "early", "Slot-Reuse"]
    headings += ["off stock", "off symm", "gap closed", "early", "peak GiB stock → TIDE → Slot-Reuse"]
    found = record.rows_by("model", "tokens", "variant")
    lines = []
    for model, tokens in by_model(record):
        rows = {name: found.get((model, tokens, name)) for name in names}
        symm, tide = rows["symm"], rows["tide"]
        if tide is None:  # the run was cut short
            continue
        off_symm = 100 * (1 - tide["ms"] / symm["ms"]) if symm else None
        peaks = " → ".join(cell(rows[name], "peak_gib", ".1f") for name in ("stock", "tide", "tide+slot_reuse"))
        lines.append(
            [
                model,
                f"{tokens:,}",
                *(cell(rows[name], "ms", ".1f") for name in ("solo", "free", "stock", "symm")),
                f"**{cell(tide, 'ms', '.1f')}**",
                *(cell(rows[name], "ms", ".1f") for name in ("tide-early", "tide+slot_reuse")),
                f"{cell(tide, 'off_stock', '.1f')} %",
                "–" if off_symm is None else f"{off_symm:.1f} %",
                cell(tide, "gap_closed", ".2f"),
                cell(rows["tide-early"], "gap_closed", ".2f"),
                peaks,
            ]
        )
    return markdown(headings, lines)


def memory(record: Record) -> str:
    """Peak memory, as stated beforehand and as measured."""
    lines = [
        [
            row["model"],
            named(row["variant"]),
            f"{row['steps']:,}",
            cell(row, "stated_gib", ".3f"),
            cell(row, "measured_gib", ".3f"),
            f"{cell(row, 'off', '+.2f')} %",
            cell(row, "reserved_gib", ".2f"),
            str(row["constant"]).replace("True", "yes").replace("False", "no"),
        ]
        for row in sorted(record.rows, key=lambda row: (row["model"], row["steps"]))
    ]
    headings = ["model", "variant", "steps", "stated GiB", "measured GiB", "off", "reserved GiB", "constant"]
    return markdown(headings, lines)


def step_all(record: Record) -> str:
    """Training steps: a line a variant, with spread, host time, memory and losses."""
    columns = [
        ("ms", "ms", ".1f"),
        ("min_ms", "min", ".1f"),
        ("max_ms", "max", ".1f"),
        ("host_ms", "host ms", ".1f"),
        ("off_stock", "off stock %", ".1f"),
        ("gap_closed", "gap closed", ".2f"),
        ("peak_gib", "peak GiB", ".2f"),
        ("stated_gib", "stated GiB", ".2f"),
        ("losses_equal", "losses = stock's", ""),
        ("loss_difference", "difference", ".1e"),
    ]
    lines = [
        [row["model"], f"{row['tokens']:,}", named(row["variant"]), *(cell(row, key, fmt) for key, _, fmt in columns)]
        for row in record.rows
    ]
    return markdown(["model", "tokens/GPU", "variant", *(heading for _, heading, _ in columns)], lines)


def collectives(record: Record) -> str:
    """Collectives of real blocks."""
    columns = [
        ("ms", "ms", ".3f"),
        ("predicted_ms", "predicted", ".3f"),
        ("busbw", "busbw GB/s", ".1f"),
        ("share", "of ceiling", ".1%"),
        ("sm_ms", "SM ms", ".2f"),
        ("kernels", "kernels", "d"),
        ("host_us", "host µs", ".0f"),
        ("row_us", "in a row", ".0f"),
        ("issue_us", "issue", ".0f"),
        ("wrong", "wrong", "d"),
    ]
    rows = sorted(
        (row for row in record.rows if not row["unit"].startswith(SWEEP)),
        key=lambda row: (row["unit"], row["collective"]),
    )
    columns = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    lines = [
        [row["unit"], row["collective"], named(row["variant"]), *(cell(row, key, fmt) for key, _, fmt in columns)]
        for row in rows
    ]
    return markdown(["unit", "collective", "variant", *(heading for _, heading, _ in columns)], lines)


def sweep(record: Record) -> str:
    """Milliseconds over the size of a unit."""
    found = record.rows_by("unit", "collective", "variant")
    rows = [row for row in record.rows if row["unit"].startswith(SWEEP)]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    kinds = {"AG": "all-gather", "RS": "reduce-scatter"}
    pairs = [(short, kind, variant) for short, kind in kinds.items() for variant in variants]
    lines = [
        [
            unit.removeprefix(f"{SWEEP} "),
            *(cell(found.get((unit, kind, variant)), "ms", ".3f") for _, kind, variant in pairs),
        ]
        for unit in dict.fromkeys(row["unit"] for row in rows)
    ]
    return markdown(["size", *(f"{short} {named(variant)}" for short, _, variant in pairs)], lines)


def ceiling(record: Record) -> str:
    """The copy engines' rates in the run."""
    rates = record.facts["copy_engine_gb_s"]
    return ", ".join(f"{name} {rate:.1f}" for name, rate in sorted(rates.items(), reverse=True)) + " GB/s"


def interference(record: Record) -> str:
    """Slowdowns of compute beside collectives, with what no collective looks like."""
    columns = [
        ("slowdown", "slowdown", ".3f"),
        ("slowdown_min", "min", ".3f"),
        ("slowdown_max", "max", ".3f"),
        ("null", "null", ".3f"),
        ("null_min", "min", ".3f"),
        ("null_max", "max", ".3f"),
        ("lost_ms", "lost ms", ".3f"),
        ("collective_ms", "collective ms", ".2f"),
        ("collective_beside_ms", "beside compute", ".2f"),
    ]
    order = {variant: place for place, variant in enumerate(dict.fromkeys(row["variant"] for row in record.rows))}
    rows = sorted(record.rows, key=lambda row: (row["collective"], row["kernel"], order[row["variant"]]))
    lines = [
        [row["kernel"], row["collective"], named(row["variant"]), *(cell(row, key, fmt) for key, _, fmt in columns)]
        for row in rows
    ]
    return markdown(["kernel", "collective", "variant", *(heading for _, heading, _ in columns)], lines)


def excesses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """(stock − 1) ÷ (variant − 1) of each kernel and collective, and the same ratio of lost milliseconds.

    A slowdown below what the null measurement shows counts as the null's, and the figure is then a lower bound.
    """
    stock = {(row["kernel"], row["collective"]): row for row in rows if row["variant"] == "stock" and "null" in row}
    found = []
    for row in rows:
        base = stock.get((row["kernel"], row["collective"]))
        if base is None or row["variant"] == "stock" or "null" not in row:
            continue
        noise = max(abs(row["null"] - 1), abs(base["null"] - 1), 1e-3)
        entry = {key: row[key] for key in ("kernel", "collective", "variant")}
        entry["figure"] = (base["slowdown"] - 1) / max(row["slowdown"] - 1, noise)
        entry["bound"] = "at least" if row["slowdown"] - 1 <= noise else ""
        entry["stock"], entry["slowdown"], entry["noise"] = base["slowdown"], row["slowdown"], noise
        if row["lost_ms"] > 0:
            entry["lost_ratio"] = base["lost_ms"] / row["lost_ms"]
        found.append(entry)
    return found


def _verdict(reached: Sequence[bool]) -> str:
    return "yes" if all(reached) else f"{sum(reached)} of {len(reached)}" if any(reached) else "no"


def goals(hardware: str, folder: Path = RESULTS) -> str:
    """The goals with their figures, as far as there are results."""
    lines: list[list[str]] = []

    def goal(
        text: str, figures: Sequence[float | None], shape: str, least: Sequence[float], below: bool = False
    ) -> None:
        known = [(value, bound) for value, bound in zip(figures, least, strict=True) if value is not None]
        if not known:
            lines.append([text, "not measured", "–"])
            return
        reached = [value <= bound if below else value >= bound for value, bound in known]
        lines.append([text, ", ".join(format(value, shape) for value, _ in known), _verdict(reached)])

    record = newest("collectives", hardware, folder)
    found = record.rows_by("unit", "collective", "variant") if record else {}

    def per_block(collective: str, key: str, variant: str = "tide") -> list[float | None]:
        return [found.get((unit, collective, variant), {}).get(key) for unit in BLOCKS]

    goal("all-gather of the ceiling: Llama ≥ 95 %, Qwen3 and Wan ≥ 90 %", per_block("all-gather", "share"), ".1%",
         (0.95, 0.90, 0.90))  # fmt: skip
    goal("reduce-scatter of the ceiling ≥ 85 %", per_block("reduce-scatter", "share"), ".1%", (0.85,) * 3)
    times = zip(per_block("reduce-scatter", "sm_ms", "stock"), per_block("reduce-scatter", "sm_ms"), strict=True)
    ratios = [one / other if one and other else None for one, other in times]
    goal("reduce-scatter SM time, stock ÷ TIDE ≥ 14.5", ratios, ".1f", (14.5,) * 3)
    for kind in ("all-gather", "reduce-scatter"):
        goal(f"{kind}: µs to issue, in a row, ≤ 100", per_block(kind, "issue_us"), ".0f", (100.0,) * 3, below=True)
    steps = newest("step", hardware, folder)
    placed = steps.rows_by("model", "tokens", "variant") if steps else {}
    for text, variant in (("", "tide"), (", with early_reduce", "tide-early")):
        closed = [placed.get((*key, variant), {}).get("gap_closed") for key in (by_model(steps) if steps else [])]
        goal(f"training step{text}: gap to the floor closed ≥ 0.8", closed, ".2f", (0.8,) * len(closed))
    beside = newest("interference", hardware, folder)
    figure = [
        entry["figure"]
        for entry in (excesses(beside.rows) if beside else [])
        if entry["variant"] == "tide" and "one wave" in entry["kernel"] and entry["collective"] == "reduce-scatter"
    ]
    goal("one-wave GEMM beside a reduce-scatter: (stock − 1) ÷ (TIDE − 1) ≥ 10", figure, ".1f", (10.0,) * len(figure))
    return markdown(["goal", "figures", "reached"], lines)


#: Kind of table: the benchmark it is made of, and how.
KINDS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "step": ("step", step),
    "step-all": ("step", step_all),
    "step-machine": ("step", machine),
    "collectives": ("collectives", collectives),
    "collectives-machine": ("collectives", machine),
    "ceiling": ("collectives", ceiling),
    "sweep": ("collectives", sweep),
    "memory": ("memory", memory),
    "interference": ("interference", interference),
    "interference-machine": ("interference", machine),
}


def render(kind: str, hardware: str, folder: Path = RESULTS) -> str:
    """One table.

    Raises
    ------
    KeyError
        If there is no such kind.
    """
    if kind == "goals":
        return goals(hardware, folder)
    if kind.startswith("scaling-"):
        import scaling  # compiles plans

        return scaling.KINDS[kind](folder)
    benchmark, make = KINDS[kind]
    record = newest(benchmark, hardware, folder, SWEEP if kind == "sweep" else "")
    return "Not measured." if record is None else make(record)


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """A document with its tables made anew."""
    return BLOCK.sub(lambda m: m[1] + render(m["kind"], m["hardware"], folder) + "\n" + m[4], text)


def main() -> None:
    """Rewrites, checks or prints."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("kind", nargs="?", choices=[*KINDS, "goals", *SCALING])
    options.add_argument("hardware", nargs="?", default="2xh200")
    options.add_argument("--check", action="store_true")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--take", type=Path, metavar="OUT")
    given = options.parse_args()
    if given.take:
        print("\n".join(take(given.take, given.results)))
    if given.kind:
        print(render(given.kind, given.hardware, given.results))
        return
    before = README.read_text(encoding="utf-8")
    after = rewritten(before, given.results)
    if given.check and after != before:
        sys.exit("README.md is not as the results are; run python benchmarks/tables.py")
    if not given.check:
        README.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
