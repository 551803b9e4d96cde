"""Promise: translation.py takes the steps of transformers' run_translation, writes what `generate` writes, and has the
measures of sacrebleu and rouge-score."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused
from support.small_model import write_encoder_decoder

SCRIPT, ARGUMENTS = RECIPES["translation"]
WORDS = ["red", "blue", "green", "small", "large", "round", "flat", "old"]
PREFIX = "turn around: "


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Words, and the same words from the last to the first."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        size = int(torch.randint(2, 7, (), generator=generator))
        words = [WORDS[each] for each in torch.randint(8, (size,), generator=generator)]
        found.append({"translation": {"en": " ".join(words), "turned": " ".join(reversed(words))}})
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peers.write_parts(tmp_path_factory.mktemp("pairs"), rows)


def flags_of(data: Path, folder: Path) -> str:
    columns = "--source_column translation.en --target_column translation.turned"
    return f"--data {data} {columns} --prefix '{PREFIX}' --model_name_or_path {folder / 'model'} --max_target_length 8"


@pytest.mark.parametrize(
    ("kind", "measure"),
    [
        ("t5", "bleu"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("m2m_100", "bleu"), ("bart", "rouge"))),
    ],
)
def test_losses_texts_and_measures_are_those_of_others(tmp_path: Path, data: Path, kind: str, measure: str) -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer
    from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

    model, tokenizer = write_encoder_decoder(tmp_path / "model", kind)
    flags = f"{peers.FLAGS} {flags_of(data, tmp_path)} --measure {measure} --save_predictions"
    run = fork(tmp_path / "run", "single", SCRIPT, flags)
    samples = [
        dict(tokenizer(PREFIX + row["translation"]["en"]))
        | {"labels": tokenizer(text_target=row["translation"]["turned"])["input_ids"]}
        for row in rows(200, 0)
    ]
    expected = peers.losses(model, samples, DataCollatorForSeq2Seq(tokenizer, model))
    assert largest_difference(run.column("train/loss"), expected) < peers.CLOSE
    exported = AutoModelForSeq2SeqLM.from_pretrained(run.output_dir / "model").eval()
    predictions = [json.loads(line) for line in (run.output_dir / "predictions.jsonl").read_text().splitlines()]
    held_out, written = rows(51, 1), []
    for row, ours in zip(held_out, predictions, strict=True):
        tokens = tokenizer(PREFIX + row["translation"]["en"], return_tensors="pt")
        given = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        ids = exported.generate(**given)[0, 1:].tolist()
        assert ours["written"] == ids + [0] * (8 - len(ids))
        written.append(tokenizer.decode(ids, skip_special_tokens=True))
    right = [row["translation"]["turned"] for row in held_out]
    if measure == "bleu":
        corpora = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}
        theirs = {name: corpus(written, [right]).score for name, corpus in corpora.items()}
    else:
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
        scores = [scorer.score(wanted, text) for wanted, text in zip(right, written)]
        theirs = {name: 100 * sum(each[name].fmeasure for each in scores) / 51 for name in scores[0]}
    assert sum(theirs.values()) > 0
    for name, value in theirs.items():
        assert run.column(f"eval/{name}")[-1] == pytest.approx(value, abs=1e-6)


def test_smoothed_loss_is_that_of_transformers() -> None:
    from transformers.modeling_outputs import Seq2SeqLMOutput
    from transformers.trainer_pt_utils import LabelSmoother

    from recipes.translation import Config, make_forward_step

    class Model(torch.nn.Module):
        def forward(self, **given: torch.Tensor) -> Seq2SeqLMOutput:
            return Seq2SeqLMOutput(logits=logits)

    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[0, 3:] = labels[2, 1:] = -100
    weight = (labels != -100).sum(1).float()
    batch = {"weight": weight} | dict.fromkeys(("labels", "input_ids", "attention_mask", "decoder_input_ids"), labels)
    losses = make_forward_step(Config(label_smoothing=0.1), 0)(Model(), batch)["loss"]
    theirs = LabelSmoother(0.1)(Seq2SeqLMOutput(logits=logits), labels)
    torch.testing.assert_close((losses * weight).sum() / weight.sum(), theirs)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("bart", "fsdp2"),
        *(
            pytest.param(kind, config, marks=pytest.mark.full)
            for kind in ("t5", "bart")
            for config in ("ddp", "fsdp2", "deepspeed_zero3", "tensor_parallel", "hsdp_tensor_parallel")
            if (kind, config) != ("bart", "fsdp2")
        ),
    ],
)
def test_one_result(tmp_path: Path, data: Path, kind: str, config: str) -> None:
    """Losses, weights, and what generated texts measure; each begins with the token that is forced."""
    write_encoder_decoder(tmp_path / "model", kind)
    flags = f"{peers.FLAGS} {flags_of(data, tmp_path)} --measure bleu --forced_first_token flat --save_predictions"
    expected, run = (fork(tmp_path / name, name, SCRIPT, flags) for name in ("single", config))
    assert_same_result(run, expected)
    predictions = [(one.output_dir / "predictions.jsonl").read_text().splitlines() for one in (run, expected)]
    written = [[json.loads(line)["written"] for line in lines] for lines in predictions]
    assert written[0] == written[1] and len({each[0] for each in written[0]}) == 1


def test_it_learns_and_writes(tmp_path: Path) -> None:
    lines = ["green,grün", "red,rot", "five,fünf", "six,sechs"] * 40
    (tmp_path / "pairs.csv").write_text("\n".join(["en,de", *lines]))
    flags = f"--data {tmp_path / 'pairs.csv'} --source_column en --target_column de --max_steps 60 --batch_size 16"
    run = fork(tmp_path / "run", "ddp", SCRIPT, f"{flags} --num_layers 1 --warmup_steps 0 --max_target_length 8")
    assert run.column("eval/exact_match")[-1] > 90
    assert fork(tmp_path / "run", "ddp", SCRIPT, "--predict five").stdout == "fünf\n"
    line = refused(fork(tmp_path / "other", "single", SCRIPT, "--predict five", succeeds=False))
    assert line == f"error: no model in {tmp_path}/other/model: train first (the same command without --predict)"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--forced_first_token zz_ZZ", "--forced_first_token zz_ZZ: the tokenizer has no such token"),
        ("--source_column nowhere", "has no column nowhere: use --source_column with one of query, document"),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: str, line: str) -> None:
    assert line in refused(fork(tmp_path / "run", "single", SCRIPT, f"{ARGUMENTS} {flags}", succeeds=False))


def test_a_measure_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from accelerate_recipes import UsageError
    from accelerate_recipes.common.tasks.nlp.translations import make_measure

    for measure, package in (("bleu", "sacrebleu"), ("rouge", "rouge_score")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=f"--measure {measure} needs {package}: run pip install 'acc"):
            make_measure(measure)


@pytest.mark.full
def test_dates(tmp_path: Path) -> None:
    assert fork(tmp_path / "run", "ddp", SCRIPT).column("eval/exact_match")[-1] > 90
