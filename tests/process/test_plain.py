"""Promise: the scripts in recipes/plain give the losses of one process, and those of the recipe."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import execute
from support.plain import PLAIN, TORCHRUN, accuracy, losses, one_process, plain, threads_left
from support.recipes import MNIST
from support.runs import ROOT, Run, largest_difference
from support.small_mnist import write_mnist

SCRIPTS = sorted(PLAIN.glob("*.py"))
LONG = {"plain_accelerate.py"}
# Without both, gloo's threads outlive Python.
IMPORT = "import torch.distributed.nn  # first: imported after init_process_group, it keeps the process group for ever"
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
    assert len(text.splitlines()) <= (250 if path.name in LONG else 120)
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
        ("ddp.py", ""),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
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
                ("plain_accelerate.py", ""),
            ]
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
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("data_parallel.py", "", None),
                ("gradients_by_hand.py", "--processes 2", None),
                ("gradients_by_hand.py", "--processes 2 --torch_order", None),
                ("gradients_by_hand.py", "--processes 4", None),
                ("ddp.py", "", 1),
                ("ddp.py", "", 4),
            ]
        ),
    ],
)
def test_script_gives_the_losses_of_one_process(
    tmp_path: Path, script: str, arguments: str, num_processes: int | None
) -> None:
    run = plain(tmp_path, script, f"--steps 30 {arguments}", num_processes)
    assert largest_difference(losses(run), losses(one_process(30))) <= 1e-5
    assert accuracy(run) == accuracy(one_process(30))


@pytest.mark.full
def test_ddp_resumes(tmp_path: Path) -> None:
    flags = f"--checkpoint {tmp_path / 'ddp.safetensors'}"
    plain(tmp_path, "ddp.py", f"--steps 20 --save_every 20 {flags}", 2)
    run = plain(tmp_path, "ddp.py", f"--steps 30 --resume {flags}", 1)
    assert largest_difference(losses(run), losses(one_process(30))[20:]) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["unsynchronised_start", "learning_rate_per_process", "set_epoch --torch_order"])
def test_mistake_changes_the_losses(tmp_path: Path, mistake: str) -> None:
    run = plain(tmp_path, "gradients_by_hand.py", f"--steps 30 --processes 2 --mistake {mistake}")
    assert largest_difference(losses(run), losses(one_process(30))) > 1e-5


@pytest.mark.full
def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    assert accuracy(plain(tmp_path, "evaluation.py", "--steps 30", 2)) == accuracy(one_process(30))


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["last_batch_mean", "padded_evaluation"])
def test_mistake_changes_the_accuracy(tmp_path: Path, mistake: str) -> None:
    right, wrong = (plain(tmp_path, "evaluation.py", flags, 4) for flags in ("", f"--mistake {mistake}"))
    assert accuracy(wrong) != accuracy(right)


def test_mnist_files(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    assert len(losses(plain(tmp_path, "one_process.py", f"--steps 3 --data {tmp_path / 'mnist'}"))) == 3


@pytest.mark.full
def test_wrong_number_of_processes(tmp_path: Path) -> None:
    run = execute([*TORCHRUN, "3", str(PLAIN / "ddp.py")], tmp_path, tmp_path)
    assert run.exit_code != 0 and "processes x --accumulate is 3, which does not divide" in run.stderr
