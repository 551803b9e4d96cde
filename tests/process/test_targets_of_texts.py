"""Promise: text_classification.py trains pairs of texts, numbers and several classes as transformers' run_glue does,
measures what scikit-learn and SciPy do, and exports what transformers' pipeline scores the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused
from support.small_model import write_bert

SCRIPT = RECIPES["text classification"][0]
WORDS = ["red", "blue", "green", "small", "large", "round", "flat", "old"]
PAIR = "--second_text_column second"
CASES = {
    "class": ("kind", ""),
    "pair": ("kind", PAIR),
    "classes": ("kinds", "--target classes"),
    "probability": ("share", f"--target probability {PAIR}"),
    "number": ("number", f"--target number {PAIR}"),
}


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of texts, with what they have in common and what the first one holds."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        first, second = (
            [WORDS[each] for each in torch.randint(8, (int(size),), generator=generator)]
            for size in torch.randint(2, 9, (2,), generator=generator)
        )
        common = len({*first} & {*second}) / len({*first} | {*second})
        found.append(
            {
                "first": " ".join(first),
                "second": " ".join(second),
                "kind": "same" if common > 0.3 else "other",
                "kinds": sorted({*first} & {"red", "old", "flat"}),
                "share": round(common, 3),
                "number": round(50 * common - 7, 3),
            }
        )
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peers.write_parts(tmp_path_factory.mktemp("pairs"), rows)


def write_model(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Writes a small BERT with a head, without dropout, and its tokenizer; returns them."""
    sizes = {"vocab_size": 16, "initializer_range": 0.2}
    return write_bert(folder, "BertForSequenceClassification", [" ".join(WORDS)] * 2, **sizes, **options)


