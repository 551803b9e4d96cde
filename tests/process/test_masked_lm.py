"""Promise: words are masked whole, by sample and epoch; losses are transformers', and its pipeline fills in words."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from accelerate_recipes.common.seeds import EVALUATION, seed_sample
from accelerate_recipes.common.tasks.models.causal_lm import IGNORED
from accelerate_recipes.common.tasks.nlp.text import load_tokens
from recipes.masked_lm import MaskedBlocks
from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import largest_difference, refused

SCRIPT, ARGUMENTS = RECIPES["masked lm"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["red", "##der", "blue", "##ish", "##ness", "green", "old", "the", "."]
LENGTH = 18


def write_model(folder: Path) -> tuple[Any, Any]:
    """Writes a small BERT without dropout, and a tokenizer of pieces of words; returns them."""
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokens = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokens.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": len(vocabulary)}
    model = BertForMaskedLM(BertConfig(**sizes, initializer_range=0.1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_text(path: Path) -> None:
    """Some 5,700 tokens."""
    generator, words = torch.Generator().manual_seed(0), ["redder", "bluishness", "blueish", "green", "old", "the", "."]
    numbers = torch.randint(len(words), (3000,), generator=generator).tolist()
    path.write_text(" ".join(words[number] for number in numbers))


def drawn(dataset: MaskedBlocks, epoch: int) -> list[dict[str, torch.Tensor]]:
    """All samples, as a run with seed 0 draws them."""
    found = []
    for index in range(len(dataset)):
        seed_sample(0, epoch, index)
        found.append(dataset[index])
    return found


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def test_losses_are_those_of_transformers_and_the_export_has_them(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, pipeline

    write_text(tmp_path / "text.txt")
    model, tokenizer = write_model(tmp_path / "model")
    flags = f"--data {tmp_path / 'text.txt'} --model_name_or_path {tmp_path / 'model'} --max_length {LENGTH}"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{peers.FLAGS} {flags}")
    train, held_out = (MaskedBlocks(part, tokenizer, 0.15) for part in load_tokens(flags.split()[1], tokenizer, 16))
    expected = peers.losses(model, drawn(train, 0), collate)
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    exported = AutoModelForMaskedLM.from_pretrained(run.output_dir / "model").eval()
    samples, total, right, number = drawn(held_out, EVALUATION), 0.0, 0, 0
    with torch.no_grad():
        for sample in samples:
            found, count = exported(**collate([sample])), int(sample["weight"])
            total, number = total + found.loss.item() * count, number + count
            right += int((found.logits.argmax(-1)[0] == sample["labels"]).sum())
    assert run.column("eval/loss")[-1] == pytest.approx(total / number, rel=1e-5)
    assert run.column("eval/accuracy")[-1] == pytest.approx(right / number, abs=1e-6)
    best = pipeline("fill-mask", model=str(run.output_dir / "model"))("the [MASK] .")[0]
    with torch.no_grad():
        logits = exported(**tokenizer("the [MASK] .", return_tensors="pt")).logits[0, 2]
    assert best["token"] == int(logits.argmax()) and best["score"] == pytest.approx(float(logits.softmax(-1).max()))
    answer = fork(run.output_dir, "single", SCRIPT, "--predict 'the [MASK] .'")
    assert answer.stdout.splitlines()[0] == f"{best['token_str']}: {best['score']:.4f}"
    line = refused(fork(run.output_dir, "single", SCRIPT, "--predict 'the .'", succeeds=False))
    assert line == "error: --predict the .: expected a text with one [MASK], the word to fill in"
    asked = f"--predict 'what did eve eat' --context {Path(__file__)}"
    other = fork(run.output_dir, "single", "recipes/question_answering.py", asked, succeeds=False)
    assert f"the model in {run.output_dir}/model cannot be used (it is BertForMaskedLM): use the" in refused(other)
    (run.output_dir / "model" / "model.safetensors").write_bytes(b"damaged")
    line = refused(fork(run.output_dir, "single", SCRIPT, "--predict 'the [MASK] .'", succeeds=False))
    assert line.endswith("use the --output_dir of a finished run of this recipe")


def test_words_are_masked_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    _, tokenizer = write_model(tmp_path / "model")
    dataset = MaskedBlocks(load_tokens(str(tmp_path / "text.txt"), tokenizer, 16)[0], tokenizer, 0.3)
    kinds, num_words = Counter[str](), 0
    for sample in drawn(dataset, 0):
        given, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        real = [one if label == IGNORED else label for one, label in zip(given, labels)]
        assert (given[0], given[-1], labels[0], labels[-1]) == (2, 3, IGNORED, IGNORED)
        assert sample["weight"] == LENGTH - labels.count(IGNORED) > 0
        texts = tokenizer.convert_ids_to_tokens(real)
        starts = [place for place in range(1, LENGTH - 1) if place == 1 or not texts[place].startswith("##")]
        num_words += len(starts)
        for start, end in zip(starts, [*starts[1:], LENGTH - 1]):
            chosen = {label != IGNORED for label in labels[start:end]}
            assert len(chosen) == 1  # all of a word or nothing
            if chosen == {True}:
                now = given[start:end]
                kinds["mask" if set(now) == {4} else "same" if now == real[start:end] else "random"] += 1
    assert kinds.total() / num_words == pytest.approx(0.3, abs=0.02)
    shares = [kinds[kind] / kinds.total() for kind in ("mask", "random", "same")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    again, other = (drawn(dataset, epoch)[0]["labels"] for epoch in (0, 1))
    assert again.equal(drawn(dataset, 0)[0]["labels"]) and not again.equal(other)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--max_length 1", "--max_length 1 leaves no room for text: use 64 or more"),
        ("--max_length 9000", "a block needs 9000; use a smaller --max_length or use more text"),
        ("--data nowhere.txt", "--data nowhere.txt: no such file"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))
