"""Conversations: which of their tokens a model learns to write, each alone or packed into blocks."""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.facts import say
from ..data.padding import pad_to_longest
from ..errors import UsageError
from .cache import cache_folder
from .causal_lm import IGNORED, find_trained_places
from .conversations import Conversation, Messages, as_text, find_unused
from .rows import Table
from .sources import check_not_streamed, hold_out, load_tables
from .streams import rows_on_disk
from .tokenization import digest_of

HELD_OUT = 20  # one conversation in so many is for evaluation, if the source has no evaluation part
VERSION = 2  # of what `encode` returns: another number makes it work anew
NUM_LOOKED_AT = 16  # conversations, for what the template does not use
ADVICE = "use --data rules for the embedded conversations, or the path of a .jsonl file"


@dataclass(frozen=True)
class Chats:
    """Encoded conversations.

    Attributes:
        rows: for each, {"tokens": ids without those beyond the limit, "trained": for each of them whether the model
            learns to write it, "num_trained", "length": the number of ids before the cut}. A list, or a
            `datasets.Dataset` whose rows stay on disk.
        chat: the conversation with an index.
    """

    rows: Any
    chat: Callable[[int], Conversation]

    def __len__(self) -> int:
        return len(self.rows)

    def messages(self, index: int) -> Messages:
        """The messages of the conversation with an index."""
        return Conversation.of(self.chat(index)).messages

    def select_answered(self, number: int, step: int = 1) -> list[Conversation]:
        """Of each `step`-th of the conversations, at most so many, those that end with an answer that is a text."""
        found = [Conversation.of(self.chat(index)) for index in range(0, min(number * step, len(self)), step)]
        return [chat for chat in found if chat.messages[-1]["role"] == "assistant" and chat.answer]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each conversation, before the cut."""
        return self.column("length")

    @cached_property
    def num_trained(self) -> list[int]:
        """The number of tokens of each conversation that the model learns to write."""
        return self.column("num_trained")

    def column(self, name: str) -> list[Any]:
        """A value of each row."""
        rows = self.rows if isinstance(self.rows, list) else self.rows.select_columns([name])
        return [row[name] for row in rows]

    def part(self, indices: list[int]) -> "Chats":
        """The conversations with these indices, which stay on disk."""
        chosen = [self.rows[index] for index in indices] if isinstance(self.rows, list) else self.rows.select(indices)
        return Chats(chosen, lambda index: self.chat(indices[index]))

    def keep_trained(self, data: str, max_length: int, use: str) -> "Chats":
        """The conversations with a trained token; a line tells how many have none.

        Args:
            data: `--data`, for messages.
            max_length: tokens beyond this number are cut.
            use: "training" or "evaluation".

        Raises:
            UsageError: none has one.
        """
        kept = [index for index, number in enumerate(self.num_trained) if number]
        self.check_trained(data, kept)
        if len(kept) == len(self):
            return self
        say(
            f"--data {data}: {len(self) - len(kept):,} of {len(self):,} {use} conversations have no trained token "
            f"within --max_length {max_length}: left out"
        )
        return self.part(kept)

    def check_trained(self, data: str, kept: list[int]) -> None:
        """Raises UsageError if no conversation is kept."""
        if not kept:
            roles = sorted({message["role"] for message in self.messages(0)})
            raise UsageError(
                f"--data {data}: no token is trained: expected messages of the role assistant, found "
                f"{', '.join(roles)}; or use a larger --max_length"
            )

    def facts(self, max_length: int) -> str:
        """How much of it is trained, and what was cut, for the terminal."""
        lengths, num_trained = self.lengths, sum(self.num_trained)
        num_tokens = sum(min(length, max_length) for length in lengths)
        num_cut = sum(length > max_length for length in lengths)
        return (
            f"{100 * num_trained / num_tokens:.0f} % of tokens trained; longest {max(lengths):,}; {num_cut:,} of "
            f"{len(self):,} too long (cut)"
        )


# A `collate_fn` for conversations and for pairs of answers.
PAD_CHATS = pad_to_longest({"labels": IGNORED, "places": -1}, None)


class ChatDataset(Dataset):
    """One conversation a sample: {"tokens": int64 of shape (length,), "labels": int64 of shape (length,), "places": of
    trained labels, "weight": float}. A label is the next token, or `IGNORED` if it is not trained. The weight is the
    number of trained labels.
    """

    def __init__(self, chats: Chats):
        self.rows = chats.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, labels = shift(self.rows[index])
        weight = float((labels != IGNORED).sum())
        return {"tokens": tokens, "labels": labels, "places": find_trained_places(labels), "weight": weight}


class PackedDataset(Dataset):
    """Several conversations a sample, packed into a block of a fixed length: {"tokens", "labels", "positions": int64 of
    shape (length,), "places": of trained labels, "weight": float}. Positions start at 0 for each conversation,
    and for the padding at the end.

    Args:
        chats: conversations that were cut at `length` tokens.
        length: tokens of a block.
    """

    def __init__(self, chats: Chats, length: int):
        self.rows, self.length = chats.rows, length
        self.blocks = pack([min(size, length) - 1 for size in chats.lengths], length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = [shift(self.rows[row]) for row in self.blocks[index]]
        if missing := self.length - sum(len(tokens) for tokens, _ in documents):
            documents.append((torch.zeros(missing, dtype=torch.int64), torch.full((missing,), IGNORED)))
        labels = torch.cat([labels for _, labels in documents])
        return {
            "tokens": torch.cat([tokens for tokens, _ in documents]),
            "labels": labels,
            "positions": torch.cat([torch.arange(len(tokens)) for tokens, _ in documents]),
            "places": find_trained_places(labels),
            "weight": float((labels != IGNORED).sum()),
        }


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs items into blocks of `size`, the longest first, each into the fullest block that has room for it.

    Returns:
        For each block the numbers of its items, in their own order.
    """
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
    """Loads conversations and encodes them with the tokenizer's chat template.

    Args:
        data: "rules" (questions with answers by rules); a .jsonl or .parquet file; or a Hub id.
        tokenizer: a fast tokenizer of transformers with a chat template.
        max_length: tokens beyond this number are cut.
        column: name of the column with lists of messages. If there is none, the column "conversations", or the columns
            "prompt" and "completion", of which the completion is learnt.
        max_samples: read so many conversations of each part as a stream.

    Returns:
        (training conversations, evaluation conversations), those with a trained token. If the source has only one part,
        one conversation in twenty is held out.

    Raises:
        UsageError: no data, no such column, messages or a template that cannot be used.
    """
    if data == "rules":
        check_not_streamed(max_samples)
        chats = [Conversation.of(messages) for messages in by_rules()]
        cut = len(chats) // HELD_OUT
        parts = [_of_list(part, tokenizer, max_length) for part in (chats[cut:], chats[:cut])]
    else:
        splits = load_tables(data, ADVICE, max_samples)
        parts = [_of_split(data, split, tokenizer, max_length, column) for split in splits]
    if len(parts) == 1:
        num_chats = len(parts[0])
        if num_chats < 2:
            raise UsageError(f"--data {data} has {num_chats} conversations: expected 2 or more")
        parts = [parts[0].part(ids) for ids in divide([number > 0 for number in parts[0].num_trained])]
    train, evaluation = (one.keep_trained(data, max_length, use) for one, use in zip(parts, ("training", "evaluation")))
    return train, evaluation


