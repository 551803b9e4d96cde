"""Promise: texts and classes come from any table, and a broken one gets one line."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.encoder import always_mask, freeze_key_biases, load_encoder, word_tokenizer
from accelerate_recipes.common.tasks.nlp.labelled_texts import EncodedTexts, load_labelled_texts
from accelerate_recipes.common.tasks.reading.labelled import Labelled, balanced_weights
from support.small_model import write_encoder, write_model

NAMES = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


def write(path: Path, *rows: str) -> str:
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_standard_library() -> None:
    train, evaluation = load_labelled_texts("stdlib")
    assert train.classes == ["asyncio", "email", "logging", "multiprocessing", "unittest"]
    assert len(train.samples) > 4 * len(evaluation.samples) - 4 > 4000
    assert not {*train.samples} >= {*evaluation.samples}
    counts = [train.labels.count(number) for number in range(5)]
    assert sum(count * weight for count, weight in zip(counts, balanced_weights([train]))) == pytest.approx(
        len(train.samples)
    )


def test_files(tmp_path: Path) -> None:
    rows = [f"review {number},{'good' if number % 3 else 'bad'}" for number in range(50)]
    train, evaluation = load_labelled_texts(write(tmp_path / "a.csv", "text,label", *rows))
    assert (len(train.samples), len(evaluation.samples), train.classes) == (40, 10, ["bad", "good"])
    json_rows = [f'{{"review": "a {number}", "stars": {number % 2}}}' for number in range(50)]
    train, _ = load_labelled_texts(write(tmp_path / "a.jsonl", *json_rows), "review", "stars")
    assert train.classes == ["0", "1"] and train.samples[0] == "a 0"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (["review,label", "a,b"], "has no column text: use --text_column with one of review, label"),
        (["text, label", "a,b"], "has no column label: use --label_column with one of text, ' label'"),
        (
            [",".join(map(str, range(10_000))), "0," * 9_999 + "0"],
            "has no column text: use --text_column with one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, "
            "16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, "
            "42, 43, 44, 45, 46, 47, 48, 49, ... (10,000 in all)",
        ),
        (["text,stars", "a,b"], "has no column label: use --label_column with one of text, stars"),
        (
            ["text,label", *["a,b"] * 9],
            "8 training and 1 evaluation texts of 1 classes: expected both, and two or more",
        ),
        (["text,label", "a,b", "c,d"], "expected two or more, even without the evaluation's 1 of 2: add texts, or"),
        (["text,label", "a,b", "c,"], "row 2 has no class in column label: fill or remove it"),
    ],
)
def test_broken_files(tmp_path: Path, rows: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        load_labelled_texts(write(tmp_path / "a.csv", *rows))
    with pytest.raises(UsageError, match="no such file"):
        load_labelled_texts(str(tmp_path / "b.csv"))


def test_one_object_that_holds_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"text": "a", "label": ["good", "bad"]}')
    with pytest.raises(UsageError, match=r"use --target classes; it has one row: expected one object per line"):
        load_labelled_texts(path)


def test_words() -> None:
    tokenizer = word_tokenizer(["The cat, the dog", "the cat 42 42"], 100)
    tokens = tokenizer("THE cat, 24 bird")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == ["[CLS]", "the", "cat", "[UNK]", "2", "4", "[UNK]"]
    assert tokenizer.pad_token_id == 0
    train, _ = load_labelled_texts("stdlib")
    some = Labelled(train.samples[:5], train.labels[:5], train.classes)
    dataset = EncodedTexts(some, tokenizer, 6, [2.0, 1.0, 1.0, 1.0, 1.0])
    assert len(dataset[0]["input_ids"]) == 6 and dataset[0]["class_weight"] == 2.0


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
OWN_SIZES = {
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50},
    "DebertaV2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
    "Esm": SIZES | {"position_embedding_type": "rotary", "pad_token_id": 1},
    "ViT": SIZES | {"image_size": 32, "patch_size": 8},
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
}


@pytest.mark.parametrize(
    "kind, number",
    {
        "Bert": 2,
        "MPNet": 2,
        "DistilBert": 2,
        "ViT": 2,
        "Swin": 4,
        "RoFormer": 0,
        "Esm": 0,
        "Yoso": 0,
        "DebertaV2": 0,
    }.items(),
)
def test_biases_are_frozen_whose_gradient_is_zero(kind: str, number: int) -> None:
    config = getattr(transformers, f"{kind}Config")(**OWN_SIZES.get(kind, SIZES))
    model = getattr(transformers, f"{kind}Model")(config).double().eval()
    freeze_key_biases(model)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad and name.endswith("bias")}
    assert len(frozen) == number
    for name, weight in model.named_parameters():
        weight.requires_grad_()
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.2)
    images = model.main_input_name == "pixel_values"
    given = torch.randn(2, 3, 32, 32).double() if images else torch.arange(3, 35).view(2, 16)
    hidden = model(given).last_hidden_state
    (hidden * torch.randn_like(hidden)).sum().backward()
    sizes = {name: weight.grad.norm() for name, weight in model.named_parameters() if weight.grad is not None}
    layers = [name.removesuffix("bias") for name in sizes if name.endswith("bias")]
    idle = [layer for layer in layers if sizes[f"{layer}bias"] < 1e-9 * sizes[f"{layer}weight"]]
    assert {f"{layer}bias" for layer in idle} == frozen


def test_pretrained_encoders(tmp_path: Path) -> None:
    write_encoder(tmp_path / "encoder")
    model, tokenizer = load_encoder(AutoModelForSequenceClassification, str(tmp_path / "encoder"), 64, **NAMES)
    assert model.config.id2label == NAMES["id2label"] and tokenizer.pad_token_id == 0
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen == ["bert.encoder.layer.0.attention.self.key.bias"]
    with pytest.raises(UsageError, match="--max_length 999 exceeds the model's 512 positions: use --max_length 512"):
        load_encoder(AutoModelForSequenceClassification, str(tmp_path / "encoder"), 999, **NAMES)
    write_model(tmp_path / "causal", num_positions=64)
    with pytest.raises(UsageError, match="has no padding token"):
        load_encoder(AutoModelForSequenceClassification, str(tmp_path / "causal"), 64, **NAMES)
    with pytest.raises(UsageError, match="no encoder there"):
        load_encoder(AutoModelForSequenceClassification, str(tmp_path / "nowhere"), 64, **NAMES)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Electra", "ModernBert"])
def test_mask_for_each_batch_gives_the_same_logits(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32} if kind == "DistilBert" else {}
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, pad_token_id=0, **sizes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    tokens, full = torch.randint(1, 32, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    padded = full.clone()
    padded[1, 5:] = 0
    expected = [model(tokens, attention_mask=mask).logits for mask in (full, padded)]
    always_mask(model)
    for mask, logits in zip((full, padded), expected):
        torch.testing.assert_close(model(tokens, attention_mask=mask).logits, logits, rtol=1e-5, atol=1e-6)
    assert model.config._attn_implementation == "masked_sdpa"
    model.save_pretrained(tmp_path)
    assert "masked_sdpa" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (range(12), range(12)),
        (["5000", "7"], ["7", "5000"]),
        (["1.5", "-1", "10", "1e1"], ["-1", "1.5", "10", "1e1"]),
        (["b", "10", "2"], ["10", "2", "b"]),
        (["nan", "1"], ["1", "nan"]),
        ([f"{10**20 + 1}", f"{10**20}"], [f"{10**20}", f"{10**20 + 1}"]),
    ],
)
def test_numbers_are_ordered_as_numbers(tmp_path: Path, names: list[object], order: list[object]) -> None:
    data = write(tmp_path / "a.csv", "text,label", *(f"t,{name}" for name in [*names] * 9))
    assert load_labelled_texts(data)[0].classes == [*map(str, order)]


@pytest.mark.parametrize(
    ("train", "test", "line"),
    [
        (["0", "1"], ["0.0", "1.0"], "that look alike, but count as different: '0' and '0.0', '1' and '1.0'"),
        (["\xe9", "e\u0301"], ["\xe9"], r"count as different: 'e\u0301' and '\xe9'"),
        (["Good", "good", "bad"], ["bad"], "'Good' and 'good'"),
        (["a", "b"], ["b", "c"], "classes in the evaluation, but in no text for training: c"),
        (["-1", "0", "1"], ["0"], "counts as a class, although it may mean no class: -1"),
        (["-100", "0"], ["0", "-1"], "counts as a class, although it may mean no class: -1, -100"),
    ],
)
def test_classes_that_may_be_a_mistake(
    tmp_path: Path, train: list[str], test: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.csv", "text,label", *(f"t,{name}" for name in train))
    write(tmp_path / "test.csv", "text,label", *(f"t,{name}" for name in test))
    load_labelled_texts(str(tmp_path))
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("cells", [["[1, 5]", "[5]", "[]"], ["[27 3]", "[3]", "[27]"]])
def test_lists_of_numbers_that_became_texts(tmp_path: Path, cells: list[str]) -> None:
    rows = [f'{{"text": "t {number}", "label": "{cells[number % 3]}"}}' for number in range(30)]
    with pytest.raises(UsageError, match=r"a cell has a list or dict as text, \["):
        load_labelled_texts(write(tmp_path / "a.jsonl", *rows), target="classes")


@pytest.mark.parametrize("cells", ["0, 1, 1", "0, 1", "1.0, 0.0"])
def test_lists_of_zeros_and_ones_name_no_classes(tmp_path: Path, cells: str) -> None:
    rows = [f'{{"text": "t {number}", "label": [{cells}]}}' for number in range(30)]
    with pytest.raises(UsageError, match="the classes are lists of 0 and 1: expected lists with the names"):
        load_labelled_texts(write(tmp_path / "a.jsonl", *rows), target="classes")


def test_numbers_of_classes_in_lists(tmp_path: Path) -> None:
    rows = [f'{{"text": "t {number}", "label": [0, 1{", 5" * (number % 2)}]}}' for number in range(30)]
    train, _ = load_labelled_texts(write(tmp_path / "a.jsonl", *rows), target="classes")
    assert train.classes == ["0", "1", "5"]


def test_ids_are_no_classes(tmp_path: Path) -> None:
    data = write(tmp_path / "a.csv", "text,label", *(f"t,{10**12 + number}" for number in range(50)))
    ids = ", ".join(str(10**12 + number) for number in range(6))
    line = f"50 texts have 50 classes ({ids}, ... (50 in all)): expected several texts of each"
    with pytest.raises(UsageError, match=re.escape(line)):
        load_labelled_texts(data)
