"""Promise: parallelism sizes that do not fit are refused before training; sizes that fit give the same result."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch

from support.launching import CONFIGS, fork, launch
from support.recipes import FOREACH, HELD, LINEAR, LOADED, MNIST, RECIPES, TRANSFORMER
from support.runs import Run, assert_same_result, refused
from support.small_model import write_model


@pytest.mark.parametrize(
    ("config", "script", "arguments", "num_processes", "expected"),
    [
        ("tensor_parallel", MNIST, "", None, "ConvNet has no tp_plan"),
        ("tensor_parallel", LINEAR, "", None, "Linear has no tp_plan"),
        ("tensor_parallel", MNIST, "--model mlp", 4, "tp_size 2 = 2 processes, but there are 4"),
        ("fsdp2_tensor_parallel", MNIST, "--model mlp", 2, "use --num_processes 4"),
        ("hsdp", MNIST, "", 2, "dp_replicate_size 2 × dp_shard_size 2 = 4 processes, but there are 2"),
    ],
)
def test_config_that_does_not_fit(
    tmp_path: Path, config: str, script: str, arguments: str, num_processes: int | None, expected: str
) -> None:
    run = fork(tmp_path / "run", config, script, arguments, num_processes, succeeds=False)
    assert expected in refused(run)
    assert not (run.output_dir / "metrics.jsonl").exists() or not run.records


@pytest.mark.parametrize(
    ("config", "before", "after", "expected"),
    [
        ("fsdp2_tensor_parallel", "MULTI_GPU", "FSDP", "has a tp_size: use distributed_type: MULTI_GPU"),
        ("hsdp", "distributed_type: FSDP", "distributed_type: MULTI_GPU", "use distributed_type: FSDP"),
        ("tensor_parallel", "tp_size", "cp_size", "use sp_size instead, as in"),
    ],
)
def test_sizes_that_would_not_be_applied(tmp_path: Path, config: str, before: str, after: str, expected: str) -> None:
    text = (CONFIGS / f"{config}.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(before, after) + "fsdp_config:\n  fsdp_version: 2\n")
    run = fork(tmp_path / "run", tmp_path / "config.yaml", MNIST, "--model mlp", succeeds=False)
    assert expected in refused(run)


def test_a_run_prints_no_warning_of_others(tmp_path: Path) -> None:
    """Accelerate imports deepspeed under FSDP2, too, and that warns about a missing GPU."""
    run = launch(tmp_path / "run", "fsdp2", LINEAR, "--max_steps 2")
    assert "WARNING" not in run.stdout + run.stderr


@pytest.mark.parametrize("config", ["tensor_parallel", "fsdp2_tensor_parallel"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_kernels_that_update_several_weights_at_once(
    tmp_path: Path, reference: Callable[..., Run], config: str, optimizer: str
) -> None:
    """They refuse a list that mixes DTensors and plain tensors, or device meshes."""
    arguments = f"{RECIPES['mnist mlp'][1]} --optimizer {optimizer}"
    run = fork(tmp_path / "run", config, FOREACH, arguments)
    assert_same_result(run, reference(MNIST, arguments))


def test_untied_transformers_model_is_trained_and_exported_whole(tmp_path: Path) -> None:
    """The recipe ties its embeddings, which then stay whole. Untied, the embedding and the head are sharded, too."""
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "tiny", num_positions=16, vocab_size=6)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    arguments = f"--data {tmp_path / 'words.txt'} --model_name_or_path {tmp_path / 'tiny'} --context 16 --batch_size 4"
    arguments += " --max_steps 5 --log_every 1 --sample_tokens 0"
    single, divided = (fork(tmp_path / c, c, TRANSFORMER, arguments) for c in ("single", "tensor_parallel"))
    assert divided.column("train/loss") == pytest.approx(single.column("train/loss"), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(divided.output_dir / "model")
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, single.weights[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("config", "num_parts"), [("fsdp2", 2), ("hsdp", 2), ("fsdp2_tensor_parallel", 4)])
def test_accumulated_gradients_are_divided_as_the_weights_are(tmp_path: Path, config: str, num_parts: int) -> None:
    """Between two micro-batches, a process holds the gradients of its own part of the weights, not of all.

    The median, because a thread of gloo that the machine runs late may hold the sum of one layer a little longer.
    """
    run = fork(tmp_path / "run", config, HELD)
    for path in sorted(run.output_dir.glob("held_*.txt")):
        whole, *held = map(int, path.read_text().split())
        first, *others = held[len(held) // 2 :]  # of the second step
        assert median(others) - first == pytest.approx(whole / num_parts, rel=0.1)


@pytest.mark.parametrize(
    ("config", "num_processes", "is_tied"),
    [
        ("fsdp2", 2, False),
        *(
            pytest.param(config, num_processes, is_tied, marks=pytest.mark.full)
            for config, num_processes in (("fsdp2", 4), ("fsdp2_tensor_parallel", 4), ("pipeline_parallel", 2))
            for is_tied in (False, True)
        ),
    ],
)
def test_process_reads_its_part_of_the_weights(tmp_path: Path, config: str, num_processes: int, is_tied: bool) -> None:
    """Besides, it needs no more than one whole tensor of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

    for name, hidden_size, vocab_size in (("model_small", 16, 256), ("model", 512, 16000)):
        shape = LlamaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=6,
            num_attention_heads=4,
            tie_word_embeddings=is_tied,
        )
        model = LlamaForCausalLM(shape).bfloat16()
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    whole, largest = sum(weight.numel() * 4 for weight in model.parameters()), 512 * 16000 * 4
    stages = " --pipeline_stages 2" * (config == "pipeline_parallel")
    run = fork(tmp_path / "run", config, LOADED, f"--model {tmp_path / 'model'}{stages}", num_processes)
    paths = sorted(run.output_dir.glob("loaded_*.txt"))
    assert len(paths) == num_processes
    for path in paths:
        rise, own = map(int, path.read_text().split())
        assert own < 0.7 * whole
        assert rise < own + largest + 30e6


def test_accumulation_of_deepspeed_may_be_auto(tmp_path: Path, reference: Callable[..., Run]) -> None:
    """The word of many files of others; the number follows from the flags."""
    text = (CONFIGS / "deepspeed_zero2.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text + "  gradient_accumulation_steps: auto\n")
    script, arguments = RECIPES["linear regression"]
    run = fork(tmp_path / "run", tmp_path / "config.yaml", script, f"{arguments} --micro_batch_size 8")
    assert run.card["gradient_accumulation_steps"] == 4
    assert_same_result(run, reference(script, arguments))


@pytest.mark.full
def test_a_file_of_deepspeed_may_say_auto(tmp_path: Path, reference: Callable[..., Run]) -> None:
    """Also for what Accelerate computes from the hidden size, which this model does not have."""
    keys = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto", **dict.fromkeys(keys, "auto")}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    file, config = tmp_path / "deepspeed.json", tmp_path / "config.yaml"
    file.write_text(json.dumps({"zero_optimization": zero, **dict.fromkeys(sizes, "auto")}))
    section = {"deepspeed_config_file": str(file)}
    config.write_text(json.dumps({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}))
    script, arguments = RECIPES["linear regression"]
    assert_same_result(fork(tmp_path / "run", config, script, arguments), reference(script, arguments))
