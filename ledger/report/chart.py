"""Charts as inline SVG: lines over steps, and bars that are made of parts. They take their colours from the page's style sheet.

A page that must open without a network, print, and follow a dark theme cannot bring a chart library's script along (Plotly's is
4 MB), and pictures that are drawn beforehand do not follow a theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 12, 44
"""Margins, in the units of the drawing."""
MOST_POINTS = 800
"""More of them could not be told apart."""
ROW = 22

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points that belong together, by rising x. A gap begins where y is not finite."""

    name: str
    points: Sequence[Point]
    colour: int
    """Number of a colour of the style sheet."""
    dashed: bool = False
    dots: bool = False
    """Points alone, not joined."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at one x."""

    x: float
    text: str


@dataclass(frozen=True)
class Part:
    """A piece of a bar."""

    name: str
    length: float
    colour: int
    pale: float = 0.0
    """Length of the end of it that is drawn pale."""


@dataclass(frozen=True)
class Bar:
    """Parts laid end to end."""

    name: str
    parts: Sequence[Part] = field(default_factory=tuple)


def lines(title: str, drawn: Sequence[Line], x_label: str, y_label: str, marks: Sequence[Mark] = (), height: int = 250) -> str:
    """Return a line chart; an empty text if there is nothing to draw."""
    points = [point for line in drawn for point in line.points if math.isfinite(point[1])]
    if not points:
        return ""
    xs = [x for x, _ in points] + [mark.x for mark in marks]
    x_ticks = ticks(min(xs), max(xs))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))
    x_scale = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_scale = _Scale(min(y_ticks), max(y_ticks), height - BOTTOM, TOP)
    body = [_grid(x_ticks, y_ticks, x_scale, y_scale, height), _labels(x_label, y_label, height)]
    for mark in marks:
        x = x_scale(mark.x)
        body.append(f'<g class="mark"><title>{escape(mark.text)}</title><path d="M{x:.1f} {TOP}V{height - BOTTOM}"/></g>')
    for line in drawn:
        body.append(_line(line, x_scale, y_scale))
    description = "; ".join(f"{line.name}: {_summary(line)}" for line in drawn)
    return _svg(title, description, height, body) + _legend((line.name, line.colour, line.dashed) for line in drawn)


def bars(title: str, drawn: Sequence[Bar], x_label: str, unit: str) -> str:
    """Return a chart of horizontal bars; an empty text if there is nothing to draw."""
    longest = max((sum(part.length for part in bar.parts) for bar in drawn), default=0.0)
    if longest <= 0:
        return ""
    height = TOP + ROW * len(drawn) + BOTTOM
    left = LEFT + 80
    x_ticks = ticks(0.0, longest)
    scale = _Scale(0.0, max(longest, x_ticks[-1]), left, WIDTH - RIGHT)
    body = [
        f'<path class="grid" d="M{scale(tick):.1f} {TOP}V{height - BOTTOM}"/>'
        f'<text x="{scale(tick):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>'
        for tick in x_ticks
    ]
    body.append(f'<text x="{(left + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>')
    for row, bar in enumerate(drawn):
        top = TOP + ROW * row + 3
        body.append(f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(bar.name)}</text>')
        begin = 0.0
        for part in bar.parts:
            body.append(_part(part, scale, begin, top, unit))
            begin += part.length
    names = {part.name: (part.name, part.colour, False) for bar in drawn for part in bar.parts}
    description = "; ".join(f"{bar.name}: {number(sum(part.length for part in bar.parts))} {unit}" for bar in drawn)
    return _svg(title, description, height, body) + _legend(names.values())


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers that reach from below `low` to above `high`."""
    if high <= low:
        low, high = (low - 0.5, low + 0.5) if not low else (low - abs(low) / 10, low + abs(low) / 10)
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number as an axis shows it."""
    if value and abs(value) >= 1e6:
        return f"{value / 1e6:.4g} M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = 0.5 if not span else (value - self.low) / span
        return self.begin + share * (self.end - self.begin)


def _grid(x_ticks: Iterable[float], y_ticks: Iterable[float], x_scale: _Scale, y_scale: _Scale, height: int) -> str:
    drawn = []
    for tick in y_ticks:
        y = y_scale(tick)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        if x_scale.low <= tick <= x_scale.high:
            x = x_scale(tick)
            drawn.append(f'<text x="{x:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>')
    return "".join(drawn)


def _labels(x_label: str, y_label: str, height: int) -> str:
    middle = (TOP + height - BOTTOM) / 2
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )


def _line(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    if line.dots:
        dots = (
            f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3"><title>{escape(line.name)}, {number(x)}: {number(y)}'
            "</title></circle>"
            for x, y in thinned(line.points)
            if math.isfinite(y)
        )
        return f'<g class="dots c{line.colour}">{"".join(dots)}</g>'
    path, pen = [], "M"
    for x, y in thinned(line.points):
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{x_scale(x):.1f} {y_scale(y):.1f}")
        pen = "L"
    return f'<path class="line c{line.colour}{" dashed" if line.dashed else ""}" d="{"".join(path)}"/>'


def thinned(points: Sequence[Point]) -> Iterator[Point]:
    """Yield at most MOST_POINTS of them: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        yield from points
        return
    stretch = math.ceil(len(points) / (MOST_POINTS // 2))
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        finite = [point for point in part if math.isfinite(point[1])]
        if not finite:
            yield part[0]
            continue
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        yield from sorted(ends)


def _part(part: Part, scale: _Scale, begin: float, top: float, unit: str) -> str:
    x, width = scale(begin), scale(begin + part.length) - scale(begin)
    pale = min(width, scale(begin + part.pale) - scale(begin))
    title = f"<title>{escape(part.name)}: {number(part.length)} {unit}</title>"
    drawn = f'<rect class="c{part.colour}" x="{x:.1f}" y="{top}" width="{width:.2f}" height="{ROW - 6}"/>'
    if pale > 0:
        drawn += f'<rect class="pale" x="{x + width - pale:.1f}" y="{top}" width="{pale:.2f}" height="{ROW - 6}"/>'
    return f"<g>{title}{drawn}</g>"


def _summary(line: Line) -> str:
    finite = [point for point in line.points if math.isfinite(point[1])]
    if not finite:
        return "nothing"
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    return (
        f"{len(finite)} points from {number(finite[0][1])} to {number(finite[-1][1])}, between {number(low)} and {number(high)}"
    )


def _svg(title: str, description: str, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" aria-label="{escape(title)}. {escape(description)}">'
        f"{''.join(body)}</svg>"
    )


def _legend(entries: Iterable[tuple[str, int, bool]]) -> str:
    drawn = "".join(
        f'<li><span class="swatch c{colour}{" dashed" if dashed else ""}"></span>{escape(name)}</li>'
        for name, colour, dashed in entries
    )
    return f'<ul class="legend">{drawn}</ul>'
