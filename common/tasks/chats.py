"""Conversations: which of their tokens a model learns to write, each alone or packed into blocks."""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError, first_line
from .cache import cache_folder
from .causal_lm import IGNORED, trained_places
from .rows import Table
from .sources import check_not_streamed, hold_out, load_tables
from .streams import rows_on_disk
from .tokenization import digest_of

Messages = list[dict[str, str]]  # [{"role": "user" or "assistant" or ..., "content": text}, ...]
HELD_OUT = 20  # one conversation in so many is for evaluation, if the source has no evaluation part
VERSION = 1  # of what `encode` returns: another number makes it work anew
ADVICE = "type --data rules for the embedded conversations, or the path of a .jsonl file"


@dataclass(frozen=True)
class Chats:
    """Encoded conversations.

    Attributes:
        rows: for each, {"tokens": ids without those beyond the limit, "trained": for each of them whether the model
            learns to write it, "num_trained", "length": the number of ids before the cut}. A list, or a
            `datasets.Dataset` whose rows stay on disk.
        messages: the messages of the conversation with an index.
    """

    rows: Any
    messages: Callable[[int], Messages]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each conversation, before the cut."""
        return self._column("length")

    @cached_property
    def _num_trained(self) -> list[int]:
        return self._column("num_trained")

    def _column(self, name: str) -> list[int]:
        rows = self.rows if isinstance(self.rows, list) else self.rows.select_columns([name])
        return [row[name] for row in rows]

    def check_trained(self, data: str) -> "Chats":
        """Returns itself. Raises UsageError if no token is trained."""
        if not any(self._num_trained):
            roles = sorted({message["role"] for message in self.messages(0)})
            raise UsageError(
                f"--data {data}: no token is trained: expected messages of the role assistant, found "
                f"{', '.join(roles)}; or type a larger --max_length"
            )
        return self

    def part(self, indices: list[int]) -> "Chats":
        """The conversations with these indices, which stay on disk."""
        return Chats(self.rows.select(indices), lambda index: self.messages(indices[index]))

    def facts(self, max_length: int) -> str:
        """How much of it is trained, and what was cut, for the terminal."""
        lengths, num_trained = self.lengths, sum(self._num_trained)
        num_tokens = sum(min(length, max_length) for length in lengths)
        num_cut = sum(length > max_length for length in lengths)
        return (
            f"{100 * num_trained / num_tokens:.0f} % of tokens trained; longest {max(lengths):,}; {num_cut:,} of "
            f"{len(self):,} too long (cut)"
        )


class ChatDataset(Dataset):
    """One conversation a sample: {"tokens": int64 of shape (length,), "labels": int64 of shape (length,), "weight":
    float}. A label is the next token, or `IGNORED` if it is not trained. The weight is the number of trained labels.

    Args:
        chats: the conversations.
        places: whether a sample also has "places", those of the trained labels.
    """

    def __init__(self, chats: Chats, places: bool = False):
        self.rows, self.places = chats.rows, places

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, labels = shifted(self.rows[index])
        sample = {"tokens": tokens, "labels": labels, "weight": float((labels != IGNORED).sum())}
        return sample | ({"places": trained_places(labels)} if self.places else {})


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
        self.blocks = packed([min(size, length) - 1 for size in chats.lengths], length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        documents = [shifted(self.rows[row]) for row in self.blocks[index]]
        if missing := self.length - sum(len(tokens) for tokens, _ in documents):
            documents.append((torch.zeros(missing, dtype=torch.int64), torch.full((missing,), IGNORED)))
        labels = torch.cat([labels for _, labels in documents])
        return {
            "tokens": torch.cat([tokens for tokens, _ in documents]),
            "labels": labels,
            "positions": torch.cat([torch.arange(len(tokens)) for tokens, _ in documents]),
            "places": trained_places(labels),
            "weight": float((labels != IGNORED).sum()),
        }


def packed(lengths: Sequence[int], size: int) -> list[list[int]]:
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


def shifted(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
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
        column: name of the column with lists of messages. If there is none, the columns "prompt" and "completion".
        max_samples: read so many conversations of each part as a stream.

    Returns:
        (training conversations, evaluation conversations). If the source has only one part, one conversation in twenty
        is held out.

    Raises:
        UsageError: no data, no such column, messages or a template that cannot be used.
    """
    if data == "rules":
        chats = by_rules()
        check_not_streamed(max_samples)
        cut = len(chats) // HELD_OUT
        return _of_list(chats[cut:], tokenizer, max_length), _of_list(chats[:cut], tokenizer, max_length)
    parts = [_of_split(data, split, tokenizer, max_length, column) for split in load_tables(data, ADVICE, max_samples)]
    if len(parts) == 1:
        num_chats = len(parts[0])
        if num_chats < 2:
            raise UsageError(f"--data {data} has {num_chats} conversations: expected 2 or more")
        divided = hold_out(num_chats, HELD_OUT)
        parts = [parts[0].part(ids.sort().values.tolist()) for ids in divided]
    return parts[0].check_trained(data), parts[1].check_trained(data)


