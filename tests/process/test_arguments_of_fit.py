"""Promise: what a recipe tells `fit` works under every config, with the result of one process."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import fork
from support.runs import Run, assert_equal_to_the_last_bit, assert_same_result, largest_difference, refused

TOLD = "tests/scripts/arguments_of_fit.py"
COURSE = "--max_steps 12 --save_every 5 --keep_checkpoints 9 --save_predictions"


def predictions(run: Run, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.output_dir / f"predictions_{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ("ddp", "--micro_batch_size 1 --num_workers 1"),
        pytest.param("fsdp2", "", marks=pytest.mark.full),
        pytest.param("single", "--micro_batch_size 2", marks=pytest.mark.full),
        pytest.param("ddp", "", marks=pytest.mark.full),
        pytest.param("deepspeed_zero2", "", marks=pytest.mark.full),
        pytest.param("deepspeed_zero3", "--micro_batch_size 2", marks=pytest.mark.full),
    ],
)
def test_all_that_fit_can_be_told(tmp_path: Path, reference: Callable[..., Run], config: str, flags: str) -> None:
    expected = reference(TOLD, COURSE)
    run = fork(tmp_path / "run", config, TOLD, f"{COURSE} {flags}")
    assert_same_result(run, expected)
    assert largest_difference(run.column("train/accuracy"), expected.column("train/accuracy")) <= 1e-6
    for name in ("seen", "new"):
        found, wanted = predictions(run, name), predictions(expected, name)
        assert [(row["predicted"], row["label"]) for row in found] == [(r["predicted"], r["label"]) for r in wanted]


def test_records_and_predictions_are_right(reference: Callable[..., Run]) -> None:
    run = reference(TOLD, COURSE)
    rows = predictions(run, "new")
    assert [row["sample"] for row in rows] == list(range(23))
    right = sum(row["predicted"] == row["label"] for row in rows) / 23
    assert run.column("eval/new/accuracy")[-1] == pytest.approx(right, abs=1e-12)
    assert run.column("eval/new/loss")[-1] == pytest.approx(sum(row["loss"] for row in rows) / 23, rel=1e-9)
    assert 0 < run.column("eval/seen/macro_f1")[-1] < 1 and not run.column("eval/seen/predicted")
    assert len(run.column("train/accuracy")) == 6 and not run.column("train/label")
    assert run.column("learning_rate") == [3e-2 * (1 - step / 12) for step in range(1, 12, 2)]
    assert (run.output_dir / "model").is_dir()


def test_sums_of_training_metrics_go_on_after_a_resume(tmp_path: Path, reference: Callable[..., Run]) -> None:
    expected = reference(TOLD, COURSE)  # a record at step 6 has the metrics of steps 5 and 6
    path = expected.output_dir / "checkpoints" / "step_00000005"
    run = fork(tmp_path / "run", "ddp", TOLD, f"{COURSE} --resume_from_checkpoint {path}")
    assert largest_difference(run.column("train/accuracy"), expected.column("train/accuracy")[2:]) <= 1e-6
    assert "another curve" not in run.stdout and "the checkpoint's run had" not in run.stdout
    alone = fork(tmp_path / "alone", "single", TOLD, f"{COURSE} --resume_from_checkpoint {path}")
    assert alone.lasting_records == expected.lasting_records[-len(alone.records) :]


def test_another_order_is_refused_and_another_schedule_or_flag_is_said(
    tmp_path: Path, reference: Callable[..., Run]
) -> None:
    path = reference(TOLD, COURSE).output_dir / "checkpoints" / "step_00000005"
    flags = f"{COURSE} --resume_from_checkpoint {path}"
    balanced = fork(tmp_path / "balanced", "single", TOLD, f"{flags} --order balanced", succeeds=False)
    assert "was made with sampler" in refused(balanced)
    bad = fork(tmp_path / "bad", "single", TOLD, f"{COURSE} --order bad", succeeds=False)
    assert "the sampler returns ids from 0 to 50: expected 0 to 49" in refused(bad)
    run = fork(tmp_path / "run", "single", TOLD, f"{flags} --power 2")
    assert "the learning rate follows a different schedule than in the checkpoint" in run.stdout
    assert "the checkpoint's run had --power 1.0, this run has 2.0" in run.stdout


def test_a_sampler_may_repeat_samples(tmp_path: Path) -> None:
    flags = "--max_steps 12 --order balanced --log_every 1"
    one = fork(tmp_path / "one", "single", TOLD, flags)
    assert one.records[0]["epoch"] == 1 / 8  # 64 ids, 8 steps
    assert_same_result(fork(tmp_path / "two", "ddp", TOLD, flags), one)
    assert_equal_to_the_last_bit(fork(tmp_path / "again", "single", TOLD, flags), one)


@pytest.mark.parametrize(
    "config",
    [
        "ddp",
        *(pytest.param(config, marks=pytest.mark.full) for config in ("single", "fsdp2", "deepspeed_zero3")),
    ],
)
def test_evaluate_only(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """It gives the metrics of the last evaluation, and changes no file of the run."""
    expected = reference(TOLD, COURSE)
    shutil.copytree(expected.output_dir, tmp_path / "run", dirs_exist_ok=True)
    files = [path for path in sorted(tmp_path.glob("run/**/*")) if path.is_file() and path.name != ".lock"]
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in files if "predictions" not in path.name}
    run = fork(tmp_path / "run", config, TOLD, f"{COURSE} --evaluate_only")
    last = expected.records[-1]
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]
    assert {f"eval/{name}" for name in found} == last.keys() - {"step"}
    assert all(abs(value - last[f"eval/{name}"]) <= 1e-6 for name, value in found.items())
    assert "eval/new/accuracy" in run.stdout and "done in" not in run.stdout
    assert all(hashlib.sha256(path.read_bytes()).digest() == digest for path, digest in before.items())


def test_evaluate_only_without_a_model(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "single", TOLD, f"{COURSE} --evaluate_only", succeeds=False)
    assert "no exported model in" in refused(run) and "train first" in refused(run)


GENERATES = "tests/scripts/generates.py"
GENERATING = "--max_steps 24 --eval_every 12 --save_predictions"


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ("ddp", "--micro_batch_size 1"),
        ("fsdp2", ""),
        pytest.param("single", "--micro_batch_size 1", marks=pytest.mark.full),
        pytest.param("deepspeed_zero3", "", marks=pytest.mark.full),
    ],
)
def test_answers_of_different_lengths(tmp_path: Path, reference: Callable[..., Run], config: str, flags: str) -> None:
    """An evaluation generates, by `model.generate` and `model.module.generate`; `examples` gets all answers, and
    numbers of their tokens, filled up to the longest."""
    expected = reference(GENERATES, GENERATING)
    run = fork(tmp_path / "run", config, GENERATES, f"{GENERATING} {flags}")
    assert_same_result(run, expected)
    rows = {
        name: [json.loads(line) for line in (each.output_dir / "predictions.jsonl").read_text().splitlines()]
        for name, each in (("run", run), ("expected", expected))
    }
    assert [row["answer"] for row in rows["run"]] == [row["answer"] for row in rows["expected"]]
    for row, wanted in zip(rows["run"], rows["expected"]):
        assert row["probability"] == pytest.approx(wanted["probability"], abs=1e-5)
    for name in ("longest", "shortest", "ends"):
        assert run.column(f"eval/{name}") == expected.column(f"eval/{name}")
    answers = [[token for token in row["answer"] if token != -100] for row in rows["expected"]]
    assert len({len(row["answer"]) for row in rows["run"]}) == 1 and len({len(answer) for answer in answers}) > 2
