"""Questions with answers in a text, from files or the Hub; long texts in windows."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor

from ...data.facts import say
from ...data.sets import ListDataset
from ...errors import UsageError
from ..reading.rows import Table, rows_with_text
from ..reading.sources import hold_out, load_tables

QUESTIONS_PER_CALL = 1000  # of the tokenizer, whose lists are large
NOWHERE = -1, -1  # the place of a token that is not part of the text
IMPOSSIBLE = "is_impossible"  # SQuAD's column: whether a question has no answer, whatever is in its answers
ADVICE = "use --data stdlib for the embedded questions, or the path of a .csv, .json, .jsonl or .parquet file"


@dataclass(frozen=True, eq=False)
class Question:
    """A question about a text, and (answer, number of its first character there) for each right answer, if any."""

    text: str
    context: str
    answers: Sequence[tuple[str, int]] = ()


class Windows(ListDataset):
    """Samples {"input_ids": int64 of shape (length,), "token_type_ids": the same, if the tokenizer gives them,
    "places": int64 of shape (length, 2), "start", "end": int64, 0-dim}: a question and a part of its text.

    A place is the first character of a token in the text, and the one after its last; -1 for other tokens. Start and
    end are the places of the first answer's tokens; the place of [CLS], if the window does not hold them all. Raises
    UsageError for a tokenizer without offsets, or a question that leaves no room for its text.

    Args:
        questions: of the source.
        tokenizer: of transformers.
        max_length: tokens of a window, with the question.
        stride: tokens of the text that a window shares with the next one.
    """

    def __init__(self, questions: list[Question], tokenizer: Any, max_length: int, stride: int):
        if not tokenizer.is_fast:
            raise UsageError(f"{type(tokenizer).__name__} does not give the positions of tokens: use a fast tokenizer")
        asked = [question.text.lstrip() for question in questions]
        longest = max(map(len, tokenizer(asked, [""] * len(asked))["input_ids"]))
        if longest + stride >= max_length:
            what = f"leaves no room for a text next to a question of {longest} tokens and --stride {stride}"
            raise UsageError(f"--max_length {max_length} {what}: use {2 * (longest + stride)}, or a smaller --stride")
        cls, options = tokenizer.cls_token_id, {"truncation": "only_second", "max_length": max_length, "stride": stride}
        options |= {"return_overflowing_tokens": True, "return_offsets_mapping": True}
        self.samples, self.owners = [], list[Question]()  # and the question of each
        for start in range(0, len(questions), QUESTIONS_PER_CALL):
            texts = [question.context for question in questions[start : start + QUESTIONS_PER_CALL]]
            encoded = tokenizer(asked[start : start + QUESTIONS_PER_CALL], texts, **options)
            for window, number in zip(encoded.encodings, encoded["overflow_to_sample_mapping"]):
                self.owners.append(questions[start + number])
                places = [at if part == 1 else NOWHERE for at, part in zip(window.offsets, window.sequence_ids)]
                sample = {"input_ids": window.ids, "places": places}
                sample |= {"token_type_ids": window.type_ids} if "token_type_ids" in encoded else {}
                nowhere = sample["input_ids"].index(cls) if cls in sample["input_ids"] else 0
                sample |= zip(("start", "end"), _labels(self.owners[-1], places, nowhere))
                self.samples.append({name: torch.tensor(value, dtype=torch.int32) for name, value in sample.items()})

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value.long() for name, value in self.samples[index].items()}


def _labels(question: Question, places: list[tuple[int, int]], cls: int) -> tuple[int, int]:
    """The places of the first and the last token of the first answer; twice [CLS]'s place if they are not all there."""
    for text, begin in question.answers[:1]:
        before = [at for at, (start, _) in enumerate(places) if 0 <= start <= begin]
        after = [at for at, (_, stop) in enumerate(places) if stop >= begin + len(text)]
        if before and after:
            return before[-1], after[0]
    return cls, cls


def best_answers(parts: Sequence[Windows], examples: dict[str, Tensor], may_be_none: bool) -> dict[Question, str]:
    """Each question's answer with the highest score in its windows; "" if "no_answer" scores higher and `may_be_none`.

    Args:
        parts: of an evaluation set, one after another.
        examples: for each window, the "score" of its best answer from "begin" to "end", and the score "no_answer".
        may_be_none: whether questions may have no answer.
    """
    found, nothing = dict[Question, tuple[float, str]](), dict[Question, float]()
    columns = (examples[name].tolist() for name in ("score", "no_answer", "begin", "end"))
    for question, score, none, begin, end in zip((one for part in parts for one in part.owners), *columns):
        found[question] = max(found.get(question, (score, "")), (score, question.context[begin:end]))
        nothing[question] = min(nothing.get(question, none), none)
    return {one: "" if may_be_none and nothing[one] > score else text for one, (score, text) in found.items()}


