"""Promise: the page of `accelerate-recipes report` is readable in a browser, and its commands repeat the runs."""

import json
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.report import write
from accelerate_recipes.report.plot import DARK, LIGHT
from support.launching import accelerate_forked, fork
from support.recipes import LINEAR
from support.runs import ROOT, Run

pytestmark = pytest.mark.full

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (360, 1200)
# Opens the page in a frame of each width, chooses each axis, and prints what can be seen.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<style>:root { color-scheme: light dark; } iframe { border: 0; height: 900px; }</style>
<iframe src="report.html"></iframe>
<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), view = frame.contentWindow, page = frame.contentDocument;
  const visible = element => element.getClientRects().length > 0;
  const result = {widths: {}};
  result.resources = view.performance.getEntriesByType("resource").map(entry => entry.name);
  result.background = view.getComputedStyle(page.body).backgroundColor;
  for (const width of WIDTHS) {
    frame.style.width = width + "px";
    const root = page.documentElement, plots = [...page.querySelectorAll("figure > div > svg")];
    const found = result.widths[width] = {axes: {}};
    for (const axis of ["samples", "seconds", "steps"]) {
      page.querySelector(`label[for=${axis}]`).click();
      found.axes[axis] = plots.filter(visible).map(plot => plot.querySelector("title").textContent);
    }
    found.overflow = root.scrollWidth - root.clientWidth;
    found.outside = [...page.querySelectorAll("body *")].filter(visible)
      .filter(element => !element.closest(".scroll") && element.getBoundingClientRect().right > root.clientWidth + 1)
      .map(element => element.outerHTML.slice(0, 200));
    const words = plots.filter(visible).flatMap(plot => [...plot.querySelectorAll("text")]);
    found.smallest = Math.min(...words.map(word =>
      parseFloat(view.getComputedStyle(word).fontSize) * word.getScreenCTM().a));
    found.overlaps = plots.filter(visible).flatMap(plot => {
      const boxes = [...plot.querySelectorAll("text")].map(word => [word.textContent, word.getBoundingClientRect()]);
      return boxes.flatMap(([one, a], index) => boxes.slice(index + 1).filter(([_, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4
      ).map(([other]) => `${one} and ${other}`));
    });
  }
  document.body.textContent = JSON.stringify(result);
});
</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A run that is done, and one whose numbers overflow."""
    folder = tmp_path_factory.mktemp("runs")
    flags = "--max_steps 40 --log_every 2 --eval_every 10 --momentum 0.5"
    diverges = "--learning_rate 3 --lr_schedule constant"
    return [
        fork(folder / "done", "ddp", LINEAR, flags),
        fork(folder / "a_run_that_fails_and_has_a_long_name", "ddp", LINEAR, f"{flags} {diverges}", succeeds=False),
    ]


@pytest.fixture
def served(tmp_path: Path, runs: list[Run]) -> Iterator[tuple[str, list[str]]]:
    """(address of the harness, the paths that were asked for)"""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            asked.append(self.path)

    write([run.output_dir for run in runs], tmp_path / "report.html", None, False)
    (tmp_path / "harness.html").write_text(HARNESS.replace("WIDTHS", str(list(WIDTHS))))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/harness.html", asked
        server.shutdown()
        thread.join()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "colours"), [(0, DARK), (1, LIGHT)], ids=["dark", "light"])
def test_page_is_readable_in_a_browser(
    tmp_path: Path, served: tuple[str, list[str]], scheme: int, colours: dict[str, str]
) -> None:
    address, asked = served
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}/profile"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1300,1000", address]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(unescape(re.findall("<body>(.*)</body>", dom, re.DOTALL)[0]))
    assert found["resources"] == [] and sorted(asked) == ["/harness.html", "/report.html"]
    assert found["background"] == "rgb({}, {}, {})".format(*bytes.fromhex(colours["page"][1:]))
    metrics = ["train/loss", "eval/loss", "eval/r2", "samples_per_second", "learning_rate", "grad_norm"]
    for width in map(str, WIDTHS):
        seen = found["widths"][width]
        assert (seen["overflow"], seen["outside"], seen["overlaps"]) == (0, [], [])
        assert seen["smallest"] >= 11  # pixels
        for axis, words in (("steps", "optimizer steps"), ("samples", "samples"), ("seconds", "seconds of training")):
            titles = [title.replace(" (logarithmic axis)", "") for title in seen["axes"][axis]]
            assert titles == [f"{metric} over {words}" for metric in metrics]


def test_command_on_the_page_repeats_the_run(
    tmp_path: Path, runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    write([runs[0].output_dir], tmp_path / "report.html", None, True)
    command = shlex.split(json.loads(capsys.readouterr().out)["runs"][0]["repeat"])
    assert command[:2] == ["accelerate", "launch"]
    command[-1] = str(tmp_path / "again")
    again = accelerate_forked(["launch", "--main_process_port", "0", *command[2:]], ROOT, tmp_path / "again")
    assert again.exit_code == 0, again.stderr
    assert again.lasting_records == runs[0].lasting_records and len(again.records) == 24
