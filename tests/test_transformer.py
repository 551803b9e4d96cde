"""Promise: the language model learns what it is given, and what it exports is a model of transformers."""

import math
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from common.config import parse
from common.errors import UsageError
from common.language_models import byte_tokenizer
from common.text import IGNORED, TokenDataset, load_tokens
from launching import ROOT, launch
from small_model import write_model

SCRIPT = "recipes/transformer.py"
RECIPE = runpy.run_path(str(ROOT / SCRIPT))
SMALL = "--context 16 --batch_size 8 --num_layers 1 --hidden_size 32 --num_heads 2"
REAL_DATA = os.environ.get("ACCELERATE_RECIPES_DATA")


@pytest.mark.parametrize("num_tokens", [2, 5, 9, 10])
def test_each_token_but_the_first_is_predicted_once(num_tokens: int) -> None:
    tokens = torch.arange(100, 100 + num_tokens)
    dataset = TokenDataset(tokens, context=4, drop_last=False)
    batch = dataset.__getitems__(list(range(len(dataset))))
    counted = batch["labels"] != IGNORED
    assert batch["labels"][counted].tolist() == tokens[1:].tolist()
    assert torch.equal(batch["tokens"][counted] + 1, batch["labels"][counted])
    assert torch.equal(batch["weight"], counted.sum(1).float())
    training = TokenDataset(tokens, context=4, drop_last=True)
    assert len(training) == (num_tokens - 1) // 4
    if len(training):
        assert "weight" not in training[0] and (training.__getitems__([0])["labels"] != IGNORED).all()


def test_bytes_are_the_tokens() -> None:
    text = "naïve 日本\n\tdef f(): pass\x00"
    tokenizer = byte_tokenizer()
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_files_of_a_folder_and_the_last_tenth_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 70)
    (tmp_path / "b.txt").write_text("b" * 29)
    train_set, eval_set = load_tokens(str(tmp_path), byte_tokenizer(), 8)
    assert bytes(train_set.tokens[:90].tolist()) == b"a" * 70 + b"\n" + b"b" * 19
    assert bytes(eval_set.tokens[:10].tolist()) == b"b" * 10


@pytest.mark.parametrize("config", [pytest.param("ddp", marks=pytest.mark.full), "deepspeed_zero3"])
def test_exported_model_is_one_of_transformers_and_writes(tmp_path: Path, config: str) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    arguments = f"--data {tmp_path / 'text.txt'} {SMALL} --max_steps 200 --learning_rate 1e-2 --warmup_steps 5"
    run = launch(tmp_path / "run", config, SCRIPT, arguments)
    model = AutoModelForCausalLM.from_pretrained(run.output_dir / "model")
    assert type(model) is LlamaForCausalLM
    _, eval_set = load_tokens(str(tmp_path / "text.txt"), AutoTokenizer.from_pretrained(run.output_dir / "model"), 16)
    batch = eval_set.__getitems__(list(range(len(eval_set))))
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED).item()
    assert run.column("eval/loss")[-1] == pytest.approx(loss, rel=1e-5)
    assert run.column("eval/perplexity")[-1] == pytest.approx(math.exp(loss), rel=1e-5)
    assert loss < 1.5  # from 5.5: it learned the sentence
    assert run.column("tokens_per_second") and run.column("tokens_per_second")[0] > 0
    written = run.stdout.split("eval/perplexity")[-1].split("\n", 1)[1]
    assert len(written) > 100 and len(re.findall("quick|brown|jumps|over|lazy", written)) >= 5


def test_activation_checkpointing_and_eager_attention_change_nothing(tmp_path: Path) -> None:
    arguments = f"--data {ROOT / 'README.md'} {SMALL} --max_steps 5 --log_every 1 --sample_tokens 0"
    plain = launch(tmp_path / "plain", "ddp", SCRIPT, arguments)
    other = launch(tmp_path / "other", "ddp", SCRIPT, f"{arguments} --activation_checkpointing --attention eager")
    assert other.column("train/loss") == pytest.approx(plain.column("train/loss"), rel=1e-5)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny", num_positions=48)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    return tmp_path / "tiny"


def test_fine_tuning_goes_on_from_an_existing_model(tmp_path: Path, tiny_model: Path) -> None:
    arguments = f"--data {tmp_path / 'words.txt'} --model_name_or_path {tiny_model} --context 16 --batch_size 4"
    run = launch(tmp_path / "run", "ddp", SCRIPT, f"{arguments} --max_steps 20 --log_every 1 --sample_tokens 8")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.tensor([[1, 2, 3, 4] * 4])
    with torch.no_grad():
        logits = model(tokens).logits
    first = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.tensor([[2, 3, 4, 1] * 4])).item()
    assert run.column("train/loss")[0] == pytest.approx(first, rel=1e-5)
    assert run.column("train/loss")[-1] < 0.9 * first
    exported = AutoTokenizer.from_pretrained(run.output_dir / "model")
    assert exported("one four")["input_ids"] == [1, 4]


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ("", "", "is empty: expected text"),
        ("short", "", "has 4 tokens to train on and 1 to evaluate: a block needs 65"),
        (b"\xff\xfe\x00binary", "", "is not text in UTF-8 (invalid start byte at byte 0)"),
        (None, "", "no such file or folder; type --data stdlib"),
        ("x" * 900, "--model_name_or_path ./nothing", "--model_name_or_path ./nothing: no causal model there"),
        (
            "x" * 900,
            "--num_heads 3",
            "--hidden_size 128 does not divide into 3 heads of even width: type --hidden_size 126",
        ),
        ("x" * 900, "--model_name_or_path TINY --context 64", "--context 64 is more than the 48 of that model"),
    ],
)
def test_bad_input(
    tmp_path: Path, tiny_model: Path, content: str | bytes | None, arguments: str, expected: str
) -> None:
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    arguments = arguments.replace("TINY", str(tiny_model))
    config = parse(RECIPE["Config"], ["--data", str(path), *arguments.split()])
    with pytest.raises(UsageError, match=re.escape(expected)):
        _, tokenizer = RECIPE["build"](config)
        load_tokens(config.data, tokenizer, config.context)


@pytest.mark.full
@pytest.mark.skipif(not REAL_DATA, reason="ACCELERATE_RECIPES_DATA names no folder of real data")
def test_tinyshakespeare(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "ddp", SCRIPT, f"--data {REAL_DATA}/tinyshakespeare.txt --weight_decay 0")
    assert run.column("eval/loss")[-1] <= 1.70
