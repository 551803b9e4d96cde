"""Promise: embeddings find the partners of texts, and the exported encoder is one of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate_recipes.common.tasks.reading.sources import hold_out
from support.launching import fork
from support.recipes import RECIPES
from support.runs import TOLERANCE, assert_same_result, largest_difference, refused
from support.small_model import write_embedder, write_encoder, write_encoder_decoder

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


def test_of_t5_only_the_encoder_trains(tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    write_pairs(tmp_path / "pairs.csv")
    write_encoder_decoder(tmp_path / "t5", "t5")
    flags = f"--data {tmp_path}/pairs.csv --query_column question --document_column answer --batch_size 16"
    flags += f" --model_name_or_path {tmp_path / 't5'} --max_steps 4 --log_every 1"
    run = fork(tmp_path / "run", "ddp", SCRIPT, flags)
    assert_same_result(run, fork(tmp_path / "one", "single", SCRIPT, flags))
    _, found = T5EncoderModel.from_pretrained(run.output_dir / "model", output_loading_info=True)
    assert not found["missing_keys"]


def write_rows(path: Path) -> None:
    """Pairs of which some share a question or an answer, with two negatives and a score: high where texts share a word,
    so that its correlation with the cosine is not nearly 0, of which rounding is a large part."""
    lines = ["question,answer,negative,negative_1,score"]
    for number in range(80):
        one, two, three = (WORDS[(number * step + step) % len(WORDS)] for step in (1, 7, 11))
        answer, score = (ANSWERS[0], 0.1) if number % 3 == 0 else (f"{two} {one}", 0.9)
        score += number % 10 / 100
        lines.append(f"{WORDS[number % 25]} {one},{answer},{three} {two},{ANSWERS[number % 9]},{score:.2f}")
    path.write_text("\n".join(lines))


CLS, LAST, MEAN = ({f"pooling_mode_{name}": True} for name in ("cls_token", "lasttoken", "mean_tokens"))
TRAINED = "--max_steps 4 --log_every 1 --eval_every 2 --warmup_steps 1 --learning_rate 3e-3 --batch_size 16 "
TRAINED += "--max_length 16 --query_column question --document_column answer"
CASES = {
    "negatives": (CLS, "--loss one_direction --matryoshka 32,8 --no_learn_temperature"),
    "last token": (LAST, "--negative_column negative_1"),
    "order": (MEAN, "--loss cosent --score_column score --query_prompt bak"),
    "adapters": (LAST, "--lora_rank 4 --temperature 0.2"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_one_result(tmp_path: Path, case: str) -> None:
    """Losses, measures and weights, under processes, shards and accumulation."""
    pooling, flags = CASES[case]
    write_rows(tmp_path / "rows.csv")
    write_embedder(tmp_path / "base", [*QUESTIONS, *ANSWERS, *WORDS], pooling, causal=pooling == LAST)
    flags = f"{TRAINED} --data {tmp_path / 'rows.csv'} --model_name_or_path {tmp_path / 'base'} {flags}"
    expected = fork(tmp_path / "single", "single", SCRIPT, flags)
    assert len({*expected.column("train/loss")}) == 4
    for config, more in (("ddp", "--micro_batch_size 4"), ("fsdp2", "")):
        run = fork(tmp_path / config, config, SCRIPT, f"{flags} {more}")
        if case == "adapters":
            ours, theirs = (load_file(one.output_dir / "model/adapter_model.safetensors") for one in (run, expected))
            assert ours.keys() == theirs.keys() and all(
                (ours[name] - theirs[name]).abs().max() <= 1e-5 for name in ours
            )
        else:
            assert_same_result(run, expected)
        for name in expected.records[-1]:
            if name.startswith(("eval/", "train/")):
                assert largest_difference(run.column(name), expected.column(name)) < TOLERANCE, name
    names = {name.removeprefix("eval/") for name in expected.records[-1] if name.startswith("eval/")}
    measures = {"pearson", "spearman"} if case == "order" else {"recall@1", "recall@10", "ndcg@10", "mrr@10", "map@100"}
    assert names == {"loss", *measures}


@pytest.mark.parametrize("flags", ["--loss symmetric", "--lora_rank 4"])
def test_the_export_in_sentence_transformers(tmp_path: Path, flags: str) -> None:
    """The evaluation's vectors, from the exported files alone."""
    package = pytest.importorskip("sentence_transformers")
    write_rows(tmp_path / "rows.csv")
    write_embedder(tmp_path / "base", [*QUESTIONS, *ANSWERS, *WORDS], LAST, "Pooling Normalize", causal=True)
    flags = f"{TRAINED} --data {tmp_path / 'rows.csv'} --model_name_or_path {tmp_path / 'base'} {flags}"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags} --save_predictions")
    model = package.SentenceTransformer(str(run.output_dir / "model"), device="cpu")
    assert model.prompts["query"] == "where is " and model.prompts["document"] == "over " and model.max_seq_length == 16
    rows = [line.split(",") for line in (tmp_path / "rows.csv").read_text().splitlines()[1:]]
    found = [json.loads(line) for line in (run.output_dir / "predictions.jsonl").read_text().splitlines()]
    _, held_out = hold_out(len(rows))
    for values, (question, answer, negative, *_) in zip(
        found, [rows[at] for at in held_out.sort().values], strict=True
    ):
        assert model.encode_query(question).tolist() == pytest.approx(values["query"], abs=1e-5)
        theirs = model.encode_document([answer, negative])
        assert theirs.flatten().tolist() == pytest.approx(values["document"] + values["negative"][0], abs=1e-5)


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
        ("--negative_column answer,wrong", "has no column wrong: use --negative_column with one of question, answer"),
        ("--score_column answer --loss cosent", "column answer, row 1 below the header: expected a number, got 'kab"),
        (
            "--score_column question --negative_column answer --loss cosent",
            "does not work with negatives: remove --negative_column",
        ),
        ("--loss cosent", "--loss cosent does not fit this data: use symmetric or one_direction"),
        ("--matryoshka 64", "--matryoshka 64: expected numbers from 1 to 32, such as 32,16"),
        ("--lora_rank 4", "use --model_name_or_path, too"),
        ("--data stdlib --negative_column wrong", "--data stdlib has no negatives and no scores"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    write_pairs(tmp_path / "pairs.csv")
    flags = f"--data {tmp_path}/pairs.csv --document_column answer --query_column question {flags}"
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))
