"""The report: figures, reasons, and the forms it comes in."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_support import public, tiny

from tide.compiler.compile import compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.shapes import MODELS
from tide.errors import InputError
from tide.report import plan_report
from tide.report.text import WIDTH, shorten
from tide.report.units import label, show_bytes, show_time
from tide.topology import Topology


def test_rows_of_llama_70b() -> None:
    report = plan_report(public("Llama-3.1-70B", 8, 8), 9)
    root, block = report.rows
    assert root.label == "root"
    assert block.label == "model.layers.0 … 79 ×80"
    assert (block.count, block.parameters, block.ranks) == (80, 9, 64)
    assert block.nbytes == 2 * 855_654_400  # parameters of a block
    assert block.descriptors == 9 * 64
    assert block.transfers < block.descriptors
    assert (block.bundled, block.bundle_nbytes) == (2, 2 * 2 * 8192)
    assert block.slots == (1, 2)
    assert root.slots == (0,)
    assert block.padding_avoided == 0
    sums = report.totals
    assert (sums["units"], sums["parameters"], sums["numel"]) == (81, 723, 70_553_706_496)
    assert sums["descriptors"] == 723 * 64
    assert sums["all_gather_seconds"] == pytest.approx(root.all_gather.seconds + 80 * block.all_gather.seconds)


def test_padding_avoided_is_what_fsdp2_pads() -> None:
    """Known padding of public models, in per cent of a block."""
    for name, ranks, percent in (
        ("Llama-3.1-70B", 72, 0.30),
        ("Qwen3-30B-A3B", 72, 12.2),
        ("gpt-oss-20b", 64, 97.0),
        ("Wan2.2-A14B", 128, 1.11),
    ):
        row = plan_report(public(name, ranks // 8, 8), 0).rows[-1]
        assert row.padding_percent == pytest.approx(percent, abs=0.6 if percent > 50 else 0.06), name


@pytest.mark.parametrize(
    ("nodes", "gpus", "route", "reason"),
    [
        (1, 4, "push, copy engine", "pushed to the peers by copy engine: 4 ranks on one node"),
        (8, 2, "doubling + push", "put on rails by recursive doubling, 3 steps: 8 nodes"),
        (9, 2, "dissemination + push", "put on rails by dissemination, 4 steps: 9 nodes is no power of two"),
        (4, 1, "doubling, puts", "one rank a node, nothing to spread"),
        (1, 1, "place", "nothing to gather: one rank holds the unit"),
    ],
)
def test_route_and_its_reason(nodes: int, gpus: int, route: str, reason: str) -> None:
    (row,) = plan_report(tiny({"w": (4096, 64)}, nodes, gpus), 0).rows
    assert row.all_gather_route == route
    assert reason in row.all_gather_reason


def test_a_group_that_sits_unevenly_says_so() -> None:
    compiled = tiny({"w": (4096, 64)}, nodes=2, gpus=4, groups=((0, 1, 2, 4),))
    report = plan_report(compiled, 0)
    (row,) = report.rows
    assert "the group of 4 ranks does not sit evenly on its 2 nodes: every rank its own node" in row.all_gather_reason
    assert "every rank its own node" in row.reduce_scatter_reason
    assert "every rank its own node" in str(report)


def test_virtual_nodes_are_named() -> None:
    compiled = tiny({"w": (4096, 64)}, topology=Topology(2, 2, virtual=True))
    assert "(virtual nodes)" in plan_report(compiled, 0).rows[0].all_gather_reason


def test_frozen_units_and_units_elsewhere() -> None:
    here, there = Mesh((tuple(range(4)),)), Mesh(((2, 3),))
    units = (
        Unit("frozen", (Parameter("frozen.w", (64, 64), grad_dtype=None),), here),
        Unit("experts", (Parameter("experts.w", (64, 64)),), there),
    )
    skipped = (("rope.freqs", "in ignored_params"),)
    compiled = compile_spec(ModelSpec(units, "mixed", skipped), Topology(1, 4), PlanOptions())
    report = plan_report(compiled, 0)
    (row,) = report.rows
    assert row.reduce_scatter is None
    text = str(report)
    assert "all parameters are frozen" in text
    assert "rank 0 holds no shard of 1 units: experts" in text
    assert "rope.freqs: in ignored_params" in text
    assert "rope.freqs" in report._repr_html_()
    assert len(plan_report(compiled, 2).rows) == 2


def test_what_stock_refuses_is_said() -> None:
    report = plan_report(tiny({"w": (8, 6)}, gpus=4, dims={"w": 1}), 0)
    assert report.rows[0].stock_refuses == ("block.w",)
    assert "stock FSDP2 refuses uneven shards of a dim other than 0: block.w" in str(report)


def test_bundle_and_slot_reasons() -> None:
    compiled = tiny({"w": (4096, 512), "a": (64,), "b": (64,), "s": (4096, 1024)}, gpus=4, dims={"s": 1})
    (row,) = plan_report(compiled, 0).rows
    assert row.bundled == 2
    assert "2 parameters with shards of at most 32.0 KiB" in row.bundle_reason
    assert "slots is None" in row.slot_reason
    short = tiny({"w": (4096, 512), "s": (4096, 512)}, gpus=4, dims={"s": 1})
    assert "1 parameter with runs shorter than 512 B" in plan_report(short, 0).rows[0].bundle_reason


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (9, 8)])
def test_text_fits_and_says_what_it_rests_on(name: str, nodes: int, gpus: int) -> None:
    report = plan_report(public(name, nodes, gpus), 0)
    text = str(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.isprintable() or set(text) - set(filter(str.isprintable, text)) == {"\n"}
    assert name in text.splitlines()[0]
    assert "Times are predictions from stated rates, not measurements" in text
    assert "Not counted anywhere: optimizer state, activations." in text
    for row in report.rows:
        assert row.all_gather_reason[:40] in text.replace("\n    ", " ")


def test_long_names_are_cut_in_the_middle() -> None:
    assert shorten("abcdefghij", 7) == "ab…ghij"
    compiled = tiny({"w": (4096, 64)})
    long = replace(compiled.spec.units[0], name="m." + "x" * 200, parameters=(Parameter("p", (64, 64)),))
    other = compile_spec(ModelSpec((long,), "s" * 300), Topology(1, 2), PlanOptions())
    assert max(map(len, str(plan_report(other, 0)).splitlines())) <= WIDTH


def test_dict_is_json_and_complete() -> None:
    report = plan_report(public("DeepSeek-V3", 9, 8), 0)
    data = json.loads(json.dumps(report.to_dict()))
    assert [row["label"] for row in data["units"]] == [row.label for row in report.rows]
    assert data["totals"]["units"] == 62
    assert data["memory"]["tide"] == report.memory.tide
    assert data["memory"]["excluded"] == "optimizer state, activations"
    assert data["units"][1]["all_gather"]["seconds"] > 0


class _Tags(HTMLParser):
    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_escaped_balanced_and_without_scripts() -> None:
    evil = "<script>alert(1)</script>"
    unit = Unit(evil, (Parameter(f"{evil}.w", (64, 64)),), Mesh(((0, 1),)))
    compiled = compile_spec(ModelSpec((unit,), evil, ((evil, evil),)), Topology(1, 2), PlanOptions())
    html = plan_report(compiled, 0)._repr_html_()
    tags = _Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    assert "table" in tags.seen
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in html
    assert "http" not in html  # nothing is loaded from elsewhere


def test_repr_is_one_line_and_ranks_are_checked() -> None:
    compiled = public("Llama-3.1-8B", 1, 2)
    assert repr(plan_report(compiled, 0)) == "<tide.PlanReport Llama-3.1-8B: 2 kinds of units; 1 nodes × 2 GPUs>"
    with pytest.raises(InputError, match="rank 2 is outside"):
        plan_report(compiled, 2)


def test_figures_for_people() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1024, 1 << 20, int(1.594 * 2**30), 150 << 30)] == [
        "0 B", "1023 B", "1.00 KiB", "1.00 MiB", "1.59 GiB", "150 GiB"
    ]  # fmt: skip
    assert [show_time(t) for t in (0, 5e-9, 1.23e-5, 9.99e-4, 5.97e-3, 0.4917, 12.3)] == [
        "0.00 µs", "0.01 µs", "12.3 µs", "999 µs", "5.97 ms", "492 ms", "12.3 s"
    ]  # fmt: skip
    assert label(["blocks.0", "blocks.1", "blocks.2"]) == "blocks.0 … 2 ×3"
    assert label(["blocks.1", "blocks.3", "blocks.5"]) == "blocks.1, 3 … 5 ×3"
    assert label(["encoder", "decoder"]) == "encoder … decoder ×2"
    assert label([""]) == "root"
