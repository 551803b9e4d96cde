"""The subcommand `report`: one page about one or several runs."""

from importlib.util import find_spec
from pathlib import Path

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.paths import check_new_file, write_file
from accelerate_recipes.report import summary
from accelerate_recipes.report.runs import read_runs


def write(runs: list[Path], output: Path, as_json: bool) -> None:
    """Writes the page, and says where it is.

    Args:
        runs: output folders of runs.
        output: the page to write.
        as_json: print the summary as JSON.

    Raises:
        UsageError: a folder is not that of a run, the page cannot be written, or plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise UsageError("report draws with plotly: run pip install 'accelerate-recipes[report]'")
    from accelerate_recipes.report.page import page

    check_new_file(output, "--output")
    found = read_runs(runs)
    write_file(output, page(found))
    if as_json:
        print_json({"files": [str(output)], **summary.as_json(found)})
    else:
        print(f"written: {output}")
