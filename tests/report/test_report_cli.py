"""The command line: what it prints, where it writes, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tide
from tide.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    listing = {
        f"layers.{layer}.{name}": [shape, "float32"]
        for layer in range(3)
        for name, shape in (("up.weight", [96, 64]), ("down.weight", [64, 96]), ("norm.weight", [64]))
    }
    model, plan = tmp_path / "model.json", tmp_path / "plan.json"
    model.write_text(json.dumps(listing))
    assert main(["plan", str(model), "--nodes", "2", "--gpus", "2", "--json", str(plan)]) == 0
    assert "layers.0 … 2 ×3" in capsys.readouterr().out
    return plan


def test_plan_prints_the_report_and_writes_the_plan(plan_file: Path) -> None:
    plan = tide.load_plan(plan_file)
    assert [unit.name for unit in plan.units] == ["layers.0", "layers.1", "layers.2"]
    assert plan.options.slots == 2
    assert plan.units[0].parameters[0].dtype == "bfloat16"
    assert plan.units[0].parameters[0].shard_dtype == "float32"


def test_public_models_by_name_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "2", "--rank", "1", "--slots", "all", "--dtype", "keep", "--links", "h100"]
    assert main(["plan", "LLAMA-3.1-8b", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("TIDE plan of Llama-3.1-8B: 1 nodes × 2 GPUs, rank 1\n")
    assert "one a unit" not in out
    assert main(["plan", "Llama-3.1-8B", "--gpus", "2", "--json", "-"]) == 0
    assert tide.load_plan(capsys.readouterr().out).spec.source == "Llama-3.1-8B"


def test_show_as_text_and_as_json(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_file), "--rank", "3"]) == 0
    assert ", rank 3" in capsys.readouterr().out.splitlines()[0]
    assert main(["show", str(plan_file), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["units"] == 3
    target = plan_file.with_name("report.json")
    assert main(["show", str(plan_file), "--json", str(target)]) == 0
    assert json.loads(target.read_text())["rank"] == 0


def test_verify(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(plan_file)]) == 0
    assert "proved" in capsys.readouterr().out
    assert main(["verify", str(plan_file), "--ranks", "0,2-3", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == tide.load_plan(plan_file).digest


def test_graph_as_text_and_as_json(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(plan_file), "--parameter", "layers.1.up.weight", "--rank", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4
    assert lines[1].split()[:2] == ["0", "2"]
    assert main(["graph", str(plan_file), "--unit", "layers.1", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["edges"]) == 3 * 16
    assert len(data["nodes"]) == 3 * 8


def test_pictures_and_traces(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["svg", str(plan_file), "arena"]) == 0
    ElementTree.fromstring(capsys.readouterr().out)
    file = plan_file.with_name("picture.svg")
    for arguments in (
        ["parameter", "--parameter", "layers.2.down.weight"],
        ["schedule", "--unit", "layers.0", "--collective", "reduce_scatter", "--rank", "3"],
    ):
        assert main(["svg", str(plan_file), *arguments, "-o", str(file)]) == 0
        ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert main(["trace", str(plan_file)]) == 0
    trace = json.loads(capsys.readouterr().out)
    assert trace["otherData"]["what"] == "tide::all_gather/layers.2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-9"], "no file and no public model 'llama-9'; public models are Llama-3.1-8B"),
        (["plan", "nowhere.json"], "nowhere.json: no such file"),
        (["plan", "gpt-oss-20b", "--rank", "8"], "rank 8 is outside"),
        (["plan", "gpt-oss-20b", "--dtype", "float7"], "dtype float7 is not supported"),
        (["show", "nowhere.json"], "no file nowhere.json; write one with"),
        (["svg", "PLAN", "parameter"], "name it with --parameter"),
        (["graph", "PLAN", "--parameter", "up"], "no parameter 'up' in the plan; did you mean 'layers.0.up.weight'"),
        (["trace", "PLAN", "--unit", "layers.9"], "no unit 'layers.9'"),
        (["plan", "gpt-oss-20b", "--gpus", "2", "--json", "/nowhere/plan.json"], "No such file or directory"),
    ],
)
def test_refusals_are_one_line_on_stderr(
    plan_file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(plan_file) if argument == "PLAN" else argument for argument in arguments]
    assert main(arguments) == 1
    caught = capsys.readouterr()
    assert caught.err.startswith("tide: ")
    assert caught.err.count("\n") == 1
    assert message in caught.err


def test_an_edited_plan_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan_file.read_text())
    data["options"]["alignment"] = 1024
    plan_file.write_text(json.dumps(data))
    assert main(["verify", str(plan_file)]) == 1
    assert "it was edited" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["plan"], ["plan", "x", "--gpus", "0"], ["svg", "p.json", "cat"], ["fly"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tide" in capsys.readouterr().err


def test_module_runs_without_torch_and_survives_a_closed_pipe(plan_file: Path) -> None:
    code = "import sys; from tide.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "show", str(plan_file)], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    command = f"{sys.executable} -m tide graph {plan_file} | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("  from")
    assert done.stderr == ""


def test_a_plan_that_fits_a_limit(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", str(plan_file.with_name("model.json")), "--gpus", "2", "--prefetch", "1"]
    assert main([*plan, "--memory-limit", "1KiB"]) == 1
    told = capsys.readouterr().err
    least = int(told.split("memory_limit=")[1].split(",")[0])
    assert main([*plan, "--memory-limit", str(least)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "to fit the memory limit: " in out
    assert "for a limit of " in out
    assert main([*plan, "--memory-limit", f"{least - 1}B"]) == 1


@pytest.mark.parametrize(
    "odd", [["--memory-limit", "much"], ["--memory-limit", "-1"], ["--slots", "3", "--prefetch", "1"]]
)
def test_odd_limits_are_wrong_usage(odd: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "Llama-3.1-8B", *odd])
    assert ended.value.code == 2
