"""accelerate-recipes report: one page about one or several runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, print_json
from accelerate_recipes.paths import check_new_file, write_file


def write(
    runs: Annotated[list[Path], typer.Argument(help="output folders of runs")],
    output: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about one or several runs: curves, differences, failures, commands.

    Example: accelerate-recipes report outputs/mnist outputs/mnist_sgd --output report.html
    """
    if find_spec("plotly") is None:
        raise UsageError("report draws with plotly: run pip install 'accelerate-recipes[report]'")
    from accelerate_recipes.report import summary
    from accelerate_recipes.report.page import page
    from accelerate_recipes.report.run_history import read_runs

    check_new_file(output, "--output", "<title>Training report: ")
    found = read_runs(runs)
    write_file(output, page(found))
    if as_json:
        print_json({"files": [str(output)], **summary.as_json(found)})
    else:
        print(f"written: {output}")
