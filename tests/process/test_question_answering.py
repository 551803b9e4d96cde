"""Promise: question_answering.py takes the steps of transformers' run_qa, has its measures, and exports what that
library loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import peers
from support.launching import fork
from support.recipes import RECIPES
from support.runs import assert_same_result, largest_difference, refused
from support.small_model import write_bert

SCRIPT, ARGUMENTS = RECIPES["question answering"]
NAMES, THINGS = ["ann", "bob", "cleo", "dan", "eve", "finn"], ["bread", "fish", "a red apple", "cake", "rice", "soup"]
LENGTH, STRIDE, LONGEST = 24, 6, 5
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Questions as in `datasets`' SQuAD: who ate what, in texts that need several windows."""
    generator, found = torch.Generator().manual_seed(seed), []
    for index in range(number):
        who, what = (torch.randperm(6, generator=generator)[:4].tolist() for _ in range(2))
        facts = [(NAMES[name], THINGS[thing]) for name, thing in zip(who, what)]
        context = " Then ".join(f"{name} ate {thing} at the table." for name, thing in facts)
        name, thing = facts[index % 3]
        begin = context.index(f"{name} ate {thing}") + len(f"{name} ate ")
        answers = {"text": [thing], "answer_start": [begin]}
        found.append({"context": context, "question": f"  what did {name} eat", "answers": answers, "id": str(index)})
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peers.write_parts(tmp_path_factory.mktemp("squad"), rows, "validation")


def write_model(folder: Path) -> tuple[Any, Any]:
    """Writes a small BERT for questions, without dropout, and its tokenizer; returns them."""
    texts = [text for row in rows(40, 2) for text in (row["context"], row["question"])]
    return write_bert(folder, "BertForQuestionAnswering", texts, vocab_size=64, initializer_range=0.2)


def features(tokenizer: Any, split: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[Any], dict[str, Any]]]:
    """(what the model gets, offsets that are None outside the text, row) of each window, padded as by run_qa with
    --pad_to_max_length."""
    found = []
    for row in split:
        encoded = tokenizer(
            row["question"].lstrip(),
            row["context"],
            **{"truncation": "only_second", "max_length": LENGTH, "stride": STRIDE, "padding": "max_length"},
            **{"return_overflowing_tokens": True, "return_offsets_mapping": True},
        )
        text, begin = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        for window in range(len(encoded["input_ids"])):
            given = {name: encoded[name][window] for name in encoded if name in INPUTS}
            of_text = encoded.sequence_ids(window)
            offsets = [at if one == 1 else None for at, one in zip(encoded["offset_mapping"][window], of_text)]
            starts = {at[0]: place for place, at in enumerate(offsets) if at}
            ends = {at[1]: place for place, at in enumerate(offsets) if at}
            both = starts.get(begin), ends.get(begin + len(text))
            labels = both if None not in both else (0, 0)  # of [CLS]
            found.append((given | dict(zip(("start_positions", "end_positions"), labels)), offsets, row))
    return found


def predictions(model: Any, windows: list[Any]) -> dict[str, str]:
    """The text with the highest sum of logits of each row, among the 20 best starts and ends of each window."""
    best: dict[str, tuple[float, str]] = {}
    for given, offsets, row in windows:
        tensors = {name: torch.tensor([given[name]]) for name in given if name in INPUTS}
        with torch.no_grad():
            output = model(**tensors)
        start, end = output.start_logits[0], output.end_logits[0]
        for first in start.topk(20).indices.tolist():
            for last in end.topk(20).indices.tolist():
                if offsets[first] is None or offsets[last] is None or not first <= last < first + LONGEST:
                    continue
                score = float(start[first] + end[last])
                if score > best.get(row["id"], (-1e9, ""))[0]:
                    best[row["id"]] = score, row["context"][offsets[first][0] : offsets[last][1]]
    return {name: text for name, (_, text) in best.items()}


