"""Lines over powers of two as plain SVG, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Of the page's units.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 260, 70, 20, 52, 34
_COLORS = ("one", "two", "three")
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 14px; font-weight: 600; }
  .end { text-anchor: end; } .middle { text-anchor: middle; }
  .grid { stroke: #8b949e; stroke-width: 0.5; stroke-dasharray: 3 4; }
  polyline { fill: none; stroke-width: 2; }
  .one { stroke: #2f6fdd; } .two { stroke: #c2410c; } .three { stroke: #2a9d4f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .one { stroke: #4c8dff; } .two { stroke: #fb923c; } .three { stroke: #57c77b; }
  }
"""


@dataclass(frozen=True)
class Line:
    """A line to draw.

    Attributes
    ----------
    label : str
    values : Sequence[float]
        At each place of the chart's horizontal axis.
    """

    label: str
    values: Sequence[float]


def line_chart(title: str, places: Sequence[int], lines: Sequence[Line], unit: str) -> str:
    """The chart's SVG: places evenly apart, values from 0."""
    most = _round_up(max(value for line in lines for value in line.values))

    def x_of(number: int) -> float:
        return _LEFT + number * (_WIDTH - _LEFT - _RIGHT) / max(1, len(places) - 1)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / most * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="12" y="20">{escape(title)}</text>',
    ]
    for tick in range(5):
        value = most * tick / 4
        y = y_of(value)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{value:g} {escape(unit)}</text>',
        ]
    parts += [
        f'<text class="middle" x="{x_of(number):.1f}" y="{_HEIGHT - 12}">{place:,}</text>'
        for number, place in enumerate(places)
    ]
    for number, line in enumerate(lines):
        color = _COLORS[number]
        points = " ".join(f"{x_of(at):.1f},{y_of(value):.1f}" for at, value in enumerate(line.values))
        x = _LEFT + number * 210
        parts += [
            f'<polyline class="{color}" points="{points}"/>',
            f'<line class="{color}" stroke-width="2" x1="{x}" x2="{x + 18}" y1="36" y2="36"/>',
            f'<text x="{x + 24}" y="40">{escape(line.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """The least of 1, 2, 4, 8 and so on times a power of ten that is not smaller."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value * (1 - 1e-9))