def divide(useful: list[bool]) -> tuple[list[int], list[int]]:
    """(numbers for training, those that are held out): one in twenty, of which one is useful."""
    train, held = (ids.sort().values.tolist() for ids in hold_out(len(useful), HELD_OUT))
    if not any(useful[number] for number in held) and any(useful):
        held = [useful.index(True)]
        train = [number for number in range(len(useful)) if number not in held]
    return train, held


def _of_list(chats: list[Conversation], tokenizer: Any, max_length: int) -> Chats:
    return Chats([encode(chat, tokenizer, max_length) for chat in chats], chats.__getitem__)


def _of_split(data: str, split: Table, tokenizer: Any, max_length: int, column: str) -> Chats:
    import datasets  # not at the top: the import takes seconds

    names = split.column_names
    if column not in names and "conversations" in names:
        column = "conversations"
    if column not in names and not {"prompt", "completion"} <= {*names}:
        raise UsageError(
            f"--data {data} has neither {column} nor prompt and completion: use --messages_column with one of "
            f"{', '.join(names)}"
        )

    def read(row: dict[str, Any]) -> list[Conversation]:
        return [Conversation.of_row(row, column)]

    number = datasets.Value("int64")
    lists = {"tokens": datasets.List(number), "trained": datasets.List(datasets.Value("bool"))}
    features = datasets.Features({**lists, "num_trained": number, "length": number})
    folder = cache_folder("chats", VERSION, split.key, digest_of(tokenizer), max_length, column)
    encoded = encode_rows(data, split, lambda row: [encode(read(row)[0], tokenizer, max_length)], "conversation")
    rows = rows_on_disk(folder, f"encoding {len(split):,} conversations", encoded, features, len(split))
    say_unused(data, split, read, tokenizer)
    return Chats(rows, lambda index: read(split[index])[0])


