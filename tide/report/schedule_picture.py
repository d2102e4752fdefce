"""A picture of one collective on the predicted clock: a lane a stream, a bar a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide.compiler.clock import Event, clock
from tide.compiler.compile import Compiled
from tide.compiler.cost import summary
from tide.compiler.steps import Copy, Program
from tide.report.svg import FAINT, INK, PALETTE, SHADE, Canvas, Svg, text_width, ticks
from tide.report.units import show_bytes, show_name, show_time

_LEFT, _NAME, _WIDTH, _LANE = 12, 84, 920, 34
#: Bars closer than this many pixels are drawn as one.
_MERGE = 0.6

#: Colour and meaning of each kind of step.
KINDS = {
    "place": (PALETTE[2], "place (kernel)"),
    "copy": (PALETTE[0], "copy (copy engine)"),
    "multicast": (PALETTE[4], "multicast"),
    "put": (PALETTE[1], "put (network)"),
    "accumulate": (PALETTE[3], "accumulate (kernel)"),
    "switch_reduce": (PALETTE[5], "switch reduce (kernel)"),
    "wait": (SHADE, "wait"),
}


class Bar(NamedTuple):
    """Steps of one kind that follow each other without a gap that could be seen."""

    kind: str
    start: float
    stop: float
    label: str
    tip: str


def step_label(event: Event, program: Program) -> str:
    """What a step does, in a few characters: ``← 3`` for a pull from rank 3."""
    if event.kind in ("copy", "put"):
        steps = next(stream.steps for stream in program.streams if stream.name == event.stream)
        step = steps[event.index]
        pull = isinstance(step, Copy) and step.pull
        return f"{'←' if pull else '→'} {event.peer}"
    return {"place": "place", "accumulate": "sum", "switch_reduce": "sum", "multicast": "all"}.get(event.kind, "")


def bars(events: Sequence[Event], program: Program, resolution: float) -> list[Bar]:
    """Bars of one stream; steps closer than ``resolution`` seconds and of one kind become one."""
    out: list[Bar] = []
    counts: list[int] = []
    for event in events:
        if event.kind not in KINDS or event.stop - event.start <= 0:
            continue
        tip = f"{event.kind} {step_label(event, program)}: {show_time(event.stop - event.start)}"
        if event.nbytes:
            tip += f", {show_bytes(event.nbytes)}"
        tip += f", from {show_time(event.start)}"
        bar = Bar(event.kind, event.start, event.stop, step_label(event, program), tip)
        last = out[-1] if out else None
        small = last is not None and min(bar.stop - bar.start, last.stop - last.start) < resolution
        if last is not None and last.kind == bar.kind and small and bar.start - last.stop < resolution:
            counts[-1] += 1
            out[-1] = Bar(
                bar.kind, last.start, bar.stop, "", f"{counts[-1]} × {bar.kind}, from {show_time(last.start)}"
            )
        else:
            out.append(bar)
            counts.append(1)
    return out


def schedule_svg(compiled: Compiled, unit: str, collective: str, rank: int) -> Svg:
    """Swim lanes of one rank's streams on the predicted clock.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    unit : str
        Unit name.
    collective : str
        ``"all_gather"`` or ``"reduce_scatter"``.
    rank : int
        World rank.
    """
    course = clock(compiled, unit, collective, rank)
    found, program = summary(compiled, course, rank), compiled.program(unit, collective, rank)
    what = f"{collective.replace('_', '-')} of {show_name(unit)}, rank {rank}"
    canvas = Canvas(_LEFT * 2 + _NAME + _WIDTH, f"Predicted {what}")
    canvas.text(_LEFT, 22, f"{what}: {show_time(found.seconds)} predicted", size=15, weight="bold")
    links = compiled.topology.links
    parts = [
        f"copy engine busy {show_time(found.copy_seconds)} at {links.copy_engine / 1e9:.0f} GB/s",
        f"network busy {show_time(found.network_seconds)} at {links.network / 1e9:.0f} GB/s",
        f"kernels {show_time(found.sm_seconds)} at {links.memory / 1e12:.2f} TB/s",
    ]
    if not found.network_bytes:
        del parts[1]
    canvas.text(_LEFT, 40, f"{compiled.topology}; " + "; ".join(parts), size=11, fill=FAINT)
    end = max(found.seconds, 1e-9)
    x, y, scale = _LEFT + _NAME, 56.0, _WIDTH / end
    height = len(program.streams) * (_LANE + 8)
    step = ticks(end * 1e3)
    digits = 0 if len(step) < 2 or step[1] >= 1 else max(len(f"{step[1]:.6f}".rstrip("0").partition(".")[2]), 1)
    for value in step:
        at = x + value * 1e-3 * scale
        canvas.line(at, y, at, y + height, SHADE)
        canvas.text(at, y + height + 14, f"{value:.{digits}f}", size=10, anchor="middle", fill=FAINT)
    canvas.text(_LEFT, y + height + 14, "ms", size=10, fill=FAINT)
    used: dict[str, None] = {}
    for stream in program.streams:
        canvas.text(_LEFT, y + _LANE / 2 + 8, stream.name, size=12)
        canvas.line(x, y + _LANE + 4, x + _WIDTH, y + _LANE + 4, FAINT, 0.5)
        lane = [event for event in found.events if event.stream == stream.name]
        for bar in bars(lane, program, _MERGE / scale):
            used[bar.kind] = None
            width = (bar.stop - bar.start) * scale
            stroke = "#FFFFFF" if width > 3 else "none"
            thin = bar.kind == "wait"
            fits = bar.label if text_width(bar.label, 10) < width - 4 else bar.label[2:]
            canvas.rect(
                x + bar.start * scale,
                y + (10 if thin else 2),
                width,
                _LANE - (16 if thin else 0),
                KINDS[bar.kind][0],
                tip=bar.tip,
                stroke=stroke,
                label=fits,
                size=10,
            )
        y += _LANE + 8
    if found.released < 0.999 * found.seconds:
        at = x + found.released * scale
        canvas.line(at, 52, at, y, INK, 1.5)
        canvas.text(at + 4, 62, "gradients free", size=10)
    entries = [KINDS[kind] for kind in KINDS if kind in used]
    y = canvas.legend(_LEFT, y + 26, entries)
    if found.assumed:
        canvas.text(
            _LEFT, y + 8, f"{found.assumed} waits for unlike nodes were taken to end at once", size=11, fill=FAINT
        )
    return canvas.render()
