"""Promise: a run that divides a model in several ways at once gives the result of one process, or is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import RECIPES
from support.runs import Run, assert_same_result, refused
from support.small_model import write_model

SCRIPT, ARGUMENTS = RECIPES["transformer"]  # its embeddings are tied: the first and the last stage have a copy
CLIPS = f"{ARGUMENTS} --max_steps 6 --eval_every 3 --num_layers 4 --max_grad_norm 0.5"  # the norm is 2 and more
STAGES = "--pipeline_stages 2"
INTERLEAVED, ZERO_BUBBLE = (f"{STAGES} --pipeline_schedule {name}" for name in ("interleaved", "zbv"))


@pytest.mark.parametrize(
    ("config", "num_processes", "flags", "options", "expected"),
    [
        ("fsdp2_pipeline", 4, f"{STAGES} --micro_batch_size 2", "", "FSDP2 2 × pipeline of 2 stages"),
        ("fsdp2_pipeline", 4, INTERLEAVED, "--fsdp_reshard_after_forward false", "FSDP2 2 × pipeline of 2 stages"),
        pytest.param(*("fsdp2_pipeline", 4, INTERLEAVED, "", "FSDP2 2 × pipeline of 2 stages"), marks=pytest.mark.full),
        ("tensor_parallel", 4, f"{ZERO_BUBBLE} --activation_checkpointing", "", "TP 2 × pipeline of 2 stages"),
        ("sequence_parallel", 4, STAGES, "", "pipeline of 2 stages × SP 2"),
        pytest.param(
            *(
                "fsdp2_sequence_parallel",
                8,
                f"{STAGES} --micro_batch_size 2",
                "",
                "FSDP2 2 × pipeline of 2 stages × SP 2",
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(  # test_checkpoints_cross_between_layouts runs it, too
            *("fsdp2_tensor_pipeline", 8, STAGES, "", "FSDP2 2 × TP 2 × pipeline of 2 stages"), marks=pytest.mark.full
        ),
        ("tensor_parallel", 4, "", "--parallelism_config_sp_size 2", "FSDP2 × TP 2 × SP 2"),
        pytest.param(
            *("fsdp2_tensor_parallel", 8, "--micro_batch_size 4", "--parallelism_config_sp_size 2"),
            "FSDP2 2 × TP 2 × SP 2",
            marks=pytest.mark.full,
        ),
        pytest.param("hsdp", 8, STAGES, "", "HSDP 2 × 2 × pipeline of 2 stages", marks=pytest.mark.full),
        pytest.param("fsdp2", 4, f"{STAGES} --compile", "", "FSDP2 2 × pipeline of 2 stages", marks=pytest.mark.full),
    ],
)
def test_the_result_of_one_process(
    tmp_path: Path,
    reference: Callable[..., Run],
    config: str,
    num_processes: int,
    flags: str,
    options: str,
    expected: str,
) -> None:
    run = fork(tmp_path / "run", config, SCRIPT, f"{CLIPS} {flags}", num_processes, options)
    assert run.card["parallelism"] == expected and run.card["checked_steps"] > 0
    expected_run = reference(SCRIPT, CLIPS)
    assert min(expected_run.column("grad_norm")) > 0.5  # it does clip
    assert_same_result(run, expected_run)


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ("fsdp2", STAGES, "FSDP2 2 × pipeline of 2 stages × EP 2"),
        ("fsdp2_tensor_parallel", "--expert_parallel 4", "FSDP2 2 × TP 2 × EP 4"),
        pytest.param("tensor_parallel", STAGES, "TP 2 × pipeline of 2 stages × EP 2", marks=pytest.mark.full),
        pytest.param("fsdp2_sequence_parallel", "--micro_batch_size 4", "FSDP2 × SP 2 × EP 2", marks=pytest.mark.full),
    ],
)
def test_experts(tmp_path: Path, reference: Callable[..., Run], config: str, flags: str, expected: str) -> None:
    arguments = f"{CLIPS} --num_experts 4"
    run = fork(tmp_path / "run", config, SCRIPT, f"{arguments} --expert_parallel 2 {flags}", 4)
    assert run.card["parallelism"] == expected and run.card["checked_steps"] > 0
    assert_same_result(run, reference(SCRIPT, arguments))


def test_untied_embeddings_and_averaged_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", num_positions=16, num_layers=4)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    arguments = f"--data {tmp_path / 'words.txt'} --model_name_or_path {tmp_path / 'tiny'} --context 16 --batch_size 8"
    arguments += " --max_steps 5 --log_every 1 --sample_tokens 0 --max_grad_norm 0.1 --ema_decay 0.9"
    whole = fork(tmp_path / "whole", "single", SCRIPT, arguments)
    assert min(whole.column("grad_norm")) > 0.1
    run = fork(tmp_path / "run", "fsdp2", SCRIPT, f"{arguments} {ZERO_BUBBLE}", 4, "--fsdp_reshard_after_forward false")
    assert_same_result(run, whole)


@pytest.mark.parametrize(
    ("config", "recipe", "flags"),
    [
        ("sequence_parallel", "finetune", "--packing"),
        ("fsdp2", "text classification", ""),  # BERT; micro-batches of a step differ in length
        pytest.param("fsdp2", "finetune", "", marks=pytest.mark.full),
    ],
)
def test_samples_of_several_lengths(
    tmp_path: Path, reference: Callable[..., Run], config: str, recipe: str, flags: str
) -> None:
    """Each has its own weight in the loss of the global batch, and the records have all metrics."""
    script, arguments = RECIPES[recipe]
    arguments += f" --max_steps 6 --eval_every 6 {flags}"
    run = fork(tmp_path / "run", config, script, f"{arguments} {STAGES}", 4)
    expected = reference(script, arguments)
    assert_same_result(run, expected)
    for name in {name for record in expected.records for name in record if name.startswith("train/")}:
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-5)


def test_checkpoints_cross_between_layouts(tmp_path: Path) -> None:
    """From 4 processes to 8, and from 8 to 1, with the optimizer's state and the averaged weights."""
    arguments = f"{CLIPS} --num_experts 4 --save_every 2 --keep_checkpoints 3 --ema_decay 0.9"
    whole = fork(tmp_path / "whole", "single", SCRIPT, arguments)
    four = fork(tmp_path / "four", "fsdp2", SCRIPT, f"{arguments} {STAGES} --expert_parallel 2", 4)
    resume = f"{arguments} --resume_from_checkpoint"
    path = four.output_dir / "checkpoints" / "step_00000002"
    eight = fork(
        tmp_path / "eight", "fsdp2_tensor_parallel", SCRIPT, f"{resume} {path} {STAGES} --expert_parallel 2", 8
    )
    path = eight.output_dir / "checkpoints" / "step_00000004"
    one = fork(tmp_path / "one", "single", SCRIPT, f"{resume} {path}")
    for run, first in ((eight, 2), (one, 4)):
        assert run.column("train/loss") == pytest.approx(whole.column("train/loss")[first:], rel=1e-5)
        assert run.column("eval/loss") == pytest.approx(whole.column("eval/loss")[first // 3 :], rel=1e-5)
    assert_same_result(four, whole)


@pytest.mark.parametrize(
    ("config", "num_processes", "flags", "options", "expected"),
    [
        ("fsdp2", 2, STAGES, "", "--pipeline_stages 2 of 2 processes leave FSDP2 nothing to divide: use --num_proce"),
        ("fsdp2_tensor_parallel", 4, STAGES, "", "× --pipeline_stages 2 = 8 processes, but there are 4: use --num_pr"),
        ("deepspeed_zero2", 2, STAGES, "", "--pipeline_stages does not combine with DeepSpeed: use --config_file"),
        (
            *("fsdp2", 4, STAGES, "--fsdp_cpu_ram_efficient_loading true"),
            "--pipeline_stages does not work with fsdp_cpu_ram_efficient_loading: use false there in the config file",
        ),
        (
            *("fsdp2", 4, ZERO_BUBBLE, ""),
            "--pipeline_schedule zbv loses gradients where FSDP2 frees a layer's weights before the backward pass: use "
            "--fsdp_reshard_after_forward false after accelerate launch, or --pipeline_schedule interleaved",
        ),
        (
            *("fsdp2", 4, ZERO_BUBBLE, "--fsdp_reshard_after_forward false"),
            "--pipeline_schedule zbv: two stages of one process need model.embed_tokens.weight, of which FSDP2 would",
        ),
        (
            *("fsdp2", 6, f"{STAGES} --num_experts 4 --expert_parallel 2", ""),
            "--expert_parallel 2 does not divide 3 processes of a stage: use --num_processes 4 after accelerate launch",
        ),
        (
            *("tensor_parallel", 8, "", "--parallelism_config_sp_size 4"),
            "4 attention heads, which 8 processes cannot share: use a smaller sp_size or tp_size in the config file",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, config: str, num_processes: int, flags: str, options: str, expected: str
) -> None:
    run = fork(tmp_path / "run", config, SCRIPT, f"{CLIPS} {flags}", num_processes, options, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists()
