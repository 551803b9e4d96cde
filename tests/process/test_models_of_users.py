"""Promise: a user's model, optimizer and data give the result of one process, or one line refuses them."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.parallel.extensions import BUILDS_IN, extensions_folder
from support.draw import drawn
from support.launching import fork
from support.recipes import CASES
from support.runs import ROOT, Run, assert_same_result, largest_difference, refused

STEPS = "--max_steps 10 --lr_schedule constant --hang_timeout 20"


def refused_before_training(folder: Path, config: str, arguments: str) -> str:
    run = fork(folder / "run", config, CASES, f"{STEPS} {arguments}", succeeds=False)
    line = refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists() or run.records == []
    assert not (run.output_dir / "model").exists()
    return line


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_weights_that_the_optimizer_was_not_given_are_frozen(
    tmp_path: Path, reference: Callable[..., Run], config: str
) -> None:
    run = fork(tmp_path / "run", config, CASES, f"{STEPS} --case 'head only'")
    assert_same_result(run, reference(CASES, f"{STEPS} --case 'head only, rest frozen'"))
    assert run.stdout.count("2 of 4 weights are frozen, as the optimizer was not given them: body.weight, ...") == 1


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("column", '"loss" has shape (8, 1): expected (8,), one value per example; type .squeeze(-1)'),
        ("square", '"loss" has shape (8, 8): expected (8,), one value per example; type .squeeze(-1) on the model'),
        ("mean", '"loss" has shape (): expected (8,), one value per example; type reduction="none"'),
        ("tokens", '"loss" has shape (8, 6): expected (8,), one value per example; type .flatten(1).mean(1)'),
        ("no loss", 'forward_step returns error: expected a dict with "loss" of shape (8,)'),
        ("no dict", 'forward_step returns Tensor: expected a dict with "loss" of shape (8,)'),
        ("metric", '"accuracy" has shape (): expected (8,)'),
        ("number", '"accuracy" is a float: expected a tensor of shape (8,)'),
        ("detached", '"loss" has no gradient: compute it from the model output'),
        ("tuples", "samples are of the type tuple: expected dicts"),
        ("tensors", "samples are of the type Tensor: expected dicts"),
        ("unequal", '"x" has shape (5,) in one sample and (6,) in another: pad them to one shape'),
        ("none", '"z" is None in a sample: expected a tensor, number or string'),
        ("other names", '"z" is not in each sample'),
        ("column of weights", '"weight" of a batch has shape (8, 1): expected (8,), one number per sample'),
        ("strange weight", "the optimizer was given a weight of shape (3,) that is not in Net"),
        ("tensor rate", "AdamW has a tensor as learning rate: give it a float"),
    ],
)
def test_mistake_is_named(tmp_path: Path, case: str, expected: str) -> None:
    assert expected in refused_before_training(tmp_path, "single", f"--case '{case}'")


@pytest.mark.parametrize(
    ("config", "case"), drawn(("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"), ("mean", "column"))
)
def test_shape_is_checked_under_each_config(tmp_path: Path, config: str, case: str) -> None:
    assert '"loss" has shape' in refused_before_training(tmp_path, config, f"--case '{case}'")


def test_mistake_in_a_worker_is_one_line(tmp_path: Path) -> None:
    line = refused_before_training(tmp_path, "single", "--case unequal --num_workers 2")
    problem = 'error: "x" has shape (5,) in one sample and (6,) in another: pad them to one shape, or type '
    assert line == problem + "collate_fn=pad_to_longest() in the call of fit"


@pytest.mark.parametrize("config", ["single", "ddp"])
def test_strings_come_along(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    run = fork(tmp_path / "run", config, CASES, f"{STEPS} --case names")
    assert_same_result(run, reference(CASES, STEPS))


ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize(
    ("config", "optimizer"), drawn(("fsdp2", "deepspeed_zero2", "deepspeed_zero3"), (*ELEMENTWISE, "Lion"))
)
def test_optimizer_that_is_elementwise(
    tmp_path: Path, reference: Callable[..., Run], config: str, optimizer: str
) -> None:
    arguments = f"{STEPS} --optimizer {optimizer}"
    run = fork(tmp_path / "run", config, CASES, arguments, succeeds=False)
    if (config, optimizer) == ("fsdp2", "Rprop"):
        assert "FSDP2 cannot train this: RuntimeError" in refused(run)
    else:
        assert_same_result(run, reference(CASES, arguments))


@pytest.mark.parametrize(
    ("config", "optimizer"),
    drawn(("ddp", "fsdp2", "tensor_parallel", "deepspeed_zero2", "deepspeed_zero3"), ("Adafactor", "Muon")),
)
def test_other_optimizers_are_right_or_refused(
    tmp_path: Path, reference: Callable[..., Run], config: str, optimizer: str
) -> None:
    arguments = f"{STEPS} --optimizer {optimizer}"
    run = fork(tmp_path / "run", config, CASES, arguments, succeeds=False)
    if run.exit_code == 0:
        assert_same_result(run, reference(CASES, arguments))
    else:
        assert config != "ddp" and refused(run)


def test_optimizer_that_needs_a_closure(tmp_path: Path) -> None:
    assert "LBFGS calls the model several times" in refused_before_training(tmp_path, "single", "--optimizer LBFGS")


@pytest.mark.parametrize(
    ("config", "case", "name"),
    [
        *((config, "unused", "spare.weight") for config in ("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3")),
        *((config, "experts", "experts.") for config in ("ddp", "fsdp2", "deepspeed_zero2")),
    ],
)
def test_weight_that_is_not_used_is_named(tmp_path: Path, config: str, case: str, name: str) -> None:
    run = fork(tmp_path / "run", config, CASES, f"{STEPS} --case {case}", succeeds=False)
    line = refused(run)
    assert f"does not use {'' if config == 'fsdp2' else name}" in line and "freeze weights that no pass uses" in line


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2"])
def test_experts_that_take_part_with_nothing(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """ZeRO would add the gradients of different experts: losses differed by 10 %."""
    arguments = f"{STEPS} --case 'experts plus nothing'"
    run = fork(tmp_path / "run", config, CASES, arguments, succeeds=False)
    if config.startswith("deepspeed"):
        assert "takes another path through the model" in refused(run)
    else:
        assert_same_result(run, reference(CASES, arguments))


APART = {
    "weights by rank": "the weight body.",
    "length by rank": "the length of the training set",
    "sample by rank": "sample 0 of the",
}


@pytest.mark.parametrize(("config", "case"), drawn(("ddp", "fsdp2", "deepspeed_zero3"), tuple(APART)))
def test_processes_that_start_apart(tmp_path: Path, config: str, case: str) -> None:
    line = refused_before_training(tmp_path, config, f"--case '{case}'")
    assert f"process 1 starts with another value of {APART[case]}" in line


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_model_knows_in_evaluation_that_it_is_one(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """The case adds noise to the loss if `model.training` is set. The weights stay the same: the rate is 1e-30."""
    arguments = f"{STEPS} --learning_rate 1e-30 --check_steps 0"  # the noise has a generator of its own
    run = fork(tmp_path / "run", config, CASES, f"{arguments} --case 'asks for the mode'")
    expected = reference(CASES, arguments)
    assert largest_difference(run.column("eval/loss"), expected.column("eval/loss")) <= 1e-5
    assert run.column("train/loss")[0] - expected.column("train/loss")[0] > 1e-3


@pytest.mark.parametrize(
    ("config", "model"), drawn(("ddp", "fsdp2", "deepspeed_zero3"), ("bert", "vit", "gpt2", "t5", "qwen2"))
)
def test_models_of_transformers(tmp_path: Path, reference: Callable[..., Run], config: str, model: str) -> None:
    """BERT and ViT list their embeddings among the layers that FSDP gathers one at a time. In T5 more than two modules
    share a weight."""
    arguments = f"{STEPS} --case {model} --optimizer SGD"
    run = fork(tmp_path / "run", config, CASES, arguments, succeeds=False)
    if (config, model) == ("fsdp2", "t5"):
        assert "share a weight, but FSDP gathers them separately" in refused(run)
        return
    assert run.exit_code == 0, run.stderr
    expected = reference(CASES, arguments)
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), expected.column(name)) <= 1e-5
    # With an absolute tolerance: a key bias starts at zero, and its gradient is zero except for rounding.
    for name, weight in expected.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "case", "expected"),
    [
        ("fsdp2", "scalar_weight", "scale has no dimension that FSDP2 could shard: give it the shape (1,)"),
        ("deepspeed_zero2", "scalar_weight", "scale has no dimension that DeepSpeed could shard"),
        ("fsdp2", "tied", "body and other share a weight, but FSDP gathers them separately"),
    ],
)
def test_weight_that_cannot_be_divided(tmp_path: Path, config: str, case: str, expected: str) -> None:
    assert expected in refused_before_training(tmp_path, config, f"--case {case}")


@pytest.mark.parametrize(
    ("config", "case", "line"),
    [
        ("fsdp2", "empty_weight", "nothing has no elements, which FSDP2 does not support"),
        ("deepspeed_zero2", "empty_weight", "nothing has no elements, which DeepSpeed does not support"),
        ("fsdp2_bf16", "complex_weight", "turn is complex64, which FSDP2 would cast"),
        ("deepspeed_zero3", "complex_weight", "turn is complex64, which DeepSpeed would cast"),
        ("fsdp2_bf16", "float64_weight", "head.weight is float64, which FSDP2 would cast"),
        ("deepspeed_zero1", "float64_weight", "head.weight is float64, which DeepSpeed would cast"),
    ],
)
def test_weight_that_a_config_cannot_take(tmp_path: Path, config: str, case: str, line: str) -> None:
    assert line in refused_before_training(tmp_path, config, f"--case {case}")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [("single", "bfloat16"), ("ddp", "bfloat16"), ("deepspeed_zero2", "float32"), ("fsdp2_bf16", "float32")],
)
def test_weights_are_exported_in_the_precision_in_which_they_are_trained(
    tmp_path: Path, config: str, dtype: str
) -> None:
    run = fork(tmp_path / "run", config, CASES, f"{STEPS} --case bf16_weights")
    assert {str(weight.dtype) for weight in run.weights.values()} == {f"torch.{dtype}"}
    line = "trains and exports this model's bfloat16 weights in float32"
    assert run.stdout.count(line) == (dtype == "float32")


def test_dropout_is_said_to_depend_on_the_micro_batch_size(tmp_path: Path) -> None:
    line = "draws random numbers, as dropout does: they depend on --micro_batch_size, here 4, not on"
    arguments = f"{STEPS} --case dropout"
    alone, two = (fork(tmp_path / config, config, CASES, arguments) for config in ("single", "ddp"))
    assert (alone.stdout.count(line), two.stdout.count(line)) == (0, 1)
    assert largest_difference(two.column("train/loss"), alone.column("train/loss")) > 1e-5  # they do depend on it


def test_dropout_between_layers_that_are_divided_is_refused(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "tensor_parallel", CASES, f"{STEPS} --case dropout", succeeds=False)
    assert "TP 2 does not give the result of one process: in step 1, " in refused(run)
    assert "something between two layers of the tp_plan draws random numbers" in run.stderr


@pytest.mark.parametrize(
    ("config", "case"),
    [
        ("ddp", "scalar_weight"),
        ("ddp", "empty_weight"),
        ("ddp", "complex_weight"),
        ("fsdp2", "complex_weight"),
        ("fsdp2", "float64_weight"),
        ("ddp", "tied"),
        ("deepspeed_zero2", "tied"),
        ("deepspeed_zero3", "tied"),
    ],
)
def test_the_same_weight_elsewhere(tmp_path: Path, reference: Callable[..., Run], config: str, case: str) -> None:
    arguments = f"{STEPS} --case {case}"
    assert_same_result(fork(tmp_path / "run", config, CASES, arguments), reference(CASES, arguments))


@pytest.mark.full
def test_build_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    """A killed build leaves running compilers, torch's lock file, which makes all other builds wait, and maybe an
    incomplete library."""
    fork(tmp_path / "first", "deepspeed_zero2", CASES, STEPS)  # compiles the extension if necessary
    folder = tmp_path / "torch_extensions" / extensions_folder().name
    shutil.copytree(extensions_folder(), folder)
    (folder / "deepspeed_shm_comm" / "lock").touch()
    (folder / "deepspeed_shm_comm" / "is_whole").unlink()
    compilers = [
        subprocess.Popen(["sleep", "1000"], env=os.environ | {BUILDS_IN: str(place)}) for place in (folder, tmp_path)
    ]
    try:
        fork(tmp_path / "run", "deepspeed_zero2", CASES, STEPS, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert [compiler.poll() for compiler in compilers] == [-signal.SIGKILL, None]  # the other one builds elsewhere
    finally:
        for compiler in compilers:
            compiler.kill()
            compiler.wait()
    assert not (folder / "deepspeed_shm_comm" / "lock").exists()
    assert (folder / "deepspeed_shm_comm" / "is_whole").exists()


@pytest.mark.full
def test_run_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import contextlib, os, pathlib, runpy, signal, sys, threading, time\n"
        "import psutil\n"
        "def kill():\n"
        f"    while not list(pathlib.Path({str(tmp_path)!r}).glob('torch_extensions/*/*/lock')):\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(3)\n"
        "    children = [child.pid for child in psutil.Process().children(recursive=True)]\n"
        "    sys.setswitchinterval(60)  # else the main thread may see that its compiler ends, and remove the lock\n"
        "    for pid in [*children, os.getpid()]:\n"
        "        with contextlib.suppress(ProcessLookupError):\n"
        "            os.kill(pid, signal.SIGKILL)\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        f"runpy.run_path({str(ROOT / CASES)!r}, run_name='__main__')\n"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    # One process, because a second one would continue the build.
    killed = fork(tmp_path / "run", "deepspeed_zero2", script, STEPS, num_processes=1, env=env, succeeds=False)
    assert killed.exit_code and list(tmp_path.glob("torch_extensions/*/*/lock"))
    run = fork(tmp_path / "run", "deepspeed_zero2", CASES, STEPS, env=env)
    assert run.stderr.count("compiling an extension of DeepSpeed, once") == 1
