"""Promise: a mistake in the command line gets one line that says what to type instead."""

import re
import subprocess
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path

import pytest

from accelerate_recipes.common.command_line import GROUPS, parse
from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.launch.checks import check_num_gpus
from accelerate_recipes.common.records.run_card import git_commit, git_diff
from accelerate_recipes.common.schedule import Schedule


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--batch_size 0", "--batch_size 0: expected 1 or more"),
        ("--micro_batch_size=-4", "--micro_batch_size -4: expected 1 or more"),
        ("--epochs -1", "--epochs -1: expected 1 or more"),
        ("--max_steps 0", "--max_steps 0: expected 1 or more"),
        ("--learning_rate 0", "--learning_rate 0.0: expected more than 0"),
        ("--learning_rate nan", "--learning_rate nan: expected a finite number"),
        ("--max_grad_norm 1e308", "--max_grad_norm 1e+308: expected less than 1e+38"),
        ("--max_grad_norm -1", "--max_grad_norm -1.0: expected 0 or more"),
        ("--epochs two", "--epochs: expected a whole number, got 'two'"),
        ("--lr_schedule banana", "--lr_schedule: invalid choice: 'banana'"),
        ("--epoch 2", "--epoch: no such flag; did you mean --epochs?"),
        ("--ema_decay 1", "--ema_decay 1.0: expected less than 1"),
        ("--seed 3000000000", "--seed 3000000000: expected less than 2147483648"),
        ("--batch_size 100000000000", "--batch_size 100000000000: expected less than 2147483648"),
        ("--max_steps 99999999999999999999", "expected less than 2147483648"),
        ("--check_steps 100000", "--check_steps 100000: expected less than 1001"),
        ("--deterministic --tf32", "--tf32 rounds them: use one of them"),
        ("--output_dir /tmp/..", "--output_dir /tmp/.. is the root of the disk: use another folder"),
        ("--output_dir=", "--output_dir: expected the path of a folder, got nothing"),
        ("--metric_for_best_model=", "--metric_for_best_model: expected a value, got nothing"),
        ("--overwrite_output_dir --resume_from_checkpoint latest", "use one of them; in a job that may restart"),
        ("stray", "stray: no such flag; --help lists them"),
        (
            "--eval-data dev.csv",
            "--eval_data: no such flag; put the files into a folder, as train.* and dev.*, and use",
        ),
        ("--tf32 True", "--tf32 takes no value, got 'True': remove the value; --no_tf32 turns it off"),
        ("--seed 3 --tf32=false", "--tf32 takes no value, got 'false'"),
        ("--no-tf32 1 --seed 3", "--no_tf32 takes no value, got '1'"),
        ("--num_processes 4", "--num_processes belongs before the script: accelerate launch --num_processes ... "),
        ("--config-file=x.yaml", "--config_file belongs before the script: accelerate launch --config_file ... "),
    ],
)
def test_command_line(arguments: str, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        parse(RunConfig, arguments.split())


def test_an_empty_prompt_is_a_prompt() -> None:
    config = make_dataclass("Config", [("query_prompt", str | None, None)], bases=(RunConfig,), kw_only=True)
    assert parse(config, ["--query_prompt="]).query_prompt == ""


def test_command_line_takes_dashes_and_underscores() -> None:
    config = parse(RunConfig, ["--batch-size=8", "--max_steps", "3", "--overwrite-output-dir"])
    assert (config.batch_size, config.max_steps, config.overwrite_output_dir) == (8, 3, True)


@pytest.mark.parametrize("arguments", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"]])
def test_flag_that_old_launchers_add(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Of deepspeed and torch.distributed.launch, which also set the variable."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse(RunConfig, [*arguments, "--seed", "3"]) == parse(RunConfig, ["--seed", "3"])


def test_flag_of_a_launcher_that_sets_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UsageError, match="LOCAL_RANK is not set: start with accelerate launch or torchrun"):
        parse(RunConfig, ["--local_rank=0"])
    with pytest.raises(SystemExit) as silent:  # one process prints
        parse(RunConfig, ["--local_rank=1"])
    assert silent.value.code == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="LOCAL_RANK is 1"):
        parse(RunConfig, ["--local_rank=0"])


@dataclass(kw_only=True)
class WithOwnRank(RunConfig):
    local_rank: int = -1


def test_recipe_with_such_a_flag_of_its_own() -> None:
    assert parse(WithOwnRank, ["--local_rank", "5"]).local_rank == 5


def test_flag_that_is_on_can_be_taken_back() -> None:
    config = parse(RunConfig, ["--compile", "--async_save", "--no-compile"])
    assert (config.compile, config.async_save, config.tf32) == (False, True, False)


def test_help_is_divided_and_shows_each_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(RunConfig, ["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    starts = [text.index(f" {title}: --{first} ") for title, first in GROUPS.items()]
    lasts = [text.rindex(f" --{name} ") for name in ("num_workers", "ema_decay", "export_dtype", "report_to", "tf32")]
    assert all(start < last for start, last in zip(starts, lasts))
    assert all(last < start for last, start in zip(lasts, starts[1:]))
    for expected in (
        "rises to its peak (default: 0)",
        "(default: 1800.0)",
        "(--no_compile turns it off; off by default)",
    ):
        assert expected in text


def test_more_processes_than_gpus() -> None:
    check_num_gpus(Environment(local_world_size=2), num_gpus=8)
    with pytest.raises(UsageError, match="2 processes but 1 GPU on this machine: use --num_processes 1"):
        check_num_gpus(Environment(local_world_size=2), num_gpus=1)
    with pytest.raises(UsageError, match="4 processes but 2 GPUs on this machine: use --num_processes 2"):
        check_num_gpus(Environment(local_world_size=4), num_gpus=2)


def test_default_that_is_no_choice_is_refused_before_training() -> None:
    @dataclass(kw_only=True)
    class Config(RunConfig):
        lr_schedule: Schedule = "cosinus"  # type: ignore[assignment]

    with pytest.raises(UsageError, match="--lr_schedule cosinus: no such choice; use one of constant, linear"):
        parse(Config, [])


def test_commit_is_dirty_by_tracked_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        user = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", *user, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    script = tmp_path / "recipe.py"
    script.touch()
    git("init")
    git("add", "recipe.py")
    git("commit", "--message", "one")
    monkeypatch.setattr("sys.argv", [str(script)])
    (tmp_path / "untracked").touch()
    commit = git_commit()
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit) and git_diff() is None
    script.write_text("changed")
    assert git_commit() == f"{commit}-dirty" and "+changed" in (git_diff() or "")


def test_flags_of_all_recipes_are_37() -> None:
    """Each costs every reader of --help: a new one replaces another, or changes this number, and says why."""
    # The last one, --check_every: nothing else compares a run with one process while it runs.
    assert len(fields(RunConfig)) == 37
