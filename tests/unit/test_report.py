"""Promise: `accelerate-recipes report` shows what the records hold, and nothing else gets into the page."""

import json
import random
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import plotly.offline
import pytest
from PIL import ImageColor

from accelerate_recipes import cli
from accelerate_recipes.errors import UsageError
from accelerate_recipes.report import plots, summary, write
from accelerate_recipes.report.plots import axes
from accelerate_recipes.report.runs import Event, Run, read_runs
from common.config import RunConfig
from common.state import LOWER_IS_BETTER

COMMAND = "accelerate launch --config_file accelerate_configs/ddp.yaml recipes/mnist.py --max_steps 40 --output_dir x"
HOSTILE = (
    "\"'></title></style></svg><script>alert(1)</script><img src=//evil.example/x onerror=alert(1)>&lt;b&gt;\ud800"
)


def training(step: int, loss: float | None, **others: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "train/loss": loss, "samples_per_second": 64.0} | others


def evaluation(step: int, **values: float | None) -> dict[str, Any]:
    return {"step": step} | {f"eval/{name}": value for name, value in values.items()}


def card(**changes: Any) -> dict[str, Any]:
    config = {"batch_size": 64, "log_every": 10, "learning_rate": 0.1, "resume_from_checkpoint": None}
    config |= {"output_dir": "x"} | changes.pop("config", {})
    facts = {"status": "done", "exit_code": 0, "error": None, "attempt": 1, "wall_seconds": 12.5}
    facts |= {"launch_command": COMMAND, "versions": {"torch": "2.13.0"}}
    facts |= {"parallelism": "DDP", "precision": "float32", "num_processes": 2, "num_steps": 40}
    return facts | {"config": config} | changes


RECORDS = [
    training(10, 4.0),
    training(20, 1.0),
    evaluation(20, loss=2.0, accuracy=0.25),
    training(30, 3.0),
    training(40, 2.0),
    evaluation(40, loss=3.0, accuracy=0.75),
]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(name, records, card) -> the output folder of a run."""

    def run(name: str = "run", records: Any = RECORDS, run_card: Any = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "run.json").write_text(json.dumps(card() if run_card is None else run_card))
        return folder

    return run


def page_of(*folders: Path) -> str:
    output = folders[0].parent / "report.html"
    write(list(folders), output, False)
    page = output.read_text()
    assert page.count(plotly.offline.get_plotlyjs()) == 1
    return page.replace(plotly.offline.get_plotlyjs(), "")  # for plotly.js itself names many addresses


def only(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def drawn(runs: list[Run], metric: str = "train/loss") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(traces, layout) of a plot."""
    found = plots.figure(runs, metric).to_dict()
    return found["data"], found["layout"]


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


def test_page_has_the_numbers_of_each_run(make: Callable[..., Path]) -> None:
    second = card(config={"learning_rate": 0.2}, precision="bf16", num_processes=1)
    second |= {"status": "failed", "exit_code": 1, "error": "ValueError: no"}
    rows = Page(page_of(make("first"), make("second", RECORDS[:3], second))).cells
    assert ["first", "done", "40 of 40", "64", "12.5 s", "DDP, float32, 2 processes"] in rows
    assert ["second", "failed, exit code 1", "20 of 40", "64", "12.5 s", "DDP, bf16, 1 process"] in rows
    assert ["first", "2 (40)", "1 (20)"] in rows  # train/loss: last, best
    assert ["first", "3 (40)", "2 (20)"] in rows  # eval/loss
    assert ["first", "0.75 (40)", "0.75 (40)"] in rows  # eval/accuracy
    assert ["second", "0.25 (20)", "0.25 (20)"] in rows
    assert ["--learning_rate", "0.1", "0.2"] in rows and ["precision", "float32", "bf16"] in rows
    assert rows.count(["--batch_size", "64", "64"]) == 1  # among all flags, not among the differences