def _of_list(chats: list[Messages], tokenizer: Any, max_length: int) -> Chats:
    return Chats([encode(messages, tokenizer, max_length) for messages in chats], chats.__getitem__)


def _of_split(data: str, split: Table, tokenizer: Any, max_length: int, column: str) -> Chats:
    import datasets  # not at the top: the import takes seconds

    names = split.column_names
    if column not in names and not {"prompt", "completion"} <= {*names}:
        raise UsageError(
            f"--data {data} has neither {column} nor prompt and completion: type --messages_column with one of "
            f"{', '.join(names)}"
        )

    def messages(row: dict[str, Any]) -> Messages:
        if column in row:
            return row[column]
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]

    def encoded() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(split, start=1):
            try:
                yield encode(messages(row), tokenizer, max_length)
            except UsageError as error:
                raise UsageError(f"--data {data}, conversation {number}: {error}") from None

    number = datasets.Value("int64")
    lists = {"tokens": datasets.List(number), "trained": datasets.List(datasets.Value("bool"))}
    features = datasets.Features({**lists, "num_trained": number, "length": number})
    folder = cache_folder("chats", VERSION, split.key, digest_of(tokenizer), max_length, column)
    rows = rows_on_disk(folder, f"encoding {len(split):,} conversations", encoded(), features, len(split))
    return Chats(rows, lambda index: messages(split[index]))


def encode(messages: Messages, tokenizer: Any, max_length: int, first: int = 0) -> dict[str, Any]:
    """Encodes a conversation: a row of `Chats`.

    The model learns to write what the template puts after the beginning of each answer of the assistant, up to its end
    mark, but not in messages before number `first`. Raises UsageError.
    """
    text, spans = answer_spans(messages, tokenizer, first)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    trained = [any(start in span for span in spans) for start in starts]
    trained[:1] = [False] * len(trained[:1])  # no token comes before it
    if len(tokens) < 2:
        raise UsageError("it has fewer than two tokens: remove it")
    trained = trained[:max_length]
    return {"tokens": tokens[:max_length], "trained": trained, "num_trained": sum(trained), "length": len(tokens)}


def answer_spans(messages: Messages, template: Any, first: int = 0) -> tuple[str, list[range]]:
    """(the text of a conversation, the places in it that the model learns to write).

    Args:
        messages: the conversation.
        template: a tokenizer or a processor with a chat template.
        first: number of the first message that may be learnt.

    Raises:
        UsageError: no messages, or a template that cannot be used.
    """
    check_messages(messages)
    if messages and messages[0]["role"] == "assistant":
        raise UsageError("it begins with an answer: remove it, or put a question before it")
    text, spans = rendered(messages, template), []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant" and turn >= first:
            before = rendered(messages[:turn], template, add_generation_prompt=True)
            after = rendered(messages[: turn + 1], template)
            if not (text.startswith(before) and text.startswith(after)):
                raise UsageError(
                    "the chat template changes earlier turns when a turn follows, so that the tokens to train on are "
                    "unknown: give the tokenizer another chat_template"
                )
            spans.append(range(len(before), len(after)))
    return text, spans


def check_messages(messages: Any) -> None:
    """Raises UsageError unless these are messages with roles."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) and one.get("role") for one in messages):
        raise UsageError('expected a list of messages such as {"role": "user", "content": "Why?"}')


def rendered(messages: Messages, template: Any, **options: bool) -> str:
    """A conversation as a text. Raises UsageError if the template refuses it."""
    if not messages:  # many templates need a message
        return ""
    try:
        return template.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates are programs, and raise what they like
        raise UsageError(f"the chat template refuses it ({first_line(error)})") from None


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
