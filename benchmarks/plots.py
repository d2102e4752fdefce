"""Pictures of the results: bus bandwidth over size, step times, slowdown of compute.

usage: python benchmarks/plots.py [2xh200 …]    writes results/*.svg from the newest results of each machine
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from records import NAME, RESULTS, SWEEP, Record, newest
from tables import named
from tide.report.svg import FAINT, INK, PALETTE, SHADE, Canvas, Svg, text_width, ticks

VARIANTS = ("stock", "symm", "tide")
COLORS = dict(zip(VARIANTS, (PALETTE[1], PALETTE[4], PALETTE[2]), strict=True))
FLOOR = PALETTE[5]


class Panel:
    """A chart's frame with a linear scale upwards.

    Parameters
    ----------
    canvas : Canvas
        To draw on.
    left, top, width, height : float
        Of the plotting area, in pixels.
    low, high : float
        Values at the bottom and at the top.
    """

    def __init__(
        self, canvas: Canvas, left: float, top: float, width: float, height: float, low: float, high: float
    ) -> None:
        self.canvas, self.left, self.top, self.width, self.height = canvas, left, top, width, height
        self.low, self.high = low, high
        self.bottom = top + height

    def y(self, value: float) -> float:
        """Pixels of a value."""
        return self.bottom - (value - self.low) / (self.high - self.low) * self.height

    def frame(self, title: str, shape: str) -> None:
        """Title, horizontal lines and their values."""
        self.canvas.text(self.left, self.top - 10, title, size=13, weight="bold")
        for tick in ticks(self.high - self.low, 6):
            value = self.low + tick
            self.canvas.line(self.left, self.y(value), self.left + self.width, self.y(value), SHADE)
            self.canvas.text(self.left - 5, self.y(value) + 4, format(value, shape), size=10, anchor="end", fill=FAINT)

    def bar(self, x: float, width: float, value: float, color: str, tip: str, label: str) -> None:
        """A bar from the bottom, with its value above."""
        at = self.y(min(value, self.high))
        self.canvas.rect(x, at, width, max(self.bottom - at, 0.5), color, tip=tip)
        if label:
            self.canvas.text(x + width / 2, at - 3, label, size=9, anchor="middle", fill=FAINT)

    def whisker(self, x: float, low: float, high: float) -> None:
        """The spread of a bar."""
        self.canvas.line(x, self.y(low), x, self.y(min(high, self.high)), INK)

    def caption(self, center: float, lines: Sequence[str]) -> None:
        """Text below the frame."""
        for number, line in enumerate(lines):
            self.canvas.text(center, self.bottom + 15 + 13 * number, line, size=10, anchor="middle")


def bandwidth(record: Record) -> Svg | None:
    """Bus bandwidth over the size of a unit, all-gather and reduce-scatter; None without a sweep."""
    rows = [row for row in record.rows if row["unit"].startswith(SWEEP) and row["variant"] in VARIANTS]
    if not rows:
        return None
    top = max(record.facts["copy_engine_gb_s"].values())
    canvas = Canvas(960, f"Bus bandwidth over size, {record.hardware}")
    high = 1.08 * max(top, *(row["busbw"] for row in rows))
    sizes = sorted({row["bytes"] for row in rows})
    labels = {row["bytes"]: row["unit"].removeprefix(f"{SWEEP} ") for row in rows}
    for number, collective in enumerate(("all-gather", "reduce-scatter")):
        panel = Panel(canvas, 50 + 470 * number, 60, 410, 260, 0, high)
        panel.frame(f"{collective}, bus bandwidth in GB/s", ".0f")
        span = math.log2(sizes[-1] / sizes[0])
        place = {size: panel.left + panel.width * (0.03 + 0.94 * math.log2(size / sizes[0]) / span) for size in sizes}
        last = -math.inf
        for size in sizes:
            if place[size] - last > text_width(labels[size], 10) + 4:
                panel.caption(place[size], [labels[size]])
                last = place[size]
        canvas.line(panel.left, panel.y(top), panel.left + panel.width, panel.y(top), FLOOR, 1.5)
        for variant in VARIANTS:
            points = sorted(
                (row["bytes"], row["busbw"])
                for row in rows
                if (row["collective"], row["variant"]) == (collective, variant)
            )
            where = [(place[size], panel.y(rate)) for size, rate in points]
            for one, other in pairwise(where):
                canvas.line(*one, *other, COLORS[variant], 2)
            for (x, y), (size, rate) in zip(where, points, strict=True):
                canvas.rect(
                    x - 3, y - 3, 6, 6, COLORS[variant], tip=f"{named(variant)}, {labels[size]}: {rate:.1f} GB/s"
                )
    _legend(canvas, [(FLOOR, f"copy engines, 1 GiB: {top:.0f} GB/s")])
    return canvas.render()


def steps(record: Record) -> Svg | None:
    """Step times of each model and size, with the floor."""
    found = record.rows_by("model", "tokens", "variant")
    cases = list(dict.fromkeys((row["model"], row["tokens"]) for row in record.rows))
    if not cases:
        return None
    canvas = Canvas(960, f"Training step, {record.hardware}")
    columns, gap, height = 4, 14, 170
    width = (940 - gap * columns) / columns - 34
    for number, case in enumerate(cases):
        rows = {variant: found[(*case, variant)] for variant in VARIANTS if (*case, variant) in found}
        floors = [found[(*case, v)]["ms"] for v in ("solo", "free") if (*case, v) in found]
        left = 40 + (number % columns) * (width + 34 + gap)
        top = 60 + (number // columns) * (height + 80)
        high = 1.12 * max([row["max_ms"] for row in rows.values()] + floors)
        panel = Panel(canvas, left, top, width, height, 0, high)
        panel.frame("", ".0f")
        slot = width / max(len(rows), 1)
        for place, (variant, row) in enumerate(rows.items()):
            x = left + slot * (place + 0.15)
            panel.bar(
                x, slot * 0.7, row["ms"], COLORS[variant], f"{named(variant)}: {row['ms']:.1f} ms", f"{row['ms']:.1f}"
            )
        if floors:
            canvas.line(left, panel.y(min(floors)), left + width, panel.y(min(floors)), FLOOR, 1.5)
        panel.caption(left + width / 2, [case[0], f"{case[1]:,} tokens a GPU"])
    _legend(canvas, [(FLOOR, "floor: the smaller of no FSDP and free collectives")], "Milliseconds a training step")
    return canvas.render()


def slowdowns(record: Record) -> Svg | None:
    """Slowdown of compute beside each collective; alone is 1."""
    rows = [row for row in record.rows if row["variant"] in VARIANTS and "slowdown" in row]
    if not rows:
        return None
    canvas = Canvas(960, f"Slowdown of compute, {record.hardware}")
    high = 1.02 * max(row["slowdown_max"] for row in rows)
    low = math.floor(20 * min(1.0, *(row["slowdown_min"] for row in rows))) / 20 - 0.05
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    found = {(row["kernel"], row["collective"], row["variant"]): row for row in rows}
    for number, collective in enumerate(("all-gather", "reduce-scatter")):
        panel = Panel(canvas, 50, 60 + number * 270, 890, 190, low, high)
        panel.frame(f"beside {collective}: time ÷ time alone", ".2f")
        slot = panel.width / len(kernels)
        for place, kernel in enumerate(kernels):
            for turn, variant in enumerate(VARIANTS):
                row = found.get((kernel, collective, variant))
                if row is None:
                    continue
                width = slot * 0.22
                x = panel.left + slot * place + slot * 0.17 + turn * width
                tip = f"{named(variant)}: {row['slowdown']:.3f}; nothing beside it: {row['null']:.3f}"
                panel.bar(x, width * 0.85, row["slowdown"], COLORS[variant], tip, f"{row['slowdown']:.2f}")
                panel.whisker(x + width * 0.75, row["slowdown_min"], row["slowdown_max"])
            panel.caption(panel.left + slot * (place + 0.5), [kernel])
        canvas.line(panel.left, panel.y(1), panel.left + panel.width, panel.y(1), FLOOR, 1.5)
    _legend(canvas, [(FLOOR, "alone")])
    return canvas.render()


def _legend(canvas: Canvas, more: list[tuple[str, str]], title: str = "") -> None:
    if title:
        canvas.text(40, 40, title, size=13, weight="bold")
    canvas.legend(40, 8, [(COLORS[variant], named(variant)) for variant in VARIANTS] + more)


PICTURES: dict[str, tuple[str, Callable[[Record], Svg | None]]] = {
    "busbw": ("collectives", bandwidth),
    "step": ("step", steps),
    "interference": ("interference", slowdowns),
}


def draw(hardware: str, folder: Path = RESULTS) -> dict[str, Svg]:
    """The pictures that there are results for, by file name."""
    found: dict[str, Svg] = {}
    for name, (benchmark, make) in PICTURES.items():
        record = newest(benchmark, hardware, folder, SWEEP if name == "busbw" else "")
        picture: Any = make(record) if record else None
        if picture is not None:
            found[f"{name}-{hardware}.svg"] = picture
    return found


def main() -> None:
    """Writes the pictures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("hardware", nargs="*", help="by default every machine that has results")
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    names = (NAME.fullmatch(path.name) for path in given.results.glob("*.json"))
    for hardware in given.hardware or sorted({name["hardware"] for name in names if name}):
        for name, picture in draw(hardware, given.results).items():
            picture.save(given.results / name)
            print(given.results / name)


if __name__ == "__main__":
    main()
