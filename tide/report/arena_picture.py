"""A picture of the arena: slots and areas to scale, and what lies in each kind of slot."""

from __future__ import annotations

from typing import NamedTuple

from tide.compiler.compile import Compiled
from tide.report.svg import FAINT, INK, PALETTE, SHADE, Canvas, Svg, byte_axis, text_width
from tide.report.units import label, show_bytes

_LEFT, _WIDTH, _STRIP = 12, 1000, 34
#: Kinds of slots that are drawn in detail.
_DETAILS = 5


class Area(NamedTuple):
    """A part of the arena; bytes."""

    name: str
    offset: int
    size: int
    color: str
    tip: str


def areas(compiled: Compiled) -> list[Area]:
    """Slots and areas in order of offset; together they are the arena."""
    arena, receive = compiled.arena, compiled.arena.receive
    found = []
    colors: dict[int, str] = {}
    for number, slot in enumerate(arena.slots):
        layout = id(compiled.layouts[slot.units[0]])
        color = colors.setdefault(layout, (PALETTE[0], PALETTE[4], PALETTE[2])[len(colors) % 3])
        units = label(slot.units)
        tip = f"slot {number}: {units}; {show_bytes(slot.size)} at {slot.offset:,}"
        found.append(Area(f"slot {number}", slot.offset, slot.size, color, tip))
    ends = (receive.receive, receive.partial, receive.wire, receive.staged, receive.spread, arena.signals, arena.size)
    sums = f"{receive.depth} {compiled.options.wire_dtype} sums of {show_bytes(receive.chunk)}"
    meaning = (
        ("receive", PALETTE[1], f"{receive.depth} positions of {receive.peers} pieces of {show_bytes(receive.piece)}"),
        ("partial", PALETTE[3], f"{sums} on their way out"),
        ("wire", PALETTE[5], f"{sums} that came in"),
        ("packed", PALETTE[0], "small gradients on their way to the ranks that sum them"),
        ("spread", PALETTE[4], f"{receive.spread_places} sums of {show_bytes(receive.spread_chunk)}, for the switch"),
        (
            "signals",
            PALETTE[6],
            f"{arena.words.count} words for {len(arena.words.units)} units and {len(arena.slots)} slots",
        ),
    )
    for (name, color, what), start, stop in zip(meaning, ends[:-1], ends[1:], strict=True):
        if stop > start:
            tip = f"{name}: {what}; {show_bytes(stop - start)} at {start:,}"
            found.append(Area(name, start, stop - start, color, tip))
    return found


def arena_svg(compiled: Compiled) -> Svg:
    """Picture of the arena, the same on every rank.

    The first strip is the arena to scale; the second, to a scale of its own, what follows the slots. Then comes
    one strip for each kind of slot, with its parameters to scale.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    """
    arena = compiled.arena
    title = f"Arena of {compiled.spec.source or 'the model'}: {show_bytes(arena.size)} on every rank"
    canvas = Canvas(_WIDTH + 2 * _LEFT, title)
    canvas.text(_LEFT, 22, title, size=15, weight="bold")
    canvas.text(_LEFT, 40, f"{compiled.topology}; offsets are equal on all ranks", size=11, fill=FAINT)
    found = areas(compiled)
    rest = [area for area in found if not area.name.startswith("slot")]
    start, y = compiled.arena.receive.receive, 64.0
    below = y + _STRIP + 48
    if rest:  # first, so that the scale of the first strip stays on top
        left = _LEFT + start * _WIDTH / arena.size
        corners = [(left, y + _STRIP), (_LEFT + _WIDTH, y + _STRIP), (_LEFT + _WIDTH, below), (_LEFT, below)]
        canvas.polygon(corners, SHADE, 0.7)
    y = _strip(canvas, y, found, 0, arena.size)
    if rest:
        factor = arena.size / max(arena.size - start, 1)
        canvas.text(_LEFT, below - 6, f"after the slots, ×{factor:,.0f}", size=11, fill=FAINT)
        y = _strip(canvas, below, rest, start, arena.size)
    y = canvas.legend(_LEFT, y + 4, _legend(compiled, found))
    return _slots(canvas, y + 8, compiled).render()


