"""Promise: words are tagged as transformers' run_ner does, and its pipeline loads the export with the same scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import largest_difference, refused
from support.small_model import write_bert

SCRIPT, ARGUMENTS = RECIPES["token classification"]
NAMES = ["B-PER", "I-PER", "O"]
PEOPLE = ["ada lovelace", "emmy noether", "alan turing", "grace hopper", "john von neumann"]


def sentences(number: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Words about people, some with punctuation in them, which is a token of its own."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        words, tags = list[str](), list[str]()
        for one in torch.randint(8, (int(torch.randint(2, 5, (), generator=generator)),), generator=generator).tolist():
            first, *rest = PEOPLE[one].split() if one < len(PEOPLE) else ["co-op"]
            words += ["the", first, *rest, "saw"]
            tags += ["O", *(["B-PER", *["I-PER"] * len(rest)] if one < len(PEOPLE) else ["O"]), "O"]
        found.append((words, tags))
    return found


def write_data(folder: Path) -> None:
    folder.mkdir()
    for seed, (split, number) in enumerate({"train": 200, "test": 31}.items()):
        parts = ["\n".join(map(" ".join, zip(words, tags))) for words, tags in sentences(number, seed)]
        (folder / f"{split}.conll").write_text("\n\n".join(parts))


def write_model(folder: Path) -> tuple[Any, Any]:
    """Writes a small BERT with a head, without dropout, and its tokenizer; returns them."""
    options = {"vocab_size": 32, "initializer_range": 0.1, "id2label": dict(enumerate(NAMES))}
    return write_bert(folder, "BertForTokenClassification", [f"the {' '.join(PEOPLE)} saw co-op"] * 2, **options)


def test_losses_measures_and_scores_are_those_of_others(tmp_path: Path) -> None:
    from transformers import DataCollatorForTokenClassification, pipeline

    write_data(tmp_path / "data")
    model, tokenizer = write_model(tmp_path / "model")
    flags = f"{peers.FLAGS} --data {tmp_path / 'data'} --model_name_or_path {tmp_path / 'model'}"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags} --save_predictions")

    def encoded(words: list[str], tags: list[str]) -> dict[str, Any]:
        found = tokenizer(words, is_split_into_words=True)
        of_words = found.word_ids()
        labels = [
            -100 if word is None or word == before else NAMES.index(tags[word])
            for before, word in zip([None, *of_words], of_words)
        ]
        return {"input_ids": found["input_ids"], "labels": labels}

    samples = [encoded(*each) for each in sentences(200, 0)]
    expected = peers.losses(model, samples, DataCollatorForTokenClassification(tokenizer))
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    predictions = [json.loads(line) for line in (run.output_dir / "predictions.jsonl").read_text().splitlines()]
    tagger = pipeline("token-classification", model=str(run.output_dir / "model"), ignore_labels=[])
    held_out = sentences(31, 1)
    total = dict.fromkeys(("words", "right", "entities", "predicted_entities", "right_entities"), 0)
    for (words, tags), ours in zip(held_out, predictions, strict=True):
        found = {one["start"]: one["entity"] for one in tagger(" ".join(words))}
        starts = [len(" ".join([*words[:number], ""])) for number in range(len(words))]
        theirs = [found[start] for start in starts]
        total["words"] += len(words)
        total["right"] += sum(map(str.__eq__, tags, theirs))
        ends = [{at for at, tag in enumerate(each) if tag == "B-PER"} for each in (tags, theirs)]
        total["entities"] += len(ends[0])
        assert sum(ours["entities"]) == len(ends[0])
        assert sum(ours["right_entities"]) <= len(ends[0] & ends[1]) + theirs.count("I-PER")
    accuracy = run.column("eval/accuracy")[-1]
    assert accuracy == pytest.approx(total["right"] / total["words"], abs=1e-6)
    counts = [sum(sum(one[name]) for one in predictions) for name in ("right_entities", "entities")]
    assert run.column("eval/recall")[-1] == pytest.approx(counts[0] / counts[1], abs=1e-6)


def test_a_conll_file_is_learnt_and_a_text_is_tagged(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    flags = f"--data {tmp_path / 'data'} --num_layers 1 --hidden_size 32 --batch_size 16 --max_steps 40"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --learning_rate 1e-2 --warmup_steps 0")
    assert run.column("eval/f1")[-1] == run.column("eval/f1_PER")[-1] > 0.9
    answer = fork(tmp_path / "run", "ddp", SCRIPT, "--predict 'the ada lovelace saw the co-op'")
    assert answer.stdout == "PER: ada lovelace\n"


def test_words_of_a_tokenizer_that_knows_spaces(tmp_path: Path) -> None:
    """RoBERTa's tokenizer takes words only if it puts a space before each; the exported one does, too."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, RobertaConfig, RobertaForTokenClassification, RobertaTokenizerFast

    words = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words.train_from_iterator(
        [f" the {' '.join(PEOPLE)} saw co-op"] * 4, 300, show_progress=False, special_tokens=special
    )
    words.save_model(str(tmp_path))
    tokenizer = RobertaTokenizerFast(vocab=str(tmp_path / "vocab.json"), merges=str(tmp_path / "merges.txt"))
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = RobertaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=130, num_labels=3)
    RobertaForTokenClassification(config).save_pretrained(tmp_path / "model")
    write_data(tmp_path / "data")
    flags = f"--data {tmp_path / 'data'} --model_name_or_path {tmp_path / 'model'} --batch_size 16 --max_steps 2"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags} --max_length 64")
    exported = AutoTokenizer.from_pretrained(run.output_dir / "model")
    assert exported.add_prefix_space and exported(["the", "ada"], is_split_into_words=True).word_ids()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--data nowhere.conll", "--data nowhere.conll: no such file"),
        ("--predict ada", "train first (the same command without --predict)"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))
