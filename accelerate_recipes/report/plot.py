"""Draws a plot as a list of shapes, which svg.py and image.py turn into a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

WIDTH, HEIGHT = 340.0, 220.0  # of a plot: on a phone, a unit is about a pixel
_TOP, _RIGHT, _BOTTOM, _LETTER = 14.0, 12.0, 38.0, 6.8
FONT_SIZE = 12
_SMALLEST = 1e-300  # below it, the arithmetic of an axis underflows
_MAX_POINTS = 400  # of a curve; more would not be seen
_MAX_DOTTED = 40  # points that get a dot each
# Colours that stay apart in three kinds of colour blindness, for a light and a dark background. No two of 20 runs share
# both colour and dashes.
LIGHT = {"text": "#1f2328", "muted": "#59636e", "grid": "#d9dee3", "page": "#ffffff"}
DARK = {"text": "#e6e8eb", "muted": "#9aa4af", "grid": "#343b43", "page": "#14171a"}
LIGHT |= {f"run{i}": colour for i, colour in enumerate(("#0067B8", "#DB6400", "#611341", "#A66BFF", "#009E77"))}
DARK |= {f"run{i}": colour for i, colour in enumerate(("#56B4E9", "#FF8A3D", "#F7E08A", "#8E6BFF", "#2FA57F"))}
_DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3), (10, 3, 2, 3))

Point = tuple[float, float]


class Line(NamedTuple):
    """A line through points; dashes are lengths of line and gap in turn."""

    points: list[Point]
    colour: str
    width: float = 1.0
    dashes: tuple[float, ...] = ()


class Dot(NamedTuple):
    """A filled circle."""

    centre: Point
    colour: str
    radius: float = 2.2


class Text(NamedTuple):
    """A line of text; anchor is start, middle or end; the position is that of the baseline."""

    position: Point
    text: str
    colour: str
    anchor: str = "start"


Shape = Line | Dot | Text


@dataclass(frozen=True)
class Curve:
    """A run's curve in a plot.

    Attributes:
        index: the number of the run, which decides colour and dashes.
        points: (x, y), sorted by x; y is None where a record has no finite value.
        marks: (kind of event, x).
    """

    index: int
    points: list[tuple[float, float | None]]
    marks: list[tuple[str, float]]


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int, smallest: float = 0.0) -> list[tuple[float, str]]:
        """(value, label) at round numbers, about `most` of them, at least `smallest` apart."""
        if self.is_log:
            return _log_ticks(self.low, self.high, most)
        return _even_ticks(self.low, self.high, max(smallest, (self.high - self.low) / most))


def colour(index: int) -> str:
    """The name of the colour of a run."""
    return f"run{index % 5}"


def dashes(index: int) -> tuple[float, ...]:
    """The dashes of a run."""
    return _DASHES[index % len(_DASHES)]


def wants_log(metric: str, values: Sequence[float]) -> bool:
    """Whether a metric gets a logarithmic axis: a loss or norm whose values differ by a factor of 100 or more."""
    named = any(word in metric for word in ("loss", "perplexity", "error", "grad_norm"))
    return named and bool(values) and min(values) > _SMALLEST and max(values) >= 100 * min(values)


def draw(
    curves: Sequence[Curve], x_label: str, is_log: bool = False, from_zero: bool = False, whole: bool = True
) -> list[Shape]:
    """Draws a plot of WIDTH × HEIGHT.

    Args:
        curves: one for each run.
        x_label: what the horizontal axis shows.
        is_log: a logarithmic vertical axis.
        from_zero: the vertical axis begins at 0.
        whole: the horizontal axis counts something.
    """
    values = [value for curve in curves for _, value in curve.points if value is not None]
    places = [x for curve in curves for x, _ in curve.points] + [x for curve in curves for _, x in curve.marks]
    low, high = _range_of_values(values, is_log, from_zero)
    y_ticks = Scale(low, high, 0, 1, is_log).ticks(5)
    left = max((len(label) for _, label in y_ticks), default=1) * _LETTER + 10
    y_scale = Scale(low, high, HEIGHT - _BOTTOM, _TOP, is_log)
    x_scale = Scale(*_range_of_places(places), left, WIDTH - _RIGHT)
    shapes = _axes(x_scale, y_scale, x_label, smallest=float(whole))
    shapes += _marks(curves, x_scale)
    for curve in curves:
        shapes += _curve(curve, x_scale, y_scale)
    return shapes


def _range_of_values(values: list[float], is_log: bool, from_zero: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if is_log:
        around = (math.log10(high) - math.log10(low)) / 20
        return low / 10**around, high * 10**around
    if from_zero:
        low = min(0.0, low)
    # Nearly equal values differ by rounding alone: they are drawn as equal ones.
    if high - low > max(1e-9 * max(abs(low), abs(high)), _SMALLEST):
        around = 0.05 * (high - low)
    else:
        around = 0.1 * abs(high) if abs(high) > _SMALLEST else 1.0
    return (low if from_zero and low == 0 and high > 0 else low - around), high + around


def _range_of_places(places: list[float]) -> tuple[float, float]:
    low, high = min(places, default=0.0), max(places, default=1.0)
    low = 0.0 if low <= high / 2 else low
    return (low, high) if high > low else (low - 1, high + 1)


def _even_ticks(low: float, high: float, rough: float) -> list[tuple[float, str]]:
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    values = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    largest = max(abs(low), abs(high))
    if 1e-3 <= largest < 1e6:
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(value, f"{value:,.{decimals}f}") for value in values]
    decimals = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
    return [(value, _short_power(f"{value:.{decimals}e}") if value else "0") for value in values]


def _log_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    every = max(1, -(-len(powers) // most))
    values = [10.0**power for power in powers if power % every == 0]
    if len(powers) < 3:
        first = math.floor(math.log10(low))
        rounded = [factor * 10.0**power for power in range(first, first + 4) for factor in (1, 3)]
        values = [value for value in rounded if low <= value <= high]
    return [(value, f"{value:,g}" if 1e-3 <= value < 1e5 else _short_power(f"{value:.0e}")) for value in values]


def _short_power(text: str) -> str:
    mantissa, power = text.split("e")
    return f"{mantissa}e{int(power)}"


def _axes(x_scale: Scale, y_scale: Scale, x_label: str, smallest: float) -> list[Shape]:
    left, right, bottom = x_scale.start, x_scale.end, y_scale.start
    shapes: list[Shape] = []
    for value, label in y_scale.ticks(5):
        y = y_scale(value)
        shapes += [Line([(left, y), (right, y)], "grid"), Text((left - 5, y + 4), label, "muted", "end")]
    ticks = x_scale.ticks(5, smallest)
    if sum(len(label) + 1 for _, label in ticks) * _LETTER > right - left:
        ticks = x_scale.ticks(3, smallest)
    for value, label in ticks:
        x = x_scale(value)
        is_last = x + len(label) * _LETTER / 2 > WIDTH
        shapes.append(Line([(x, bottom), (x, bottom + 4)], "muted"))
        shapes.append(Text((WIDTH if is_last else x, bottom + 17), label, "muted", "end" if is_last else "middle"))
    shapes.append(Line([(left, bottom), (right, bottom)], "muted"))
    shapes.append(Text(((left + right) / 2, HEIGHT - 5), x_label, "muted", "middle"))
    return shapes


def _marks(curves: Sequence[Curve], x_scale: Scale) -> list[Shape]:
    """A dotted line for each event, and its sign above it, beside the sign before it where both are close."""
    shapes: list[Shape] = []
    marks = sorted(
        ((x_scale(x), curve.index, kind) for curve in curves for kind, x in curve.marks), key=lambda mark: mark[0]
    )
    free = 0.0
    for x, index, kind in marks:
        place = min(max(x, free), WIDTH - 5)
        free = place + 11
        shapes.append(Line([(x, _TOP), (x, HEIGHT - _BOTTOM)], colour(index), 1, (1, 3)))
        shapes += sign(kind, (place, _TOP - 6), colour(index))
    return shapes


def sign(kind: str, centre: Point, colour: str) -> list[Shape]:
    """The sign of an event, or of a value that is not finite ("gap")."""
    (x, y), size = centre, 4.0
    cross = [(x - size, y - size), (x + size, y + size)], [(x - size, y + size), (x + size, y - size)]
    outlines = {
        "resumed": [[(x - size, y - size), (x + size, y), (x - size, y + size), (x - size, y - size)]],
        "restarted": [[(x + size, y - size), (x - size, y), (x + size, y + size), (x + size, y - size)]],
        "stopped": [[(x - 3, y - 3), (x + 3, y - 3), (x + 3, y + 3), (x - 3, y + 3), (x - 3, y - 3)]],
        "failed": cross,
        "gap": [[(x, y - size), (x, y + size)], [(x - size, y), (x + size, y)], *cross],
    }
    return [Line(points, colour, 1.8) for points in outlines[kind]]


def _curve(curve: Curve, x_scale: Scale, y_scale: Scale) -> list[Shape]:
    shapes: list[Shape] = []
    kept = thinned(curve.points)
    for is_finite, group in groupby(kept, key=lambda point: point[1] is not None):
        points = [(x_scale(x), y_scale(y) if y is not None else HEIGHT - _BOTTOM - 6) for x, y in group]
        if not is_finite:
            shapes += [shape for point in points for shape in sign("gap", point, colour(curve.index))]
            continue
        if len(points) > 1:
            shapes.append(Line(points, colour(curve.index), 1.8, dashes(curve.index)))
        if len(points) == 1 or len(kept) <= _MAX_DOTTED:
            shapes += [Dot(point, colour(curve.index)) for point in points]
    return shapes


def thinned(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most about _MAX_POINTS of the points: of each stretch the lowest, the highest, and the first gap."""
    if len(points) <= _MAX_POINTS:
        return points
    size, kept = 2 * len(points) / _MAX_POINTS, [points[0]]
    for part in range(_MAX_POINTS // 2):
        stretch = list(enumerate(points[round(part * size) : round((part + 1) * size)]))
        finite = [(y, index) for index, (_, y) in stretch if y is not None]
        gaps = [index for index, (_, y) in stretch if y is None][:1]
        extremes = [min(finite)[1], max(finite)[1]] if finite else []
        kept += [stretch[index][1] for index in sorted({*extremes, *gaps})]
    return [*kept, points[-1]]