def test_page_loads_nothing(make: Callable[..., Path]) -> None:
    text = page_of(make("first"), make("second"))
    page = Page(text)
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert [page.tags.count(tag) for tag in ("link", "style", "h1", "script")] == [1, 1, 1, 1 + 4]  # 4 plots
    assert {value for name, value in page.attributes if name in ("href", "src", "xlink:href", "action")} == {"data:,"}
    assert "url(" not in text and "@import" not in text and "://" not in text
    assert any(value and value.startswith("default-src 'none'") for _, value in page.attributes)


def test_same_runs_have_the_same_page(make: Callable[..., Path]) -> None:
    run = make()
    assert page_of(run) == page_of(run)


def test_text_from_the_files_stays_text(make: Callable[..., Path], tmp_path: Path) -> None:
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
    text = page_of(make(name, records, hostile_card), make("x'onload='alert(3)"))
    page = Page(text)
    assert set(page.tags) <= {
        *("html", "head", "meta", "link", "title", "style", "body", "h1", "main", "section", "h2", "h3", "p", "ul"),
        *("li", "div", "figure", "table", "thead", "tbody", "tr", "th", "td", "pre", "code", "details", "summary"),
        *("footer", "script"),
    }
    assert page.tags.count("script") == 1 + len({metric for one in (records, RECORDS) for metric in _metrics(one)})
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


def test_curve_has_its_values(make: Callable[..., Path]) -> None:
    (curve,), layout = drawn([only(make())])
    assert (curve["x"], curve["y"]) == ([10, 20, 30, 40], [4, 1, 3, 2]) and curve["mode"] == "lines+markers"
    assert (layout["yaxis"]["type"], layout["yaxis"]["rangemode"]) == ("linear", "normal")
    assert drawn([only(make("many", [training(step, 1.0) for step in range(50)]))])[0][0]["mode"] == "lines"
    wide, layout = drawn([only(make("wide", [training(1, 100.0), training(2, 1.0)]))])
    assert layout["yaxis"]["type"] == "log" and wide[0]["y"] == [100, 1]
    assert drawn([only(make("rate"))], "samples_per_second")[1]["yaxis"]["rangemode"] == "tozero"


def test_equal_curves_say_so(make: Callable[..., Path]) -> None:
    runs = read_runs([make("first"), make("other", RECORDS[:1]), make("second"), make("a<b")])
    names = [trace["name"] for trace in drawn(runs)[0]]
    assert names == ["first", "other", "second (equal to first)", "a&lt;b (equal to first)"]


def test_only_a_wide_range_gets_a_logarithmic_axis() -> None:
    assert plots.wants_log("train/loss", [0.01, 1.0]) and plots.wants_log("grad_norm", [1.0, 500.0])
    assert not plots.wants_log("train/loss", [0.011, 1.0]) and not plots.wants_log("train/loss", [0.0, 1.0])
    assert not plots.wants_log("learning_rate", [1e-6, 1.0]) and not plots.wants_log("train/loss", [])


def test_many_records_keep_their_extremes() -> None:
    numbers = random.Random(0)
    points: list[tuple[int, float | None]] = [(step, numbers.random()) for step in range(50_000)]
    points[12_345], points[23_456], points[34_567] = (12_345, 9.0), (23_456, -9.0), (34_567, None)
    kept = plots.thinned(points)
    assert len(kept) <= 1010 and kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[12_345], points[23_456], points[34_567], points[-1]} <= set(kept)
    assert set(kept) <= set(points)


def test_axes_of_samples_and_seconds(make: Callable[..., Path]) -> None:
    """64 samples a step, one step a second, then two steps a second."""
    rates = [(10, 64.0), (20, 128.0), (40, 128.0)]
    records = [training(step, 1.0, samples_per_second=rate) for step, rate in rates]
    run = only(make(records=[*records, evaluation(15, loss=1.0), evaluation(55, loss=1.0)]))
    assert [run.position("samples", step) for step in (0, 15)] == [0, 960]
    found = [run.position("seconds", step) for step in (0, 5, 10, 15, 20, 30, 40, 55)]
    assert found == [0, 5, 10, 12.5, 15, 20, 25, None]
    assert summary.throughput(run) == pytest.approx(64 * 40 / 25)
    assert axes([run]) == ["steps", "samples", "seconds"]
    (curve,), layout = drawn([run], "eval/loss")
    buttons = {button["label"]: button["args"] for button in layout["updatemenus"][0]["buttons"]}
    # The other evaluation came after the last training record.
    expected = {"steps": [15, 55], "samples": [960, 3520], "seconds": [12.5, None]}
    assert {axis: arguments[0]["x"] for axis, arguments in buttons.items()} == {k: [v] for k, v in expected.items()}
    assert curve["x"] == expected["steps"] and layout["xaxis"]["title"]["text"] == "optimizer steps"
    assert buttons["seconds"][1]["xaxis.title.text"] == "seconds of training"


