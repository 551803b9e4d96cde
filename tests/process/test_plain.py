"""Promise: the scripts in recipes/plain give the losses of one process, and those of the recipe."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import execute
from support.plain import PLAIN, accuracy, losses, one_process, plain, rarely, threads_left
from support.recipes import MNIST
from support.runs import ROOT, Run, largest_difference
from support.small_mnist import write_mnist

SCRIPTS = sorted(PLAIN.glob("*.py"))
# Without both, gloo's threads outlive Python.
IMPORT = "import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group forever"
END = "dist.destroy_process_group()  # what `train` made is freed, so gloo's threads end here; later they may abort"
# The recipe with the scripts' order of samples (seed 0, batch 128), optimizer and schedule.
SAME = "--model mlp --optimizer sgd --learning_rate 0.01 --lr_schedule constant --warmup_steps 0 --max_grad_norm 0 "
SAME += "--batch_size 128 --log_every 1 --max_steps 30"


def command_of(text: str) -> str:
    """The first command in a script's docstring."""
    command = re.search(r"^    ((python|torchrun|accelerate) .*)", text, re.MULTILINE)
    assert command is not None
    return command[1]


@pytest.mark.quick
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_stands_alone_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert "from common" not in text and "import common" not in text
    assert f"recipes/plain/{path.name}" in command_of(text)
    assert all(word in text for word in ("Idea: ", "Expect", "What people get wrong"))
    if "dist.init_process_group(" in text:
        assert IMPORT in text and re.search(rf"^    train\(.*\)\n    {re.escape(END)}\n", text, re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_command_works_as_it_stands(tmp_path: Path, path: Path) -> None:
    for folder in ("recipes", "accelerate_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    run = execute(command_of(path.read_text()).split(), tmp_path, tmp_path)
    assert run.exit_code == 0, run.stdout + run.stderr
    assert re.search(r"^(accuracy|distance) ", run.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *rarely(
            ("ddp.py", ""),
            ("gradients_by_hand.py", "--processes 1"),
            ("evaluation.py", ""),
            ("distributed_optimizer.py", ""),
            ("mixed_precision.py", ""),
            ("local_sgd.py", ""),
            ("compressed_gradients.py", "--hook powersgd --powersgd_start 2"),
            ("compressed_gradients.py", "--hook bf16"),
            ("linear_regression.py", ""),
            ("model_parallel.py", ""),
            ("model_parallel.py", "--pipeline"),
        ),
    ],
)
def test_gloo_ends_with_the_script(tmp_path: Path, script: str, arguments: str) -> None:
    """A thread of gloo that outlives Python aborts now and then: it has to free a tensor, and needs Python for it."""
    assert not [name for name in threads_left(tmp_path, script, f"--steps 3 {arguments}") if "gloo" in name]


def test_one_process_gives_the_losses_of_the_recipe(reference: Callable[..., Run]) -> None:
    assert len(losses(one_process(30))) == 30
    assert largest_difference(losses(one_process(30)), reference(MNIST, SAME).column("train/loss")) <= 1e-5


@pytest.mark.parametrize(
    ("script", "arguments", "num_processes"),
    [
        ("ddp.py", "--accumulate 2", 2),
        ("distributed_optimizer.py", "", 2),
        *rarely(
            ("data_parallel.py", "", None),
            ("gradients_by_hand.py", "--processes 2", None),
            ("gradients_by_hand.py", "--processes 2 --torch_order", None),
            ("gradients_by_hand.py", "--processes 4", None),
            ("ddp.py", "", 1),
            ("ddp.py", "", 4),
            ("distributed_optimizer.py", "", 1),
            ("distributed_optimizer.py", "", 4),
            ("mixed_precision.py", "--precision fp32", 2),
        ),
    ],
)
def test_script_gives_the_losses_of_one_process(
    tmp_path: Path, script: str, arguments: str, num_processes: int | None
) -> None:
    run = plain(tmp_path, script, f"--steps 30 {arguments}", num_processes)
    assert largest_difference(losses(run), losses(one_process(30))) <= 1e-5
    assert accuracy(run) == pytest.approx(accuracy(one_process(30)), abs=1e-4)  # one of the 359 samples is 3e-3


@pytest.mark.full
def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    assert accuracy(plain(tmp_path, "evaluation.py", "--steps 30", 2)) == accuracy(one_process(30))


@pytest.mark.full
def test_unequal_shares_give_the_losses_of_one_process(tmp_path: Path) -> None:
    """3 processes share batches of 10 samples: 4, 3 and 3. The weights come near to the closed form."""

    def distance(run: Run) -> float:
        return float(re.search(r"^distance to the closed form (\S+)", run.stdout, re.MULTILINE)[1])

    one, three = (plain(tmp_path, "linear_regression.py", num_processes=n) for n in (1, 3))
    assert largest_difference(losses(three), losses(one)) <= 1e-5
    assert distance(three) == pytest.approx(distance(one), abs=2e-6) and 0.4 < distance(one) < 0.5
    assert distance(plain(tmp_path, "linear_regression.py", "--steps 1000", num_processes=2)) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "mistake", "num_processes"),
    [
        ("gradients_by_hand.py", "--steps 30 --processes 2", "unsynchronised_start", None),
        ("gradients_by_hand.py", "--steps 30 --processes 2", "learning_rate_per_process", None),
        ("gradients_by_hand.py", "--steps 30 --processes 2 --torch_order", "set_epoch", None),
        ("linear_regression.py", "", "mean_of_means", 4),
        ("evaluation.py", "", "last_batch_mean", 4),
        ("evaluation.py", "", "padded_evaluation", 4),
    ],
)
def test_mistake_changes_the_result(
    tmp_path: Path, script: str, arguments: str, mistake: str, num_processes: int | None
) -> None:
    right = plain(tmp_path, script, arguments, num_processes)
    wrong = plain(tmp_path, script, f"{arguments} --mistake {mistake}", num_processes)
    if script == "evaluation.py":
        assert accuracy(wrong) != accuracy(right)
    else:
        assert largest_difference(losses(wrong), losses(right)) > 1e-3