def measures(case: str, predictions: list[dict[str, Any]]) -> dict[str, float]:
    """What scikit-learn and SciPy say of these predictions."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn import metrics

    columns = {name: [one[name] for one in predictions] for name in predictions[0]}
    if case == "number":
        both = columns["predicted"], columns["target"]
        return {"pearson": pearsonr(*both)[0], "spearman": spearmanr(*both)[0]}
    label = columns["label"]
    if case in ("class", "pair"):
        predicted = columns["predicted"]
        return {
            "accuracy": metrics.accuracy_score(label, predicted),
            "f1": metrics.f1_score(label, predicted),
            "macro_f1": metrics.f1_score(label, predicted, average="macro"),
            "matthews": metrics.matthews_corrcoef(label, predicted),
        }
    probability = torch.tensor(columns["probability"])
    precision = metrics.average_precision_score(label, probability)
    each = {name: metrics.f1_score(label, probability > 0.5, average=name) for name in ("micro", "macro")}
    return {"mean_average_precision": precision, "micro_f1": each["micro"], "macro_f1": each["macro"]}


@pytest.mark.parametrize("case", CASES)
def test_losses_measures_and_scores_are_those_of_others(tmp_path: Path, data: Path, case: str) -> None:
    from transformers import DataCollatorWithPadding, pipeline

    column, flags = CASES[case]
    problem, names = {
        "classes": ("multi_label_classification", ["flat", "old", "red"]),
        "probability": ("multi_label_classification", ["LABEL_0"]),
        "number": ("regression", ["LABEL_0"]),
    }.get(case, ("single_label_classification", ["other", "same"]))
    model, tokenizer = write_model(tmp_path / "model", id2label=dict(enumerate(names)), problem_type=problem)
    flags = f"{peers.FLAGS} --data {data} --text_column first --label_column {column} {flags} --save_predictions"
    run = fork(tmp_path / "run", "single", SCRIPT, f"{flags} --model_name_or_path {tmp_path / 'model'}")

    def texts(row: dict[str, Any]) -> dict[str, str]:
        return {"text": row["first"]} | ({"text_pair": row["second"]} if PAIR in flags else {})

    def label(row: dict[str, Any]) -> Any:
        cell = row[column]
        return {"classes": lambda: [float(name in cell) for name in names], "probability": lambda: [cell]}.get(
            case, lambda: names.index(cell) if isinstance(cell, str) else cell
        )()

    train, held_out = rows(200, 0), rows(51, 1)
    samples = [dict(tokenizer(**texts(row), truncation=True)) | {"labels": label(row)} for row in train]
    expected = peers.losses(model, samples, DataCollatorWithPadding(tokenizer))
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    predictions = [json.loads(line) for line in (run.output_dir / "predictions.jsonl").read_text().splitlines()]
    measured = {name.removeprefix("eval/"): value for name, value in run.records[-1].items() if "eval/" in name}
    theirs = measures(case, predictions)
    assert {name: measured[name] for name in theirs} == pytest.approx(theirs, abs=1e-6)
    assert measured.keys() - theirs.keys() <= {"loss", "accuracy"}
    scorer = pipeline("text-classification", model=str(run.output_dir / "model"))
    for row, ours in zip(held_out, predictions, strict=True):
        found = {one["label"]: one["score"] for one in scorer(texts(row), top_k=None)}
        scores = [found[name] for name in names]
        if case == "number":
            assert scores == pytest.approx([ours["predicted"]], rel=1e-5, abs=1e-5)
        elif "probability" in ours:
            assert scores == pytest.approx(ours["probability"], abs=1e-5)
        else:
            assert max(found, key=found.get) == names[ours["predicted"]]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("number", "tensor_parallel"),
        pytest.param("classes", "ddp", marks=pytest.mark.full),
        *(
            pytest.param(case, config, marks=pytest.mark.full)
            for case in ("pair", "classes", "probability", "number")
            for config in ("fsdp2", "deepspeed_zero3", "pipeline_parallel")
        ),
    ],
)
def test_one_result(tmp_path: Path, data: Path, case: str, config: str) -> None:
    column, flags = CASES[case]
    write_model(tmp_path / "model")  # whose numbers are far apart, unlike those of a new one: their order is a measure
    flags = f"{peers.FLAGS} --data {data} --text_column first --label_column {column} {flags} --learning_rate 1e-3"
    flags += f" --model_name_or_path {tmp_path / 'model'}"
    stages = " --pipeline_stages 2" if config == "pipeline_parallel" else ""
    expected, run = (
        fork(tmp_path / name, name, SCRIPT, flags + more) for name, more in (("single", ""), (config, stages))
    )
    assert_same_result(run, expected)


def test_a_text_is_classified(tmp_path: Path) -> None:
    lines = [f"{kind} day number {number},{kind}" for number in range(60) for kind in ("good", "bad")]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *lines]))
    flags = f"--data {tmp_path}/texts.csv --num_layers 1 --hidden_size 32 --batch_size 16 --warmup_steps 0"
    fork(tmp_path / "run", "single", SCRIPT, f"{flags} --max_steps 40 --learning_rate 1e-2")
    answer = fork(tmp_path / "run", "ddp", SCRIPT, "--predict 'good day number 7'")
    first, second = answer.stdout.splitlines()
    assert first.startswith("good: 0.9") and second.startswith("bad: 0.0")
    line = refused(fork(tmp_path / "other", "single", SCRIPT, "--predict good", succeeds=False))
    assert line == f"error: no model in {tmp_path}/other/model: train first (the same command without --predict)"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--second_text_column third", "has no column third: use --second_text_column with one of first, second, kind"),
        ("--target classes --balanced", "--balanced weights classes, but --target is classes: leave one of them out"),
        ("--label_column kinds", "column kinds has lists of classes: use --target classes"),
        ("--target number", "column kind, row 1 below the header: expected a number, got 'other'"),
        ("--target probability --label_column number", "in column number is not one: use --target number"),
        (
            "--data {folder}/one.jsonl --target number --label_column number",
            "all numbers for training are the same (-1.0): expected different ones",
        ),
        ("--data stdlib --target number", "--data stdlib has single texts with one class each: use the path of a file"),
    ],
)
def test_wrong_flags(tmp_path: Path, data: Path, flags: str, line: str) -> None:
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, [row | {"number": -1} for row in rows(20, 0)])))
    flags = f"--data {data} --text_column first --label_column kind {flags.format(folder=tmp_path)}"
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, flags, succeeds=False))
