"""Writes the page: HTML, style, plots and plotly.js in one file, without anything to load."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from accelerate_recipes.bundle import VERSION
from accelerate_recipes.report.plots import axes, div, metrics_to_plot, title
from accelerate_recipes.report.runs import Run
from accelerate_recipes.report.summary import best, differences, last, repeat, settings, throughput

_HERE = Path(__file__).parent


def page(runs: Sequence[Run]) -> str:
    """The page about these runs. All texts from their files are escaped."""
    sections = [_overview(runs), _plots(runs), _differences(runs), _commands(runs), _settings(runs)]
    template = Template((_HERE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"Training report: {', '.join(run.name for run in runs)}"),
        style=(_HERE / "style.css").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        sections="\n".join(sections),
        notes=_notes(),
    )


def _overview(runs: Sequence[Run]) -> str:
    rows = [[escape(run.name), *map(escape, _facts(run))] for run in runs]
    table = _table(["run", "status", "optimizer steps", "samples per second", "last attempt took", "parallelism"], rows)
    remarks = "".join(f"<li>{escape(remark)}</li>" for run in runs for remark in _remarks(run))
    return _section("Runs", table + (f"<ul>{remarks}</ul>" if remarks else ""))


def _remarks(run: Run) -> list[str]:
    remarks = []
    for event in run.events:
        step = "" if event.step is None else f", step {event.step}"
        remarks.append(f"{run.name}, attempt {event.attempt}{step}: {event.text}")
    if run.status == "running":
        time = f"{datetime.fromtimestamp(run.changed):%Y-%m-%d %H:%M:%S}"
        remarks.append(f"{run.name}: it is still running, or was killed. The last record is of {time}.")
    if run.num_damaged:
        remarks.append(f"{run.name}: lines of metrics.jsonl that are not records, and are left out: {run.num_damaged}")
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


def _plots(runs: Sequence[Run]) -> str:
    if not (metrics := metrics_to_plot(runs)):
        return _section("Curves", '<p class="muted">There are no records yet.</p>')
    plots = "\n".join(_plot(runs, metric, number) for number, metric in enumerate(metrics))
    return _section("Curves", f'{_switch(runs)}<div class="plots">\n{plots}\n</div>')


def _switch(runs: Sequence[Run]) -> str:
    """The choice of the horizontal axis, for all plots; nothing if there is only one."""
    names = axes(runs)
    options = [
        f'<label><input type="radio" name="axis" value="{name}"{" checked" * (name == names[0])}> {name}</label>'
        for name in names
    ]
    return f'<p class="switch">horizontal axis: {" ".join(options)}</p>\n' if len(names) > 1 else ""


def _plot(runs: Sequence[Run], metric: str, number: int) -> str:
    heading = escape(title(runs, metric))
    return f"<figure><h3>{heading}</h3>\n{div(runs, metric, number)}\n{_values(runs, metric)}</figure>"


def _values(runs: Sequence[Run], metric: str) -> str:
    rows, has_best = [], False
    for run in runs:
        if not (curve := run.curve(metric)):
            continue
        points = [last(curve), best(metric, curve)]
        has_best = has_best or points[1] is not None
        cells = ["–" if point is None else f"{number(point[1])} ({point[0]:,})" for point in points]
        rows.append([escape(run.name), *cells])
    if has_best:
        return _table(["run", "last (step)", "best (step)"], rows)
    return _table(["run", "last (step)"], [row[:2] for row in rows])


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    rows = [[escape(name), *map(escape, values)] for name, values in differences(runs)]
    table = _table(["", *(run.name for run in runs)], rows)
    return _section("What differs", table if rows else "<p>Flags, versions and hardware are the same.</p>")


def _commands(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        command = repeat(run)
        if command is None:
            parts.append(f"<p>{escape(run.name)}: the run card does not say how the run was started.</p>")
            continue
        parts.append(f"<p>{escape(run.name)}</p>")
        parts.append(f"<pre>{escape(command)}</pre>")
    return _section("Repeat a run", "\n".join(parts))


def _settings(runs: Sequence[Run]) -> str:
    rows = [[escape(name), *map(escape, values)] for name, values in settings(runs)]
    table = _table(["", *(run.name for run in runs)], rows)
    return f"<details>\n<summary>All flags, versions and hardware</summary>\n{table}\n</details>"


def _notes() -> str:
    return (
        "<p>Best: the lowest value where the name contains loss, perplexity or error, else the highest. "
        "Seconds of training come from samples_per_second: they exclude start, evaluation and saving, and steps that "
        "were lost and taken again. Of many records in a curve, the lowest and highest of each stretch are drawn. "
        "A star at the bottom of a plot is a record without a finite value.</p>"
        f"<p>Written by accelerate-recipes {escape(VERSION)}.</p>"
    )


def number(value: float) -> str:
    """A number with the digits that matter."""
    size = abs(value)
    if value and (size < 1e-3 or size >= 1e9):
        return f"{value:.3e}"
    return f"{value:,.4g}" if size < 1e3 else f"{value:,.0f}"


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{content}\n</section>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself. The cells are HTML; the headings are not."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