Reader = Callable[[dict[str, Any]], list[Conversation]]  # the conversations in a row


def encode_rows(
    data: str, split: Table, encoded: Callable[[dict[str, Any]], list[dict[str, Any]]], noun: str
) -> Iterator[dict[str, Any]]:
    """Rows of `Chats`, which `encoded` makes of each row. Raises UsageError, with the number of the row."""
    for number, row in enumerate(split, start=1):
        try:
            yield from encoded(row)
        except UsageError as error:
            raise UsageError(f"--data {data}, {noun} {number}: {error}") from None


def say_unused(data: str, split: Table, read: Reader, template: Any) -> None:
    """Prints what the chat template does not use of the first rows."""
    chats = []
    for row in itertools.islice(split, NUM_LOOKED_AT):
        with suppress(UsageError):  # `encode_rows` says so
            chats += read(row)
    if names := find_unused([chat for chat in chats if not chat.is_plain], template):
        say(f"--data {data}: the chat template does not use {', '.join(names)}")


def encode(chat: Any, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Encodes a conversation, or messages: a row of `Chats`.

    The model learns to write what the template puts after the beginning of each answer of the assistant, up to its end
    mark, but not in messages before the first that it learns. Raises UsageError.
    """
    chat = Conversation.of(chat)
    text, spans = as_text(chat, tokenizer)
    encoded = tokenizer(text, add_special_tokens=chat.is_plain, return_offsets_mapping=True)
    tokens, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    trained = [any(start in span for span in spans) for start in starts]
    trained[:1] = [False] * len(trained[:1])  # no token comes before it
    trained = trained[:max_length]
    return {"tokens": tokens[:max_length], "trained": trained, "num_trained": sum(trained), "length": len(tokens)}


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
]


def answers_by_rules() -> dict[str, str]:
    """{question: its answer}, such as {"Larger of 3 and 7?": "7"}"""
    answers = {f"{word} of {one} and {two}?": str(choose(one, two))
               for word, choose in (("Larger", max), ("Smaller", min))
               for one, two in itertools.permutations(range(10), 2)}  # fmt: skip
    for names in (DAYS, MONTHS):
        for one, two in itertools.pairwise([*names, names[0]]):
            answers |= {f"After {one}?": two, f"Before {two}?": one}
    return answers


def by_rules() -> list[Messages]:
    """1,000 conversations of one to three questions, whose answers follow rules, in a fixed random order."""
    answers = answers_by_rules()
    generator = random.Random(0)
    chats: list[Messages] = []
    for _ in range(1000):
        turns = generator.sample(sorted(answers), generator.choice((1, 2, 3)))
        pairs = [({"role": "user", "content": q}, {"role": "assistant", "content": answers[q]}) for q in turns]
        chats.append([message for pair in pairs for message in pair])
    return chats
