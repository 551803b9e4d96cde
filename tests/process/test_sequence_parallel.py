"""Promise: processes that share the tokens of each sample give the result of one process, or are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.launching import CONFIGS, fork
from support.recipes import MNIST, RECIPES, TRANSFORMER
from support.runs import Run, assert_same_result, refused, weight_distance

SCRIPT, ARGUMENTS = RECIPES["transformer"]
REFUSED = {
    "5 heads": "LlamaForCausalLM has 5 attention heads, not divisible by {} processes: use sp_size 5 in",
    "eager": "attention eager cannot divide sequences: use --attention sdpa",
    "mamba": "MambaForCausalLM's attention cannot divide sequences: use --config_file",
    "bloom": "BloomForCausalLM's attention cannot divide sequences: use --config_file",
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_losses_and_gradients_of_many_models(tmp_path: Path, size: int) -> None:
    """Also those of which a sample has a length that does not divide, several documents, or few trained tokens."""
    options = f"--parallelism_config_sp_size {size}"
    run = fork(tmp_path / "run", "sequence_parallel", "tests/scripts/slices.py", "", size, options)
    results = json.loads(run.stdout.splitlines()[-1])
    for case, found in results.items():
        if case in REFUSED:
            assert found.startswith(REFUSED[case].format(size)), case
        else:
            assert max(found) <= (0.02 if case == "bf16" else 1e-6), case
    assert len(results) == 22


@pytest.mark.full
def test_packed_conversations(tmp_path: Path, reference: Callable[..., Run]) -> None:
    script, arguments = RECIPES["finetune"]
    arguments += " --packing --loss_chunk 64"
    run = fork(tmp_path / "run", "sequence_parallel", script, arguments)
    assert_same_result(run, reference(script, arguments))


@pytest.mark.full
def test_resumed_run_goes_on_as_the_undisturbed_one(tmp_path: Path) -> None:
    arguments = f"{ARGUMENTS} --max_steps 6 --save_every 3"
    whole = fork(tmp_path / "whole", "sequence_parallel", SCRIPT, arguments)
    path = whole.output_dir / "checkpoints" / "step_00000003"
    run = fork(tmp_path / "run", "sequence_parallel", SCRIPT, f"{arguments} --resume_from_checkpoint {path}")
    assert run.column("train/loss") == whole.column("train/loss")[3:] and weight_distance(run, whole) == 0


def write(folder: Path, model: Any) -> str:
    """Flags for a model with the tokens of bytes, which this writes into the folder."""
    from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return f"{ARGUMENTS} --model_name_or_path {folder} --max_steps 2"


def test_layers_that_need_all_tokens_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kinds = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
    config = transformers.Lfm2Config(**shape, **ids, **kinds, max_position_embeddings=64)
    flags = write(tmp_path / "lfm2", transformers.Lfm2ForCausalLM(config))
    lines = fork(tmp_path / "run", "sequence_parallel", TRANSFORMER, flags, succeeds=False)
    assert "SP 2 does not give the result of one process: in step 1, " in refused(lines)
    assert "likely cause: a layer other than attention needs all tokens of a sample" in lines.stdout + lines.stderr


@pytest.mark.parametrize(
    ("config", "script", "flags", "options", "expected"),
    [
        ("sequence_parallel", MNIST, "", "", "ConvNet cannot divide sequences: use --config_file accelerate_config"),
        ("sequence_parallel", TRANSFORMER, f"{ARGUMENTS} --attention eager", "", "use --attention sdpa"),
    ],
)
def test_what_cannot_run(tmp_path: Path, config: str, script: str, flags: str, options: str, expected: str) -> None:
    run = fork(tmp_path / "run", config, script, flags, options=options, succeeds=False)
    assert expected in refused(run)


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    section = "parallelism_config:\n  parallelism_config_sp_size: 2\n"
    (tmp_path / "config.yaml").write_text((CONFIGS / "deepspeed_zero2.yaml").read_text() + section)
    run = fork(tmp_path / "run", tmp_path / "config.yaml", SCRIPT, ARGUMENTS, succeeds=False)
    assert "SP does not combine with DeepSpeed: use a config of FSDP2, such as --config_file" in refused(run)


def test_dropout_is_refused(tmp_path: Path) -> None:
    shape = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=256, bos_token_id=None, eos_token_id=None
    )
    flags = write(tmp_path / "gpt2", transformers.GPT2LMHeadModel(shape))
    run = fork(tmp_path / "run", "sequence_parallel", TRANSFORMER, flags, succeeds=False)
    assert "SP 2 does not give the result of one process: in step 1, " in refused(run)
    assert "draws random numbers, or needs all tokens of a sample, as convolutions do" in run.stdout + run.stderr
    run = fork(tmp_path / "unchecked", "sequence_parallel", TRANSFORMER, f"{flags} --check_steps 0", succeeds=False)
    assert "the forward pass draws random numbers, such as dropout, and SP 2 divides it" in refused(run)
