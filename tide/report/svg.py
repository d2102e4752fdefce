"""Drawing by hand: a small canvas that writes SVG, with colours that colour-blind readers can tell apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tide.report.units import show_bytes

#: Okabe and Ito's colours, without black: blue, orange, green, purple, sky, vermilion, yellow.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INK, FAINT, PAPER, SHADE = "#222222", "#666666", "#FFFFFF", "#E4E4E4"
#: Width of a character relative to the font size, on the safe side for sans-serif faces.
_CHARACTER = 0.6


class Svg(str):
    """SVG text that notebooks show as a picture."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Svg of {len(self):,} characters>"

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file."""
        Path(path).write_text(self, encoding="utf-8")


def text_width(text: str, size: float) -> float:
    """Estimated width of a text in pixels."""
    return len(text) * size * _CHARACTER


def contrast(fill: str) -> str:
    """Ink or paper, whichever is read better on ``fill``."""
    red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.2 else PAPER


class Canvas:
    """Collects shapes; coordinates are pixels from the top left corner.

    Parameters
    ----------
    width : int
        Width of the picture; the height follows from what is drawn.
    title : str
        Read out to those who cannot see it.
    """

    def __init__(self, width: int, title: str) -> None:
        self.width, self.title = width, title
        self.height = 0.0
        self._parts: list[str] = []
        self._arrows: dict[str, str] = {}

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        tip: str = "",
        stroke: str = "none",
        dash: str = "",
        label: str = "",
        size: float = 11,
    ) -> bool:
        """A rectangle, with a tooltip, and with ``label`` inside if it fits; whether it did."""
        attributes = f'fill="{fill}" stroke="{stroke}"' + (f' stroke-dasharray="{dash}"' if dash else "")
        shape = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.1):.2f}" height="{height:.2f}" {attributes}'
        self._parts.append(f"<rect {shape}><title>{escape(tip)}</title></rect>" if tip else f"<rect {shape}/>")
        self._grow(y + height)
        if not label or text_width(label, size) > width - 4:
            return False
        ink = INK if fill == "none" else contrast(fill)
        self.text(x + width / 2, y + height / 2 + size * 0.36, label, size=size, anchor="middle", fill=ink)
        return True

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        fill: str = INK,
        weight: str = "normal",
    ) -> None:
        """A line of text with its baseline at ``y``."""
        bold = "" if weight == "normal" else f' font-weight="{weight}"'
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{bold}>'
            f"{escape(text)}</text>"
        )
        self._grow(y + size * 0.4)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, width: float = 1) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}" '
            f'stroke-width="{width:g}"/>'
        )
        self._grow(max(y1, y2))

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, opacity: float = 1) -> None:
        """A filled outline."""
        where = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._parts.append(f'<polygon points="{where}" fill="{fill}" fill-opacity="{opacity:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1.4) -> None:
        """An arrow that leaves and arrives vertically."""
        head = self._arrows.setdefault(stroke, f"head{len(self._arrows)}")
        middle, end = (y1 + y2) / 2, y2 - 4
        self._parts.append(
            f'<path d="M{x1:.2f},{y1:.2f} C{x1:.2f},{middle:.2f} {x2:.2f},{middle:.2f} {x2:.2f},{end:.2f}" '
            f'fill="none" stroke="{stroke}" stroke-width="{width:g}" marker-end="url(#{head})"/>'
        )
        self._grow(max(y1, y2))

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> float:
        """Coloured boxes with their meaning, in lines from ``y`` on; the ``y`` below them."""
        at = x
        for color, meaning in entries:
            needed = 24 + text_width(meaning, 11)
            if at > x and at + needed > self.width - 10:
                at, y = x, y + 18
            self.rect(at, y, 12, 12, color, stroke=FAINT)
            self.text(at + 17, y + 10, meaning, size=11)
            at += needed + 10
        return y + 24

    def _grow(self, y: float) -> None:
        self.height = max(self.height, y)

    def render(self) -> Svg:
        """The picture."""
        height = math.ceil(self.height + 10)
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 Z" fill="{color}"/></marker>'
            for color, name in self._arrows.items()
        )
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">'
            f"<title>{escape(self.title)}</title><defs>{heads}</defs>"
            f'<rect width="{self.width}" height="{height}" fill="{PAPER}"/>'
            f"{''.join(self._parts)}</svg>"
        )


def ticks(limit: float, count: int = 8) -> list[float]:
    """Round decimal numbers from 0 to ``limit``, about ``count`` of them."""
    if limit <= 0:
        return [0.0]
    raw = limit / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * number for number in range(int(limit / step + 1e-9) + 1)]


def byte_ticks(limit: int, count: int = 8) -> list[int]:
    """Powers of two apart, from 0 to ``limit``, about ``count`` of them."""
    step = 1 << max((limit // count).bit_length(), 0)
    return list(range(0, limit + 1, step))


def byte_axis(canvas: Canvas, x: float, y: float, width: float, limit: int) -> None:
    """Scale in bytes under a strip."""
    for value in byte_ticks(limit):
        at = x + width * value / limit
        canvas.line(at, y, at, y + 5, FAINT)
        anchor = "start" if value == 0 else "middle"
        if at + text_width(show_bytes(value), 10) / 2 <= canvas.width:
            canvas.text(at, y + 16, show_bytes(value) if value else "0", size=10, anchor=anchor, fill=FAINT)
