"""Which plots a report has, and what they show."""

from collections.abc import Sequence

from accelerate_recipes.report.plot import FONT_SIZE, Curve, Line, Shape, Text, colour, dashes, draw, sign, wants_log
from accelerate_recipes.report.runs import AXES, Run

SIGNS = {
    "resumed": "resumed",
    "restarted": "started again from the beginning",
    "stopped": "stopped by a signal",
    "failed": "failed",
    "gap": "no finite value",
}
_FIRST = ("train/loss", "eval/loss")
_THROUGHPUT = ("samples_per_second", "tokens_per_second", "mfu")
_SAMPLE_WIDTH = 34.0


def plotted(runs: Sequence[Run]) -> list[str]:
    """The metrics to plot: losses, evaluation metrics, throughput, and the others."""
    names = dict.fromkeys(metric for run in runs for metric in run.metrics)
    chosen = [name for name in names if name != "skipped_steps" or any(_values(runs, name))]
    groups = (*_FIRST, "train/", "eval/", *_THROUGHPUT)
    return sorted(chosen, key=lambda name: next((i for i, group in enumerate(groups) if name.startswith(group)), 99))


def axes(runs: Sequence[Run]) -> list[str]:
    """The horizontal axes on which all runs can be shown."""
    return [axis for axis in AXES if all(run.has(axis) for run in runs)]


def title(runs: Sequence[Run], metric: str) -> str:
    """The title of a plot."""
    return f"{metric} (logarithmic axis)" if wants_log(metric, _values(runs, metric)) else metric


def figure(runs: Sequence[Run], metric: str, axis: str) -> list[Shape]:
    """The shapes of the plot of a metric on an axis of AXES."""
    curves = [_curve(run, index, metric, axis) for index, run in enumerate(runs) if metric in run.metrics]
    is_log = wants_log(metric, _values(runs, metric))
    return draw(curves, AXES[axis], is_log, from_zero=metric in _THROUGHPUT, whole=axis != "seconds")


def sample(index: int) -> list[Shape]:
    """A short piece of a run's line."""
    return [Line([(0, 7), (_SAMPLE_WIDTH, 7)], colour(index), 2.4, dashes(index))]


def signs(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """The signs that the plots of these metrics contain."""
    found = {event.kind for run in runs for event in run.events if event.step is not None}
    has_gap = any(value is None for run in runs for metric in metrics for _, value in run.curve(metric))
    return [kind for kind in SIGNS if kind in found or (kind == "gap" and has_gap)]


def legend(runs: Sequence[Run], metrics: Sequence[str]) -> list[list[Shape]]:
    """The lines of a legend: one for each run and each sign."""
    lines: list[list[Shape]] = []
    for index, run in enumerate(runs):
        lines.append([*sample(index), Text((_SAMPLE_WIDTH + 8, FONT_SIZE - 1), run.name, "text")])
    for kind in signs(runs, metrics):
        mark = sign(kind, (_SAMPLE_WIDTH / 2, 7), "muted")
        lines.append([*mark, Text((_SAMPLE_WIDTH + 8, FONT_SIZE - 1), SIGNS[kind], "muted")])
    return lines


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    return [value for run in runs for _, value in run.curve(metric) if value is not None]


def _curve(run: Run, index: int, metric: str, axis: str) -> Curve:
    placed = [(run.position(axis, step), value) for step, value in run.curve(metric)]
    marks = [(event.kind, run.position_of(event, axis)) for event in run.events]
    return Curve(
        index,
        [(x, value) for x, value in placed if x is not None],
        [(kind, x) for kind, x in marks if x is not None],
    )
