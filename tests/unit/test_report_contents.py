"""Promise: the page of `accelerate-recipes report` shows the runs, and nothing else gets into it."""

import json
import random
import re
import sys
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import ImageColor

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.report import plots, summary, write
from accelerate_recipes.report.run_history import read_runs
from accelerate_recipes.templates import FOLDER
from support.report import COMMAND, EARLIER, RECORDS, card, only, page_of, saved
from support.tool import tool

HOSTILE = (
    "\"'></title></style></svg><script>alert(1)</script><img src=//evil.example/x onerror=alert(1)>&lt;b&gt;\ud800"
)


class Page(HTMLParser):
    """Collects what a browser would see in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[list[str]] = []
        self.text, self._in_cell = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.cells[-1][-1] = (self.cells[-1][-1] + data).strip()


def test_page_has_the_numbers_of_each_run(tmp_path: Path) -> None:
    second = card(config={"learning_rate": 0.2}, precision="bf16", num_processes=1)
    second |= {"status": "failed", "exit_code": 1, "error": "ValueError: no"}
    rows = Page(page_of(saved(tmp_path, "first"), saved(tmp_path, "second", RECORDS[:3], second))).cells
    assert ["first", "done", "40 of 40", "64", "12.5 s", "DDP, float32, 2 processes"] in rows
    assert ["second", "failed, exit code 1", "20 of 40", "64", "12.5 s", "DDP, bf16, 1 process"] in rows
    assert ["first", "2 (40)", "1 (20)"] in rows  # train/loss: last, best
    assert ["first", "3 (40)", "2 (20)"] in rows  # eval/loss
    assert ["first", "0.75 (40)", "0.75 (40)"] in rows  # eval/accuracy
    assert ["second", "0.25 (20)", "0.25 (20)"] in rows
    assert ["--learning_rate", "0.1", "0.2"] in rows and ["precision", "float32", "bf16"] in rows
    assert rows.count(["--batch_size", "64", "64"]) == 1  # among all flags, not among the differences


def test_page_loads_nothing(tmp_path: Path) -> None:
    text = page_of(saved(tmp_path, "first"), saved(tmp_path, "second"))
    assert page_of(tmp_path / "first", tmp_path / "second") == text  # the same runs, the same page
    page = Page(text)
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert [page.tags.count(tag) for tag in ("link", "style", "h1", "script")] == [
        1,
        1,
        1,
        2 + 4,
    ]  # plotly, the switch, 4 plots
    assert {value for name, value in page.attributes if name in ("href", "src", "xlink:href", "action")} == {"data:,"}
    assert "url(" not in text and "@import" not in text and "://" not in text
    assert any(value and value.startswith("default-src 'none'") for _, value in page.attributes)


def test_text_from_the_files_stays_text(tmp_path: Path) -> None:
    names = ("status", "error", "exit_code", "parallelism", "precision", "num_processes", "wall_seconds")
    hostile_card = card(
        **dict.fromkeys(names, HOSTILE),
        command=f"{HOSTILE}.py",
        config={HOSTILE: HOSTILE, "data": HOSTILE, "resume_from_checkpoint": HOSTILE},
        versions={HOSTILE: HOSTILE},
        hardware={"gpus": [HOSTILE]},
        earlier_attempts=[{"status": "failed", "exit_code": HOSTILE, "error": HOSTILE, "first_step": HOSTILE}],
    )
    records = [{"step": 10, HOSTILE: 1.0, f"eval/{HOSTILE}": None}, {"step": 20, HOSTILE: 2.0, f"eval/{HOSTILE}": 1}]
    name = "<script>alert(2)<!--"
    text = page_of(saved(tmp_path, name, records, hostile_card), saved(tmp_path, "x'onload='alert(3)"))
    page = Page(text)
    assert set(page.tags) <= {
        *("html", "head", "meta", "link", "title", "style", "body", "h1", "main", "section", "h2", "h3", "p", "ul"),
        *("li", "div", "figure", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "details", "summary"),
        *("footer", "script", "input", "label"),
    }
    assert page.tags.count("script") == 2 + len({metric for one in (records, RECORDS) for metric in _metrics(one)})
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    for metric in records[0].keys() - {"step"}:
        for text in _texts(plots.figure(read_runs([tmp_path / name]), metric).to_dict()):
            assert "<" not in text and ">" not in text
    assert name in page.text and HOSTILE[:-1] in page.text


def _metrics(records: list[dict[str, Any]]) -> set[str]:
    return {name for record in records for name in record} - {"step", "epoch"}


def _texts(value: Any) -> list[str]:
    """All strings in a figure."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [value] if isinstance(value, str) else [text for one in inner for text in _texts(one)]


