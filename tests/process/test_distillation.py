"""Promise: distillation.py takes the steps of TRL's GKD without texts of the student, and of NeMo Automodel's recipe,
and has one result with a frozen teacher, with all weights or with adapters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from accelerate_recipes.common.tasks.chat.chats import PAD_CHATS, ChatDataset, load_chats
from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused

SCRIPT, ARGUMENTS = RECIPES["distillation"]
WORDS = ["red", "blue", "green", "small", "large", "round", "flat", "old"]
IGNORED = -100


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Words, and the same words from the last to the first."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        size = int(torch.randint(1, 4, (), generator=generator))
        words = [WORDS[each] for each in torch.randint(8, (size,), generator=generator)]
        texts = {"user": " ".join(words), "assistant": " ".join(reversed(words))}
        found.append({"messages": [{"role": role, "content": text} for role, text in texts.items()]})
    return found


def write_llama(folder: Path, seed: int, vocab_size: int = 256, num_layers: int = 1) -> Any:
    """A small Llama whose tokens are bytes, with large weights, so that it predicts something; and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate_recipes.common.tasks.chat.chat_models import small_chat_model

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": num_layers}
    ends = {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **sizes, **ends))
    model.save_pretrained(folder)
    small_chat_model(64, "sdpa")[1].save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher with more rows for tokens, and conversations."""
    folder = tmp_path_factory.mktemp("distillation")
    write_llama(folder / "student", 0, num_layers=2)
    write_llama(folder / "teacher", 1, vocab_size=272, num_layers=2)
    peers.write_parts(folder, rows)
    return folder


def flags_of(folder: Path) -> str:
    models = f"--model_name_or_path {folder / 'student'} --teacher {folder / 'teacher'} --max_length 64"
    return f"{peers.FLAGS} --data {folder} {models} --num_answers 0"


class Distilled:
    """A student whose loss is that of the papers, over the tokens of the answers."""

    def __init__(self, student: Any, teacher: Any, beta: float, temperature: float, kd_ratio: float):
        self.student, self.teacher, self.parameters = student, teacher.eval(), student.parameters
        self.beta, self.temperature, self.kd_ratio = beta, temperature, kd_ratio

    def __call__(self, tokens: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        trained = labels != IGNORED
        logits = self.student(input_ids=tokens).logits[trained]
        with torch.no_grad():
            wanted = self.teacher(input_ids=tokens).logits[..., : logits.shape[-1]][trained]
        student, teacher = (Categorical(logits=each / self.temperature) for each in (logits, wanted))
        if self.beta in (0, 1):
            pair = (teacher, student) if self.beta == 0 else (student, teacher)
            divergence = kl_divergence(*pair)
        else:
            mixture = Categorical(probs=self.beta * teacher.probs + (1 - self.beta) * student.probs)
            parts = kl_divergence(teacher, mixture), kl_divergence(student, mixture)
            divergence = self.beta * parts[0] + (1 - self.beta) * parts[1]
        kd_loss = self.temperature**2 * divergence.mean()  # TRL leaves out the square
        cross_entropy = F.cross_entropy(logits, labels[trained])
        return SimpleNamespace(loss=self.kd_ratio * kd_loss + (1 - self.kd_ratio) * cross_entropy)


@pytest.mark.parametrize(
    ("beta", "temperature", "kd_ratio"),
    [
        (0.0, 2.0, 0.5),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((0.0, 1.0, 1.0), (1.0, 0.9, 1.0), (0.5, 1.5, 1.0))),
    ],
)
def test_losses_are_those_of_peers(
    tmp_path: Path, folder: Path, beta: float, temperature: float, kd_ratio: float
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = f"{flags_of(folder)} --beta {beta} --temperature {temperature} --kd_ratio {kd_ratio}"
    run = fork(tmp_path / "run", "single", SCRIPT, flags)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    train, held_out = (ChatDataset(part) for part in load_chats(str(folder), tokenizer, 64, "messages"))
    distilled = Distilled(student, teacher, beta, temperature, kd_ratio)
    expected = peers.losses(distilled, [train[row] for row in range(len(train))], PAD_CHATS)
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    batch = PAD_CHATS([held_out[row] for row in range(len(held_out))])
    best = [model(input_ids=batch["tokens"]).logits[..., :256].argmax(-1) for model in (student, teacher)]
    trained = batch["labels"] != IGNORED
    agreement = (best[0] == best[1])[trained].float().mean()
    assert run.column("eval/agreement")[-1] == pytest.approx(float(agreement), abs=1e-3)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("fsdp2", " --lora_rank 2"),
        *(
            pytest.param(config, more, marks=pytest.mark.full)
            for config in ("ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3", "tensor_parallel", "pipeline_parallel")
            for more in ("", " --lora_rank 2")
            if (config, more) != ("fsdp2", " --lora_rank 2")
        ),
    ],
)
def test_one_result(tmp_path: Path, folder: Path, config: str, more: str) -> None:
    """With a pretrained teacher, which stays as it is."""
    flags, stages = flags_of(folder) + more, " --pipeline_stages 2" * (config == "pipeline_parallel")
    before = (folder / "teacher" / "model.safetensors").read_bytes()
    expected, run = (fork(tmp_path / n, n, SCRIPT, flags + own) for n, own in (("single", ""), (config, stages)))
    if more:
        assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= 1e-5
    else:
        assert_same_result(run, expected)
    assert (folder / "teacher" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--data chats.jsonl", "--teacher is missing: use the path or Hub id of a chat model with the same tokenizer"),
        ("--teacher nowhere", "--teacher nowhere: no causal model there"),
        (
            "--loss_chunk 64",
            "--loss_chunk does not work here: a teacher is compared at all tokens at once: leave it out",
        ),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))


def test_a_teacher_with_other_tokens(tmp_path: Path, folder: Path) -> None:
    write_llama(tmp_path / "other", 0)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    file.write_text(json.dumps(content))
    flags = f"{flags_of(folder)} --teacher {tmp_path / 'other'}"
    line = refused(fork(tmp_path / "run", "single", SCRIPT, flags, succeeds=False))
    assert f"--teacher {tmp_path / 'other'} and the student differ in their tokens" in line


@pytest.mark.full
def test_rules(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT)
    assert run.column("eval/agreement")[-1] > 0.95


@pytest.mark.full
def test_small_updates_of_bf16_weights(tmp_path: Path) -> None:
    """DeepSpeed's weights begin with the bits of bf16, so that the first small updates have no effect on a pass."""
    fork(tmp_path / "run", "deepspeed_zero2_bf16", SCRIPT, "--max_steps 3")
