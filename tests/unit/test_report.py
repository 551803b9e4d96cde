"""Promise: the curves and events of `accelerate-recipes report` are those of the records."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.report import plots, summary
from accelerate_recipes.report.page import page
from accelerate_recipes.report.plots import axes
from accelerate_recipes.report.run_history import Event, Run, read_runs
from support.report import EARLIER, RECORDS, STOPPED, card, evaluation, only, page_of, saved, training

NOT_FINITE = "stopped: train/loss is nan at step 33 in process 0, samples 4, 5: try a lower --learning_rate"
LATEST = {"resume_from_checkpoint": "latest"}
FROM_PATH = {"resume_from_checkpoint": "x/checkpoints/step_00000020"}


def drawn(runs: list[Run], metric: str = "train/loss") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(traces, layout) of a plot."""
    found = plots.figure(runs, metric).to_dict()
    return found["data"], found["layout"]


def test_curve_has_its_values(tmp_path: Path) -> None:
    (curve,), layout = drawn([only(saved(tmp_path))])
    assert (curve["x"], curve["y"]) == ([10, 20, 30, 40], [4, 1, 3, 2]) and curve["mode"] == "lines+markers"
    assert (layout["yaxis"]["type"], layout["yaxis"]["rangemode"]) == ("linear", "normal")
    assert drawn([only(saved(tmp_path, "many", [training(step, 1.0) for step in range(50)]))])[0][0]["mode"] == "lines"
    wide, layout = drawn([only(saved(tmp_path, "wide", [training(1, 100.0), training(2, 1.0)]))])
    assert layout["yaxis"]["type"] == "log" and wide[0]["y"] == [100, 1]
    assert drawn([only(saved(tmp_path, "rate"))], "samples_per_second")[1]["yaxis"]["rangemode"] == "tozero"


def test_equal_curves_say_so(tmp_path: Path) -> None:
    names = ["first", "other", "second", "a<b"]
    runs = read_runs([saved(tmp_path, name, RECORDS[:1] if name == "other" else RECORDS) for name in names])
    labels = [trace["name"] for trace in drawn(runs)[0]]
    assert labels == ["first", "other", "second (equal to first)", "a&lt;b (equal to first)"]


def test_only_a_wide_range_gets_a_logarithmic_axis() -> None:
    assert plots.wants_log("train/loss", [0.01, 1.0]) and plots.wants_log("grad_norm", [1.0, 500.0])
    assert not plots.wants_log("train/loss", [0.011, 1.0]) and not plots.wants_log("train/loss", [0.0, 1.0])
    assert not plots.wants_log("learning_rate", [1e-6, 1.0]) and not plots.wants_log("train/loss", [])


def test_many_records_keep_their_extremes() -> None:
    numbers = random.Random(0)
    points: list[tuple[int, float | None]] = [(step, numbers.random()) for step in range(50_000)]
    points[12_345], points[23_456], points[34_567] = (12_345, 9.0), (23_456, -9.0), (34_567, None)
    kept = plots.thin(points)
    assert len(kept) <= 1010 and kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[12_345], points[23_456], points[34_567], points[-1]} <= set(kept)
    assert set(kept) <= set(points)


def test_axes_of_samples_and_seconds(tmp_path: Path) -> None:
    """64 samples a step, one step a second, then two steps a second."""
    rates = [(10, 64.0), (20, 128.0), (40, 128.0)]
    records = [training(step, 1.0, samples_per_second=rate) for step, rate in rates]
    run = only(saved(tmp_path, records=[*records, evaluation(15, loss=1.0), evaluation(55, loss=1.0)]))
    assert [run.position("samples", step) for step in (0, 15)] == [0, 960]
    found = [run.position("seconds", step) for step in (0, 5, 10, 15, 20, 30, 40, 55)]
    assert found == [0, 5, 10, 12.5, 15, 20, 25, None]
    assert summary.throughput(run) == pytest.approx(64 * 40 / 25)
    assert axes([run]) == ["steps", "samples", "seconds"]
    (curve,), layout = drawn([run], "eval/loss")
    # The other evaluation came after the last training record.
    expected = {"steps": [15, 55], "samples": [960, 3520], "seconds": [12.5, None]}
    assert {axis: changes["x"] for axis, changes in layout["meta"].items()} == {k: [v] for k, v in expected.items()}
    assert curve["x"] == expected["steps"] and layout["xaxis"]["title"]["text"] == "optimizer steps"
    assert layout["meta"]["seconds"]["title"] == "seconds of training"


def test_seconds_begin_with_the_records(tmp_path: Path) -> None:
    """A run that was resumed from another folder has its first record in the middle."""
    run = only(saved(tmp_path, records=[training(110, 1.0), training(120, 1.0)]))
    assert [run.position("seconds", step) for step in (99, 100, 110, 120)] == [None, 0, 10, 20]


