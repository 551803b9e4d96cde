"""Promise: a mixture of sources gives one result, and resumes exactly in the middle of an epoch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import (
    DIFFUSION,
    EMBEDDINGS,
    FINETUNE,
    IMAGE_CLASSIFICATION,
    LINEAR,
    MNIST,
    PREFERENCES,
    TEXT_CLASSIFICATION,
    TRANSFORMER,
)
from support.runs import TOLERANCE, Run, assert_same_result, largest_difference, refused
from support.small_mnist import write_mnist

CHATS = "--num_answers 0 --max_length 96 --batch_size 8 --micro_batch_size 4 --log_every 1 --learning_rate 1e-3 "
CHATS += "--max_steps 14 --eval_every 7"


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """`--data` of two files with conversations."""
    for name, number in (("short", 60), ("long", 40)):
        rows = []
        for value in range(number):
            question = {"role": "user", "content": f"After {value}?" + " And then?" * (name == "long")}
            rows.append({"messages": [question, {"role": "assistant", "content": str(value + 1)}]})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"--data {tmp_path}/short.jsonl:3,{tmp_path}/long.jsonl:1"


def by_source(run: Run) -> dict[str, list[float]]:
    names = {name for record in run.records for name in record if "@" in name}
    return {name: [record[name] for record in run.records if record.get(name) is not None] for name in names}


@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(one, marks=pytest.mark.full) for one in ("fsdp2", "deepspeed_zero2"))]
)
def test_one_result(tmp_path: Path, chats: str, config: str) -> None:
    one = fork(tmp_path / "one", "single", FINETUNE, f"{CHATS} {chats}")
    run = fork(tmp_path / "run", config, FINETUNE, f"{CHATS} {chats}")
    assert_same_result(run, one)
    expected, found = by_source(one), by_source(run)
    assert (
        found.keys()
        == expected.keys()
        == {
            f"{part}/{metric}@{source}"
            for part in ("train", "eval")
            for metric in ("loss", "share", "token_accuracy", "entropy")
            for source in ("short", "long")
        }
    )
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name


def test_resume_in_the_middle_of_an_epoch(tmp_path: Path, chats: str) -> None:
    flags = f"{CHATS} {chats} --save_every 4 --keep_checkpoints 9 --mixture_ends all"
    whole = fork(tmp_path / "whole", "ddp", FINETUNE, flags)
    path = whole.output_dir / "checkpoints" / "step_00000008"
    rest = fork(tmp_path / "rest", "ddp", FINETUNE, f"{flags} --resume_from_checkpoint {path}")
    assert rest.column("train/loss") == whole.column("train/loss")[8:]
    for name, values in by_source(rest).items():
        assert values == by_source(whole)[name][-len(values) :], name
    other = chats.replace("short.jsonl:3", "short.jsonl:2")
    run = fork(tmp_path / "other", "ddp", FINETUNE, f"{CHATS} {other} --resume_from_checkpoint {path}", succeeds=False)
    assert "was made with mixture {'short': [" in refused(run)
    shorter = flags.replace(" --mixture_ends all", "")
    run = fork(tmp_path / "first", "ddp", FINETUNE, f"{shorter} --resume_from_checkpoint {path}", succeeds=False)
    assert "was made with mixture {'short': [" in refused(run)


@pytest.mark.full
def test_recipes_of_other_kinds_of_data(tmp_path: Path) -> None:
    for name, words in (("one", "a b c d e f g "), ("two", "u v w x y z ")):
        (tmp_path / f"{name}.txt").write_text(words * 200)
        rows = [f"{words[number % 6 * 2 :]}{number},{'odd' if number % 2 else 'even'}" for number in range(80)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
        pairs = [{"prompt": f"{words}{number}", "chosen": f"{number}", "rejected": name} for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        write_mnist(tmp_path / f"{name}_digits")
    shared = "--max_steps 2 --log_every 1 --batch_size 8"
    cases = {
        TRANSFORMER: (".txt", "--context 16 --sample_tokens 0 --num_layers 1"),
        TEXT_CLASSIFICATION: (".csv", "--vocabulary 64 --hidden_size 16 --num_layers 1"),
        MNIST: ("_digits", "--model mlp"),
        PREFERENCES: (".jsonl", "--max_length 64 --num_answers 0"),
        DIFFUSION: ("_digits", "--patch_size 6 --hidden_size 16 --num_layers 1 --num_pictures 1 --num_steps 2"),
    }
    for script, (end, flags) in cases.items():
        data = f"--data {tmp_path}/one{end}:1,{tmp_path}/two{end}:1"
        run = fork(tmp_path / Path(script).stem, "ddp", script, f"{flags} {shared} {data}")
        first = Path(f"one{end}").stem
        assert {f"train/loss@{first}", f"eval/share@{first}"} <= by_source(run).keys(), run.stdout
        assert "mixture: an epoch has" in run.stdout


def test_pairs_of_several_sources_are_compared_with_each_other(tmp_path: Path, reference: Callable[..., Run]) -> None:
    """The loss compares all pairs of a batch, so that it has no part of a source."""
    for name, words in (("one", "a b c d e f g"), ("two", "u v w x y z")):
        rows = [f"{words} {number},{number} {words}" for number in range(60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["query,document", *rows]))
    flags = "--max_steps 4 --log_every 1 --batch_size 8 --vocabulary 128 --hidden_size 16 --num_layers 1"
    flags += f" --data {tmp_path}/one.csv:1,{tmp_path}/two.csv:1"
    run, expected = fork(tmp_path / "run", "ddp", EMBEDDINGS, flags), reference(EMBEDDINGS, flags)
    assert largest_difference(run.column("train/loss"), expected.column("train/loss")) <= TOLERANCE
    assert "mixture: an epoch has" in run.stdout
    measures = ["recall@1", "recall@10", "ndcg@10", "mrr@10", "map@100"]
    assert by_source(run).keys() == {f"eval/{name}" for name in measures}  # no sources: among so many nearest


def test_mistakes_get_one_line(tmp_path: Path, chats: str) -> None:
    (tmp_path / "one.csv").write_text("text,label\n" + "\n".join(f"x{n},{n % 2}" for n in range(20)))
    (tmp_path / "two.csv").write_text("text,label\n" + "\n".join(f"x{n},{n % 3}" for n in range(20)))
    csv = f"--data {tmp_path}/one.csv:1,{tmp_path}/two.csv:1"
    nested = tmp_path / "outer.yaml"
    nested.write_text(f"{tmp_path}/inner.yaml: 1\nshort.jsonl: 1\n")
    (tmp_path / "inner.yaml").write_text("a.jsonl: 1\nb.jsonl: 1\n")
    cases = [
        (FINETUNE, chats.replace("long.jsonl", "lost.jsonl"), "lost.jsonl: no such file"),
        (PREFERENCES, f"--data {nested}", "this recipe takes one source: use it without a weight"),
        (LINEAR, "--data a.csv:1,b.csv:1", "this recipe takes one source: use it without a weight"),
        (TEXT_CLASSIFICATION, csv, "classes is ['0', '1', '2'] in two and ['0', '1'] in the first source"),
        (IMAGE_CLASSIFICATION, "--data shapes:1,nowhere:1", "--data nowhere: no such folder"),
    ]
    for number, (script, data, line) in enumerate(cases):
        run = fork(tmp_path / str(number), "single", script, data, succeeds=False)
        assert line in refused(run), run.stderr