def test_seconds_begin_with_the_records(make: Callable[..., Path]) -> None:
    """A run that was resumed from another folder has its first record in the middle."""
    run = only(make(records=[training(110, 1.0), training(120, 1.0)]))
    assert [run.position("seconds", step) for step in (99, 100, 110, 120)] == [None, 0, 10, 20]


def test_run_without_throughput_is_shown_over_steps(make: Callable[..., Path]) -> None:
    silent = make("silent", [{"step": 1, "train/loss": 1.0}])
    no_card = make("no_card", RECORDS, [])
    assert axes(read_runs([silent])) == ["steps", "samples"]
    assert axes(read_runs([no_card])) == ["steps"]
    assert axes(read_runs([make(), silent])) == ["steps", "samples"]
    assert not drawn(read_runs([no_card]))[1].get("updatemenus")
    assert [one["label"] for one in drawn(read_runs([silent]))[1]["updatemenus"][0]["buttons"]] == ["steps", "samples"]


STOPPED = (
    "stopped: by SIGTERM: step_1/checkpoints/step_00000036 is saved, type --resume_from_checkpoint latest to go on"
)
NOT_FINITE = "stopped: train/loss is nan at step 33 in process 0, samples 4, 5: try a lower --learning_rate"
LATEST = {"resume_from_checkpoint": "latest"}
FROM_PATH = {"resume_from_checkpoint": "x/checkpoints/step_00000020"}
EARLIER = [
    {"first_step": 0, "status": "running", "exit_code": None, "error": None},
    {"first_step": 0, "status": "stopped", "exit_code": 75, "error": STOPPED},
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"status": "running"}, []),
        ({"status": "stopped", "exit_code": 75, "error": STOPPED}, [("stopped", 1, 36)]),
        ({"status": "failed", "exit_code": 3, "error": NOT_FINITE}, [("failed", 1, 33)]),
        ({"status": "failed", "exit_code": 1, "error": "KeyError: 'step 5'"}, [("failed", 1, 40)]),
        ({"attempt": 2, "config": LATEST}, [("resumed", 2, None)]),
        ({"attempt": 2, "config": FROM_PATH}, [("resumed", 2, 20)]),
        ({"config": FROM_PATH}, [("resumed", 1, 20)]),
        ({"attempt": 2, "config": LATEST, "first_step": 30}, [("resumed", 2, 30)]),
        (
            {"attempt": 3, "config": LATEST, "first_step": 36, "earlier_attempts": EARLIER},
            [("failed", 1, None), ("restarted", 2, 0), ("stopped", 2, 36), ("resumed", 3, 36)],
        ),
        (
            {"attempt": "x", "config": 3, "earlier_attempts": [3, "x"], "error": 7, "status": "failed"},
            [("failed", 1, 40)],
        ),
    ],
)
def test_resumes_failures_and_restarts(
    make: Callable[..., Path], changes: dict[str, Any], expected: list[tuple[str, int, int | None]]
) -> None:
    made = card() | changes if changes.get("config") == 3 else card(**changes)
    run = only(make(run_card=made))
    assert [(event.kind, event.attempt, event.step) for event in run.events] == expected
    text = page_of(run.folder)
    assert all(f"attempt {event.attempt}" in text for event in run.events)
    labels: dict[int, list[str]] = {}
    for kind, _, step in expected:
        if step is not None:
            labels.setdefault(step, []).append(kind)
    marks = [trace for trace in drawn([run])[0] if trace["mode"] == "lines+text"]
    assert len(marks) == bool(labels)
    if marks:
        (mark,) = marks
        assert mark["x"] == [x for step in labels for x in (step, step, None)] and mark["line"]["dash"] == "dot"
        assert [text for text in mark["text"] if text] == [", ".join(kinds) for kinds in labels.values()]


