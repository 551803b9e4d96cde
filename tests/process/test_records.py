"""Promise: the files of a run show what it did and how to repeat it."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from accelerate_recipes.project import make
from support.launching import execute, fork
from support.recipes import LINEAR, USERS
from support.runs import ROOT, Run, refused

sys.path.insert(0, str(ROOT / "tests" / "scripts"))
from unet import Discs

UNET = "tests/scripts/unet.py"
SHORT = "--max_steps 20 --log_every 5 --eval_every 10"


def test_tensorboard_shows_config_metrics_and_summary(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fork(tmp_path / "run", "ddp", LINEAR, f"{SHORT} --report_to tensorboard")
    events = EventAccumulator(str(run.output_dir / "tensorboard" / "linear_regression")).Reload()
    for name in ("train/loss", "learning_rate", "grad_norm", "eval/r2"):
        expected = {record["step"]: record[name] for record in run.records if name in record}
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(expected, rel=1e-6)
    assert events.Scalars("summary/eval/r2")[0].value == pytest.approx(run.column("eval/r2")[-1])
    config = next((run.output_dir / "tensorboard").rglob("hparams.yml")).read_text()
    assert "batch_size: 64" in config and "parallelism: DDP" in config and "torch: " in config


def test_trackio_has_the_run(tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    run = fork(tmp_path / "run", "ddp", LINEAR, f"{SHORT} --report_to trackio", env=env)
    import sqlite3

    (database,) = (tmp_path / "trackio").glob("linear_regression*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
        (config,) = connection.execute("select config from configs").fetchone()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert {s: m["train/loss"] for s, m in logged if "train/loss" in m} == {
        record["step"]: record["train/loss"] for record in run.records if "train/loss" in record
    }
    assert any("summary/eval/r2" in metrics for _, metrics in logged)
    assert json.loads(config)["batch_size"] == 64


@pytest.mark.full
def test_wandb_offline_has_the_run(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, f"{SHORT} --report_to wandb", env={"WANDB_MODE": "offline"})
    (log,) = (run.output_dir / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert all(name in content for name in (b"batch_size", b"train/loss", b"summary/eval/r2"))


def test_run_card_has_the_command_that_repeats_the_run(tmp_path: Path) -> None:
    command = "accelerate launch --config_file accelerate_configs/ddp.yaml --main_process_port 0 recipes/"
    command += f"linear_regression.py {SHORT} --seed 3 --micro_batch_size 16 --output_dir '{tmp_path / 'my run'}'"
    first = execute(shlex.split(command), ROOT, tmp_path / "my run")
    assert first.exit_code == 0 and first.card["launch_command"] == command
    again = fork(tmp_path / "again", "ddp", LINEAR, f"{SHORT} --seed 3 --micro_batch_size 16")
    assert losses(again) == losses(first) and len(losses(first)) == 4


def losses(run: Run) -> list[float]:
    return run.column("train/loss")


def test_weight_decay_reaches_the_optimizer(tmp_path: Path) -> None:
    """At learning rate 0.1 and decay 1, one step shrinks the weight by 10 % more, and does not shrink the bias."""
    arguments = "--max_steps 1 --momentum 0 --learning_rate 0.1 --lr_schedule constant"
    for config in ("ddp", "deepspeed_zero2"):
        plain = fork(tmp_path / f"{config} plain", config, LINEAR, arguments)
        decayed = fork(tmp_path / f"{config} decayed", config, LINEAR, arguments + " --weight_decay 1")
        torch.manual_seed(0)
        initial = torch.nn.Linear(10, 1)
        expected = plain.weights["weight"] - 0.1 * initial.weight.detach()
        torch.testing.assert_close(decayed.weights["weight"], expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(decayed.weights["bias"], plain.weights["bias"])


@pytest.mark.parametrize(("ends_after", "num_lost"), [(25, 0), (1000, 1)], ids=["for a while", "to the end"])
def test_records_wait_for_room_on_the_disk(tmp_path: Path, ends_after: int, num_lost: int) -> None:
    """No file may grow beyond 3,000 bytes before optimizer step `ends_after`."""
    script = tmp_path / "full.py"
    script.write_text(
        "import resource, runpy\n"
        "from torch.optim import AdamW\n"
        "_, most = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, most))\n"
        "steps, before = [], AdamW.step\n"
        "def step(self, *arguments, **options):\n"
        "    steps.append(1)\n"
        f"    if len(steps) == {ends_after}:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "    return before(self, *arguments, **options)\n"
        "AdamW.step = step\n"
        f"runpy.run_path({str(ROOT / USERS)!r}, run_name='__main__')\n"
    )
    flags = "--max_steps 30 --model shared_weight"  # of which the export has room
    expected = fork(tmp_path / "expected", "single", USERS, flags)
    without_git = {"GIT_DIR": os.devnull}  # the card would have what the checkout has other than its commit
    run = fork(tmp_path / "run", "single", script, flags, env=without_git)
    assert run.stderr.count("records wait in memory until it can") == 1
    assert len(run.lasting_records) + run.card["lost_records"] == len(expected.records)
    assert run.lasting_records == expected.lasting_records[: len(run.records)]
    assert bool(run.card["lost_records"]) == bool(num_lost) == ("records are lost" in run.stderr)
    assert run.card["status"] == "done" and run.card["exit_code"] == 0


def test_run_that_ends_early_records_its_last_losses(tmp_path: Path) -> None:
    flags = (
        "--max_steps 40 --eval_every 2 --learning_rate 1e-30 --metric_for_best_model loss --early_stopping_patience 2"
    )
    all_of_them = fork(tmp_path / "all", "single", USERS, flags).column("train/loss")
    run = fork(tmp_path / "run", "single", USERS, f"{flags} --log_every 4")
    assert [(record["step"], "train/loss" in record) for record in run.records] == [
        (2, False), (4, True), (4, False), (6, False), (6, True)
    ]  # fmt: skip
    assert len(all_of_them) == 6
    assert run.column("train/loss")[-1] == pytest.approx(sum(all_of_them[4:]) / 2)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--optimizer LBFGS", "LBFGS calls the model several times per step"),
        ("--summary verdict", 'summarize returned "verdict" as str: expected a number'),
        ("--summary verdict --metric_for_best_model loss", 'summarize returned "verdict" as str: expected a number'),
    ],
)
def test_every_end_has_a_card(tmp_path: Path, flags: str, line: str) -> None:
    run = fork(tmp_path / "run", "ddp", USERS, flags, succeeds=False)
    assert line in refused(run)
    assert (run.card["status"], run.card["exit_code"]) == ("failed", 2) and line in run.card["error"]
    assert run.card["config"]["batch_size"] == 8


@pytest.mark.parametrize("card", ["null", "[1]", '{"attempt": "x", "status": "done"}', "[" * 100_000])
def test_files_that_somebody_else_has_written(tmp_path: Path, card: str) -> None:
    flags = "--max_steps 8 --save_every 4"
    expected = fork(tmp_path / "run", "single", USERS, flags)
    records = expected.lasting_records
    with (expected.output_dir / "metrics.jsonl").open("a") as file:
        file.write('null\n[1]\n{}\n{"step": "one"}\n\xff\n' + "[" * 100_000)
    (expected.output_dir / "run.json").write_text(card)
    again = fork(tmp_path / "run", "single", USERS, f"{flags} --resume_from_checkpoint latest")
    assert again.lasting_records == records and again.card["status"] == "done"


def test_loop_that_is_left_by_break_records_its_last_steps(tmp_path: Path) -> None:
    """In a project's own loop. It has saved nothing at its last step, so that the last line promises nothing."""
    make("mnist", tmp_path / "project", own_loop=True)
    script, after = tmp_path / "project" / "train.py", "                watch.after_step(state.step, result)\n"
    loop = script.parent / "loop.py"
    text = loop.read_text()
    assert text.count(after) == 1
    loop.write_text(text.replace(after, f"{after}                if state.step == 5:\n                    break\n"))
    run = fork(tmp_path / "run", "single", script, "--model mlp --max_steps 12 --log_every 4 --save_every 4")
    assert run.column("step")[-1] == 5 and len(run.column("train/loss")) == 2
    assert "done in" in run.stdout and "to train longer" not in run.stdout


