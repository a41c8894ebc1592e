"""A horizontal bar chart as plain SVG, readable on light and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Of the page's units.
_WIDTH, _LABEL_WIDTH, _VALUE_WIDTH = 720, 220, 60
_BAR_HEIGHT, _PITCH, _TOP, _BOTTOM = 16, 24, 50, 28

# An SVG on a page knows what its reader prefers, also where it is embedded as an image.
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 14px; font-weight: 600; }
  .end { text-anchor: end; }
  .middle { text-anchor: middle; }
  .bar { fill: #2f6fdd; }
  .spread { stroke: #1f2328; stroke-width: 1.5; }
  .target { stroke: #c2410c; stroke-width: 2; }
  .limit { stroke: #8b949e; stroke-width: 1; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .bar { fill: #4c8dff; }
    .spread { stroke: #e6edf3; }
    .target { stroke: #fb923c; }
  }
"""


@dataclass(frozen=True)
class Bar:
    """A value to show.

    Attributes
    ----------
    label : str
    value : float
    low, high : float
        Its spread, drawn as a thin line.
    target : float | None
        Drawn as a mark.
    """

    label: str
    value: float
    low: float
    high: float
    target: float | None = None


def bar_chart(title: str, bars: Sequence[Bar], limit: float = 1.0) -> str:
    """The chart's SVG; a dashed line stands at `limit`."""
    height = _TOP + _PITCH * len(bars) + _BOTTOM
    largest = max(limit, *(bar.high for bar in bars))
    unit = (_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / largest
    limit_x = _LABEL_WIDTH + limit * unit
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        parts += _drawn(bar, _TOP + number * _PITCH, unit)
    parts += [
        _line("limit", (limit_x, limit_x), (_TOP - 8, height - _BOTTOM)),
        f'<text class="middle" x="{limit_x:.1f}" y="{height - 10}">limit</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _drawn(bar: Bar, top: float, unit: float) -> list[str]:
    middle = top + _BAR_HEIGHT / 2
    base, width = f"{middle + 4:.1f}", bar.value * unit
    low, high = _LABEL_WIDTH + bar.low * unit, _LABEL_WIDTH + bar.high * unit
    parts = [
        f'<text class="end" x="{_LABEL_WIDTH - 8}" y="{base}">{escape(bar.label)}</text>',
        f'<rect class="bar" x="{_LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2"/>',
        _line("spread", (low, high), (middle, middle)),
        f'<text class="end" x="{_WIDTH - 8}" y="{base}">{bar.value:.3f}</text>',
    ]
    if bar.target is not None:
        x = _LABEL_WIDTH + bar.target * unit
        parts.append(_line("target", (x, x), (top - 2, top + _BAR_HEIGHT + 2)))
    return parts


def _line(name: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    return f'<line class="{name}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'
