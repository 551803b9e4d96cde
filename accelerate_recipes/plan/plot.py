"""The scaling curves of a plan, as a page that plotly draws in the browser."""

from importlib.util import find_spec
from pathlib import Path

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.paths import check_new_file
from accelerate_recipes.plan.facts import Speed


def check(path: Path | None, scaling: bool) -> None:
    """Raises UsageError if no plot can be written."""
    if path is None:
        return
    if not scaling:
        raise UsageError("--plot draws scaling curves: use --scaling, too")
    check_new_file(path, "--plot")
    if find_spec("plotly") is None:
        raise UsageError("--plot needs plotly: run pip install 'accelerate-recipes[report]'")


def write(path: Path, configs: dict[str, list[Speed]], title: str) -> None:
    """Writes a page with the efficiency of each config over the number of GPUs."""
    from plotly.graph_objects import Figure, Scatter  # the import takes a second

    curves = [
        Scatter(
            name=config,
            x=[row.num_processes for row in rows],
            y=[row.efficiency for row in rows],
            text=[f"{row.seconds:.3g} s a step, {row.gpu_hours:,.3g} GPU hours" for row in rows],
            mode="lines+markers",
        )
        for config, rows in configs.items()
    ]
    axes = {"xaxis": {"title": {"text": "GPUs"}, "type": "log"}, "yaxis": {"tickformat": ".0%", "rangemode": "tozero"}}
    Figure(curves, axes | {"title": {"text": f"{title}: efficiency"}}).write_html(path)
    print(f"\nThe curves are in {path}")
