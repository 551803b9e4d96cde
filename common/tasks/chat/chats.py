"""The tokens that a model learns to write; one conversation per sample, or several packed into blocks."""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...data.collate import pad_to_longest
from ...data.facts import say
from ...data.sets import ListDataset
from ...errors import UsageError
from ..models.causal_lm import IGNORED, find_trained_places
from ..models.tokenization import END, digest_of
from ..reading.rows import Row, Table
from ..reading.sources import check_not_streamed, divide, load_tables
from ..streams import cache_folder, rows_on_disk
from .conversations import USUAL, Conversation, Messages, answer_spans, find_unused, reach_into

HELD_OUT = 20  # one conversation in this many is for evaluation, if the source has no evaluation part
VERSION = 8  # of the encoded rows: a new number encodes them again
NUM_LOOKED_AT = 16  # conversations to check for parts that the template does not use
OF_TEMPLATE = "tools", "chat_template_kwargs"  # columns for the template, besides messages


@dataclass(frozen=True)
class Chats:
    """Encoded conversations."""

    # For each, {"tokens": ids without those beyond the limit, "trained": for each of them whether the model learns to
    # write it, "num_trained", "length": the number of ids before the cut, "is_empty": of an answer, "equal": whether
    # both conversations of a pair have the same tokens}. A list, or a `datasets.Dataset` whose rows stay on disk.
    rows: Any
    chat: Callable[[int], Conversation]  # the conversation with an index
    per_sample: int = 1  # how many consecutive conversations make a sample

    def __len__(self) -> int:
        return len(self.rows)

    def select_answered(self, number: int) -> list[Conversation]:
        """The conversations in the first `number` samples that end with an answer in text."""
        every = range(0, len(self), self.per_sample)[:number]
        return [chat for chat in (Conversation.of(self.chat(index)) for index in every) if chat.is_answered]

    def column(self, name: str) -> list[Any]:
        """The entry of this name in each row."""
        return [row[name] for row in self.rows] if isinstance(self.rows, list) else self.rows[name][:]

    def part(self, samples: Iterable[int]) -> "Chats":
        """The conversations of these samples, which stay on disk."""
        indices = [self.per_sample * sample + side for sample in samples for side in range(self.per_sample)]
        chosen = [self.rows[index] for index in indices] if isinstance(self.rows, list) else self.rows.select(indices)
        return Chats(chosen, lambda index: self.chat(indices[index]), self.per_sample)

    @cached_property
    def teaching(self) -> tuple[list[int], list[int]]:
        """(samples whose conversations all have a trained token; the same without pairs of equal conversations)"""
        numbers, equal = range(len(self) // self.per_sample), self.column("equal")
        num_trained = self.column("num_trained")
        trained = [num_trained[side :: self.per_sample] for side in range(self.per_sample)]
        whole = [number for number in numbers if all(side[number] for side in trained)]
        return whole, [number for number in whole if not equal[self.per_sample * number]]

    def keep_teaching(self, data: str, max_length: int, use: str) -> "Chats":
        """The samples that teach something. Tokens beyond `max_length` are cut. Prints, for each reason,
        how many others there are for `use` in training or evaluation. Raises UsageError if there are none."""
        total, (whole, kept) = len(self) // self.per_sample, self.teaching
        lacks = {1: "conversations have no trained token", 2: "pairs have an answer without a token"}
        reasons = {lacks[self.per_sample]: total - len(whole), "pairs have two equal answers": len(whole) - len(kept)}
        for reason, number in reasons.items():
            if number:
                say(f"--data {data}: {number:,} of {total:,} {use} {reason} within --max_length {max_length}: left out")
        taught = self if len(kept) == total else self.part(kept)
        if number := sum(taught.column("is_empty")):
            say(f"--data {data}: {number:,} {use} conversations have an empty answer: the model learns only its end")
        if whole and not kept:
            raise UsageError(f"--data {data}: both answers of each pair are equal: there is no preference to learn")
        if not kept:
            roles = sorted({message["role"] for message in Conversation.of(self.chat(0)).messages})
            advice = f"expected messages of the role assistant, found {', '.join(roles) or 'no message'}"
            if "assistant" in roles:
                advice = "use a chat_template that writes the answers, a larger --max_length, or weights above 0"
            raise UsageError(f"--data {data}: no token is trained: {advice}")
        return taught

    def facts(self, max_length: int) -> str:
        """The share of trained tokens, and how many conversations were cut, for the terminal."""
        lengths, num_trained = self.column("length"), sum(self.column("num_trained"))
        num_tokens = sum(min(length, max_length) for length in lengths)
        num_cut = sum(length > max_length for length in lengths)
        trained = f"{100 * num_trained / num_tokens:.0f} % of tokens trained"
        return f"{trained}; longest {max(lengths):,}; {num_cut:,} of {len(self):,} too long (cut)"


# A `collate_fn` for conversations and for pairs of answers.
PAD_CHATS = pad_to_longest({"labels": IGNORED, "places": -1}, None)


class ChatDataset(ListDataset):
    """Conversations: {"tokens", "labels": int64 of shape (length,), "places": of trained labels, "weight": float}. A
    label is the next token, or `IGNORED` if it is not trained. The weight is the number of trained labels.

    Args:
        chats: the conversations.
        block: None for one per sample. Otherwise several are packed into a sample of this many tokens, the length at
            which they were cut; then "positions" start at 0 for each conversation, and for the padding at the end.
    """

    def __init__(self, chats: Chats, block: int | None = None):
        self.rows, self.block = chats.rows, block
        lengths = [] if block is None else [min(size, block) - 1 for size in chats.column("length")]
        self.samples = [[row] for row in range(len(chats))] if block is None else pack(lengths, block)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chats, positions = [shift(self.rows[row]) for row in self.samples[index]], {}
        if self.block is not None:
            if missing := self.block - sum(len(tokens) for tokens, _ in chats):
                chats.append((torch.zeros(missing, dtype=torch.int64), torch.full((missing,), IGNORED)))
            positions = {"positions": torch.cat([torch.arange(len(tokens)) for tokens, _ in chats])}
        tokens, labels = map(torch.cat, zip(*chats))
        trained = {"places": find_trained_places(labels), "weight": float((labels != IGNORED).sum())}
        return {"tokens": tokens, "labels": labels} | positions | trained


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The numbers of the items in each block of `size`: the longest first, each into the fullest block with room."""
    blocks: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free, block), sorted
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        place = bisect_left(rooms, (lengths[item], -1))
        free, block = rooms.pop(place) if place < len(rooms) else (size, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(item)
        insort(rooms, (free - lengths[item], block))
    return [sorted(block) for block in blocks]


def shift(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of a row of `Chats`: a label is the next token."""
    tokens, trained = torch.tensor(row["tokens"]), torch.tensor(row["trained"])
    return tokens[:-1], tokens[1:].masked_fill(~trained[1:], IGNORED)


def load_chats(
    data: str, tokenizer: Any, max_length: int, column: str, max_samples: int | None = None
) -> tuple[Chats, Chats]:
    """(training conversations, evaluation conversations) with a trained token, encoded with the tokenizer's chat
    template. If the source has only one part, one conversation in twenty is held out. Raises UsageError for missing
    data or columns, and messages or a template that cannot be used.

    Args:
        data: "rules" (questions with answers by rules); a .jsonl or .parquet file; or a Hub id.
        tokenizer: a fast tokenizer of transformers with a chat template.
        max_length: tokens beyond this number are cut.
        column: name of the column with lists of messages; else "conversations", or "prompt" and "completion" (learnt).
        max_samples: read at most this many conversations of each part, as a stream.
    """
    needs = [{column}, {"conversations"}, {"prompt", "completion"}]
    lacks = f"has neither {column} nor prompt and completion: rename two columns, or use --messages_column with one of"
    kind, limits = f"conversation in {column}", (max_length, max_samples)
    read = lambda row: [Conversation.of_row(row, column)]  # noqa: E731
    embedded = lambda: [{column: messages} for messages in by_rules()]  # noqa: E731
    return load_samples(data, tokenizer, *limits, kind, read, embedded, needs, lacks)


def load_samples(
    data: str,
    tokenizer: Any,
    max_length: int,
    max_samples: int | None,
    kind: str,
    read: Callable[[Row], list[Conversation]],
    embedded: Callable[[], list[Row]],
    needs: list[set[str]],
    lacks: str,
) -> tuple[Chats, Chats]:
    """(training part, evaluation part) of encoded samples, each a conversation or a pair of them, that
    teach something. Raises UsageError like `load_chats`.

    Args:
        data, tokenizer, max_length, max_samples: as in `load_chats`.
        kind: what a sample is; begins with "conversation" or "pair". Each function that reads samples has its own kind.
        read: the conversations in a row.
        embedded: makes the rows of "rules".
        needs: the columns of one of these sets must be there.
        lacks: the message if they are not; it ends with the names of the columns.
    """
    noun, size = kind.split()[0], 2 if kind == "pair" else 1

    def encoded(rows: Iterable[Row]) -> Iterator[Row]:
        for number, row in enumerate(rows, start=1):
            try:
                found = [encode(chat, tokenizer, max_length) for chat in read(row)]
                is_equal = len(found) > 1 and found[0]["tokens"] == found[1]["tokens"]
                yield from (one | {"equal": is_equal} for one in found)
            except UsageError as error:
                raise UsageError(f"--data {data}, {noun} {number}: {error}") from None

    def chat_of(rows: Any) -> Callable[[int], Conversation]:
        return lambda index: read(rows[index // size])[index % size]

    if data == "rules":
        check_not_streamed(data, max_samples)
        own = embedded()
        whole, cut = Chats([*encoded(own)], chat_of(own), size), len(own) // HELD_OUT
        parts = [whole.part(range(cut, len(own))), whole.part(range(cut))]
    else:
        import datasets  # not at the top: the import takes seconds

        integer, truth = datasets.Value("int64"), datasets.Value("bool")
        features = datasets.Features(
            {"tokens": datasets.List(integer), "trained": datasets.List(truth)}
            | dict.fromkeys(("num_trained", "length"), integer)
            | dict.fromkeys(("is_empty", "equal"), truth)
        )
        parts = []
        advice = f"use --data rules, or the path of a .jsonl file of {noun}s"
        for table in load_tables(data, advice, max_samples, partial(_has_answers, read=read, needs=needs)):
            used = next((names for names in needs if names <= {*table.column_names}), None)
            if used is None:
                raise UsageError(f"--data {data} {lacks} {', '.join(table.column_names)}{table.form}")
            table.say_unread(*used, *OF_TEMPLATE, *["prompt"] * (noun == "pair"))
            folder = cache_folder(kind, VERSION, table.key, digest_of(tokenizer), max_length)
            title, number = f"encoding {len(table):,} {noun}s", size * len(table)
            parts.append(Chats(rows_on_disk(folder, title, encoded(table), features, number), chat_of(table), size))
            _say_unused(data, table, read, tokenizer)
    if len(parts) == 1:
        if (number := len(parts[0]) // size) < 2:
            raise UsageError(f"--data {data} has {number} {noun}{'s' * (number != 1)}: expected 2 or more")
        parts = [parts[0].part(samples) for samples in _divide(number, parts[0].teaching[1])]
    uses = "training", "evaluation"
    train, evaluation = (part.keep_teaching(data, max_length, use) for part, use in zip(parts, uses))
    return train, evaluation


def _has_answers(table: Table, read: Callable[[Row], list[Conversation]], needs: list[set[str]]) -> bool:
    """Whether a split has a message to learn, or one that cannot be read: encoding it reports the error."""
    if not any(all(map(table.has_classes, names)) for names in needs):
        return False
    with suppress(UsageError):
        return any(message["role"] == "assistant" for row in table for chat in read(row) for message in chat.messages)
    return True


def _divide(number: int, useful: list[int]) -> tuple[list[int], list[int]]:
    """(samples for training, held-out samples): one in twenty is held out, at least one of them useful."""
    train, held = divide([[*range(number)]], HELD_OUT)
    if useful and not {*useful} & {*held}:
        held = useful[:1]
        train = [sample for sample in range(number) if sample not in held]
    return train, held


def _say_unused(data: str, table: Table, read: Callable[[Row], list[Conversation]], template: Any) -> None:
    """Prints which parts of the first rows the chat template does not use."""
    chats = []
    for row in itertools.islice(table, NUM_LOOKED_AT):
        with suppress(UsageError):  # its encoding reports that
            chats += read(row)
    if roles := {message["role"] for chat in chats for message in chat.messages} - {*USUAL}:
        say(f"--data {data}: messages of the role {', '.join(sorted(roles))} are not trained, only those of assistant")
    if names := find_unused([chat for chat in chats if not chat.is_plain], template):
        found = [message.get(name) for chat in chats for message in chat.messages for name in names]
        hint = ' ("weight": 0 keeps a message out of training)' if bool in map(type, found) else ""
        say(f"--data {data}: the chat template does not use {', '.join(names)}{hint}")


def encode(chat: Any, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Encodes a conversation, or messages: a row of `Chats`.

    The model learns to write what the template puts after the beginning of each answer of the assistant, up to its end
    mark, but not in messages before the conversation's `first`. Raises UsageError.
    """
    chat = Conversation.of(chat)
    if chat.is_plain:  # its contents unchanged; the last one is learnt
        (prompt, answer), end = (message["content"] for message in chat.messages), tokenizer.eos_token or END
        text = prompt + answer + ("" if answer.endswith(end) else end)
        spans = [range(len(prompt), len(text))]
    else:
        text, spans = answer_spans(chat.messages, tokenizer, chat.first, chat.options)
    encoded = tokenizer(text, add_special_tokens=chat.is_plain, return_offsets_mapping=True)
    tokens, trained = encoded["input_ids"], reach_into(spans, encoded["offset_mapping"])
    trained[:1] = [False] * len(trained[:1])  # no token comes before it
    tokens, trained, facts = tokens[:max_length], trained[:max_length], {"length": len(tokens)}
    facts |= {"num_trained": sum(trained), "is_empty": chat.has_empty_answer}
    return {"tokens": tokens, "trained": trained} | facts


DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
MONTHS = "January February March April May June July August September October November December"


def answers_by_rules() -> dict[str, str]:
    """{question: its answer}, such as {"Larger of 3 and 7?": "7"}"""
    answers = {f"{word} of {one} and {two}?": str(choose(one, two))
               for word, choose in (("Larger", max), ("Smaller", min))
               for one, two in itertools.permutations(range(10), 2)}  # fmt: skip
    for names in (DAYS.split(), MONTHS.split()):  # not `calendar`'s names, which are in the system's language
        for one, two in itertools.pairwise([*names, names[0]]):
            answers |= {f"After {one}?": two, f"Before {two}?": one}
    return answers


def by_rules() -> list[Messages]:
    """1,000 conversations of one to three questions, whose answers follow rules, in a fixed random order."""
    answers, chats, generator = answers_by_rules(), list[Messages](), random.Random(0)
    for _ in range(1000):
        turns = generator.sample(sorted(answers), generator.choice((1, 2, 3)))
        pairs = [({"role": "user", "content": q}, {"role": "assistant", "content": answers[q]}) for q in turns]
        chats.append([message for pair in pairs for message in pair])
    return chats
