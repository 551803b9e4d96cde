"""Promise: fine-tuning gives one result under every config, packed or not, with all weights or with adapters."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.launching import execute, fork
from support.recipes import FINETUNE, RECIPES
from support.runs import ROOT, TOLERANCE, Run, largest_difference, refused, weight_distance
from support.small_model import write_model

SHORT = "--max_length 96 --batch_size 8 --max_steps 6 --log_every 1 --eval_every 6 --num_answers 0"
LORA = f"{SHORT} --lora_rank 4 --learning_rate 1e-2 --save_every 3 --keep_checkpoints 9"
SOME = ["ddp", *(pytest.param(one, marks=pytest.mark.full) for one in ("fsdp2", "deepspeed_zero2", "deepspeed_zero3"))]


def assert_close(run: Run, expected: Run) -> None:
    for name in (f"{kind}/{name}" for kind in ("train", "eval") for name in ("loss", "token_accuracy", "entropy")):
        assert run.column(name) and largest_difference(run.column(name), expected.column(name)) <= TOLERANCE


@pytest.fixture(scope="module")
def base(reference: Callable[..., Run]) -> Path:
    """A small chat model with its tokenizer."""
    return reference(FINETUNE, SHORT).output_dir / "model"


@pytest.mark.parametrize("config", [*SOME, pytest.param("tensor_parallel", marks=pytest.mark.full)])
def test_packed_conversations(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    expected = reference(FINETUNE, f"{SHORT} --packing")
    run = fork(tmp_path / "run", config, FINETUNE, f"{SHORT} --packing --micro_batch_size 2 --loss_chunk 100")
    assert_close(run, expected)
    assert weight_distance(run, expected) <= TOLERANCE


def test_a_rehearsal_leaves_weights_on_disk(tmp_path: Path) -> None:
    """Steps so fast that the tenth is rehearsed. Otherwise the first process would hold weights when the layers are
    divided, and the others, whose weights are on disk, would not take part."""
    write_model(tmp_path / "model", num_positions=64)
    chat = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    flags = f"{SHORT} --max_length 64 --max_steps 10 --eval_every 10 --learning_rate 1e-3 --data {tmp_path}/chats.jsonl"
    flags += f" --model_name_or_path {tmp_path}/model"
    single, run = (fork(tmp_path / name, name, FINETUNE, flags) for name in ("single", "tensor_parallel"))
    assert_close(run, single)


def test_evaluation_does_not_depend_on_packing(tmp_path: Path, base: Path) -> None:
    """At a tiny learning rate, so that both evaluate the weights of `base`."""
    runs = [
        fork(tmp_path / f"run{flags}", "single", FINETUNE, f"{SHORT} --max_steps 1 --learning_rate 1e-30 "
             f"--model_name_or_path {base}{flags}")
        for flags in ("", " --packing")
    ]  # fmt: skip
    assert largest_difference(*(run.column("eval/loss") for run in runs)) <= 1e-6
    assert runs[0].column("train/loss") != runs[1].column("train/loss")


@pytest.mark.full
@pytest.mark.parametrize(
    "config", ["deepspeed_zero2", *(pytest.param(one, marks=pytest.mark.full) for one in ("fsdp2", "deepspeed_zero3"))]
)
def test_logits_of_some_tokens(tmp_path: Path, reference: Callable[..., Run], config: str) -> None:
    """Micro-batches of different lengths take the same number of chunks, as ZeRO needs."""
    flags = f"{SHORT} --micro_batch_size 2"
    run = fork(tmp_path / "run", config, FINETUNE, f"{flags} --loss_chunk 40 --activation_checkpointing")
    assert_close(run, reference(FINETUNE, flags))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_other_optimizers(tmp_path: Path, reference: Callable[..., Run], optimizer: str) -> None:
    flags = f"{SHORT} --optimizer {optimizer}"
    expected = reference(FINETUNE, flags)
    assert_close(fork(tmp_path / "ddp", "ddp", FINETUNE, flags), expected)
    sharded = fork(tmp_path / "fsdp2", "fsdp2", FINETUNE, flags, succeeds=optimizer == "sgd")
    if optimizer == "sgd":
        assert_close(sharded, expected)
    else:
        line = refused(sharded)
        assert (
            line.startswith("error: FSDP2 cannot train this: ") and "use --config_file accelerate_configs/ddp" in line
        )


@pytest.fixture(scope="module")
def adapted(reference: Callable[..., Run], base: Path) -> Run:
    return reference(FINETUNE, f"{LORA} --model_name_or_path {base} --merge")


def adapters(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.output_dir / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "config", [*SOME, *(pytest.param(f"{one}tensor_parallel", marks=pytest.mark.full) for one in ("", "fsdp2_"))]
)
def test_adapters(tmp_path: Path, base: Path, adapted: Run, config: str) -> None:
    """The same adapters as in one process, also after a resume from the checkpoint of one process."""
    path = adapted.output_dir / "checkpoints" / "step_00000003"
    for flags, first in (("", 0), (f" --resume_from_checkpoint {path}", 3)):
        run = fork(tmp_path / f"run{first}", config, FINETUNE, f"{LORA} --model_name_or_path {base}{flags}")
        assert "trainable: " in run.stdout
        assert largest_difference(run.column("train/loss"), adapted.column("train/loss")[first:]) <= TOLERANCE
        ours, theirs = adapters(run), adapters(adapted)
        assert ours.keys() == theirs.keys() and all((ours[name] - theirs[name]).abs().max() <= 1e-5 for name in ours)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("tensor_parallel", "--lora_rank 1"),  # nothing divides the rank
        ("tensor_parallel", "--lora_targets q_proj,down_proj"),
        ("fsdp2_tensor_parallel", ""),
        ("fsdp2_tensor_parallel", "--lora_rank 1"),  # some processes hold no element of an adapter
        ("fsdp2", "--lora_rank 1"),
    ],
)
def test_adapters_of_divided_layers_resume_under_ddp(tmp_path: Path, base: Path, config: str, more: str) -> None:
    """The norm of the gradient is that of whole and divided adapters together."""
    flags = f"{LORA} --model_name_or_path {base} {more}"
    expected = fork(tmp_path / "single", "single", FINETUNE, flags)
    divided = fork(tmp_path / "divided", config, FINETUNE, f"{flags} --micro_batch_size 2 --activation_checkpointing")
    path = divided.output_dir / "checkpoints" / "step_00000003"
    resumed = fork(tmp_path / "resumed", "ddp", FINETUNE, f"{flags} --resume_from_checkpoint {path}")
    for run, first in ((divided, 0), (resumed, 3)):
        assert largest_difference(run.column("train/loss"), expected.column("train/loss")[first:]) <= TOLERANCE
        assert largest_difference(run.column("grad_norm"), expected.column("grad_norm")[first:]) <= 10 * TOLERANCE
        ours, theirs = adapters(run), adapters(expected)
        assert ours.keys() == theirs.keys() and all((ours[name] - theirs[name]).abs().max() <= 1e-5 for name in ours)


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_adapters_go_on_with_dropout(tmp_path: Path, base: Path, config: str) -> None:
    """Dropout depends on the micro-batch and not on the process. The second run begins with what the first has made."""
    flags = f"{LORA} --lora_dropout 0.3 --lora_alpha 4 --micro_batch_size 2 --model_name_or_path {base}"
    first = fork(tmp_path / "first", "single", FINETUNE, flags)
    run = fork(tmp_path / "run", config, FINETUNE, flags)
    assert_close(run, first)
    flags = f"{SHORT} --micro_batch_size 2 --learning_rate 1e-2 --model_name_or_path {first.output_dir}/model"
    expected = fork(tmp_path / "second", "single", FINETUNE, flags)
    onward = fork(tmp_path / "onward", config, FINETUNE, f"{flags} --merge")
    assert_close(onward, expected)
    ours, theirs = adapters(onward), adapters(expected)
    assert ours.keys() == theirs.keys() and all((ours[name] - theirs[name]).abs().max() <= 1e-5 for name in ours)
    settings = json.loads((onward.output_dir / "model" / "adapter_config.json").read_text())
    assert settings["lora_alpha"] == 4 and settings["lora_dropout"] == 0.3
    assert settings["base_model_name_or_path"] == str(base.resolve())
    still = fork(tmp_path / "still", "single", FINETUNE, f"{flags} --max_steps 1 --learning_rate 1e-30")
    assert largest_difference(still.column("eval/loss"), first.column("eval/loss")) <= 1e-6


def write_chat_model(folder: Path) -> None:
    """Writes a Llama in bfloat16 whose template ends an answer with another token than its settings of generation.
    transformers reads these settings, but would not write them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for one in messages %}{{ '<|im_start|>' + one['role'] + ' ' + one['content'] + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **shape, **ends)).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 256, "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(settings))


