"""Promise: equal or refused, for state that nobody lists, and for what begins after the checked steps."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.launching import fork
from support.recipes import FLAGS, MISFIT
from support.runs import Run, assert_same_result, refused

STATE, LATE = "tests/users/state.py", "tests/users/late.py"
GIVEN_BACK = (
    *("cached", "least_recent", "user_dict", "chain_map", "bytes", "numbers", "ctypes", "shared_array", "namespace"),
    *("objects", "text", "module", "queue", "context", "thread", "array", "weak", "decorated", "environment"),
    *("bits", "rows"),
)
ALL = ",".join(GIVEN_BACK)  # one that is not given back changes the losses
OTHER, SEVERAL = (
    "besides the hidden states: another stage of the pipeline has that",
    "times, but the pipeline was cut",
)
ONE = "does not give the result of one process"
PIPELINES = ("pipeline_parallel", "interleaved", "zbv")
DIVIDING = ("fsdp2", "deepspeed_zero2", "deepspeed_zero3", "tensor_parallel")
STATES: dict[tuple[str, str], str | None] = {  # None: the result of one process; else a part of the line
    **{(f"{where}{late}", "ddp"): None for where, late in product((*GIVEN_BACK, ALL), ("", " --late"))},
    ("file", "ddp"): "when one process repeats the first step from the same state,",
    ("logger", "fsdp2"): "when one process repeats the first step from the same state,",
    **{("hooks_clip", config): None for config in ("ddp", "fsdp2", "deepspeed_zero2", "tensor_parallel")},
    **{("hooks_clip_late", config): None for config in ("ddp", "fsdp2", "fsdp2_tensor_parallel")},
    ("hooks_momentum", "ddp"): "does not give the result of one process: in step 1",
    ("hooks_momentum", "tensor_parallel"): None,
    ("hooks_after", "fsdp2"): "has a hook, after its gradient is accumulated",
    ("hook_of_the_step", "ddp"): None,
    ("hook_of_the_step", "fsdp2"): "from a tensor that is divided among processes: call .full_tensor() first",
    ("hook_of_all_steps", "ddp"): None,
}
BEGINS: dict[tuple[str, str], str | None] = {
    **{("nothing", config): None for config in (*PIPELINES, "tensor_parallel")},
    **{("cap", config): None for config in ("pipeline_parallel", "fsdp2")},
    **{("activity", config): f".activity, {OTHER}" for config in PIPELINES},
    ("size", "pipeline_parallel"): f".size, {OTHER}",
    ("skip_connection", "pipeline_parallel"): OTHER,
    **{
        ("between", config): "a pass of forward_step changes the hidden states between two layers"
        for config in PIPELINES
    },
    ("skipped_layer", "interleaved"): f"calls blocks.1 0 {SEVERAL}",
    ("second_view", "pipeline_parallel"): f"calls blocks.1 2 {SEVERAL}",
    ("target", "zbv"): f"calls blocks.2 2 {SEVERAL}",
    ("dropout", "pipeline_parallel"): "the layers of LateNet draw random numbers",
    ("early_exit", "pipeline_parallel"): "branches on stem.",
    ("penalty", "interleaved"): OTHER,
    **{("captured", config): OTHER for config in PIPELINES},
    ("penalty_of_trained", "pipeline_parallel"): OTHER,
    **{("new_hook", config): "a hook was registered on a module of the model" for config in PIPELINES},
    ("new_hook", "tensor_parallel"): None,
    **{("frozen", config): "changes requires_grad of blocks.2." for config in PIPELINES},
    # Their gradients were zeros, which SGD's momentum and AdamW take for a step.
    **{("detached", config): "the loss of this step does not depend on the layers before st" for config in PIPELINES},
    ("frozen", "tensor_parallel"): "the weights with requires_grad differ from those at the start in step 4",
    ("one_layer", "interleaved"): "calls blocks.2 by itself",
    ("first_layer", "interleaved"): "calls blocks.0 by itself",
    (
        "of_the_other_stage",
        "zbv",
    ): "uses stem.weight, besides the hidden states: another stage of the pipeline has that",
    ("noise_in_step", "ddp"): None,
    **{("noise_in_step", config): "draws random numbers in step 4, and " for config in (*DIVIDING, "zbv")},
    ("norm_in_step", "ddp"): None,
    **{(f"plateau{often}", "ddp"): None for often in ("", " --eval_every 1")},
    ("momentum", "ddp"): None,
    **{(what, config): None for what in ("no_gradient", "masks", "limits") for config in PIPELINES},
    ("running_mean", "tensor_parallel"): None,
    ("norm_in_step", "interleaved"): None,
    (
        "norm_in_step",
        "deepspeed_zero2",
    ): "begins to use norm of a tensor in which DeepSpeed ZeRO-2 has parts of several weights",
    ("norm_in_step", "fsdp2"): "from a tensor that is divided among processes: call .full_tensor() first",
    ("number", "pipeline_parallel"): "branches on blocks.0.up.weight",
    ("norm_in_a_hook", "pipeline_parallel"): OTHER,
    ("clipping", "pipeline_parallel"): "into another tensor: another stage of the pipeline has that",
    ("activity", "tensor_parallel"): "in step 4 a pass computes the values of forward_step of mean",
    ("measured", "tensor_parallel"): "computes the values of forward_step of mean[-1](blocks.0.up), and TP 2 divides",
    (
        "width --eval_every 6",
        "tensor_parallel",
    ): "in step 4 a pass computes slice[1, 12, 9223372036854775807] of blocks.0.up",
    ("rolled", "tensor_parallel"): "in step 1 a pass computes blocks.0.down of roll[0, -1](blocks.0.up)",
    ("measured", "ddp"): None,
    ("hook_of_units", "tensor_parallel"): "in step 4 a pass computes blocks.0.down of ",
    (
        "mean_of_units",
        "tensor_parallel",
    ): "in step 1 a pass computes blocks.0.down of blocks.0.up and mean[-1](blocks.0.up), and",
    ("total", "tensor_parallel"): None,
    **{("groups", config): None for config in ("fsdp2", "deepspeed_zero2")},
    ("head", "fsdp2"): None,
    **{("temperature", config): None for config in ("tensor_parallel", "pipeline_parallel")},
    # A process with two stages has two copies of the model.
    **{("temperature", config): f'{ONE}: the evaluation after step 6 gives "loss" as' for config in PIPELINES[1:]},
    ("temperature --ema_decay 0.9", "interleaved"): f'{ONE}: the evaluation after step 6 gives "loss" as',
    ("nothing --ema_decay 0.9", "interleaved"): None,
    ("head", "deepspeed_zero2"): "something besides the optimizer's step writes weights of the model; DeepSpeed ZeRO-2",
    ("cap", "tensor_parallel"): "linalg_vector_norm",
    ("dropout", "tensor_parallel"): "in step 4 a pass computes",
    ("units", "tensor_parallel"): "process 1's blocks.0.active differs from the processes before it",
    **{("once_more", config): None for config in ("ddp", "fsdp2", "hsdp", "deepspeed_zero3")},
    ("for_some", "ddp"): None,
    **{("for_some", config): ", and not every process does" for config in ("fsdp2", "hsdp", "deepspeed_zero3")},
    ("skipped_layer", "ddp"): "this step does not use blocks.1.norm.weight, unlike earlier steps, and DDP waits for",
    ("penalty", "tensor_parallel"): "TP 2 cannot train this: RuntimeError",
    ("list", "pipeline_parallel"): f"activity, {OTHER}",
    ("own_gradient", "tensor_parallel"): "in step 4 a pass computes clone without gradients of blocks.0.up",
    ("ramp --eval_every 6", "tensor_parallel"): "in step 4 a pass computes mul with another tensor of blocks.0.up",
    # What nothing watches, the last step of a short rehearsal shows.
    ("captured_weights", "fsdp2"): f"{ONE}: in step 6",
    ("captured_weights", "ddp"): None,
    ("pruned", "ddp"): "the model no longer has the weight blocks.1.up.weight: prune or replace weights before fit",
    ("saves_itself", "pipeline_parallel"): None,
    ("batch", "zbv"): None,
    ("eval_mode", "tensor_parallel"): None,
    **{("gradient_penalty", config): None for config in ("deepspeed_zero2", "deepspeed_zero1", "fsdp2")},
    **{("teacher", config): None for config in ("tensor_parallel", "ddp", "deepspeed_zero2")},
    ("teacher", "pipeline_parallel"): "a hook copies stem.weight: another stage of the pipeline has that",
}


def run_of(folder: Path, script: str, arguments: str, config: str) -> Run:
    schedule = f" --pipeline_schedule {config}" if config in PIPELINES[1:] else ""
    config = "pipeline_parallel" if config in PIPELINES else config
    return fork(folder, config, script, f"{arguments}{schedule}{FLAGS.get(config, '')}", succeeds=False)


def check(run: Run, expected: Run, line: str | None) -> None:
    if line is None:
        assert run.exit_code == 0, run.stderr
        assert_same_result(run, expected)
    else:
        assert line in refused(run) and "Traceback" not in run.stderr and not (run.output_dir / "model").exists()


def cells(lines: dict[tuple[str, str], Any]) -> list[Any]:
    """One by one where several in one run, or the other schedule of two stages, say it: only with `make test-full`."""

    def is_said(what: str, config: str) -> bool:
        return what.split()[0] in GIVEN_BACK or (config == "interleaved" and (what, "zbv") in lines)

    return [pytest.param(*cell, id=" ".join(cell), marks=[pytest.mark.full] * is_said(*cell)) for cell in lines]


@pytest.mark.parametrize(("where", "config"), cells(STATES))
def test_state_is_given_back_or_the_run_ends(
    tmp_path: Path, reference: Callable[..., Run], where: str, config: str
) -> None:
    arguments = f"--hang_timeout 60 --where {where}"
    check(run_of(tmp_path / "run", STATE, arguments, config), reference(STATE, arguments), STATES[where, config])


@pytest.mark.parametrize(("what", "config"), cells(BEGINS))
def test_what_begins_late_has_one_result_or_ends_the_run(
    tmp_path: Path, reference: Callable[..., Run], what: str, config: str
) -> None:
    arguments = f"--hang_timeout 60 --what {what}"
    check(run_of(tmp_path / "run", LATE, arguments, config), reference(LATE, arguments), BEGINS[what, config])


@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_a_buffer_that_begins_to_depend_on_samples_ends_the_run(tmp_path: Path, config: str) -> None:
    run = run_of(tmp_path / "run", LATE, "--what mean_of_samples", config)
    assert (
        run.exit_code == 3 and "after step 4 process 1 holds a different blocks.0.active than process 0" in run.stderr
    )
    assert "they agreed after step 3. Likely cause: the model begins to change this buffer" in run.stderr


@pytest.mark.parametrize(
    "config", ["fsdp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("ddp", "deepspeed_zero2"))]
)
def test_an_optimizer_that_begins_to_follow_its_own_samples_ends_the_run(tmp_path: Path, config: str) -> None:
    run = run_of(tmp_path / "run", LATE, "--what own_momentum", config)
    assert run.exit_code == 3 and re.search(
        r"after step 4 process 1 has [\d.]+ as momentum of group 0 of the optimizer, process 0 has [\d.]+\. Likely "
        "cause: a schedule or a hook follows the loss of its own process",
        run.stderr,
    )


def test_a_line_names_a_file_that_the_check_has_written(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", STATE, "--where file --late", "ddp")
    assert run.exit_code == 0 and "the parity check also wrote" in run.stdout


@pytest.mark.parametrize("begins", [True, False])
def test_a_rehearsal_is_compared_again_at_step_10(tmp_path: Path, begins: bool) -> None:
    run = run_of(
        tmp_path / "run", LATE, f"--max_steps 12 --eval_every 12 --what {'factor' if begins else 'nothing'}", "ddp"
    )
    if begins:
        assert "DDP does not give the result of one process: in step 10, " in refused(run)
        assert "the first steps were the same; something begins later" in run.stderr
    else:
        assert run.exit_code == 0 and run.card["num_steps"] == 12


@pytest.mark.parametrize("what", ["factor", "nothing"])
def test_steps_after_a_save_are_compared(tmp_path: Path, what: str) -> None:
    flags = f"--check_steps 0 --max_steps 7 --save_every 2 --check_every 4 --what {what}"
    run = run_of(tmp_path / "run", LATE, flags, "pipeline_parallel" if what == "nothing" else "ddp")
    if what == "factor":
        line, path = refused(run), tmp_path / "run" / "checkpoints" / "step_00000004"
        assert f"does not give the result of one process after {path}: the grad_norm of step 5 is" in line
        assert f"late.py --checkpoint {path} looks for the cause" in line
    else:
        assert run.exit_code == 0 and "not compared" not in run.stdout, run.stderr


def test_dropout_is_the_same_after_a_save(tmp_path: Path) -> None:
    """It depends on --micro_batch_size, which the process that repeats the steps takes from the run."""
    flags = "--case dropout --max_steps 6 --save_every 4 --check_every 4 --log_every 1"  # step 6 is compared twice
    run = fork(tmp_path / "run", "ddp", MISFIT, flags)
    assert "not compared" not in run.stdout and "no weight has moved" not in run.stdout
    assert "the forward pass draws random numbers" in run.stdout