def _strip(canvas: Canvas, y: float, found: list[Area], start: int, stop: int) -> float:
    scale = _WIDTH / (stop - start)
    for area in found:
        x, width = _LEFT + (area.offset - start) * scale, area.size * scale
        stroke = "#FFFFFF" if width > 3 else "none"
        both = f"{area.name}: {show_bytes(area.size)}"
        name = both if text_width(both, 11) < width - 4 else area.name
        canvas.rect(x, y, width, _STRIP, area.color, tip=area.tip, stroke=stroke, label=name)
    canvas.rect(_LEFT, y, _WIDTH, _STRIP, "none", stroke=INK)
    if start == 0:
        byte_axis(canvas, _LEFT, y + _STRIP, _WIDTH, stop)
    return y + _STRIP + 22


def _legend(compiled: Compiled, found: list[Area]) -> list[tuple[str, str]]:
    entries: dict[str, str] = {}
    together: dict[str, list[str]] = {}
    for slot, area in zip(compiled.arena.slots, found, strict=False):
        together.setdefault(area.color, []).extend(slot.units)
    order = {unit.name: number for number, unit in enumerate(compiled.spec.units)}
    for color, units in together.items():
        slots = [area for area in found[: len(compiled.arena.slots)] if area.color == color]
        each = f"{len(slots)} slots" if len(slots) > 1 else "1 slot"
        entries[color] = f"{each}: {label(sorted(units, key=order.__getitem__))}"
    for area in found[len(compiled.arena.slots) :]:
        entries.setdefault(area.color, f"{area.name} {show_bytes(area.size)}")
    return list(entries.items())


def _slots(canvas: Canvas, y: float, compiled: Compiled) -> Canvas:
    """Strips of what lies in each kind of slot."""
    drawn: set[int] = set()
    left_out = 0
    for unit in compiled.spec.units:
        layout = compiled.layouts[unit.name]
        if id(layout) in drawn:
            continue
        drawn.add(id(layout))
        if len(drawn) > _DETAILS:
            left_out += 1
            continue
        slot = compiled.arena.slots[compiled.arena.slot_of[unit.name]]
        alike = [other.name for other in compiled.spec.units if compiled.layouts[other.name] is layout]
        canvas.text(_LEFT, y + 12, f"storage of {label(alike)}: {show_bytes(layout.size)}", size=12, weight="bold")
        y += 20
        scale, unlabelled = _WIDTH / slot.size, []
        for index, parameter in enumerate(unit.parameters):
            name = parameter.name.removeprefix(f"{unit.name}.") if unit.name else parameter.name
            offset, nbytes = layout.offsets[index], layout.nbytes[index]
            color = PALETTE[(0, 2, 1, 3, 4, 5)[index % 6]]
            tip = f"{name} {parameter.shape} {parameter.dtype}: {show_bytes(nbytes)} at {offset:,} of the slot"
            width = nbytes * scale
            short = name.removesuffix(".weight").rpartition(".")[2] or name
            text = next((form for form in (name, short) if text_width(form, 11) < width - 4), "")
            stroke = "#FFFFFF" if width > 3 else "none"
            if not canvas.rect(_LEFT + offset * scale, y, width, _STRIP, color, tip=tip, stroke=stroke, label=text):
                unlabelled.append(f"{name} {show_bytes(nbytes)}")
        if layout.bundle is not None:
            nbytes = int(layout.bundle.length.sum())
            tip = f"bundle of {len(layout.bundle.members)} parameters: {show_bytes(nbytes)}"
            canvas.rect(_LEFT + layout.bundle.offset * scale, y, nbytes * scale, _STRIP, PALETTE[6], tip=tip)
            unlabelled.append(f"bundle {show_bytes(nbytes)}")
        canvas.rect(_LEFT, y, _WIDTH, _STRIP, "none", stroke=INK)
        y += _STRIP + 16
        if unlabelled:
            y = _too_small(canvas, y, unlabelled)
        y += 12
    if left_out:
        canvas.text(_LEFT, y + 8, f"and {left_out} more kinds of units", size=11, fill=FAINT)
    return canvas


def _too_small(canvas: Canvas, y: float, names: list[str]) -> float:
    """Names of what is too narrow for a label, in at most two lines; the ``y`` after them."""
    lines, line = [], "too narrow for a label:"
    for number, name in enumerate(names):
        if text_width(f"{line} {name},", 11) > _WIDTH:
            lines.append(line)
            line = "   "
        if len(lines) == 2:
            lines[-1] += f" and {len(names) - number} more"
            line = ""
            break
        line += f" {name}" + ("," if number < len(names) - 1 else "")
    for text in [*lines, line] if line else lines:
        canvas.text(_LEFT, y, text, size=11, fill=FAINT)
        y += 15
    return y
