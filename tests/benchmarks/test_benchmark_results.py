"""Tables and pictures are made from the results that are committed, and say what those say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import plots
import records
import tables

HARDWARE = "2xh200"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the results, to change."""
    for path in records.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def change(folder: Path, benchmark: str, edit) -> None:
    """Edits the first row of a benchmark's newest file."""
    path = folder / records.newest(benchmark, HARDWARE, folder).files[0]
    content = json.loads(path.read_text())
    edit(content["results"][0])
    path.write_text(json.dumps(content))


def interference_rows() -> list[dict]:
    return [
        {
            "kernel": "GEMM (one wave)",
            "collective": collective,
            "variant": variant,
            "slowdown": slowdown,
            "slowdown_min": slowdown - 0.01,
            "slowdown_max": slowdown + 0.02,
            "null": 1.001,
            "null_min": 0.995,
            "null_max": 1.004,
            "lost_ms": 10 * (slowdown - 1),
        }
        for collective in ("all-gather", "reduce-scatter")
        for variant, slowdown in (("stock", 1.4), ("tide", 1.05))
    ]


def test_the_readme_shows_the_results():
    text = tables.README.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text, "run python benchmarks/tables.py"
    shown = {(block["kind"], block["hardware"]) for block in tables.BLOCK.finditer(text)}
    assert {("step", HARDWARE), ("collectives", HARDWARE), ("sweep", HARDWARE), ("goals", HARDWARE)} <= shown


def test_a_changed_result_changes_the_readme(folder):
    text = tables.README.read_text(encoding="utf-8")
    assert tables.rewritten(text, folder) == text
    change(folder, "step", lambda row: row.update(ms=1234.5))
    assert "1234.5" in tables.rewritten(text, folder)


def test_a_table_has_a_line_a_case_and_its_figures():
    record = records.newest("step", HARDWARE)
    lines = tables.step(record).splitlines()[2:]
    cases = sorted({(row["model"], row["tokens"]) for row in record.rows if row["variant"] == "tide"})
    assert len(lines) == len(cases)
    found = record.rows_by("model", "tokens", "variant")
    for line, case in zip(lines, cases, strict=True):
        assert f"| {found[(*case, 'stock')]['ms']:.1f} |" in line
        assert f"**{found[(*case, 'tide')]['ms']:.1f}**" in line


@pytest.mark.parametrize("kind", [*tables.KINDS, "goals", *tables.SCALING])
def test_every_table_is_square(kind):
    lines = [line for line in tables.render(kind, HARDWARE).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) <= 1


def test_what_was_not_measured_is_said(tmp_path):
    assert tables.render("interference", HARDWARE, tmp_path) == "Not measured."
    assert tables.render("goals", HARDWARE, tmp_path).count("not measured") == 8


def test_goals_are_judged_by_the_figures(folder):
    path = folder / f"interference-{HARDWARE}-2026-12-01.json"
    for slowdown, figure, verdict in ((1.02, "20.0", "yes"), (1.05, "8.0", "no")):
        rows = interference_rows()
        rows[-1]["slowdown"] = slowdown
        path.write_text(json.dumps({"results": rows}))
        assert tables.goals(HARDWARE, folder).splitlines()[-1].endswith(f"| {figure} | {verdict} |")


def test_the_newest_day_counts_in_all_its_parts(folder):
    for name in ("step-2xh200-2030-01-01-llama.json", "step-2xh200-2030-01-01-wan.json"):
        (folder / name).write_text(json.dumps({"date": "2030", "results": [{"model": name}]}))
    (folder / "step-4xh200-2031-01-01.json").write_text(json.dumps({"results": []}))
    record = records.newest("step", HARDWARE, folder)
    assert [row["model"] for row in record.rows] == list(record.files)
    assert len(record.files) == 2
    assert records.newest("step", f"{HARDWARE}@2030-01-01", folder) == record
    assert records.newest("step", f"{HARDWARE}@2029-01-01", folder) is None


def test_a_day_without_a_sweep_leaves_the_last_one(folder):
    (folder / "collectives-2xh200-2030-01-01.json").write_text(json.dumps({"results": [{"unit": "block"}]}))
    assert records.newest("collectives", HARDWARE, folder).rows == [{"unit": "block"}]
    swept = records.newest("collectives", HARDWARE, folder, records.SWEEP)
    assert swept == records.newest("collectives", f"{HARDWARE}@2026-11-29", folder)


def test_a_session_is_taken_under_the_machines_name(tmp_path):
    facts = {"benchmark": "step", "gpu": "NVIDIA H200", "gpus": 2, "ranks": 4, "date": "2026-12-24T10:00Z"}
    outputs, results = tmp_path / "out", tmp_path / "results"
    outputs.mkdir()
    results.mkdir()
    for name, tokens in (("step", 1), ("step-2", 2)):
        (outputs / f"{name}.json").write_text(json.dumps({**facts, "results": [{"tokens": tokens}]}))
    (outputs / "cuda_check.json").write_text("{}")
    taken = records.take(outputs, results)
    assert sorted(taken) == ["step-2xh200-4ranks-2026-12-24-2.json", "step-2xh200-4ranks-2026-12-24.json"]
    record = records.newest("step", "2xh200-4ranks", results)
    assert sorted(row["tokens"] for row in record.rows) == [1, 2]
    assert records.newest("step", "2xh200", results) is None


def test_the_pictures_are_as_the_results_are():
    drawn = plots.draw(HARDWARE)
    assert {"busbw-2xh200.svg", "step-2xh200.svg"} <= set(drawn)
    for name, picture in drawn.items():
        ElementTree.fromstring(picture)
        assert (records.RESULTS / name).read_text(encoding="utf-8") == picture, "run python benchmarks/plots.py"


def test_a_picture_tells_every_figure():
    record = records.newest("step", HARDWARE)
    picture = plots.steps(record)
    for row in record.rows:
        if row["variant"] in plots.VARIANTS:
            assert f"{tables.named(row['variant'])}: {row['ms']:.1f} ms" in picture


def test_slowdowns_are_drawn_with_their_noise():
    record = records.Record("interference", HARDWARE, (), {}, interference_rows())
    picture = plots.slowdowns(record)
    ElementTree.fromstring(picture)
    assert picture.count("nothing beside it: 1.001") == 4


def test_nothing_is_drawn_of_nothing():
    empty = records.Record("collectives", HARDWARE, (), {"copy_engine_gb_s": {"push": 1.0}}, [])
    assert plots.bandwidth(empty) is None
    assert plots.slowdowns(empty) is None