def test_mnist_files(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    assert len(losses(one_process(3, str(tmp_path / "mnist")))) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.distributed.optim
@pytest.mark.parametrize(
    ("script", "arguments", "num_processes", "message"),
    [
        ("ddp.py", "", 3, "processes x --accumulate is 3, which does not divide"),
        ("distributed_optimizer.py", "", 3, "a number of processes that divides 128 (now 3)"),
        ("distributed_optimizer.py", "--resume missing.pt", 2, "--resume: no file missing.pt"),
        ("local_sgd.py", "", 0, "start with torchrun"),
        ("local_sgd.py", "--sync_every 0", 2, "--sync_every must be at least 1"),
        ("compressed_gradients.py", "", 3, "a number of processes that divides 128 (now 3)"),
        ("compressed_gradients.py", "--powersgd_start 1", 2, "--powersgd_start at least 2"),
        ("mixed_precision.py", "", 3, "run torchrun --standalone --nproc_per_node 2"),
        ("mixed_precision.py", "--mistake clip_scaled", 1, "clip_scaled needs --precision"),
        ("model_parallel.py", "", 4, "--data_parallel 1 needs 2 processes"),
        ("model_parallel.py", "--data_parallel 2", 3, "--data_parallel 2 needs 4 processes"),
        ("model_parallel.py", "--data_parallel 3", 6, "--data_parallel: invalid choice: 3 (choose from 1, 2, 4, 8)"),
        ("model_parallel.py", "--pipeline 3", 2, "--pipeline: invalid choice: 3 (choose from 1, 2, 4, 8, 16)"),
    ],
)
def test_bad_combination_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    arguments: str,
    num_processes: int,
    message: str,
) -> None:
    """The check comes before the processes meet, so one is enough: this one."""
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if num_processes:
            monkeypatch.setenv(name, "0" if "RANK" in name else str(num_processes))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(PLAIN / script), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
