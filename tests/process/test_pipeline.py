"""Promise: a pipeline gives the result of one process; a pipeline that cannot run is refused before training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.launching import fork
from support.recipes import LINEAR, RECIPES, USERS
from support.runs import Run, assert_same_result, largest_difference, refused

SCRIPT, ARGUMENTS = RECIPES["transformer"]
FOUR_LAYERS = f"{ARGUMENTS} --num_layers 4"
TWO = "--pipeline_stages 2"
FIVE = f"{TWO} --pipeline_schedule interleaved --batch_size 10 --micro_batch_size 2"  # micro-batches


@pytest.mark.parametrize(
    ("arguments", "flags", "num_processes", "expected"),
    [
        (FOUR_LAYERS, "--pipeline_stages 3 --micro_batch_size 2", 3, "pipeline of 3 stages"),
        pytest.param(ARGUMENTS, "--pipeline_stages 2 --compile", 2, "pipeline of 2 stages", marks=pytest.mark.full),
    ],
)
def test_pipeline_gives_the_result_of_one_process(
    tmp_path: Path, reference: Callable[..., Run], arguments: str, flags: str, num_processes: int, expected: str
) -> None:
    run = fork(tmp_path / "run", "pipeline_parallel", SCRIPT, f"{arguments} {flags}", num_processes)
    assert run.card["parallelism"] == expected
    assert_same_result(run, reference(SCRIPT, arguments))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("gpt2", "fsdp2"),  # its embedding is tied to the head
        ("padded_encoder", "pipeline_parallel"),  # torch's own
        ("old_weight_norm", "pipeline_parallel"),  # deepcopy refuses the weight that its hook computes
        ("energy_on_disk", "pipeline_parallel"),  # its layers differentiate in their forward pass
        ("batch_norm", "pipeline_parallel"),  # after the layers: its buffers are those of the last stage
        ("all_but_head_frozen", "pipeline_parallel"),  # a stage without anything to train
        ("routed", "pipeline_parallel"),  # after the layers: the passes that cut the model do not use each expert
        ("of_some_samples", "fsdp2"),
        *(pytest.param(model, "fsdp2", marks=pytest.mark.full) for model in ("mamba", "opt", "vit", "causal_adapters")),
        pytest.param("pruned", "pipeline_parallel", marks=pytest.mark.full),
    ],
)
def test_any_chain_of_layers(tmp_path: Path, reference: Callable[..., Run], model: str, config: str) -> None:
    arguments = f"--model {model} --optimizer sgd --max_steps 4"
    run = fork(tmp_path / "run", config, USERS, f"{arguments} {TWO}", 4 if config == "fsdp2" else 2)
    expected = reference(USERS, arguments)
    for name in ("train/loss", "eval/loss", "grad_norm"):
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-5)
    for name, weight in expected.weights.items():  # a key bias starts at zero, and gets rounding errors alone
        torch.testing.assert_close(run.weights[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "recipe", "flags"),
    [
        ("sequence_parallel", "finetune", "--packing"),
        # BERT; micro-batches of a step differ in length
        pytest.param("fsdp2", "text classification", "", marks=pytest.mark.full),
    ],
)
def test_records_have_all_metrics(
    tmp_path: Path, reference: Callable[..., Run], config: str, recipe: str, flags: str
) -> None:
    """Samples of several lengths have their own weights in the loss of the global batch, and in each metric."""
    script, arguments = RECIPES[recipe]
    arguments += f" --max_steps 6 --eval_every 6 {flags}"
    run = fork(tmp_path / "run", config, script, f"{arguments} {TWO}", 4)
    expected = reference(script, arguments)
    assert_same_result(run, expected)
    for name in {name for record in expected.records for name in record if name.startswith("train/")}:
        assert run.column(name) == pytest.approx(expected.column(name), rel=1e-5)


def test_pipeline_in_bf16_is_close_to_one_process_in_bf16(tmp_path: Path) -> None:
    options = "--mixed_precision bf16"
    whole = fork(tmp_path / "whole", "single", SCRIPT, ARGUMENTS, options=options)
    run = fork(tmp_path / "run", "pipeline_parallel", SCRIPT, f"{ARGUMENTS} --pipeline_stages 2", options=options)
    assert run.card["precision"] == "bf16"
    for name in ("train/loss", "eval/loss"):
        assert largest_difference(run.column(name), whole.column(name)) <= 0.005


@pytest.mark.parametrize(
    ("script", "arguments", "num_processes", "expected"),
    [
        (
            SCRIPT,
            f"{ARGUMENTS} --pipeline_stages 3 --batch_size 12",
            3,
            "2 layers of LlamaForCausalLM are fewer than 3 st",
        ),
        (
            SCRIPT,
            f"{ARGUMENTS} {FIVE}",
            2,
            "--pipeline_schedule interleaved with 5 micro-batches: not a multiple of",
        ),
        (
            SCRIPT,
            f"{ARGUMENTS} --pipeline_schedule zbv",
            2,
            "--pipeline_schedule zbv needs a pipeline: use --pipeline_s",
        ),
        (SCRIPT, f"{ARGUMENTS} {TWO}", 3, "--pipeline_stages 2 does not divide 3 processes: use"),
        (
            SCRIPT,
            f"{ARGUMENTS} {TWO} --micro_batch_size 16",
            2,
            "1 micro-batches per step are too few to keep --pipeline",
        ),
        (LINEAR, TWO, 2, "Linear has no list of layers where each gets the output of the one before"),
        (
            USERS,
            f"--model encoder_decoder {TWO}",
            2,
            "has two chains of layers, decoder.block and encoder.block; a",
        ),
        (USERS, f"--model called_twice {TWO}", 2, "CalledTwice calls a layer 2 times in a pass of forward_step"),
        (
            SCRIPT,
            f"{ARGUMENTS} {TWO} --num_experts 4 --router_loss 0.1",
            2,
            "need more than the hidden states of the l",  # what the routers of all layers chose
        ),
        (USERS, f"--model carries_more {TWO}", 2, "hidden states of the layer before (TypeError: "),
        (USERS, f"--model dropout {TWO}", 2, "the layers of Net draw random numbers, such as dropout, and a pipeline"),
    ],
)
def test_pipeline_that_cannot_run(
    tmp_path: Path, script: str, arguments: str, num_processes: int, expected: str
) -> None:
    run = fork(tmp_path / "run", "pipeline_parallel", script, arguments, num_processes, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists()


def test_replicas_do_not_add_gradients_of_different_weights(tmp_path: Path) -> None:
    arguments = f"--model routed {TWO} --micro_batch_size 1"  # each uses the experts of its samples
    run = fork(tmp_path / "run", "pipeline_parallel", USERS, arguments, 4, succeeds=False)
    assert "not all passes use experts." in refused(run) and not (run.output_dir / "model").exists()


@pytest.mark.full  # six processes
def test_copies_of_a_tied_embedding_stay_equal_whatever_the_order_of_sums(tmp_path: Path) -> None:
    """NCCL may add the gradients of the first stages in another order than those of the last stages."""
    flags = "--pipeline_stages 2 --max_steps 3 --batch_size 12 --check_steps 0 --sample_tokens 0"
    run = fork(tmp_path / "run", "pipeline_parallel", "tests/scripts/orders.py", flags, num_processes=6)
    first, *others = (torch.load(path) for path in sorted(run.output_dir.glob("tied_*.pt")))
    assert len(others) == 5 and all(torch.equal(first, other) for other in others)
