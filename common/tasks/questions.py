"""Questions whose answers stand in a text: embedded, in a file, or on the Hub; long texts in windows."""

import ast
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.facts import say
from ..errors import UsageError
from .pairs import documented_functions
from .rows import Row, Table
from .sources import hold_out, load_tables

HELD_OUT = 10  # one text in so many is for evaluation, if the source has no evaluation part
QUESTIONS_PER_CALL = 1000  # of the tokenizer, whose lists are large
OUTSIDE = -1
NOWHERE = OUTSIDE, OUTSIDE  # the place of a token that is not of the text
ADVICE = "use --data stdlib for the embedded questions, or the path of a .csv, .json, .jsonl or .parquet file"


@dataclass(frozen=True, eq=False)
class Question:
    """A question about a text.

    Attributes:
        answers: (answer, number of its first character in the text) of each right answer; none if the text has none.
    """

    text: str
    context: str
    answers: Sequence[tuple[str, int]]


class Windows(Dataset):
    """Samples {"input_ids": int64 of shape (length,), "token_type_ids": the same, if the tokenizer gives them,
    "places": int64 of shape (length, 2), "start": int, "end": int}: a question and a part of its text.

    A place is the first character of a token in the text, and the one after its last; `NOWHERE` for other tokens.
    Start and end are the places of the first answer's tokens; the place of [CLS], if the window does not hold them all.

    Args:
        questions: of the source.
        tokenizer: of transformers.
        max_length: tokens of a window, with the question.
        stride: tokens of the text that a window shares with the next one.

    Raises:
        UsageError: a tokenizer without offsets, or a question that leaves no room for its text.
    """

    def __init__(self, questions: list[Question], tokenizer: Any, max_length: int, stride: int):
        if not tokenizer.is_fast:
            raise UsageError(f"{type(tokenizer).__name__} does not say where tokens stand: use a fast tokenizer")
        self.samples: list[dict[str, Any]] = []
        self.owners: list[Question] = []
        for start in range(0, len(questions), QUESTIONS_PER_CALL):
            part = questions[start : start + QUESTIONS_PER_CALL]
            asked = [question.text.lstrip() for question in part]
            longest = max(map(len, tokenizer(asked, [""] * len(asked))["input_ids"]))
            if longest + stride >= max_length:
                raise UsageError(
                    f"--max_length {max_length} leaves no room for a text beside a question of {longest} tokens and "
                    f"--stride {stride}: use --max_length {2 * (longest + stride)}, or a smaller --stride"
                )
            encoded = tokenizer(
                asked,
                [question.context for question in part],
                **{"truncation": "only_second", "max_length": max_length, "stride": stride},
                **{"return_overflowing_tokens": True, "return_offsets_mapping": True},
            )
            for row, number in enumerate(encoded["overflow_to_sample_mapping"]):
                of_text = [sequence == 1 for sequence in encoded.sequence_ids(row)]
                places = [at if is_text else NOWHERE for at, is_text in zip(encoded["offset_mapping"][row], of_text)]
                tokens = {name: encoded[name][row] for name in ("input_ids", "token_type_ids") if name in encoded}
                ids, cls = tokens["input_ids"], tokenizer.cls_token_id
                start_end = _labels(part[number], places, ids.index(cls) if cls in ids else 0)
                held = {
                    name: torch.tensor(value, dtype=torch.int32)
                    for name, value in (tokens | {"places": places}).items()
                }
                self.samples.append(held | dict(zip(("start", "end"), start_end)))
                self.owners.append(part[number])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {name: value.long() if isinstance(value, Tensor) else value for name, value in sample.items()}


def _labels(question: Question, places: list[tuple[int, int]], cls: int) -> tuple[int, int]:
    """The places of the first and the last token of the first answer; twice that of [CLS] if they are not all there."""
    inside = [at for at, (begin, _) in enumerate(places) if begin != OUTSIDE]
    for text, begin in question.answers[:1]:
        end = begin + len(text)
        if inside and places[inside[0]][0] <= begin and end <= places[inside[-1]][1]:
            first = max(at for at in inside if places[at][0] <= begin)
            return first, min(at for at in inside if places[at][1] >= end)
    return cls, cls


