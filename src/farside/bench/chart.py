"""Line charts as inline SVG, without anything from outside. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 12.0, 10.0, 34.0
_MAX_DECADES = 7


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of one run; `style` is the CSS class that gives the colour."""

    style: str
    points: Sequence[tuple[float, float]]


_LOG_FLOOR = 1e-9
"""Smaller values are not drawn on a logarithmic axis."""


def line_chart(title: str, x_label: str, curves: Sequence[Curve], *, log: bool = False) -> str:
    """An SVG element with axes, ticks and one line per curve. `log`: a logarithmic y axis."""
    points = [(x, y) for curve in curves for x, y in curve.points if not log or y >= _LOG_FLOOR]
    if not points:
        return ""
    x_ticks = ticks(0.0, max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    y_ticks = log_ticks(low, high) if log else ticks(0.0, high)
    x_end, y_start, y_end = max(x_ticks[-1], 1e-9), y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / x_end

    def at_y(y: float) -> float:
        if log:
            share = math.log(max(y, y_start) / y_start) / math.log(y_end / y_start)
        else:
            share = (y - y_start) / (y_end - y_start)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    parts = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{_LEFT:g} {at_y(y):.1f}H{_WIDTH - _RIGHT:g}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6:g}" y="{at_y(y) + 4:.1f}">{_label(y)}</text>')
    for x in x_ticks:
        parts.append(f'<text class="x" x="{at_x(x):.1f}" y="{_HEIGHT - _BOTTOM + 16:g}">{_label(x)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="x" x="{middle:g}" y="{_HEIGHT - 4:g}">{escape(x_label)}</text>')
    for curve in curves:
        line = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in curve.points if not log or y >= _LOG_FLOOR)
        if line:
            parts.append(f'<path class="line {curve.style}" d="M{line}"/>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`; always at least two."""
    raw = max(high - low, 1e-9) / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(step * scale for step in (1, 2, 2.5, 5, 10) if step * scale >= raw)
    first, last = math.floor(low / step), max(math.ceil(high / step - 1e-9), math.floor(low / step) + 1)
    return [n * step for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around the range, the lowest dropped where there would be too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    return [10.0**n for n in range(max(first, last - _MAX_DECADES), last + 1)]


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
