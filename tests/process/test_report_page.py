"""Promise: a browser draws the page of `accelerate-recipes report`, and its commands repeat the runs."""

import json
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from accelerate_recipes.report import write
from support.launching import accelerate_forked, execute, fork
from support.recipes import LINEAR
from support.runs import ROOT, Run

pytestmark = pytest.mark.full

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
METRICS = ["train/loss", "eval/loss", "eval/r2", "samples_per_second", "learning_rate", "grad_norm"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A run that is done, and one whose numbers overflow."""
    folder = tmp_path_factory.mktemp("runs")
    flags = "--max_steps 40 --log_every 2 --eval_every 10 --momentum 0.5"
    diverges = "--learning_rate 3 --lr_schedule constant"
    command = f"accelerate launch --config_file accelerate_configs/ddp.yaml --main_process_port 0 {LINEAR} {flags}"
    return [
        execute(shlex.split(f"{command} --output_dir '{folder / 'done'}'"), ROOT, folder / "done"),
        fork(folder / "a_run_that_fails_and_has_a_long_name", "ddp", LINEAR, f"{flags} {diverges}", succeeds=False),
    ]


class Drawn(HTMLParser):
    """What scripts have put into a page: the widths of plots, and their curves."""

    def __init__(self, text: str):
        super().__init__()
        self.widths: list[float] = []
        self.curves = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if tag == "svg" and "main-svg" in classes:
            self.widths.append(float(values.get("width") or 0))
        self.curves += tag == "path" and "js-line" in classes


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [500, 1200])
def test_browser_draws_every_plot(tmp_path: Path, runs: list[Run], width: int) -> None:
    """The page's policy blocks what comes from elsewhere."""
    assert BROWSER is not None
    write([run.output_dir for run in runs], tmp_path / "report.html", False)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={tmp_path}/profile", f"--window-size={width},1000", f"file://{tmp_path}/report.html"]
    drawn = Drawn(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert len(drawn.widths) >= len(METRICS) and min(drawn.widths) > 200 and max(drawn.widths) <= width
    assert drawn.curves >= 2 * len(METRICS)


def test_command_on_the_page_repeats_the_run(
    tmp_path: Path, runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    write([runs[0].output_dir], tmp_path / "report.html", True)
    command = shlex.split(json.loads(capsys.readouterr().out)["runs"][0]["repeat"])
    assert command[:2] == ["accelerate", "launch"]
    command[-1] = str(tmp_path / "again")
    again = accelerate_forked(["launch", "--main_process_port", "0", *command[2:]], ROOT, tmp_path / "again")
    assert again.exit_code == 0, again.stderr
    assert again.lasting_records == runs[0].lasting_records and len(again.records) == 24
