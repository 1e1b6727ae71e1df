"""Plots as SVG, drawn for a page that sets their colours by CSS variables, in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 480
"""Of every plot, in its own units: text of 12 is legible where it is shown half a wide page or a whole narrow one wide."""
SERIES = 6
"""Colours that the page knows: ``--s0`` to ``--s5``."""


def text(value: object) -> str:
    """Safe in HTML and SVG, in attributes, too."""
    return html.escape(str(value), quote=True)


def _words(x: float, y: float, said: object, anchor: str = "start", kind: str = "label") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(said)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, style: str = "") -> str:
    styled = f' style="{style}"' if style else ""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{styled}/>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{text(title)}">'
        f"<title>{text(title)}</title>{''.join(parts)}</svg>"
    )


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten within; only whole powers where these are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low <= 1000 else (1,)
    found = [s * 10.0**e for e in exponents for s in steps]
    return [v for v in found if low * 0.999 <= v <= high * 1.001]


@dataclass(frozen=True)
class Curve:
    """One cumulative distribution: points of (value, share up to it), both rising."""

    name: str
    points: Sequence[tuple[float, float]]
    mark: float = 0.0
    """A value to mark in its colour, such as its deadline; 0: none."""


def cdf(curves: Sequence[Curve], axis: str, title: str) -> str:
    """Shares up to a value, over a logarithmic axis."""
    curves = [c for c in curves if c.points]
    values = [x for c in curves for x, _ in c.points if x > 0] + [c.mark for c in curves if c.mark]
    if not values:
        return ""
    low, high = min(values), max(values)
    low, high = low / 1.15, max(high * 1.15, low * 4)
    legend = 20.0 * len(curves)
    left, right, top, bottom = 46.0, WIDTH - 12.0, 10.0, 244.0

    def at_x(value: float) -> float:
        return left + (right - left) * math.log(max(value, low) / low) / math.log(high / low)

    def at_y(share: float) -> float:
        return bottom - (bottom - top) * share

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_line(left, at_y(share), right, at_y(share), "grid"))
        parts.append(_words(left - 7, at_y(share) + 4, f"{100 * share:.0f} %", "end"))
    for value in _decades(low, high):
        parts.append(_line(at_x(value), top, at_x(value), bottom, "grid"))
        parts.append(_words(at_x(value), bottom + 17, f"{value:g}", "middle"))
    parts.append(_words((left + right) / 2, bottom + 36, axis, "middle", "axis"))
    for i, curve in enumerate(curves):
        colour = f"stroke:var(--s{i % SERIES})"
        if curve.mark:
            x = at_x(curve.mark)
            parts.append(_line(x, top, x, bottom, "mark", colour))
        path = [f"M{at_x(curve.points[0][0]):.1f},{at_y(0):.1f}"]
        path += [f"L{at_x(x):.1f},{at_y(y):.1f}" for x, y in curve.points]
        parts.append(f'<path class="curve" d="{"".join(path)}" style="{colour}"/>')
        y = bottom + 58 + 20 * i
        parts.append(_line(left, y - 4, left + 22, y - 4, "curve", colour))
        named = curve.name + (f" (dashed: deadline {curve.mark:g} ms)" if curve.mark else "")
        parts.append(_words(left + 30, y, named))
    return _svg(bottom + 48 + legend, title, parts)


@dataclass(frozen=True)
class Estimate:
    """A share with its interval."""

    name: str
    value: float
    low: float
    high: float
    said: str
    """Beside it, e.g. of how many."""
    strong: bool = False
    """What the others are compared with."""


def intervals(rows: Sequence[Estimate], axis: str, title: str) -> str:
    """One row for each estimate: a dot on its interval, over an axis of shares that begins where it matters."""
    if not rows:
        return ""
    low = min(r.low for r in rows)
    begin = 0.0 if low < 0.5 else math.floor(low * 20) / 20
    begin = min(begin, 0.9)
    left, right, row = 8.0, WIDTH - 14.0, 42.0
    bottom = 14 + row * len(rows)

    def at(share: float) -> float:
        return left + (right - left) * (share - begin) / (1 - begin)

    parts = []
    step = 0.2 if begin == 0 else 0.1 if begin < 0.7 else 0.05 if begin < 0.86 else 0.02
    ticks = [begin + step * i for i in range(math.floor((1 - begin) / step + 1e-6) + 1)]
    for tick in ticks:
        anchor = "start" if tick == begin else "end" if tick > 0.999 else "middle"
        parts.append(_line(at(tick), 8, at(tick), bottom, "grid"))
        parts.append(_words(at(tick), bottom + 17, f"{100 * tick:.0f} %", anchor))
    parts.append(_words((left + right) / 2, bottom + 36, axis, "middle", "axis"))
    for i, one in enumerate(rows):
        y = 14 + row * i
        parts.append(_words(left, y + 13, one.name, kind="name strong" if one.strong else "name"))
        parts.append(_words(right, y + 13, one.said, "end"))
        colour = f"--s{0 if one.strong else 1}"
        middle = y + 27
        parts.append(
            _line(at(one.low), middle, at(one.high), middle, "range", f"stroke:var({colour})")
        )
        parts.append(
            f'<circle cx="{at(one.value):.1f}" cy="{middle:.1f}" r="5" style="fill:var({colour})"/>'
        )
    return _svg(bottom + 44, title, parts)


@dataclass(frozen=True)
class Stack:
    """A whole in parts."""

    name: str
    parts: Sequence[float]
    said: str


def stacks(rows: Sequence[Stack], names: Sequence[str], colours: Sequence[str], title: str) -> str:
    """One bar for each whole, and what the colours mean. ``colours`` are names of CSS variables."""
    rows = [r for r in rows if sum(r.parts) > 0]
    if not rows:
        return ""
    left, right, row = 8.0, WIDTH - 8.0, 44.0
    parts = []
    for i, one in enumerate(rows):
        y = 6 + row * i
        parts.append(_words(left, y + 13, one.name, kind="name"))
        parts.append(_words(right, y + 13, one.said, "end"))
        x, whole = left, sum(one.parts)
        for part, colour in zip(one.parts, colours, strict=True):
            width = (right - left) * part / whole
            if part:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 20:.1f}" width="{max(1.0, width):.1f}" height="14"'
                    f' style="fill:var({colour})"/>'
                )
            x += width
    x, y = left, 6 + row * len(rows) + 12
    for name, colour in zip(names, colours, strict=True):
        wide = 38 + 7.6 * len(name)
        if x + wide > right:
            x, y = left, y + 20
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" style="fill:var({colour})"/>'
        )
        parts.append(_words(x + 18, y + 1, name))
        x += wide
    return _svg(y + 12, title, parts)