def test_adapter_merged_and_full_model_end_alike(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_chat_model(tmp_path / "base")
    flags = f"{SHORT} --max_steps 1 --learning_rate 1e-30 --model_name_or_path {tmp_path / 'base'}"
    full = fork(tmp_path / "full", "single", FINETUNE, flags).output_dir / "model"
    lora = fork(tmp_path / "lora", "ddp", FINETUNE, f"{flags} --lora_rank 2 --merge").output_dir
    tokens = torch.arange(40, 60).unsqueeze(0)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (full, lora / "merged", lora / "model")]
    for model in models:
        assert model.generation_config.eos_token_id == [258, 256] and model.generation_config.temperature == 0.9
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, models[0](tokens).logits)
    written = [load_file(folder / "model.safetensors") for folder in (full, lora / "merged")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(weight, written[1][name]) for name, weight in written[0].items())
    assert {weight.dtype for weight in written[1].values()} == {torch.bfloat16}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (full, lora / "merged")]
    assert configs[0] == configs[1]


def test_checkpoints_and_exports_hold_adapters_alone(tmp_path: Path, base: Path, adapted: Run) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    size = (base / "model.safetensors").stat().st_size
    shard = adapted.output_dir / "checkpoints" / "step_00000006" / "shard_00000.safetensors"
    assert shard.stat().st_size < size / 4 and not (adapted.output_dir / "model" / "model.safetensors").exists()
    tokens = torch.arange(40, 80).unsqueeze(0)
    with torch.no_grad():
        alone = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapted.output_dir / "model")
        merged = AutoModelForCausalLM.from_pretrained(adapted.output_dir / "merged")
        assert (beside(tokens).logits - merged(tokens).logits).abs().max() <= 1e-5
        assert (alone - merged(tokens).logits).abs().max() > 1e-2


