"""Draws the records of a run as SVG: the losses on the left, an evaluation metric on the right."""

import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 360, 220  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 28  # its margins
COLOURS = {"train": "#2b7de0", "eval": "#e0661a"}  # they read on white and on the dark page
GREY = "#7a828c"
MOST = 300  # points of a curve

Points = list[tuple[float, float]]


def curves(records: Sequence[dict[str, Any]]) -> str:
    """An SVG of the losses, and of the first evaluation metric that is no loss.

    Args:
        records: those of metrics.jsonl.
    """
    names = [name for record in records for name in record if name.startswith("eval/") and not name.endswith("loss")]
    panels = [("loss", ["train/loss", "eval/loss"]), *((name.removeprefix("eval/"), [name]) for name in names[:1])]
    drawn = [_panel(title, [(name, _points(records, name)) for name in chosen]) for title, chosen in panels]
    moved = [f'<g transform="translate({WIDTH * place},0)">{panel}</g>' for place, panel in enumerate(drawn)]
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    body = "\n".join(moved)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'


def _points(records: Sequence[dict[str, Any]], name: str) -> Points:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return points[:: max(1, math.ceil(len(points) / MOST))]


def _panel(title: str, named: list[tuple[str, Points]]) -> str:
    every = [point for _, points in named for point in points if math.isfinite(point[1])]
    values = [value for _, value in every]
    is_log = title in ("loss", "perplexity") and min(values) > 0 and max(values) > 20 * min(values)
    low, high = (math.log10(v) if is_log else v for v in (min(values), max(values)))
    last, span = max(step for step, _ in every), (high - low) or 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        height = ((math.log10(value) if is_log else value) - low) / span
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * height

    parts = [f'<text x="{LEFT}" y="16" fill="{GREY}" font-weight="bold">{title}{" (log)" * is_log}</text>']
    for value in _ticks(min(values), max(values), is_log):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GREY}" '
            f'stroke-opacity="0.3"/><text x="{LEFT - 4}" y="{y(value) + 4:.1f}" text-anchor="end" fill="{GREY}">'
            f"{value:.9g}</text>"
        )
    for step, anchor in ((0, "start"), (last, "end")):
        label = f"step {step:,}" if step else "0"
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}" fill="{GREY}">{label}</text>')
    for place, (name, points) in enumerate((name, points) for name, points in named if points):
        colour = COLOURS[name.partition("/")[0]]
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points if math.isfinite(value))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) == 1 or (name.startswith("eval") and len(points) <= 40):
            parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{colour}"/>' for s, v in points]
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{16 + 13 * place}" text-anchor="end" fill="{colour}">{name}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten on a logarithmic axis, or if there are too few also twice and
    five times these; else multiples of one such number."""
    if is_log:  # its values differ by more than a factor of 20
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        tens, finer = ([factor * 10.0**power for power in powers for factor in each] for each in ((1,), (1, 2, 5)))
        ticks = [tick for tick in tens if low <= tick <= high]
        return ticks if len(ticks) > 1 else [tick for tick in finer if low <= tick <= high]
    size = 10.0 ** math.floor(math.log10(high - low)) if high > low else 0.0
    for step in (5 * size, 2 * size, size, size / 2, size / 5):
        ticks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)] if step else []
        if len(ticks) > 2:
            return ticks
    return [low]
