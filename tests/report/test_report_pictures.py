"""Pictures: well-formed, within their frame, to scale; and traces that a viewer can read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_support import public, tiny

from tide.compiler.clock import clock
from tide.errors import InputError
from tide.report import arena_svg, chrome_trace, parameter_svg, schedule_svg
from tide.report.svg import Svg, ticks

NS = "{http://www.w3.org/2000/svg}"


def _parse(picture: Svg) -> ElementTree.Element:
    """The picture's tree, after checks that hold for every picture."""
    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{NS}rect"):
        x, y, w, h = (float(rect.attrib.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width + 0.01
        assert y + h <= height + 0.01
    for text in root.iter(f"{NS}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 < float(text.attrib["y"]) <= height
        assert float(text.attrib["font-size"]) >= 9
    assert not list(root.iter(f"{NS}script"))
    assert picture._repr_svg_() == picture
    return root


def _texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{NS}text")]


def _tips(root: ElementTree.Element) -> dict[str, float]:
    """Width of each rectangle by its tooltip."""
    return {
        title.text or "": float(rect.attrib["width"])
        for rect in root.iter(f"{NS}rect")
        if (title := rect.find(f"{NS}title")) is not None
    }


def test_arena_is_to_scale() -> None:
    compiled = public("Llama-3.1-70B", 8, 8)
    root = _parse(arena_svg(compiled))
    tips = _tips(root)
    first, second = (next(w for tip, w in tips.items() if tip.startswith(f"slot {n}:")) for n in (0, 1))
    slots = compiled.arena.slots
    assert first / second == pytest.approx(slots[0].size / slots[1].size, rel=1e-2)
    assert first == pytest.approx(1000 * slots[0].size / compiled.arena.size, abs=0.1)
    texts = _texts(root)
    assert any(f"{compiled.arena.size / 2**30:.2f} GiB on every rank" in text for text in texts)
    assert {"1 slot: root", "2 slots: model.layers.0 … 79 ×80"} <= set(texts)
    assert any(tip.startswith("receive:") for tip in tips)
    assert any("mlp.gate_proj.weight (28672, 8192) bfloat16" in tip for tip in tips)


def test_arena_with_a_slot_for_every_unit() -> None:
    root = _parse(arena_svg(public("DeepSeek-V3", 1, 8, slots=None)))
    assert sum(tip.startswith("slot ") for tip in _tips(root)) == 62
    assert "58 slots: model.layers.3 … 60 ×58" in _texts(root)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (2, 2)])
def test_every_picture_of_a_small_plan(nodes: int, gpus: int) -> None:
    compiled = tiny({"w": (6, 4), "b": (3,)}, nodes, gpus, dims={"w": 1})
    _parse(arena_svg(compiled))
    _parse(parameter_svg(compiled, "block", "block.b"))
    for collective in ("all_gather", "reduce_scatter"):
        _parse(schedule_svg(compiled, "block", collective, 0))


def test_parameter_of_one_run_a_rank() -> None:
    compiled = tiny({"w": (10, 4)}, gpus=4)
    picture = parameter_svg(compiled, "block", "block.w")
    root = _parse(picture)
    assert picture.count("marker-end") == 4  # an arrow a shard
    tips = _tips(root)
    full = tips["rank 0, run 0: 24 bytes at 0 of storage"]
    short = tips["rank 3, run 0: 8 bytes at 72 of storage"]
    assert full / short == pytest.approx(3, rel=0.01)
    assert "rank 0: 48 B" in _texts(root)


def test_parameter_of_many_runs_and_an_empty_shard() -> None:
    root = _parse(parameter_svg(tiny({"w": (100, 8, 2)}, gpus=4, dims={"w": 1}), None, "block.w"))
    tips = _tips(root)
    assert "rank 1, run 0: 8 bytes at 8 of storage" in tips
    assert "rank 3, run 99: 8 bytes at 3,192 of storage" in tips
    assert "gaps: 98 more runs left out" in _texts(root)
    root = _parse(parameter_svg(tiny({"w": (2, 8)}, gpus=4), None, "block.w"))
    assert _texts(root).count("empty") == 2
    root = _parse(parameter_svg(public("gpt-oss-20b", 8, 8), None, "model.layers.3.mlp.experts.mlp1_weight"))
    assert "gaps: 57 more ranks left out" in _texts(root)


def test_parameter_names_are_checked_and_escaped() -> None:
    compiled = tiny({"<w>&": (8, 8)}, gpus=2)
    assert "block.<w>&" in _texts(_parse(parameter_svg(compiled, "block", "block.<w>&")))
    with pytest.raises(InputError, match="belongs to unit 'block', not to 'other'"):
        parameter_svg(compiled, "other", "block.<w>&")


def test_schedule_has_a_lane_a_stream() -> None:
    compiled = public("Llama-3.1-70B", 8, 8)
    gather = _texts(_parse(schedule_svg(compiled, "model.layers.0", "all_gather", 3)))
    assert {"ag.node", "ag.wire", "→ 11", "put (network)", "copy (copy engine)"} <= set(gather)
    reduce = _texts(_parse(schedule_svg(compiled, "model.layers.0", "reduce_scatter", 3)))
    assert {"rs.push", "rs.sum", "rs.wire", "rs.fold", "accumulate (kernel)"} <= set(reduce)


def test_schedule_merges_what_could_not_be_seen() -> None:
    picture = schedule_svg(public("Llama-3.1-405B", 128, 8), "model.layers.0", "reduce_scatter", 0)
    assert len(picture) < 2_000_000
    _parse(picture)


def test_pictures_are_deterministic() -> None:
    one, two = (schedule_svg(public("Llama-3.1-8B", 2, 4), "model.layers.0", "all_gather", 0) for _ in range(2))
    assert one == two


def test_trace_opens_as_chrome_events(tmp_path: Path) -> None:
    compiled = public("Llama-3.1-8B", 2, 4)
    file = tmp_path / "trace.json"
    trace = chrome_trace(compiled, "model.layers.0", "all_gather", 1, path=file)
    assert json.loads(file.read_text()) == trace
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert {event["pid"] for event in events} == set(range(8))
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"ag.place", "ag.node", "ag.wire"}
    spans = [event for event in events if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end == pytest.approx(clock(compiled, "model.layers.0", "all_gather", 1).seconds * 1e6)
    copies = [event for event in spans if event["cat"] == "copy"]
    assert all(0 < event["args"]["GB/s"] <= 388 for event in copies)
    for pid in range(8):
        for tid in (0, 1):
            lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
            assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(lane))


def test_ticks_are_round() -> None:
    assert ticks(5.97) == pytest.approx([0, 1, 2, 3, 4, 5])
    assert ticks(0) == [0.0]
