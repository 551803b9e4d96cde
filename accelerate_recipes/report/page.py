"""The page: HTML, style, plots and plotly.js in one file that loads nothing else."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from plotly.offline import get_plotlyjs

from accelerate_recipes.bundle import VERSION
from accelerate_recipes.report.plots import axes, div, metrics_to_plot, title
from accelerate_recipes.report.run_history import Run
from accelerate_recipes.report.summary import best, differences, last, repeat, settings, throughput
from accelerate_recipes.templates import render


def page(runs: Sequence[Run]) -> str:
    """The page about these runs. All texts from their files are escaped."""
    names = [run.name for run in runs]
    return render(
        "report.html",
        title=f"Training report: {', '.join(names)}",
        plotly=get_plotlyjs(),
        names=names,
        facts=[[run.name, *_facts(run)] for run in runs],
        remarks=[remark for run in runs for remark in _remarks(run)],
        axes=axes(runs),
        plots=[_plot(runs, metric, number) for number, metric in enumerate(metrics_to_plot(runs))],
        differences=[[name, *values] for name, values in differences(runs)],
        commands=[(run.name, repeat(run)) for run in runs],
        settings=[[name, *values] for name, values in settings(runs)],
        version=VERSION,
    )


def _remarks(run: Run) -> list[str]:
    remarks = []
    for event in run.events:
        step = "" if event.step is None else f", step {event.step}"
        remarks.append(f"{run.name}, attempt {event.attempt}{step}: {event.text}")
    if run.status == "running":
        time = f"{datetime.fromtimestamp(run.changed):%Y-%m-%d %H:%M:%S}"
        remarks.append(f"{run.name}: it is still running, or was killed. The last record is from {time}.")
    if run.num_damaged:
        remarks.append(f"{run.name}: skipped lines of metrics.jsonl that are not records: {run.num_damaged}")
    return remarks


def _facts(run: Run) -> list[str]:
    status, planned, rate = run.status, run.planned_steps, throughput(run)
    if status == "running":
        status = "running or killed"
    elif status in ("failed", "stopped"):
        status = f"{status}, exit code {run.card.get('exit_code')}"
    how = [run.card.get("parallelism"), run.card.get("precision")]
    if "num_processes" in run.card:
        how.append(f"{run.card['num_processes']} process" + "es" * (run.card["num_processes"] != 1))
    return [
        status,
        f"{run.last_step:,}" + ("" if planned is None else f" of {planned:,}"),
        "–" if rate is None else number(rate),
        "–" if run.wall_seconds is None else f"{run.wall_seconds:,.1f} s",
        ", ".join(str(part) for part in how if part is not None),
    ]


def _plot(runs: Sequence[Run], metric: str, index: int) -> dict[str, Any]:
    """A plot, and its last and best values as a table."""
    rows = []
    for run in runs:
        if curve := run.curve(metric):
            points = last(curve), best(metric, curve)
            cells = ["–" if point is None else f"{number(point[1])} ({point[0]:,})" for point in points]
            rows.append([run.name, *cells])
    headings = ["run", "last (step)", "best (step)"]
    if all(best(metric, run.curve(metric)) is None for run in runs):
        headings, rows = headings[:2], [row[:2] for row in rows]
    return {"title": title(runs, metric), "div": div(runs, metric, index), "headings": headings, "rows": rows}


def number(value: float) -> str:
    """A number with its significant digits."""
    size = abs(value)
    if value and (size < 1e-3 or size >= 1e9):
        return f"{value:.3e}"
    return f"{value:,.4g}" if size < 1e3 else f"{value:,.0f}"