def best_spans(start: Tensor, end: Tensor, places: Tensor, max_length: int) -> dict[str, Tensor]:
    """For `best_answers`: of each window the answer of at most `max_length` tokens with the highest sum of logits.

    Args:
        start, end: logits, of shape (batch, length).
        places: int64 of shape (batch, length, 2), as in `Windows`.
    """
    length, row = start.shape[1], torch.arange(len(start), device=start.device)
    is_text = places[..., 0] != OUTSIDE
    fits = torch.ones(length, length, dtype=torch.bool, device=start.device).triu().tril(max_length - 1)
    fits = fits & is_text[:, :, None] & is_text[:, None, :]
    sums = (start[:, :, None] + end[:, None, :]).masked_fill(~fits, -1e9)
    score, place = sums.flatten(1).max(1)
    begin, last = places[row, place // length, 0], places[row, place % length, 1]
    return {"score": score, "no_answer": start[:, 0] + end[:, 0], "begin": begin, "end": last}


def best_answers(parts: Sequence[Windows], examples: dict[str, Tensor], may_be_none: bool) -> dict[Question, str]:
    """The answer to each question: of all its windows the one with the highest score; "" if none scores higher.

    Args:
        parts: of an evaluation set, one after another.
        examples: for each of their windows: the "score" of its best answer, from character "begin" to "end" of its
            text, and "no_answer", the score of none.
        may_be_none: whether questions may have no answer.
    """
    owners = [owner for part in parts for owner in part.owners]
    found: dict[Question, tuple[float, str]] = {}
    nothing: dict[Question, float] = {}
    columns = (examples[name].tolist() for name in ("score", "no_answer", "begin", "end"))
    for question, score, none, begin, end in zip(owners, *columns):
        found[question] = max(found.get(question, (score, "")), (score, question.context[begin:end]))
        nothing[question] = min(nothing.get(question, none), none)
    return {one: "" if may_be_none and nothing[one] > score else text for one, (score, text) in found.items()}


def exact_and_f1(answers: dict[Question, str], may_be_none: bool) -> dict[str, float]:
    """The measures of SQuAD's script, in percent, of {question: what the model answers}."""
    rows = [(bool(question.answers), *_scores(text, question.answers)) for question, text in answers.items()]
    groups = {"": rows}
    if may_be_none:
        groups |= {"answerable_": [row for row in rows if row[0]], "unanswerable_": [row for row in rows if not row[0]]}
    return {
        f"{group}{name}": 100 * sum(row[column] for row in each) / max(1, len(each))
        for group, each in groups.items()
        for column, name in ((1, "exact_match"), (2, "f1"))
    }


def _scores(given: str, answers: Iterable[tuple[str, int]]) -> tuple[float, float]:
    """(whether the words are those of a right answer, the highest F1 of the words)"""
    exact, f1, words = 0.0, 0.0, _words(given)
    for right in list(filter(None, (_words(text) for text, _ in answers))) or [[]]:
        exact = max(exact, float(words == right))
        same = (Counter(words) & Counter(right)).total()
        f1 = max(f1, 2 * same / (len(words) + len(right)) if words and right else float(words == right))
    return exact, f1


def _words(text: str) -> list[str]:
    """The words that count: in lower case, without punctuation and articles."""
    plain = "".join(one for one in text.lower() if one not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def load_questions(
    data: str, context: str = "context", question: str = "question", answers: str = "answers"
) -> tuple[list[Question], list[Question]]:
    """Loads questions with their texts and answers.

    Args:
        data: "stdlib" (docstrings of Python's standard library); or what `load_tables` takes: rows with the columns of
            `datasets`' SQuAD, or with an answer as text; or SQuAD's own JSON file.
        context, question, answers: names of the columns.

    Returns:
        (training questions, evaluation questions). If the source has only one part, one text in ten is held out.

    Raises:
        UsageError: no data, no such column, or an answer that does not stand in its text.
    """
    if data == "stdlib":
        parts = [[*_standard_library()]]
    else:
        parts = [_rows(table, context, question, answers) for table in load_tables(data, ADVICE)]
    if len(parts) == 1:
        contexts = [*dict.fromkeys(question.context for question in parts[0])]
        held = {contexts[number] for number in hold_out(len(contexts), HELD_OUT)[1].tolist()}
        parts = [[one for one in parts[0] if (one.context in held) == is_held] for is_held in (False, True)]
    if not all(parts):
        raise UsageError(
            f"--data {data} has questions about one text: expected some for training and some for evaluation"
        )
    without = sum(not question.answers for part in parts for question in part)
    if without:
        say(f"--data {data}: {without:,} of {sum(map(len, parts)):,} questions have no answer")
    return parts[0], parts[1]


def _standard_library() -> Iterator[Question]:
    """Questions about what a function does and returns, and the defaults of its arguments; some have no answer."""
    for node, docstring in documented_functions():
        head = f"{node.name}({ast.unparse(node.args)}): "
        context = head + " ".join(" ".join(docstring.split("\n\n")[:2]).split())
        asked = {
            f"What does {node.name} do?": re.compile(r"(?P<answer>.+?)(?=\. |\.?$)").match(context, len(head)),
            f"What does {node.name} return?": re.search(r"\b[Rr]eturns? (?P<answer>.+?)(?=[.;:] |\.?$)", context),
        }
        # The first arguments have no default, and what has none is asked for where others have one.
        for argument in node.args.args[1:] if node.args.defaults else ():
            pattern = rf"\b{argument.arg}(: [^=,]+)?\s?=\s?(?P<answer>[^,()]*\w[^,()]*)[,)]"
            asked[f"What is the default of {argument.arg}?"] = re.search(pattern, head)
        for question, found in asked.items():
            yield Question(question, context, [(found["answer"], found.start("answer"))] if found else [])


def _rows(table: Table, context: str, question: str, answers: str) -> list[Question]:
    rows: Iterable[Row] = table
    if "data" in table.column_names and context not in table.column_names:  # SQuAD's own file
        paragraphs = (each for row in table for article in row["data"] for each in article["paragraphs"])
        rows = (
            {question: one["question"], answers: one["answers"], context: each["context"]}
            for each in paragraphs
            for one in each["qas"]
        )
    else:
        table.check_columns({"--context_column": context, "--question_column": question, "--answers_column": answers})
    found, left_out = list[Question](), list[int]()
    for number, row in enumerate(rows, start=1):
        asked, text = row[question], row[context]
        if not all(isinstance(each, str) and each.strip() for each in (asked, text)):
            left_out.append(number)
            continue
        try:
            found.append(Question(asked, text, _answers(row[answers], text)))
        except UsageError as error:
            raise UsageError(f"--data {table.name}, row {number}: {error}") from None
    if left_out:
        say(
            f"--data {table.name}: {len(left_out):,} rows have no text or no question, such as row {left_out[0]}: "
            "left out"
        )
    return found


def _answers(cell: Any, context: str) -> list[tuple[str, int]]:
    """(answer, its first character) of each. Raises UsageError if it does not stand there."""
    if cell is None or isinstance(cell, str):
        found = [(cell, context.find(cell))] if cell else []
    else:
        try:  # {"text": [...], "answer_start": [...]}, or a list of such dicts with one answer each
            columns = [(one["text"], one["answer_start"]) for one in (cell if isinstance(cell, list) else [cell])]
            found = [
                each
                for text, begin in columns
                for each in ([(text, begin)] if isinstance(text, str) else zip(text, begin))
            ]
            found = [(str(text), int(begin)) for text, begin in found]
        except (TypeError, KeyError, ValueError):
            raise UsageError(
                f'expected an answer as a text, or as {{"text": [...], "answer_start": [...]}}; found {str(cell)[:40]}'
            ) from None
    for text, begin in found:
        if begin < 0 or context[begin : begin + len(text)] != text:
            where = "in" if begin < 0 else f"at character {begin} of"
            raise UsageError(f"the answer '{text}' does not stand {where} its text: write it as it stands there")
    return found