@pytest.mark.parametrize("pads", [True, pytest.param(False, marks=pytest.mark.full)])
def test_losses_and_measures_are_those_of_run_qa(tmp_path: Path, data: Path, pads: bool) -> None:
    from torchmetrics.functional.text import squad
    from transformers import AutoModelForQuestionAnswering, default_data_collator

    model, tokenizer = write_model(tmp_path / "model")
    flags = f"{peers.FLAGS} --data {data} --model_name_or_path {tmp_path / 'model'} --max_length {LENGTH} "
    flags += f"--stride {STRIDE} --max_answer_length {LONGEST} {'--pad_to_max_length' * pads}"
    run = fork(tmp_path / "run", "single", SCRIPT, flags)
    train = [given for given, *_ in features(tokenizer, rows(200, 0))]
    assert len(train) > 400 and any(0 in given["attention_mask"] for given in train)
    expected = peers.losses(model, train, default_data_collator)
    difference = largest_difference(run.column("train/loss"), expected)
    # Without --pad_to_max_length padding is no place for an answer.
    assert difference < peers.CLOSE if pads else difference > 100 * peers.CLOSE
    exported = AutoModelForQuestionAnswering.from_pretrained(run.output_dir / "model").eval()
    held_out = rows(51, 1)
    found = predictions(exported, features(tokenizer, held_out))
    theirs = squad(
        [{"id": row["id"], "prediction_text": found[row["id"]]} for row in held_out],
        [{"id": row["id"], "answers": row["answers"]} for row in held_out],
    )
    for name, value in theirs.items():
        assert run.column(f"eval/{name}")[-1] == pytest.approx(float(value), abs=1e-5)  # of 100, in float32


def test_the_exported_model_is_asked(tmp_path: Path, data: Path) -> None:
    fork(
        tmp_path / "run", "ddp", SCRIPT, f"--data {data} --max_steps 4 --batch_size 16 --hidden_size 32 --num_layers 1"
    )
    (tmp_path / "text.txt").write_text("eve ate a red apple at home.")
    asked = f"--predict 'what did eve eat' --context {tmp_path / 'text.txt'}"
    answer = fork(tmp_path / "run", "ddp", SCRIPT, asked).stdout
    assert answer.endswith("\n") and (answer == "no answer\n" or answer[:-1] in "eve ate a red apple at home.")
    line = refused(fork(tmp_path / "run", "single", SCRIPT, "--predict 'what did eve eat'", succeeds=False))
    assert line == "error: --predict asks about a text: use --context with the path of its file"
    line = refused(fork(tmp_path / "other", "single", SCRIPT, asked, succeeds=False))
    assert line == f"error: no model in {tmp_path}/other/model: train first (the same command without --predict)"


def test_modernbert_has_its_head_under_another_name(tmp_path: Path, data: Path) -> None:
    from transformers import AutoModelForQuestionAnswering, ModernBertConfig, ModernBertForMaskedLM

    _, tokenizer = write_model(tmp_path / "bert")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id"), 0)
    config = ModernBertConfig(vocab_size=64, **sizes, **ids)
    for model in (ModernBertForMaskedLM(config), tokenizer):
        model.save_pretrained(tmp_path / "modernbert")
    flags = f"--data {data} --max_steps 4 --batch_size 16 --log_every 1 --model_name_or_path {tmp_path / 'modernbert'}"
    run = fork(tmp_path / "run", "fsdp2", SCRIPT, flags)
    assert_same_result(run, fork(tmp_path / "one", "single", SCRIPT, flags))
    _, found = AutoModelForQuestionAnswering.from_pretrained(run.output_dir / "model", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


@pytest.mark.full
def test_embedded_questions(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", SCRIPT)
    assert run.column("eval/exact_match")[-1] > 58 and run.column("eval/f1")[-1] > 77


@pytest.mark.full
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero3", "tensor_parallel"])
def test_resume_is_exact(tmp_path: Path, config: str) -> None:
    flags = f"{ARGUMENTS} --max_steps 6 --save_every 3 --eval_every 6"
    whole = fork(tmp_path / "whole", config, SCRIPT, flags)
    path = whole.output_dir / "checkpoints" / "step_00000003"
    run = fork(tmp_path / "run", config, SCRIPT, f"{flags} --resume_from_checkpoint {path}")
    assert run.column("train/loss") == whole.column("train/loss")[3:]
    assert run.column("eval/f1") == whole.column("eval/f1")
