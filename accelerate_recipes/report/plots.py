"""The plots of a report, which plotly draws in the browser."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from plotly.graph_objects import Figure
from plotly.io import to_html

from accelerate_recipes.report.run_history import AXES, Curve, Event, Run

# They are readable on the white and the dark page. No two of 20 runs share both colour and dashes.
COLOURS = ("#2b7de0", "#e0661a", "#159a72", "#a35ff0", "#d1447a")
DASHES = ("solid", "dash", "dot", "dashdot")
_FONT, _GRID, _CLEAR = "#7a828c", "rgba(128,128,128,0.25)", "rgba(0,0,0,0)"
_FIRST = ("train/loss", "eval/loss")
_THROUGHPUT = ("samples_per_second", "tokens_per_second", "mfu")
_SMALLEST = 1e-300  # below it, the arithmetic of a logarithmic axis underflows
_MAX_POINTS = 1000  # of a curve; more would make the page slow
_MAX_DOTTED = 40  # points that get a dot each

_Trace = dict[str, Any]


def metrics_to_plot(runs: Sequence[Run]) -> list[str]:
    """The metrics to plot: losses, evaluation metrics, throughput, and the others."""
    names = dict.fromkeys(metric for run in runs for metric in run.metrics)
    chosen = [name for name in names if name != "skipped_steps" or any(_values(runs, name))]
    # A training metric that no evaluation has is a part of another metric, such as one of the sums of a ratio.
    evaluated = {name.rpartition("/")[2] for name in names if name.startswith("eval/")}
    parts = {name for name in names if name.startswith("train/") and evaluated and name[6:] not in evaluated}
    chosen = [name for name in chosen if name not in parts or name == "train/loss"]
    groups = (*_FIRST, "train/", "eval/", *_THROUGHPUT)
    return sorted(chosen, key=lambda name: next((i for i, group in enumerate(groups) if name.startswith(group)), 99))


def axes(runs: Sequence[Run]) -> list[str]:
    """The horizontal axes on which all runs can be shown."""
    return [axis for axis in AXES if all(run.has(axis) for run in runs)]


def wants_log(metric: str, values: Sequence[float]) -> bool:
    """Whether a metric gets a logarithmic axis: a loss or norm whose values differ by a factor of 100 or more."""
    named = any(word in metric for word in ("loss", "perplexity", "error", "grad_norm"))
    return named and bool(values) and min(values) > _SMALLEST and max(values) >= 100 * min(values)


def title(runs: Sequence[Run], metric: str) -> str:
    return f"{metric} (logarithmic axis)" if wants_log(metric, _values(runs, metric)) else metric


def div(runs: Sequence[Run], metric: str, number: int) -> str:
    """The plot with this number on the page, as HTML. The page must contain plotly.js."""
    options = {"displaylogo": False, "responsive": True}
    plot = figure(runs, metric)
    return to_html(plot, full_html=False, include_plotlyjs=False, config=options, div_id=f"plot{number}")


def figure(runs: Sequence[Run], metric: str) -> Figure:
    """The plot of a metric, with a curve for each run that has it. Its `meta` has {axis: what changes} for the page's
    switch of the horizontal axis. Gaps and events have their own axis from 0 to 1: the switch only changes x."""
    names = {index: _legend(runs, index, metric) for index, run in enumerate(runs) if metric in run.metrics}
    traces = {
        axis: [trace for index, name in names.items() for trace in _traces(runs[index], index, name, metric, axis)]
        for axis in axes(runs)
    }
    lines = {"gridcolor": _GRID, "zerolinecolor": _GRID, "automargin": True, "exponentformat": "e"}
    scale = "log" if wants_log(metric, _values(runs, metric)) else "linear"
    start = "tozero" if metric in _THROUGHPUT else "normal"
    layout = {
        "template": "none",
        "height": 320 + 20 * min(10, len(names)),
        "margin": {"l": 10, "r": 30, "t": 30, "b": 10},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"color": _FONT, "family": "system-ui, sans-serif"},
        "hoverlabel": {"namelength": -1},
        "modebar": {"bgcolor": _CLEAR, "color": _FONT, "activecolor": _FONT},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top", "bgcolor": _CLEAR},
        "meta": {axis: {"x": [trace["x"] for trace in moved], "title": AXES[axis]} for axis, moved in traces.items()},
        "xaxis": lines | {"title": {"text": AXES["steps"]}},
        "yaxis": lines | {"title": {"text": _text(metric)}, "type": scale, "rangemode": start},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
    }
    return Figure(traces["steps"], layout)


def _traces(run: Run, index: int, name: str, metric: str, axis: str) -> list[_Trace]:
    """The curve of a run, the stars of its records without a finite value, and its events."""
    points, colour = thin(run.curve(metric)), COLOURS[index % len(COLOURS)]
    x, y = [run.position(axis, step) for step, _ in points], [value for _, value in points]
    # A line does not show a value between two gaps.
    alone = [one is not None and a is b is None for a, one, b in zip([None, *y], y, [*y[1:], None])]
    size = 9 if len(y) == 1 else 5  # a point alone in a plot
    sizes = [size if is_alone or len(y) <= _MAX_DOTTED else 0 for is_alone in alone]
    is_dotted = any(sizes)
    common: _Trace = {"type": "scatter", "name": name, "legendgroup": str(index)}
    curve: _Trace = {
        "mode": "lines+markers" if is_dotted else "lines",
        "x": x,
        "y": y,
        "line": {"color": colour, "width": 2, "dash": DASHES[index % len(DASHES)]},
        "marker": {"color": colour, "size": sizes if is_dotted else None},
    }
    gaps = [place for place, value in zip(x, y) if value is None]
    stars: _Trace = {
        "mode": "markers",
        "x": gaps,
        "y": [0.03] * len(gaps),
        "marker": {"color": colour, "size": 9, "symbol": "star"},
        "hovertemplate": "no finite value at %{x}",
    }
    over = common | {"yaxis": "y2", "showlegend": False}
    return [common | curve, *(over | trace for trace in (stars, _marks(run, index, axis)) if trace["x"])]


def _marks(run: Run, index: int, axis: str) -> _Trace:
    """A dotted line for each step with events."""
    events: dict[int, list[Event]] = {}
    for event in run.events:
        if event.step is not None:
            events.setdefault(event.step, []).append(event)
    labels = [", ".join(event.kind for event in group) for group in events.values()]
    end = run.clock[-1][0] if axis == "seconds" and run.clock else math.inf  # for events after the last record
    places = [run.position(axis, min(step, end)) for step in events]
    top = 1 - 0.08 * (index % len(COLOURS))  # so that the labels of several runs at one step can be read
    return {
        "mode": "lines+text",
        "x": [x for place in places for x in (place, place, None)],
        "y": [0, top, None] * len(places),
        "text": [text for label in labels for text in ("", label, "")],
        "textposition": "top center",
        "textfont": {"color": COLOURS[index % len(COLOURS)], "size": 11},
        "line": {"color": COLOURS[index % len(COLOURS)], "width": 1, "dash": "dot"},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def thin(curve: Curve) -> Curve:
    """At most about _MAX_POINTS of the points: the lowest and the highest of each stretch, and its first gap."""
    if len(curve) <= _MAX_POINTS:
        return curve
    size, kept = 2 * len(curve) / _MAX_POINTS, [curve[0]]
    for part in range(_MAX_POINTS // 2):
        stretch = list(enumerate(curve[round(part * size) : round((part + 1) * size)]))
        finite = [(y, index) for index, (_, y) in stretch if y is not None]
        gaps = [index for index, (_, y) in stretch if y is None][:1]
        extremes = [min(finite)[1], max(finite)[1]] if finite else []
        kept += [stretch[index][1] for index in sorted({*extremes, *gaps})]
    return [*kept, curve[-1]]


def _legend(runs: Sequence[Run], index: int, metric: str) -> str:
    """The name of a run, and the first run with the same curve."""
    curve = runs[index].curve(metric)
    equal = next((run.name for run in runs[:index] if run.curve(metric) == curve), None)
    return _text(runs[index].name + (f" (equal to {equal})" if equal is not None else ""))


def _text(text: str) -> str:
    """Escaped text for plotly, which reads some HTML, and cannot read halves of characters."""
    return escape(text.encode(errors="replace").decode(), quote=False)


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    return [value for run in runs for _, value in run.curve(metric) if value is not None]