@pytest.mark.full
def test_equal_runs_write_equal_files(tmp_path: Path, base: Path, adapted: Run) -> None:
    """Python's sets, and Rust's in safetensors, have another order in each process."""
    arguments = f"{LORA} --model_name_or_path {base} --output_dir {tmp_path / 'run'}".split()
    env = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    run = execute([sys.executable, str(ROOT / FINETUNE), *arguments], tmp_path, tmp_path / "run", env)
    assert run.exit_code == 0, run.stderr
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run.output_dir / "model" / name).read_bytes() == (adapted.output_dir / "model" / name).read_bytes()


@pytest.mark.parametrize("config", ["ddp", pytest.param("tensor_parallel", marks=pytest.mark.full)])
def test_adapters_are_evaluated(tmp_path: Path, base: Path, adapted: Run, config: str) -> None:
    shutil.copytree(adapted.output_dir, tmp_path / "run")
    flags = f"{LORA} --model_name_or_path {base} --evaluate_only"
    fork(tmp_path / "run", config, FINETUNE, flags)
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]["loss"]
    assert abs(found - adapted.column("eval/loss")[-1]) <= 1e-6


def test_adapters_of_another_base_are_refused(tmp_path: Path, adapted: Run) -> None:
    other = fork(tmp_path / "other", "single", FINETUNE, f"{SHORT} --seed 1 --max_steps 1").output_dir / "model"
    path = adapted.output_dir / "checkpoints" / "step_00000003"
    flags = f"{LORA} --model_name_or_path {other} --resume_from_checkpoint {path}"
    assert "was made with base " in refused(fork(tmp_path / "run", "single", FINETUNE, flags, succeeds=False))
    shutil.copytree(adapted.output_dir / "model", tmp_path / "run" / "model")
    flags = f"{LORA} --model_name_or_path {other} --evaluate_only"
    assert "belongs to base " in refused(fork(tmp_path / "run", "single", FINETUNE, flags, succeeds=False))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--max_samples 3", "--max_samples reads rows of a file or of the Hub, and --data rules has none"),
        ("--lora_rank 4", "use --model_name_or_path, too"),
        ("--merge", "use --lora_rank, too"),
        (
            "--max_length 96 --lora_rank 4 --lora_targets q_proj,vproj --model_name_or_path BASE",
            "no layer vproj (the head does not count); use all-linear, or some of down_proj,",
        ),
        ("--model_name_or_path BASE", "--max_length 256 exceeds the model's 96 positions: use --max_length 96"),
        ("--data nowhere.jsonl", "--data nowhere.jsonl: no such file"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, base: Path, flags: str, line: str) -> None:
    run = fork(tmp_path / "run", "single", FINETUNE, flags.replace("BASE", str(base)), succeeds=False)
    assert line in refused(run) and run.exit_code == 2