def exact_and_f1(answers: dict[Question, str], may_be_none: bool) -> dict[str, float]:
    """The measures of SQuAD's script, in percent, of {question: what the model answers}."""
    rows = [(bool(question.answers), *_scores(text, question.answers)) for question, text in answers.items()]
    groups = {"": (True, False)} | ({"answerable_": (True,), "unanswerable_": (False,)} if may_be_none else {})
    means = dict[str, float]()
    for group, kinds in groups.items():
        each = [scores for has_answer, *scores in rows if has_answer in kinds] or [[0.0, 0.0]]
        exact, f1 = (100 * sum(column) / len(each) for column in zip(*each))
        means |= {f"{group}exact_match": exact, f"{group}f1": f1}
    return means


def _scores(given: str, answers: Sequence[tuple[str, int]]) -> tuple[float, float]:
    """(whether the words are a right answer's, the highest F1 of the words)"""
    words, rights = _words(given), [*filter(None, (_words(text) for text, _ in answers))] or [[]]
    same = [(Counter(words) & Counter(right)).total() for right in rights]
    f1 = max(2 * number / (len(words) + len(right)) if right else not words for number, right in zip(same, rights))
    return float(words in rights), float(f1)


def _words(text: str) -> list[str]:
    """The words that count: in lower case, without punctuation and articles."""
    plain = "".join(one for one in text.lower() if one not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def load_questions(
    data: str, context: str, question: str, answers: str, embedded: Callable[[], list[Question]]
) -> tuple[list[Question], list[Question]]:
    """(training questions, evaluation questions) with their texts and answers. If the source has only one part, one
    text in ten is held out. Raises UsageError for data that it cannot use.

    Args:
        data: "stdlib", for what `embedded` returns; or what `load_tables` takes: rows with the columns of `datasets`'
            SQuAD, or with an answer as text; or SQuAD's own JSON file.
        context, question, answers: names of the columns.
    """
    tables = [] if data == "stdlib" else load_tables(data, ADVICE, None, lambda it: it.has_classes(answers, "data"))
    parts = [_rows(table, context, question, answers) for table in tables] or [embedded()]
    if len(parts) == 1:
        contexts = [*dict.fromkeys(one.context for one in parts[0])]
        held = {contexts[number] for number in hold_out(len(contexts))[1].tolist()}
        parts = [[one for one in parts[0] if (one.context in held) == is_held] for is_held in (False, True)]
    if not all(parts):
        raise UsageError(f"--data {data} has questions about only one text: expected several, to train and to evaluate")
    if without := sum(not one.answers for part in parts for one in part):
        say(f"--data {data}: {without:,} of {sum(map(len, parts)):,} questions have no answer")
    return parts[0], parts[1]


def _rows(table: Table, context: str, question: str, answers: str) -> list[Question]:
    if "data" in table.column_names and context not in table.column_names:
        with suppress(TypeError, KeyError):  # SQuAD's own file
            paragraphs = [each for cell in table.values("data") for article in cell for each in article["paragraphs"]]
            asked = [one | {"context": it["context"]} for it in paragraphs for one in it["qas"]]
            context, question, answers = "context", "question", "answers"
            table = replace(table, column_names=[context, question, answers, IMPOSSIBLE], rows=asked)
    table.check_columns({"--context_column": context, "--question_column": question, "--answers_column": answers})
    starts = table.values("answer_start") if "answer_start" in table.column_names else repeat(None)  # of texts
    none = table.texts(IMPOSSIBLE) if IMPOSSIBLE in table.column_names else repeat(None)
    cells = [None if (text or "").lower() in ("true", "1") else cell for text, cell in zip(none, table.values(answers))]
    rows = rows_with_text(table, context, question, beside=[*zip(count(1), cells, starts)])
    return [
        Question(asked, text, _answers(cell, start, text, f"--data {table.name}, row {row}"))
        for text, asked, (row, cell, start) in rows
    ]


def _answers(cell: Any, start: Any, context: str, where: str) -> list[tuple[str, int]]:
    """(answer, its first character) of each. Raises UsageError if it is not there."""
    if cell is None or isinstance(cell, str):
        cell = [{"text": cell, "answer_start": context.find(cell or "") if start in (None, "") else start}]
    cell = [cell] if isinstance(cell, dict) and isinstance(cell.get("text"), str) else cell
    try:
        both = ([one[key] for one in cell] if isinstance(cell, list) else cell[key] for key in ("text", "answer_start"))
        found = [(str(text), int(float(begin))) for text, begin in zip(*both, strict=True) if text not in (None, "")]
    except (TypeError, KeyError, ValueError, OverflowError):
        forms = 'a text, or as {"text": [...], "answer_start": [...]}'
        raise UsageError(f"{where}: expected an answer as {forms}; found {str(cell)[:40]}") from None
    for text, begin in found:
        if begin < 0 or context[begin : begin + len(text)] != text:
            place, there = "in" if begin < 0 else f"at character {begin} of", context.find(text)
            right = f"it is at character {there}" if there >= 0 else "copy it from the text unchanged"
            raise UsageError(f"{where}: answer '{text}' is not {place} its text: {right}")
    return found
