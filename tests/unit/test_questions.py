"""Promise: questions are read as they stand, long texts in windows, and measured as by SQuAD's script."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_recipes import UsageError
from accelerate_recipes.common.data.collate import pad_to_longest
from accelerate_recipes.common.tasks.models.encoder import word_tokenizer
from accelerate_recipes.common.tasks.nlp.questions import Question, Windows, best_answers, exact_and_f1
from accelerate_recipes.common.tasks.nlp.questions import load_questions as load
from recipes.question_answering import best_spans, questions_about_functions

TEXT = "The cat sat on the mat, and the dog ate the red bone."


def load_questions(data: str) -> tuple[list[Question], list[Question]]:
    return load(data, "context", "question", "answers", questions_about_functions)


def question(
    text: str = "what ate", answers: tuple[tuple[str, int], ...] = (("dog", 32),), context: str = TEXT
) -> Question:
    return Question(text, context, answers)


def windows(questions: list[Question], max_length: int = 10, stride: int = 2) -> Windows:
    return Windows(questions, word_tokenizer([TEXT, "what ate", TEXT, "what ate"], 64), max_length, stride)


def test_windows_cover_the_text_and_know_their_answer() -> None:
    asked = question()
    found = windows([asked])
    assert len(found) == 4 and all(owner is asked for owner in found.owners)
    texts, labels = [], []
    for index in range(len(found)):
        sample = found[index]
        texts.append([TEXT[begin:end] for begin, end in sample["places"].tolist() if begin >= 0])
        start, end = sample["start"], sample["end"]
        labels.append(TEXT[sample["places"][start, 0] : sample["places"][end, 1]] if start else None)
        assert sample["places"][:4].eq(-1).all()  # [CLS] what ate [CLS]
    assert texts[0] == ["The", "cat", "sat", "on", "the", "mat"] and texts[1][:2] == texts[0][-2:]
    assert labels == [None, "dog", "dog", None]
    whole = windows([question(answers=(("the red bone", 40),))], 64)
    assert TEXT[whole[0]["places"][whole[0]["start"], 0] : whole[0]["places"][whole[0]["end"], 1]] == "the red bone"
    assert windows([question(answers=())], 64)[0]["start"] == 0


def test_a_question_needs_room() -> None:
    line = "--max_length 6 leaves no room for a text next to a question of 4 tokens and --stride 2: use 12, or a"
    with pytest.raises(UsageError, match=line):
        windows([question()], 6)


def test_best_span_is_that_of_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 20, 12, generator=generator)
    places = torch.arange(24).view(1, 12, 2).repeat(20, 1, 1)
    places[:, :3] = places[10:, 9:] = -1
    found = best_spans(start, end, places, 4)
    for row in range(20):
        inside = [at for at in range(12) if places[row, at, 0] >= 0]
        sums = {(i, j): start[row, i] + end[row, j] for i in inside for j in inside if i <= j < i + 4}
        first, last = max(sums, key=sums.get)
        assert found["score"][row] == sums[first, last] and found["no_answer"][row] == start[row, 0] + end[row, 0]
        assert (found["begin"][row], found["end"][row]) == (2 * first, 2 * last + 1)


def test_the_best_window_answers() -> None:
    first, second = question(context="one two three four"), question(context="five six")
    parts = [windows([first], 8, 1), windows([second], 8, 1)]
    assert [len(part) for part in parts] == [1, 1]
    parts[0].owners.append(first)  # as if its text had two windows
    examples = {
        "score": torch.tensor([1.0, 2.0, 3.0]),
        "no_answer": torch.tensor([5.0, 0.5, 4.0]),
        "begin": torch.tensor([0, 4, 0]),
        "end": torch.tensor([3, 7, 4]),
    }
    assert best_answers(parts, examples, may_be_none=False) == {first: "two", second: "five"}
    assert best_answers(parts, examples, may_be_none=True) == {first: "two", second: ""}
    # The metric for the best weights is looked for in an evaluation of one sample.
    assert best_answers(parts, {name: value[:1] for name, value in examples.items()}, True) == {first: ""}


ANSWERS = [
    ("the red bone", ["red bone"]),
    ("A red, red bone!", ["bone", "the red bone"]),
    ("mat", ["mats", "cat"]),
    ("", ["dog"]),
    ("Dog", ["the dog", "a dog and a cat"]),
    ("year 2,000", ["in the year 2000"]),
]


def test_measures_are_those_of_squad() -> None:
    from torchmetrics.functional.text import squad

    given = {question(answers=tuple((text, 0) for text in right)): text for text, right in ANSWERS}
    predicted = [{"id": str(number), "prediction_text": text} for number, (text, _) in enumerate(ANSWERS)]
    target = [
        {"id": str(number), "answers": {"text": right, "answer_start": [0] * len(right)}}
        for number, (_, right) in enumerate(ANSWERS)
    ]
    theirs = {name: float(value) for name, value in squad(predicted, target).items()}
    assert exact_and_f1(given, may_be_none=False) == pytest.approx(theirs, abs=1e-5)  # float32
    # As in the script of SQuAD 2, no answer is right if there is none.
    given |= {question(answers=()): "", question(answers=()): "dog"}
    found = exact_and_f1(given, may_be_none=True)
    assert found["answerable_f1"] == pytest.approx(theirs["f1"], abs=1e-5)
    assert found["unanswerable_f1"] == found["unanswerable_exact_match"] == 50
    assert found["f1"] == pytest.approx((6 * theirs["f1"] + 2 * 50) / 8, abs=1e-5)
    # Nor is an answer of articles alone one of the right answers, if there are others.
    found = exact_and_f1({question(answers=(("The", 0), ("dog", 32))): ""}, may_be_none=True)
    assert found["f1"] == found["exact_match"] == 0


DOG = {"text": ["dog"], "answer_start": [32]}
ROWS: list[Any] = [
    {"context": TEXT, "question": "what ate", "answers": DOG},
    {"context": TEXT, "question": "what ate", "answers": [{"text": "dog", "answer_start": 32}]},
    {"context": TEXT, "question": "what ate", "answers": {"text": "dog", "answer_start": 32}},
    {"context": TEXT, "question": "what ate", "answers": "dog"},
    {"context": TEXT, "question": "what flew", "answers": {"text": [], "answer_start": []}},
    {"context": "0 dogs", "question": "how many", "answers": {"text": [0], "answer_start": [0]}},
    {"context": "  ", "question": "what ate", "answers": "dog"},
    {"context": "Another dog", "question": "who", "answers": "dog"},
]


def test_answers_in_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    train, held_out = load_questions(str(tmp_path / "file.jsonl"))
    found = sorted(train + held_out, key=lambda one: one.context)
    assert [list(one.answers) for one in found] == [[("0", 0)], [("dog", 8)], *[[("dog", 32)]] * 4, []]
    assert not {one.context for one in train} & {one.context for one in held_out}  # a text is on one side
    output = capsys.readouterr().out
    assert "1 of 8 rows have no text in column context or question, such as row 7: left out" in output
    assert "1 of 7 questions have no answer" in output


def test_a_column_says_where_answers_begin(tmp_path: Path) -> None:
    """Not the first dog of the text; a row without a number has the first one."""
    rows = [{"context": text, "question": "what ate", "answers": "dog"} for text in (TEXT, TEXT + " now")]
    text = "".join(json.dumps(row | {"answer_start": begin}) + "\n" for row, begin in zip(rows, (32, None)))
    (tmp_path / "file.jsonl").write_text(text)
    train, held_out = load_questions(str(tmp_path / "file.jsonl"))
    begins = {(one.context, begin) for one in train + held_out for _, begin in one.answers}
    assert begins == {(TEXT, 32), (TEXT + " now", TEXT.index("dog"))}


def test_where_answers_begin_in_csv(tmp_path: Path) -> None:
    """As pandas writes a column of numbers in which some are missing."""
    lines = [
        "context,question,answers,answer_start",
        f'"{TEXT}",who,dog,32.0',
        f'"{TEXT} now",who,dog,',
        "no dog,who,,",
    ]
    (tmp_path / "file.csv").write_text("\n".join(lines) + "\n")
    train, held_out = load_questions(str(tmp_path / "file.csv"))
    found = {one.context: [*one.answers] for one in train + held_out}
    assert found == {TEXT: [("dog", 32)], f"{TEXT} now": [("dog", TEXT.index("dog"))], "no dog": []}
    (tmp_path / "file.csv").write_text("\n".join([*lines, '"a dog",who,dog,inf', '"a dog",who,dog,x']))
    with pytest.raises(UsageError, match="row 4: expected an answer as a text"):
        load_questions(str(tmp_path / "file.csv"))


def test_a_split_with_hidden_answers_is_no_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hidden = [row | {"answers": {"text": [], "answer_start": []}} for row in ROWS]
    for name, rows in (("train", ROWS), ("test", hidden)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, evaluation = load_questions(str(tmp_path))
    assert any(one.answers for one in evaluation) and "test" in capsys.readouterr().out


@pytest.mark.parametrize("indent", [None, 2, "first"])
def test_squad_s_own_file(tmp_path: Path, indent: Any) -> None:
    """The first line of its object may hold more than the brace."""
    asked = [{"question": "what ate", "id": "1", "answers": ROWS[1]["answers"], "is_impossible": False}]
    asked += [{"question": "what flew", "id": "2", "answers": [], "plausible_answers": [], "is_impossible": True}]
    articles = [{"title": "", "paragraphs": [{"context": text, "qas": asked} for text in (TEXT, TEXT + " Well.")]}]
    for split in ("train", "dev"):
        text = json.dumps({"version": "v2.0", "data": articles}, indent=2 if indent else None)
        (tmp_path / f"{split}.json").write_text(text.replace("\n", "", indent == "first"))
    for part in load_questions(str(tmp_path)):
        assert [(one.text, list(one.answers)) for one in part] == 2 * [("what ate", [("dog", 32)]), ("what flew", [])]


@pytest.mark.parametrize("flag", [True, "True", 1])
def test_an_impossible_question_has_no_answer(tmp_path: Path, flag: object) -> None:
    """Also if the data give one, in a table or in SQuAD's own file."""
    rows = [ROWS[0] | {"context": TEXT + str(number), "is_impossible": flag if number else ""} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    articles = [{"paragraphs": [{"context": row["context"], "qas": [row]} for row in rows]}]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    for name in ("rows.jsonl", "squad.json"):
        found = [one for part in load_questions(str(tmp_path / name)) for one in part]
        assert {one.context[-1]: len(one.answers) for one in found} == {"0": 1, "1": 0, "2": 0}


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (
            {"text": ["dog"], "answer_start": [31]},
            "row 1: answer 'dog' is not at character 31 of its text: it is at character "
            f"{ROWS[0]['context'].find('dog')}",
        ),
        ("wolf", "row 1: answer 'wolf' is not in its text"),
        ({"text": "dog"}, 'row 1: expected an answer as a text, or as {"text": [...], "answer_start": [...]}; found'),
        ([1], 'row 1: expected an answer as a text, or as {"text": [...], "answer_start": [...]}; found [1]'),
    ],
)
def test_wrong_answers(tmp_path: Path, answers: Any, line: str) -> None:
    (tmp_path / "file.jsonl").write_text(json.dumps(ROWS[0] | {"answers": answers}))
    with pytest.raises(UsageError) as caught:
        load_questions(str(tmp_path / "file.jsonl"))
    assert line in str(caught.value)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("context,question,answer\na b,what,b\n")
    with pytest.raises(
        UsageError, match="no column answers: use --answers_column with one of context, question, answer"
    ):
        load_questions(str(tmp_path / "file.csv"))


def test_embedded_questions_have_their_answers() -> None:
    train, held_out = load_questions("stdlib")
    assert len(train) > 3000 and len(held_out) > 300
    for one in train + held_out:
        for text, begin in one.answers:
            assert one.context[begin : begin + len(text)] == text and any(each.isalnum() for each in text)
    batch = pad_to_longest({"places": -1})([windows(train[:9], 96)[row] for row in (0, 5)])
    assert batch["places"].shape[0] == 2 and batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1]
