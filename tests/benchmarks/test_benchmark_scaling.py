"""Predictions for more GPUs than were measured, and tables that keep them apart from measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import predict
import scaling
import tables
from models import CASES
from records import RESULTS


@pytest.mark.parametrize("gpus", predict.GPUS)
def test_traffic_is_what_casts_pushes_and_sums_move(gpus):
    gather, reduce = predict.rows_of(CASES["llama"], gpus)
    elements = sum(p.numel() for p in _block().parameters())
    crossing = 2 * elements * (gpus - 1) / gpus  # bytes in bf16 that a rank sends, and as many that it receives
    cast = (4 + 2) * elements / gpus
    assert gather["traffic"] == pytest.approx(cast + 2 * crossing, rel=2e-3)
    sums = 2 * elements + 4 * elements / gpus
    assert reduce["traffic"] == pytest.approx(2 * crossing + sums, rel=2e-3)


def _block():
    import torch

    with torch.device("meta"):
        return CASES["llama"].make()


@pytest.mark.parametrize("name", predict.MODELS)
def test_no_prediction_beats_the_rate_of_the_copies(name):
    for gpus in predict.GPUS:
        for row in predict.rows_of(CASES[name], gpus):
            assert 0.9 < row["share"] < 1, row


def test_names_are_those_of_the_benchmarks():
    assert set(tables.SCALING) == set(scaling.KINDS)
    assert {f"{CASES[name].name} block" for name in predict.MODELS} == set(tables.BLOCKS)


def test_what_was_not_measured_stays_empty(tmp_path: Path):
    for path in RESULTS.glob("collectives-2xh200-*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    rows = [line.split(" | ") for line in scaling.collectives(tmp_path).splitlines()[2:]]
    assert {row[2] for row in rows} == {"2", "4", "8"}
    for row in rows:
        measured, expected = row[3:6], row[6]
        assert float(expected) > 0
        assert (measured == ["–"] * 3) == (row[2] != "2"), row


def test_a_measurement_on_eight_takes_its_place(tmp_path: Path):
    content = json.loads(next(RESULTS.glob("collectives-4xh200-*.json")).read_text())
    for row in content["results"]:
        row["ms"] = 77.0
    (tmp_path / "collectives-8xh200-2030-01-01.json").write_text(json.dumps(content))
    (tmp_path / "collectives-4xh200-2030-01-01.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="no copy engine's rate was measured with 2"):
        scaling.collectives(tmp_path)
    (tmp_path / "collectives-2xh200-2030-01-01.json").write_text(json.dumps(content))
    eight = [line for line in scaling.collectives(tmp_path).splitlines() if " | 8 | " in line]
    assert len(eight) == 6
    assert all(line.count(" 77.00 ") == 3 for line in eight)


def test_a_step_takes_its_compute_and_what_nothing_hides(tmp_path: Path):
    lines = [line.strip("| ").split(" | ") for line in scaling.steps().splitlines()[2:]]
    assert lines
    for model, _, gpus, *figures in lines:
        solo, tide, least = figures[0], figures[3], float(figures[5])
        name = next(key for key in predict.MODELS if model.startswith(CASES[key].name))
        if solo != "–":
            assert least == pytest.approx(float(solo) + scaling.least(name, int(gpus)), abs=0.1)
            assert least < float(tide)
    assert scaling.steps(tmp_path).count("\n") == 1  # headings only, where nothing was measured
