"""The subcommand `report`: one page about one or several runs."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from accelerate_recipes.console import print_json
from accelerate_recipes.errors import UsageError
from accelerate_recipes.report import summary
from accelerate_recipes.report.figures import figure, legend, plotted, title
from accelerate_recipes.report.page import page
from accelerate_recipes.report.runs import Run, read_runs

_NAMES = {"--output": "report.html", "--png": "report.png"}


def write(runs: list[Path], output: Path, png: Path | None, as_json: bool) -> None:
    """Writes the page, and says where it is.

    Args:
        runs: output folders of runs.
        output: the page to write.
        png: with a path, the plots go there too, as an image.
        as_json: print the summary as JSON.

    Raises:
        UsageError: a folder is not that of a run, or a file cannot be written.
    """
    _check_target("--output", output)
    if png is not None:
        _check_target("--png", png)
        if png.suffix.lower() != ".png":
            raise UsageError(f"--png {png}: the image is a PNG file: type --png {png.with_suffix('.png')}")
    found = read_runs(runs)
    files = {output: page(found).encode(errors="replace")}
    if png is not None:
        files[png] = _image(found)
    for path, content in files.items():
        _replace(path, content)
    if as_json:
        print_json({"files": [str(path) for path in files], **summary.as_json(found)})
    else:
        print(f"written: {' and '.join(map(str, files))}")


def _image(runs: Sequence[Run]) -> bytes:
    from accelerate_recipes.report.image import image  # pillow takes time to import

    metrics = plotted(runs)
    return image([(title(runs, metric), figure(runs, metric, "steps")) for metric in metrics], legend(runs, metrics))


def _check_target(flag: str, path: Path) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"{flag} {path} is a folder: type {path / _NAMES[flag]}")
        if path.exists() and not path.is_file():  # a device must not be replaced by a file
            raise UsageError(f"{flag} {path} is not a file: type the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no folder {path.parent}; create it, or type another path")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written ({error.strerror}): type another path") from None


def _replace(path: Path, content: bytes) -> None:
    """Writes a file as a whole, or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise UsageError(f"{path} cannot be written ({error.strerror}): type another path") from None
