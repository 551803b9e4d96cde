"""Promise: a run that was killed at any moment resumes to the result of an undisturbed run, under any config."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from accelerate_recipes.common.checkpoint.reader import Reader
from accelerate_recipes.common.cpu_group import CpuGroup
from support.launching import fork, launch
from support.manifests import rewrite
from support.recipes import COURSE, DISTURBED, FLAGS, LATEST, MNIST, RECIPES, USERS
from support.runs import ROOT, Run, assert_equal_to_the_last_bit, largest_difference, refused, weight_distance


def kill_and_resume(
    tmp_path: Path,
    config: str,
    fault: str,
    step: int,
    process: int,
    flags: str,
    options: str = "",
    launched: bool = False,
) -> Run:
    """Starts a run that `fault` ends, and resumes it. Returns the resumed run."""
    flags += f" --fault {fault} --fault_step {step} --fault_process {process}"
    start = launch if launched else fork
    first = start(tmp_path / "run", config, DISTURBED, f"{COURSE} {flags}", options=options, succeeds=False)
    assert first.exit_code != 0 and (first.output_dir / "fault_was_here").exists(), first.stdout + first.stderr
    assert not (first.output_dir / "model").exists()
    assert f'File "{ROOT}/accelerate_recipes' not in first.stdout + first.stderr, "a traceback from our code"
    for path in first.output_dir.glob("checkpoints/step_*"):
        Reader.open_verified(path, CpuGroup())
    run = fork(tmp_path / "run", config, DISTURBED, f"{COURSE} {LATEST}", options=options)
    assert run.card["status"] == "done" and run.card["attempt"] == 2
    return run


@pytest.mark.parametrize(
    ("config", "fault", "step", "process", "flags"),
    [
        ("single", "kill", 8, 0, ""),  # at the start of an epoch
        ("ddp", "kill", 10, 1, ""),  # in the middle of an epoch
        ("fsdp2", "kill_all", 7, 0, ""),
        ("deepspeed_zero2", "kill", 11, 1, ""),
        pytest.param("ddp", "kill_launcher", 5, 0, "", marks=pytest.mark.full),
        pytest.param("ddp", "write", 7, 0, "", marks=pytest.mark.full),
        ("ddp", "write", 8, 0, "--async_save"),
        ("fsdp2", "write", 2, 1, ""),
    ],
)
def test_killed_run_goes_on_as_the_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[[str, str], Run], config: str, fault: str, step: int, process: int, flags: str
) -> None:
    """If the fault kills all processes or the launcher, the run needs the real launcher."""
    launched = fault in ("kill_all", "kill_launcher")
    run = kill_and_resume(tmp_path, config, fault, step, process, flags, launched=launched)
    assert_equal_to_the_last_bit(run, undisturbed(config, COURSE))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("deepspeed_zero3", ""),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("hsdp", ""),
                ("ddp_bf16", ""),
                ("fsdp2_bf16", ""),
                ("deepspeed_zero1", ""),
                ("deepspeed_zero1", "--mixed_precision bf16"),
                ("deepspeed_zero2_bf16", ""),
                ("deepspeed_zero3", "--mixed_precision bf16"),
                ("deepspeed_zero3_offload", ""),
            ]
        ),
    ],
)
def test_killed_run_goes_on_under_each_config(
    tmp_path: Path, made_once: Callable[..., Run], config: str, options: str
) -> None:
    """The 33 units of the hidden layer do not divide by two processes."""
    run = kill_and_resume(tmp_path, config, "kill", 11, 1, "", options)
    assert_equal_to_the_last_bit(run, made_once(config, DISTURBED, COURSE, options))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_killed_anywhere(tmp_path: Path, undisturbed: Callable[[str, str], Run], seed: int) -> None:
    draw = random.Random(seed)
    config = draw.choice(["single", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
    fault = draw.choice(["kill", "kill_all", "kill_launcher", "write", "write"])
    process = 0 if config == "single" else draw.randrange(2)
    last = {"write": 40 if process == 0 else 4}.get(fault, 13)
    run = kill_and_resume(tmp_path, config, fault, draw.randrange(last), process, draw.choice(["", "--async_save"]))
    assert_equal_to_the_last_bit(run, undisturbed(config, COURSE))


@pytest.mark.parametrize("config", ["single", "ddp", "fsdp2", pytest.param("deepspeed_zero2", marks=pytest.mark.full)])
def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, undisturbed: Callable[[str, str], Run], config: str
) -> None:
    run = fork(tmp_path / "run", config, DISTURBED, f"{COURSE} --async_save --fault slow_write")
    assert int((run.output_dir / "fault_was_here").read_text()) > 0
    expected = undisturbed(config, COURSE)
    assert_equal_to_the_last_bit(run, expected)
    assert run.checkpoints == expected.checkpoints == [12, 14]
    for step in run.checkpoints:  # the state of that step, although training went on
        ours, theirs = (Reader(one.output_dir / "checkpoints" / f"step_{step:08d}") for one in (run, expected))
        assert ours.content["files"] == theirs.content["files"]


def test_launcher_starts_a_killed_run_again_by_itself(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    arguments = f"{COURSE} --fault kill --fault_step 7 --fault_process 1"
    run = launch(tmp_path / "run", "ddp", DISTURBED, arguments, options="--max_restarts 1")
    assert "resumed from" in run.stdout and run.card["attempt"] == 2
    assert_equal_to_the_last_bit(run, undisturbed("ddp", COURSE))


# Each config resumes from the config before it, two steps later.
RELAYS = {
    "mnist mlp": "single ddp fsdp2 hsdp tensor_parallel fsdp2_tensor_parallel deepspeed_zero1 deepspeed_zero2 "
    "deepspeed_zero3 fsdp2",
    "transformer": "tensor_parallel pipeline_parallel sequence_parallel deepspeed_zero3",
    "experts": "fsdp2_expert_parallel ddp fsdp2_expert_parallel fsdp2 deepspeed_zero3",
    "text classification": "single fsdp2 tensor_parallel deepspeed_zero2 deepspeed_zero3 ddp",
    "embeddings": "single fsdp2 tensor_parallel deepspeed_zero2 deepspeed_zero3 ddp",
    "finetune": "pipeline_parallel fsdp2 fsdp2_sequence_parallel tensor_parallel deepspeed_zero3 ddp",
    "diffusion": "single deepspeed_zero3 fsdp2 deepspeed_zero1 tensor_parallel deepspeed_zero2 ddp",
    "scalar weight": "ddp fsdp2 fsdp2_tensor_parallel",
    "shared weight": "fsdp2 ddp fsdp2",
    "several ranges of a weight": "tensor_parallel single tensor_parallel",
}
OF_USERS = {
    "scalar weight": "--model scalar_weight",
    "shared weight": "--model shared_between_blocks",
    "several ranges of a weight": "--model gpt2 --optimizer sgd",
}


@pytest.mark.parametrize(
    ("relay", "others"),
    [
        ("transformer", ""),
        pytest.param("scalar weight", "--ema_decay 0.9", marks=pytest.mark.full),
        pytest.param("shared weight", "", marks=pytest.mark.full),
        pytest.param("several ranges of a weight", "--ema_decay 0.9", marks=pytest.mark.full),
        pytest.param("experts", "--ema_decay 0.9", marks=pytest.mark.full),
        pytest.param("mnist mlp", "--ema_decay 0.9", marks=pytest.mark.full),
        pytest.param("text classification", "", marks=pytest.mark.full),
        pytest.param("embeddings", "", marks=pytest.mark.full),
        pytest.param("finetune", "", marks=pytest.mark.full),
        pytest.param("diffusion", "", marks=pytest.mark.full),
        pytest.param("mnist mlp", "--optimizer sgd --learning_rate 0.1", marks=pytest.mark.full),
    ],
)
def test_checkpoint_of_any_config_loads_under_any_other(
    tmp_path: Path, reference: Callable[..., Run], relay: str, others: str
) -> None:
    script, arguments = (USERS, OF_USERS[relay]) if relay in OF_USERS else RECIPES[relay]
    expected = reference(script, f"{arguments} {others}")
    for number, config in enumerate(RELAYS[relay].split()):
        flags = f"{arguments} {others} --save_every 2 --keep_checkpoints 10"
        flags += FLAGS.get(config, "")
        if number:
            path = tmp_path / str(number - 1) / "checkpoints" / f"step_{2 * number:08d}"
            flags += f" --resume_from_checkpoint {path}"
        run = fork(tmp_path / str(number), config, script, flags)
        assert largest_difference(run.column("train/loss"), expected.column("train/loss")[2 * number :]) <= 1e-5
        assert run.column("learning_rate") == expected.column("learning_rate")[2 * number :]
        assert weight_distance(run, expected) <= 1e-5, config


@pytest.mark.parametrize(
    "config",
    [
        "deepspeed_zero2",
        *(pytest.param(f"deepspeed_{one}", marks=pytest.mark.full) for one in ("zero1", "zero2_bf16", "zero3")),
    ],
)
def test_state_of_several_parameter_groups_is_saved(tmp_path: Path, config: str) -> None:
    """After a fresh start, DeepSpeed links only the optimizer state of the first group to its weights."""
    flags = "--max_steps 6 --log_every 1 --save_every 3 --model mlp --weight_decay 0.1"
    first = fork(tmp_path / "first", config, MNIST, flags)
    path = first.output_dir / "checkpoints" / "step_00000003"
    run = fork(tmp_path / "run", config, MNIST, f"{flags} --resume_from_checkpoint {path}")
    assert run.column("train/loss") == first.column("train/loss")[3:] and weight_distance(run, first) == 0


def test_other_number_of_processes_says_what_it_does(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    path = undisturbed("ddp", COURSE).output_dir / "checkpoints" / "step_00000012"
    run = fork(tmp_path / "run", "single", DISTURBED, f"{COURSE} --resume_from_checkpoint {path}")
    assert "it was saved by 2 processes (DDP) and continues on 1 process (no parallelism)\n" in run.stdout
    assert run.column("learning_rate") == undisturbed("ddp", COURSE).column("learning_rate")[-1:]


@pytest.mark.full
def test_sums_of_a_record_under_way_go_on_under_another_number_of_processes(tmp_path: Path) -> None:
    """Each run resumes from the one before it, two steps later. The only record is the mean of all ten steps."""
    flags = "--max_steps 10 --log_every 10 --save_every 2 --keep_checkpoints 9 --model mlp"
    whole = fork(tmp_path / "0", "single", MNIST, flags)
    for step, config in ((2, "fsdp2"), (4, "tensor_parallel"), (6, "ddp"), (8, "single")):
        path = tmp_path / str(step - 2) / "checkpoints" / f"step_{step:08d}"
        run = fork(tmp_path / str(step), config, MNIST, f"{flags} --resume_from_checkpoint {path}")
        assert largest_difference(run.column("train/loss"), whole.column("train/loss")) <= 1e-5


def test_evaluation_that_a_signal_ended_is_recorded_once(
    tmp_path: Path, undisturbed: Callable[[str, str], Run]
) -> None:
    flags = "--fault evaluation --fault_step 1"
    run = fork(tmp_path / "run", "single", DISTURBED, f"{COURSE} {flags}", succeeds=False)
    (run.output_dir / "fault_was_here").unlink()
    flags = f"{LATEST} --fault kill --fault_step 0"  # after the evaluation, before the next checkpoint
    again = fork(tmp_path / "run", "single", DISTURBED, f"{COURSE} {flags}", succeeds=False)
    assert again.records[-1]["step"] == 4 and "eval/loss" in again.records[-1]
    last = fork(tmp_path / "run", "single", DISTURBED, f"{COURSE} {LATEST}")
    assert_equal_to_the_last_bit(last, undisturbed("single", COURSE))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoint_is_passed_over_or_refused(tmp_path: Path, undisturbed: Callable[[str, str], Run]) -> None:
    flags = f"{COURSE} --fault kill_all --fault_step 10"
    run = fork(tmp_path / "run", "ddp", DISTURBED, flags, succeeds=False)
    newest = run.output_dir / "checkpoints" / "step_00000009"
    assert run.checkpoints == [6, 9]
    flags = f"{COURSE} --resume_from_checkpoint {run.output_dir}"
    other = fork(tmp_path / "other", "ddp", DISTURBED, flags, succeeds=False)
    assert refused(other).endswith(f"): use {newest}")
    damage(newest / "shard_00001.safetensors")
    with (run.output_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 10, "tr')  # half a record, as a full disk leaves it
    line = refused(
        fork(run.output_dir, "ddp", DISTURBED, f"{COURSE} --resume_from_checkpoint {newest}", succeeds=False)
    )
    assert "is not a complete checkpoint (shard_00001.safetensors was altered): use latest" in line
    run = fork(run.output_dir, "ddp", DISTURBED, f"{COURSE} {LATEST}")
    line = (
        f"{newest} is not a complete checkpoint (shard_00001.safetensors was altered): using the checkpoint before it"
    )
    assert line in run.stdout
    assert (newest.parent / f"damaged_{newest.name}").is_dir()
    assert_equal_to_the_last_bit(run, undisturbed("ddp", COURSE))
    for path in run.output_dir.glob("checkpoints/step_*"):
        damage(path / "manifest.json")
    line = refused(fork(run.output_dir, "ddp", DISTURBED, f"{COURSE} {LATEST}", succeeds=False))
    assert "no checkpoint in" in line and "is complete: use --overwrite_output_dir" in line


def strip(checkpoint: Path, prefix: str) -> None:
    """Removes the tensors whose names begin so from the only file of a checkpoint, and from its manifest."""
    (file,) = checkpoint.glob("shard_*")
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(prefix)}
    save_file(kept, file)
    entry = {"size": file.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes())}

    def change(manifest: dict) -> dict:
        tensors = {name: manifest["tensors"][name] for name in kept}
        return manifest | {"files": {file.name: entry}, "tensors": tensors}

    rewrite(checkpoint, change)


def test_weight_without_state_of_the_optimizer_is_named(tmp_path: Path, made_once: Callable[..., Run]) -> None:
    """A weight that no forward pass has used has no optimizer state. Here the state was removed."""
    flags = "--max_steps 8 --save_every 4 --ema_decay 0.9"
    shutil.copytree(made_once("single", USERS, flags).output_dir, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000008")
    strip(tmp_path / "run" / "checkpoints" / "step_00000004", "optimizer.stem.weight.")
    run = fork(tmp_path / "run", "single", USERS, f"{flags} {LATEST}")
    assert "it has no optimizer state for stem.weight: that state starts from scratch" in run.stdout


def test_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    """Files may not grow beyond 16 KB: enough for records, too little for checkpoints."""
    limited = tmp_path / "limited.py"
    limited.write_text(
        f"import resource, runpy\nresource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))\n"
        f"runpy.run_path({str(ROOT / DISTURBED)!r}, run_name='__main__')\n"
    )
    run = fork(tmp_path / "run", "ddp", limited, f"{COURSE} --width 3000", succeeds=False)
    output = run.stdout + run.stderr
    assert run.checkpoints == [] and "the checkpoint of step 3 could not be written" in output
    left = {path.name for path in run.output_dir.glob("checkpoints/*")} - {"model_files"}
    assert not left, "an unfinished checkpoint takes the space of the next one"
    assert f'File "{ROOT}/accelerate_recipes' not in output, "a traceback from our code"
    assert run.records[-1]["step"] == 14, output  # the export at the end fails, too


def test_output_dir_that_vanishes(tmp_path: Path) -> None:
    flags = f"{COURSE} --fault vanish --fault_step 7"
    run = fork(tmp_path / "run", "ddp", DISTURBED, flags, succeeds=False)
    assert run.stdout.count("the checkpoint of step 9 could not be written") == 1
    assert "model cannot be written (No such file or directory)" in run.stderr
    away = Run(0, "", "", tmp_path / "run.away")
    assert away.checkpoints == [3, 6] and not run.output_dir.exists()
    again = fork(away.output_dir, "ddp", DISTURBED, f"{COURSE} {LATEST}")
    assert again.column("train/loss")[-1] == away.column("train/loss")[-1]


def test_best_weights_are_kept_and_patience_ends_a_run(tmp_path: Path) -> None:
    arguments = "--max_steps 40 --log_every 1 --eval_every 2 --save_every 4 --learning_rate 0.3 --lr_schedule constant"
    arguments += " --metric_for_best_model loss --early_stopping_patience 3"
    run = fork(tmp_path / "run", "fsdp2", DISTURBED, arguments)
    losses = run.column("eval/loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 4 < 20 and run.card["status"] == "done"
    kept = load_file(run.output_dir / "best" / "model.safetensors")
    at_best = fork(tmp_path / "best", "fsdp2", DISTURBED, f"{arguments} --max_steps {2 * best + 2}")
    assert all(torch.equal(kept[name], weight) for name, weight in at_best.weights.items())
    assert any(not torch.equal(kept[name], weight) for name, weight in run.weights.items())
    again = fork(run.output_dir, "fsdp2", DISTURBED, f"{arguments} {LATEST}")
    assert "nothing to do" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--metric_for_best_model acc", "--metric_for_best_model acc: no such metric; use one of loss"),
        ("--early_stopping_patience 2", "--early_stopping_patience needs a metric: use --metric_for_best_model loss"),
    ],
)
def test_metric_that_is_not_there(tmp_path: Path, arguments: str, expected: str) -> None:
    run = fork(tmp_path / "run", "ddp", DISTURBED, arguments, succeeds=False)
    assert expected in refused(run) and not (run.output_dir / "metrics.jsonl").exists()