def test_event_after_the_last_record_is_at_the_end(make: Callable[..., Path]) -> None:
    run = only(make())
    event = Event("failed", 1, 47, "")
    assert [run.position_of(event, axis) for axis in ("steps", "samples", "seconds")] == [47, 47 * 64, 40]


def test_value_that_is_not_finite_leaves_a_gap(make: Callable[..., Path]) -> None:
    lines = [json.dumps(training(step, step / 10)) for step in (10, 20, 50, 60, 70, 90)]
    lines += [
        f'{{"step": {step}, "train/loss": {value}}}' for step, value in ((30, "null"), (40, "NaN"), (80, "1e999"))
    ]
    run = only(make(records="\n".join(lines)))
    (line, stars), layout = drawn([run])
    assert line["y"] == [1, 2, None, None, 5, 6, 7, None, 9] and not line.get("connectgaps")
    assert (stars["x"], stars["yaxis"], stars["marker"]["symbol"]) == ([30, 40, 80], "y2", "star")
    assert layout["yaxis2"]["range"] == [0, 1] and max(stars["y"]) < 0.1
    moved = [one["args"][0]["x"] for one in layout["updatemenus"][0]["buttons"]]
    assert [[len(x) for x in one] for one in moved] == [[9, 3]] * len(moved)
    curve = run.curve("train/loss")
    assert summary.last(curve) == (90, 9.0) and summary.best("train/loss", curve) == (10, 1.0)


def test_value_between_two_gaps_is_a_dot(make: Callable[..., Path]) -> None:
    records = [training(step, None if step in (60, 62) else 1.0) for step in range(100)]
    curve, _ = drawn([only(make(records=records))])[0]
    assert [step for step, size in zip(curve["x"], curve["marker"]["size"]) if size] == [61]


def test_damaged_lines_are_left_out(make: Callable[..., Path]) -> None:
    good = json.dumps(training(10, 1.0))
    being_written = '{"step": 20, "train/lo'
    damaged = ["nonsense", "[1]", "null", '{"step": true}', '{"step": -1}', '{"step": "1"}', "{}", "[" * 100_000]
    damaged += ['{"step": 1e3}']
    run = only(make(records="\n".join([good, *damaged, being_written])))
    assert run.num_damaged == len(damaged) and len(run.records) == 1
    assert f"that are not records, and are left out: {len(damaged)}" in page_of(run.folder)
    assert only(make("ended", f"{good}\n{being_written}\n")).num_damaged == 1
    run = only(make("running", "\n".join([good, being_written])))
    assert run.num_damaged == 0 and len(run.records) == 1
    assert "left out:" not in page_of(run.folder)


@pytest.mark.parametrize("records", [[], [training(1, 2.0)], [evaluation(3, loss=1.0)], RECORDS[:1] * 2])
def test_few_records(make: Callable[..., Path], records: list[dict[str, Any]]) -> None:
    running = card(status="running", exit_code=None, wall_seconds=0.1)
    folder = make(records=records, run_card=running)
    text = page_of(folder)
    assert "running or killed" in text and "0.1 s" not in text
    assert ("There are no records yet" in text) == (not records)
    metric = next(iter(only(folder).metrics), None)
    if metric:
        assert drawn([only(folder)], metric)[0][0]["marker"]["size"] == [5] * len(records)