def test_mistakes_get_one_line_and_write_nothing(tmp_path: Path) -> None:
    run, empty = saved(tmp_path), tmp_path / "empty"
    empty.mkdir()
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "run.json").write_text(json.dumps(card(status="failed", exit_code=2, error="error: type less")))
    before = sorted(tmp_path.rglob("*"))
    page, nowhere = tmp_path / "page.html", tmp_path / "no" / "page.html"
    cases: list[tuple[list[Path], Path, str]] = [
        ([tmp_path / "absent"], page, "no such folder; use the --output_dir of a run"),
        ([empty], page, "has no metrics.jsonl: use the --output_dir of a run"),
        ([tmp_path], page, f"has no metrics.jsonl: use {run}"),
        ([run / "metrics.jsonl"], page, f"is not a folder: use {run}"),
        ([refused], page, "failed before the first step (error: type less): use another run"),
        ([run, run / ".." / "run"], page, "is given 2 times: use each run once"),
        ([run], empty, "is a folder: use the name of a file in it"),
        ([run], nowhere, f"there is no folder {nowhere.parent}"),
        ([run], Path("/dev/null"), "is not a file"),
        ([run], run / "metrics.jsonl", "exists, and this command did not create it: use another name"),
    ]
    for runs, output, line in cases:
        with pytest.raises(UsageError, match=re.escape(line)) as error:
            write(runs, output, False)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before and not Path("/dev/null").is_file()


def test_without_plotly_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"run pip install 'accelerate-recipes\[report\]'$"):
        write([run], tmp_path / "report.html", False)


def test_page_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path)
    (tmp_path / "report.html").write_text("<title>Training report: old")
    monkeypatch.setattr(Path, "replace", _full_disk)
    with pytest.raises(UsageError, match=r"report\.html cannot be written \(No space left on device\)"):
        write([run], tmp_path / "report.html", False)
    assert (tmp_path / "report.html").read_text().endswith(": old")
    monkeypatch.undo()
    write([run], tmp_path / "report.html", False)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report.html"}


def _full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_command_prints_a_line_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, "my run")
    saved(tmp_path, "second", RECORDS[:3], card(num_processes=4))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        assert tool(monkeypatch, "report", *flags) == 0
        return capsys.readouterr().out

    assert run("my run") == "written: report.html\n"
    assert run("my run", "--output", "p.html") == "written: p.html\n"
    found = json.loads(run("my run", "second", "--json"))
    assert found["files"] == ["report.html"] and found["differences"] == {"processes": {"my run": "2", "second": "4"}}
    assert found["runs"][0]["metrics"]["train/loss"] == {
        "last": {"step": 40, "value": 2},
        "best": {"step": 20, "value": 1},
    }
    assert [one["samples_per_second"] for one in found["runs"]] == [64, 64]
    assert found["runs"][0]["repeat"] == f"{COMMAND} --output_dir 'my run_again'"


def test_colours_stand_out() -> None:
    """A contrast of 3 on both backgrounds, as WCAG asks for lines."""
    style = (FOLDER / "report.css").read_text()
    pages = re.findall("--page: (#[0-9a-f]{6});", style)
    assert len(pages) == 2
    for page, colour in product(pages, plots.COLOURS):
        low, high = sorted(map(_luminance, (page, colour)))
        assert (high + 0.05) / (low + 0.05) >= 3, (page, colour)
    count = len(plots.COLOURS), len(plots.DASHES)
    assert len({(index % count[0], index % count[1]) for index in range(20)}) == 20


def _luminance(colour: str) -> float:
    parts = [part / 255 for part in ImageColor.getrgb(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("command", [None, 1, "python /usr/lib/ipykernel_launcher.py -f kernel.json"])
def test_run_without_a_script_has_no_command(tmp_path: Path, command: Any) -> None:
    folder = saved(tmp_path, run_card=card(launch_command=command))
    assert summary.repeat(only(folder)) is None
    assert "does not say how the run was started" in page_of(folder)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_files_never_end_in_a_traceback(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed)
    odd = [None, True, -1, 0, 10**400, 1e308, -1e-320, "x", HOSTILE, [], {}, [[1]], {"a": None}, float("nan"), 2**60]

    def broken(value: Any) -> Any:
        if numbers.random() < 0.15:
            return numbers.choice(odd)
        return {key: broken(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    records = "\n".join(json.dumps(broken(record)) for record in RECORDS * 3)
    folder = saved(tmp_path, records=records, run_card=broken(card(attempt=3, first_step=20, earlier_attempts=EARLIER)))
    Page(page_of(folder, saved(tmp_path, "good")))
