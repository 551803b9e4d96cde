"""Promise: each token of a text but the first is predicted once, or the text is refused in one line."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerate_recipes.common.command_line import parse
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.causal_lm import load_pretrained
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer
from accelerate_recipes.common.tasks.nlp.text import IGNORED, TokenDataset, load_tokens
from support.recipes import TRANSFORMER
from support.runs import ROOT
from support.small_model import write_model

RECIPE = runpy.run_path(str(ROOT / TRANSFORMER))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny", num_positions=48)
    (tmp_path / "words.txt").write_text("one two three four " * 100)
    return tmp_path / "tiny"


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


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ("", "", "is empty: expected text"),
        ("hello world\n".encode("utf-16-le"), "", "holds zero bytes: it is not UTF-8 text; run iconv"),
        ("short", "", "has 4 training and 1 evaluation tokens: a block needs 65"),
        (b"\x89PNG\r\n\x00", "", "is not text in UTF-8 (invalid start byte at byte 0)"),
        (None, "", "no such file or folder; use --data stdlib"),
        ("x" * 900, "--model_name_or_path ./nothing", "--model_name_or_path ./nothing: no causal model there"),
        (
            "x" * 900,
            "--num_heads 3",
            "--hidden_size 128 does not divide into 3 heads of even width: use --hidden_size 126",
        ),
        ("x" * 900, "--model_name_or_path TINY --context 64", "--context 64 exceeds the model's 48 positions"),
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


def test_encoder_is_no_language_model(tmp_path: Path, tiny_model: Path) -> None:
    """An encoder attends to the tokens that it should predict. Its perplexity would fall to 1."""
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(vocab_size=8, **shape)).save_pretrained(tmp_path / "bert")
    for path in tiny_model.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "bert")
    with pytest.raises(UsageError, match="BertLMHeadModel attends to later tokens"):
        load_pretrained(str(tmp_path / "bert"), 16, "eager")


def test_model_that_lacks_weights(tiny_model: Path) -> None:
    path = tiny_model / "model.safetensors"
    weights = load_file(path)
    lost = next(name for name in weights if "q_proj" in name)
    save_file({name: weight for name, weight in weights.items() if name != lost}, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"lacks 1 of the weights of LlamaForCausalLM, such as {lost}"):
        load_pretrained(str(tiny_model), 16, "eager")
