"""Promise: the language model learns its text, and transformers loads the exported model."""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from accelerate_recipes.common.tasks.nlp.text import IGNORED, load_tokens
from support.launching import fork
from support.recipes import TRANSFORMER
from support.runs import ROOT
from support.small_model import write_model

SMALL = "--context 16 --batch_size 8 --num_layers 1 --hidden_size 32 --num_heads 2"
REAL_DATA = os.environ.get("ACCELERATE_RECIPES_DATA")


@pytest.mark.parametrize("config", ["ddp", "deepspeed_zero3"])
def test_exported_model_is_one_of_transformers_and_writes(tmp_path: Path, config: str) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    arguments = f"--data {tmp_path / 'text.txt'} {SMALL} --max_steps 100 --learning_rate 1e-2 --warmup_steps 5"
    run = fork(tmp_path / "run", config, TRANSFORMER, arguments)
    model = AutoModelForCausalLM.from_pretrained(run.output_dir / "model")
    assert type(model) is LlamaForCausalLM
    _, eval_set = load_tokens(str(tmp_path / "text.txt"), AutoTokenizer.from_pretrained(run.output_dir / "model"), 16)
    batch = eval_set.__getitems__(list(range(len(eval_set))))
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED).item()
    assert run.column("eval/loss")[-1] == pytest.approx(loss, rel=1e-5)
    assert run.column("eval/perplexity")[-1] == pytest.approx(math.exp(loss), rel=1e-5)
    assert loss < 1.5  # 5.5 at the start: it has learned the sentence
    assert run.column("tokens_per_second") and run.column("tokens_per_second")[0] > 0
    written = run.stdout.split("eval/perplexity")[-1].split("\n", 1)[1]
    assert len(written) > 100 and len(re.findall("quick|brown|jumps|over|lazy", written)) >= 5


def test_main_process_generates_when_the_others_have_ended(tmp_path: Path) -> None:
    script = "tests/scripts/afterwards.py"
    assert fork(tmp_path / "run", "ddp", script).stdout.count("alone False") == 1
    run = fork(tmp_path / "run", "single", script, env={"AFTERWARDS": "memory"})
    assert "does not fit into the memory of one GPU" in run.stdout


def test_exported_model_generates_in_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    arguments = f"--data {tmp_path / 'text.txt'} {SMALL} --max_steps 100 --learning_rate 1e-2 --warmup_steps 5"
    run = fork(tmp_path / "run", "ddp", TRANSFORMER, f"{arguments} --sample_tokens 0")
    generator = pipeline("text-generation", model=str(run.output_dir / "model"))
    prompt = "the quick"
    (answer,) = generator(prompt, max_new_tokens=7, do_sample=False, return_tensors=True)
    tokens = torch.tensor([list(prompt.encode())])
    own = generator.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=7, do_sample=False)
    assert answer["generated_token_ids"] == own[0].tolist()
    model = AutoModelForCausalLM.from_pretrained(run.output_dir / "model")
    with torch.no_grad():
        for _ in range(7):
            likeliest = model(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, likeliest], 1)
    assert answer["generated_token_ids"] == tokens[0].tolist()
    (text,) = generator(prompt, max_new_tokens=7, do_sample=False)
    assert text["generated_text"] == bytes(tokens[0].tolist()).decode()
    assert len(set(tokens[0, len(prompt) :].tolist())) > 1  # it has learned more than the commonest byte


def test_activation_checkpointing_and_eager_attention_change_nothing(tmp_path: Path) -> None:
    arguments = f"--data {ROOT / 'README.md'} {SMALL} --max_steps 5 --log_every 1 --sample_tokens 0"
    plain = fork(tmp_path / "plain", "ddp", TRANSFORMER, arguments)
    other = fork(tmp_path / "other", "ddp", TRANSFORMER, f"{arguments} --activation_checkpointing --attention eager")
    assert other.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-5)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny", num_positions=48)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    return tmp_path / "tiny"


def test_fine_tuning_goes_on_from_an_existing_model(tmp_path: Path, tiny_model: Path) -> None:
    arguments = f"--data {tmp_path / 'words.txt'} --model_name_or_path {tiny_model} --context 16 --batch_size 4"
    run = fork(tmp_path / "run", "ddp", TRANSFORMER, f"{arguments} --max_steps 20 --log_every 1 --sample_tokens 8")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.tensor([[1, 2, 3, 4] * 4])
    with torch.no_grad():
        logits = model(tokens).logits
    first = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.tensor([[2, 3, 4, 1] * 4])).item()
    assert run.column("train/loss")[0] == pytest.approx(first, rel=1e-5)
    assert run.column("train/loss")[-1] < 0.9 * first
    exported = AutoTokenizer.from_pretrained(run.output_dir / "model")
    assert exported("one four")["input_ids"] == [1, 4]


@pytest.mark.full
@pytest.mark.skipif(not REAL_DATA, reason="needs ACCELERATE_RECIPES_DATA, a folder of real data")
def test_tinyshakespeare(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", TRANSFORMER, f"--data {REAL_DATA}/tinyshakespeare.txt --weight_decay 0")
    # Measured: 1.701; 1.721 with another seed; 1.694 with attention that rounds otherwise.
    assert run.column("eval/loss")[-1] <= 1.75
