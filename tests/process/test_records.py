"""Promise: what a run leaves behind tells what it did, and how to do it again."""

import json
from pathlib import Path

import pytest
import torch

from support.launching import fork
from support.recipes import LINEAR
from support.runs import Run

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


def test_wandb_offline_has_the_run(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, f"{SHORT} --report_to wandb", env={"WANDB_MODE": "offline"})
    (log,) = (run.output_dir / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert all(name in content for name in (b"batch_size", b"train/loss", b"summary/eval/r2"))


def test_profile_traces_three_steps_of_each_process(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", LINEAR, "--max_steps 8 --profile")
    for rank in range(2):
        trace = json.loads((run.output_dir / "profile" / f"rank_{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert {name for name in names if name.startswith("ProfilerStep#")} == {f"ProfilerStep#{k}" for k in (3, 4, 5)}
        assert "aten::linear" in names and any("allreduce" in name for name in names)


def test_too_few_steps_for_a_trace_lose_nothing(tmp_path: Path) -> None:
    first = fork(tmp_path / "run", "single", LINEAR, "--max_steps 3")
    second = fork(tmp_path / "run", "single", LINEAR, "--max_steps 3 --profile --overwrite_output_dir", succeeds=False)
    assert "error: --profile needs 6 steps, there are 3: type --max_steps" in second.stderr
    assert second.card == first.card and second.weights.keys() == {"weight", "bias"}


def test_run_card_repeats_the_run(tmp_path: Path) -> None:
    arguments = f"{SHORT} --seed 3 --learning_rate 0.02 --micro_batch_size 16 --momentum 0"
    first = fork(tmp_path / "first", "ddp", LINEAR, arguments)
    again = fork(tmp_path / "again", "ddp", LINEAR, f"--repeat {first.output_dir / 'run.json'}")
    assert losses(again) == losses(first) and len(losses(first)) == 4
    assert again.card["gradient_accumulation_steps"] == 2
    other = fork(tmp_path / "other", "ddp", LINEAR, f"--repeat {first.output_dir / 'run.json'} --seed 4")
    assert losses(other) != losses(first)  # what is given wins


def losses(run: Run) -> list[float]:
    return run.column("train/loss")


def test_weight_decay_reaches_the_optimizer(tmp_path: Path) -> None:
    """One step at learning rate 0.1 and decay 1 shrinks weights by 10 % more, the bias by nothing."""
    arguments = "--max_steps 1 --momentum 0 --learning_rate 0.1 --lr_schedule constant"
    for config in ("ddp", "deepspeed_zero2"):
        plain = fork(tmp_path / f"{config} plain", config, LINEAR, arguments)
        decayed = fork(tmp_path / f"{config} decayed", config, LINEAR, arguments + " --weight_decay 1")
        torch.manual_seed(0)
        initial = torch.nn.Linear(10, 1)
        expected = plain.weights["weight"] - 0.1 * initial.weight.detach()
        torch.testing.assert_close(decayed.weights["weight"], expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(decayed.weights["bias"], plain.weights["bias"])