def test_mistakes_get_one_line_and_write_nothing(make: Callable[..., Path], tmp_path: Path) -> None:
    run, empty = make(), tmp_path / "empty"
    empty.mkdir()
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "run.json").write_text(json.dumps(card(status="failed", exit_code=2, error="error: type less")))
    before = sorted(tmp_path.rglob("*"))
    page, nowhere = tmp_path / "page.html", tmp_path / "no" / "page.html"
    cases: list[tuple[list[Path], Path, str]] = [
        ([tmp_path / "absent"], page, "no such folder; type the --output_dir of a run"),
        ([empty], page, "has no metrics.jsonl: type the --output_dir of a run"),
        ([tmp_path], page, f"has no metrics.jsonl: type {run}"),
        ([run / "metrics.jsonl"], page, f"is not a folder: type {run}"),
        ([refused], page, "failed before the first step (error: type less): type another run"),
        ([run, run / ".." / "run"], page, "is given 2 times: type each run once"),
        ([run], empty, f"is a folder: type {empty / 'report.html'}"),
        ([run], nowhere, f"there is no folder {nowhere.parent}"),
        ([run], Path("/dev/null"), "is not a file"),
    ]
    for runs, output, line in cases:
        with pytest.raises(UsageError, match=re.escape(line)) as error:
            write(runs, output, False)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before and not Path("/dev/null").is_file()


def test_without_plotly_one_line_says_what_to_install(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"type pip install 'accelerate-recipes\[report\]'$"):
        write([run], tmp_path / "report.html", False)


def test_page_is_replaced_as_a_whole(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(Path, "replace", _full_disk)
    with pytest.raises(UsageError, match=r"report\.html cannot be written \(No space left on device\)"):
        write([run], tmp_path / "report.html", False)
    assert (tmp_path / "report.html").read_text() == "old"
    monkeypatch.undo()
    write([run], tmp_path / "report.html", False)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report.html"}


def _full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_command_prints_a_line_or_json(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("first")
    make("second", RECORDS[:3], card(num_processes=4))
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["accelerate-recipes", "report", *flags])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return capsys.readouterr().out

    assert run("first") == "written: report.html\n"
    assert run("first", "--output", "p.html") == "written: p.html\n"
    found = json.loads(run("first", "second", "--json"))
    assert found["files"] == ["report.html"] and found["differences"] == {"processes": {"first": "2", "second": "4"}}
    assert found["runs"][0]["metrics"]["train/loss"] == {
        "last": {"step": 40, "value": 2},
        "best": {"step": 20, "value": 1},
    }
    assert [one["samples_per_second"] for one in found["runs"]] == [64, 64]
    assert found["runs"][0]["repeat"] == f"{COMMAND} --output_dir first_again"


def test_colours_stand_out() -> None:
    """A contrast of 3 on both backgrounds, as WCAG asks for lines."""
    style = (Path(plots.__file__).parent / "style.css").read_text()
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


def test_the_report_judges_as_the_loop_does() -> None:
    assert summary.LOWER_IS_BETTER == LOWER_IS_BETTER
    assert {*summary.NOT_COMPARED} <= RunConfig.__dataclass_fields__.keys()


def test_command_to_repeat(make: Callable[..., Path]) -> None:
    folder = make("my run")
    assert summary.repeat(only(folder)) == f"{COMMAND} --output_dir '{folder}_again'"


@pytest.mark.parametrize("command", [None, 1, "python /usr/lib/ipykernel_launcher.py -f kernel.json"])
def test_run_without_a_script_has_no_command(make: Callable[..., Path], command: Any) -> None:
    folder = make(run_card=card(launch_command=command))
    assert summary.repeat(only(folder)) is None
    assert "does not say how the run was started" in page_of(folder)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_files_never_end_in_a_traceback(make: Callable[..., Path], seed: int) -> None:
    numbers = random.Random(seed)
    odd = [None, True, -1, 0, 10**400, 1e308, -1e-320, "x", HOSTILE, [], {}, [[1]], {"a": None}, float("nan"), 2**60]

    def broken(value: Any) -> Any:
        if numbers.random() < 0.15:
            return numbers.choice(odd)
        return {key: broken(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    records = "\n".join(json.dumps(broken(record)) for record in RECORDS * 3)
    folder = make(records=records, run_card=broken(card(attempt=3, first_step=20, earlier_attempts=EARLIER)))
    Page(page_of(folder, make("good")))
