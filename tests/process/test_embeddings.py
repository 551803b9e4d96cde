"""Promise: embeddings find the partners of texts, and the exported encoder is one of transformers."""

from pathlib import Path

import pytest
import torch

from recipes.embeddings import recall
from support.launching import fork
from support.recipes import RECIPES
from support.runs import refused
from support.small_model import write_encoder

SCRIPT, ARGUMENTS = RECIPES["embeddings"]
WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go", "lu") for second in ("k", "l", "m", "n", "r", "s")]
QUESTIONS = [f"{word} where is {word}" for word in WORDS]  # twice, because the tokenizer leaves out rare words
ANSWERS = [f"{word[::-1]} over there {word[::-1]}" for word in WORDS]


def write_pairs(path: Path) -> None:
    """Each question and each answer has a word of its own."""
    path.write_text("\n".join(["question,answer", *(",".join(pair) for pair in zip(QUESTIONS, ANSWERS))]))


def vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """As a user computes them, from the exported files alone."""
    from transformers import AutoModel, AutoTokenizer

    encoder, found = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert all(name.startswith("pooler.") for name in found["missing_keys"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        hidden = encoder.eval()(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    return torch.nn.functional.normalize((hidden * mask[..., None]).sum(1), dim=-1)


@pytest.mark.parametrize("source", ["", pytest.param("encoder", marks=pytest.mark.full)])
def test_exported_encoder_finds_the_answer(tmp_path: Path, source: str) -> None:
    write_pairs(tmp_path / "pairs.csv")
    flags = f"--data {tmp_path}/pairs.csv --query_column question --document_column answer --hidden_size 32"
    flags += " --batch_size 16 --max_steps 60 --learning_rate 1e-2"
    if source:
        write_encoder(tmp_path / source)
        flags += f" --model_name_or_path {tmp_path / source} --max_steps 4"
    run = fork(tmp_path / "run", "ddp", SCRIPT, flags)
    folder = run.output_dir / "model"
    scores = vectors(folder, QUESTIONS) @ vectors(folder, ANSWERS).T
    if not source:
        hits = scores.argmax(1) == torch.arange(len(WORDS))
        assert hits.sum() >= 0.9 * len(WORDS) - 1  # all but the held-out tenth
    again = fork(tmp_path / "run", "single", SCRIPT, f"{flags} --evaluate_only")
    assert f"eval/loss {run.column('eval/loss')[-1]:.4g}"[:13] in again.stdout


def test_recall_counts_how_often_the_partner_is_near() -> None:
    document, query = torch.eye(20), torch.eye(20)
    query[0] = -query[0]  # all others are nearer
    query[1, 2] = 2.0  # one is nearer
    assert recall({"query": query, "document": document}) == pytest.approx({"recall@1": 0.9, "recall@10": 0.95})


@pytest.mark.full
def test_recall(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT)
    assert run.column("eval/recall@1")[-1] > 0.25 and run.column("eval/recall@10")[-1] > 0.5


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--num_heads 5", "--hidden_size 32 does not divide into 5 heads: use --hidden_size 30"),
        ("--batch_size 1", "--batch_size 1: expected 2 or more"),
        ("--query_column prompt", "has no column prompt: use --query_column with one of question, answer"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    write_pairs(tmp_path / "pairs.csv")
    flags = f"--data {tmp_path}/pairs.csv --document_column answer --query_column question {flags}"
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))