def test_each_step_has_a_trained_token(tmp_path: Path) -> None:
    """What has none is left out before the steps are planned, also of packed blocks."""
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
    rows = [{"messages": [question, answer] if number % 4 == 0 else [question]} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"{SHORT} --batch_size 1 --data {tmp_path}/chats.jsonl"
    for more in ("", " --packing"):
        run = fork(tmp_path / f"run{more}", "single", FINETUNE, flags + more)
        found = [record["train/loss"] for record in run.records if "train/loss" in record]
        assert len(found) == 6 and None not in found
        assert "of 38 training conversations have no trained token within --max_length 96: left out" in run.stdout


def write_custom(folder: Path, base: Path) -> None:
    """A model whose class lies beside it, as Python code."""
    shutil.copytree(base, folder)
    settings = json.loads((base / "config.json").read_text())
    code = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    settings |= {"auto_map": code, "model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own_config.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
    )
    (folder / "own_model.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .own_config import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )


def test_code_that_a_model_brings_runs_with_a_flag_alone(tmp_path: Path, base: Path) -> None:
    """No question is asked. The exported model has its code, and loads."""
    write_custom(tmp_path / "custom", base)
    env = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    flags = f"{SHORT} --max_steps 1 --model_name_or_path {tmp_path}/custom --num_answers 1"
    run = fork(tmp_path / "refused", "ddp", FINETUNE, flags, env=env, succeeds=False)
    assert "comes with its own Python code: read it, and use --trust_remote_code to run it" in refused(run)
    assert run.exit_code == 2 and "[y/N]" not in run.stdout + run.stderr
    run = fork(tmp_path / "run", "single", FINETUNE, f"{flags} --trust_remote_code", env=env)
    assert "of 1 held-out answers are right" in run.stdout
    for name in ("own_config.py", "own_model.py"):
        assert (run.output_dir / "model" / name).read_text() == (tmp_path / "custom" / name).read_text()


@pytest.mark.full
def test_a_checkpoint_of_a_pipeline_resumes_under_another_config(tmp_path: Path) -> None:
    flags = SHORT.replace("--max_steps 6", "--max_steps 4")
    saved = fork(tmp_path / "saved", "pipeline_parallel", FINETUNE, f"{flags} --save_every 2 --pipeline_stages 2")
    path = saved.output_dir / "checkpoints" / "step_00000002"
    run = fork(tmp_path / "run", "ddp", FINETUNE, f"{flags} --resume_from_checkpoint {path}")
    assert largest_difference(run.column("train/loss"), saved.column("train/loss")[2:]) <= TOLERANCE


@pytest.mark.full
def test_pretrained_model_is_fine_tuned(tmp_path: Path, reference: Callable[..., Run]) -> None:
    pretrained = reference(*RECIPES["transformer"]).output_dir / "model"
    turns = [[{"role": "user", "content": str(row % 10)}, {"role": "assistant", "content": "b"}] for row in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    flags = f"{SHORT} --data {tmp_path}/chats.jsonl --max_length 32 --num_answers 2 --model_name_or_path {pretrained}"
    run = fork(tmp_path / "run", "ddp", FINETUNE, flags)
    assert "the run uses, and exports, a plain one" in run.stdout and "of 2 held-out answers are right" in run.stdout


def test_model_answers(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp_bf16", FINETUNE, SHORT.replace("--num_answers 0", "--num_answers 3"))
    assert "of 3 held-out answers are right" in run.stdout and "% of tokens trained; longest" in run.stdout