def test_curve_of_one_point_is_a_large_dot(tmp_path: Path) -> None:
    (curve,), _ = drawn([only(saved(tmp_path, records=[training(1, 2.0)]))])
    assert curve["mode"] == "lines+markers" and curve["marker"]["size"] == [9]


def test_run_without_throughput_is_shown_over_steps(tmp_path: Path) -> None:
    silent = saved(tmp_path, "silent", [{"step": 1, "train/loss": 1.0}])
    no_card = saved(tmp_path, "no_card", RECORDS, [])
    assert axes(read_runs([silent])) == ["steps", "samples"]
    assert axes(read_runs([no_card])) == ["steps"]
    assert axes(read_runs([saved(tmp_path), silent])) == ["steps", "samples"]
    assert 'name="axis"' not in page(read_runs([no_card]))
    assert re.findall('name="axis" value="([a-z]+)"', page(read_runs([silent]))) == ["steps", "samples"]


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
    tmp_path: Path, changes: dict[str, Any], expected: list[tuple[str, int, int | None]]
) -> None:
    made = card() | changes if changes.get("config") == 3 else card(**changes)
    run = only(saved(tmp_path, run_card=made))
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


def test_event_after_the_last_record_is_at_the_end(tmp_path: Path) -> None:
    run = only(saved(tmp_path))
    vars(run)["events"] = [Event("failed", 1, 47, "")]
    meta = drawn([run])[1]["meta"]
    assert [meta[axis]["x"][-1][0] for axis in ("steps", "samples", "seconds")] == [47, 47 * 64, 40]


def test_value_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    lines = [json.dumps(training(step, step / 10)) for step in (10, 20, 50, 60, 70, 90)]
    lines += [
        f'{{"step": {step}, "train/loss": {value}}}' for step, value in ((30, "null"), (40, "NaN"), (80, "1e999"))
    ]
    run = only(saved(tmp_path, records="\n".join(lines)))
    (line, stars), layout = drawn([run])
    assert line["y"] == [1, 2, None, None, 5, 6, 7, None, 9] and not line.get("connectgaps")
    assert (stars["x"], stars["yaxis"], stars["marker"]["symbol"]) == ([30, 40, 80], "y2", "star")
    assert layout["yaxis2"]["range"] == [0, 1] and max(stars["y"]) < 0.1
    moved = [changes["x"] for changes in layout["meta"].values()]
    assert [[len(x) for x in one] for one in moved] == [[9, 3]] * len(moved)
    curve = run.curve("train/loss")
    assert summary.last(curve) == (90, 9.0) and summary.best("train/loss", curve) == (10, 1.0)


def test_value_between_two_gaps_is_a_dot(tmp_path: Path) -> None:
    records = [training(step, None if step in (60, 62) else 1.0) for step in range(100)]
    curve, _ = drawn([only(saved(tmp_path, records=records))])[0]
    assert [step for step, size in zip(curve["x"], curve["marker"]["size"]) if size] == [61]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    good = json.dumps(training(10, 1.0))
    being_written = '{"step": 20, "train/lo'
    damaged = ["nonsense", "[1]", "null", '{"step": true}', '{"step": -1}', '{"step": "1"}', "{}", "[" * 100_000]
    damaged += ['{"step": 1e3}']
    run = only(saved(tmp_path, records="\n".join([good, *damaged, being_written])))
    assert run.num_damaged == len(damaged) and len(run.records) == 1
    assert f"skipped lines of metrics.jsonl that are not records: {len(damaged)}" in page_of(run.folder)
    assert only(saved(tmp_path, "ended", f"{good}\n{being_written}\n")).num_damaged == 1
    run = only(saved(tmp_path, "running", "\n".join([good, being_written])))
    assert run.num_damaged == 0 and len(run.records) == 1
    assert "left out:" not in page_of(run.folder)


@pytest.mark.parametrize("records", [[], [training(1, 2.0)], [evaluation(3, loss=1.0)], RECORDS[:1] * 2])
def test_few_records(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    running = card(status="running", exit_code=None, wall_seconds=0.1)
    folder = saved(tmp_path, records=records, run_card=running)
    text = page_of(folder)
    assert "running or killed" in text and "0.1 s" not in text
    assert ("There are no records yet" in text) == (not records)
    metric = next(iter(only(folder).metrics), None)
    if metric:
        assert drawn([only(folder)], metric)[0][0]["marker"]["size"] == [9 if len(records) == 1 else 5] * len(records)


def test_names_that_the_report_leaves_out_are_flags() -> None:
    assert {*summary.NOT_COMPARED} <= RunConfig.__dataclass_fields__.keys()
