"""Promise: processes that share the experts of each layer give the result of one process, or are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from support.launching import fork
from support.recipes import FINETUNE, RECIPES, TRANSFORMER
from support.runs import Run, assert_same_result, refused

SCRIPT, ARGUMENTS = RECIPES["experts"]
CONFIG = "fsdp2_expert_parallel"
SIZES = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None},
    **{"pad_token_id": None, "num_experts_per_tok": 2},
}
# {name: its own sizes}; what each has that others lack: tied weights, noise before the router, a shared expert, biases.
MODELS = {
    "Mixtral": {"num_local_experts": 4, "tie_word_embeddings": True, "router_jitter_noise": 0.1},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


def made(folder: Path, name: str) -> Path:
    """A folder with a mixture of experts with random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if name == "GptOss" else "sdpa")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + 0.02 * torch.randn_like(weight))  # some start as zeros, and their experts as equals
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_processes", "flags"),
    [
        (4, "--expert_parallel 2 --micro_batch_size 2 --router_loss 0.1"),
        (4, "--expert_parallel 4 --activation_checkpointing"),
        (2, "--expert_parallel 2 --max_grad_norm 0.05 --ema_decay 0.9"),
    ],
)
def test_with_replicas_and_accumulation(
    tmp_path: Path, reference: Callable[..., Run], num_processes: int, flags: str
) -> None:
    run = fork(tmp_path / "run", CONFIG, SCRIPT, f"{ARGUMENTS} {flags}", num_processes)
    assert run.card["parallelism"] == f"FSDP2 × EP {flags.split()[1]}"
    alone = " ".join(flags.split()[2:]).replace("--micro_batch_size 2", "")
    assert_same_result(run, reference(SCRIPT, f"{ARGUMENTS} {alone}"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Mixtral", CONFIG),
        *(pytest.param(one, CONFIG, marks=pytest.mark.full) for one in MODELS if one != "Mixtral"),
        *(pytest.param(one, "fsdp2_tensor_parallel", marks=pytest.mark.full) for one in ("Qwen2Moe", "Qwen3Moe")),
    ],
)
def test_models_of_transformers(tmp_path: Path, name: str, config: str) -> None:
    """Conversations have different lengths, so that the processes have different numbers of tokens."""
    model = made(tmp_path / "model", name)
    attention = " --attention eager" if name == "GptOss" else ""
    flags = f"--model_name_or_path {model} --max_length 96 --batch_size 4 --micro_batch_size 2 --learning_rate 1e-3"
    flags += f" --max_steps 8 --log_every 1 --eval_every 8 --num_answers 0{attention}"
    run = fork(tmp_path / "run", config, FINETUNE, f"{flags} --expert_parallel 2")
    one = fork(tmp_path / "one", "single", FINETUNE, flags)
    assert_same_result(run, one)
    exported, weights = AutoModelForCausalLM.from_pretrained(run.output_dir / "model"), dict[str, torch.Tensor]()
    weights = load_file(run.output_dir / "model" / "model.safetensors")
    for key, weight in exported.state_dict().items():
        assert torch.equal(weight, weights[key]), key


@pytest.mark.full
def test_an_expert_that_gets_no_token(tmp_path: Path) -> None:
    """Its weights decay as on one process, also where a process has no other experts."""
    torch.manual_seed(0)
    folder = made(tmp_path / "model", "Mixtral")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[2:] = -layer.mlp.gate.weight.data[:2].abs() * 100  # the second process's experts
        layer.post_attention_layernorm.weight.data.abs_()
    model.save_pretrained(folder)
    flags = (
        f"--model_name_or_path {folder} --context 16 --batch_size 4 --micro_batch_size 2 --max_steps 4 --log_every 1 "
    )
    flags += "--eval_every 4 --sample_tokens 0 --learning_rate 1e-3"
    run = fork(tmp_path / "run", CONFIG, TRANSFORMER, f"{flags} --expert_parallel 2")
    assert_same_result(run, fork(tmp_path / "one", "single", TRANSFORMER, flags))


@pytest.mark.parametrize(
    ("config", "script", "flags", "line"),
    [
        (
            CONFIG,
            SCRIPT,
            f"{ARGUMENTS} --num_experts 3",
            "has 3 experts, not divisible by 2 processes: use",
        ),
        (
            "ddp",
            *RECIPES["transformer"],
            "--router_loss: no router of LlamaForCausalLM chooses by probability alone",
        ),
        ("sequence_parallel", SCRIPT, f"{ARGUMENTS} --router_loss 0.2", "MixtralForCausalLM cannot divide sequences"),
        (CONFIG, *RECIPES["mnist cnn"], "ConvNet has no experts of transformers 5 to divide: remove --expert_parallel"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: str, script: str, flags: str, line: str) -> None:
    more = " --expert_parallel 2"
    if "--router_loss" in line + flags:
        more = " --router_loss 0.1"
    run = fork(tmp_path / "run", config, script, f"{flags}{more}", succeeds=False)
    assert line in refused(run)


def test_a_number_of_processes_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", CONFIG, SCRIPT, f"{ARGUMENTS} --expert_parallel 2", 3, succeeds=False)
    assert "--expert_parallel 2 does not divide 3 processes: use --num_processes 2 after accelerate" in refused(run)


@pytest.mark.full
def test_in_bf16(tmp_path: Path) -> None:
    options, flags = "--mixed_precision bf16", f"{ARGUMENTS} --learning_rate 1e-3"
    run = fork(tmp_path / "run", CONFIG, SCRIPT, f"{flags} --expert_parallel 2", options=options)
    one = fork(tmp_path / "one", "single", SCRIPT, flags, options=options)
    for here, there in zip(run.column("train/loss"), one.column("train/loss"), strict=True):
        assert here == pytest.approx(there, rel=0.01)