def test_lines_are_short_and_a_ratio_of_sums_is_shown_as_such(tmp_path: Path) -> None:
    flags = "--max_steps 12 --log_every 4 --eval_every 8 --save_predictions"
    runs = [fork(tmp_path / name, config, UNET, flags) for name, config in (("one", "single"), ("two", "ddp"))]
    lines = [line for line in runs[1].stdout.splitlines() if line.startswith("step ")]
    assert all(len(line) <= 100 for line in lines)
    assert re.fullmatch(r"step 4/12  loss \S+  learning_rate 0.003  \S+ samples/s  \d+:\d\d left", lines[0])
    assert re.fullmatch(r"step 8/12  eval/loss \S+  eval/accuracy \S+  eval/iou \S+", lines[2])
    assert re.fullmatch(r"step 12/12  loss \S+  accuracy \S+  learning_rate 0.003  \S+ samples/s  00:00 left", lines[3])
    assert len(runs[1].column("train/overlap")) == 3  # for plots of one's own
    one, two = ([json.loads(row) for row in (run.output_dir / "predictions.jsonl").open()] for run in runs)
    assert len(one) == len(two) == 40
    masks = [torch.tensor([row["found"] for row in rows]) for rows in (one, two)]
    assert masks[0].shape == (40, 32, 32) and masks[0].dtype == torch.bool
    assert (masks[0] != masks[1]).float().mean() < 1e-3  # rounding errors
    samples = [Discs(40, seed=2)[index]["mask"] > 0 for index in range(40)]
    assert (masks[1] == torch.stack(samples)).float().mean() == pytest.approx(runs[1].column("eval/accuracy")[-1])
