"""Conversations with images: their messages, and the images in order."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from ...data.facts import say
from ...errors import UsageError
from ..reading.image_decoding import Opener
from ..reading.labelled_images import folder_of
from ..reading.rows import Table, holds_images
from ..reading.sources import check_not_streamed, divide, load_tables
from ..reading.text_files import local_path
from .chats import HELD_OUT
from .conversations import EXPECTED, Conversation, as_messages, check_messages, json_of

Messages = list[dict[str, Any]]  # [{"role": ..., "content": [{"type": "image"} or {"type": "text", "text": ...}]}]
Images = list[Image.Image]  # in RGB
MARK = "<image>"  # an image in the text of a message
PATHS = ("image", "path", "url")  # names under which a part of a message holds its image
NO_PATH = re.compile(r"\w+://|data:|[A-Za-z0-9+/=\s]{200,}$")  # an address, perhaps with data in it; or base64
ADVICE = "use --data shapes for the embedded conversations, or the path of a .jsonl file"


@dataclass(frozen=True)
class VisionChats:
    """Conversations that are read one by one."""

    rows: Sequence[int]  # their numbers in the source
    load: Callable[[int], tuple[Messages, Images]]  # the messages and the images of the conversation with a number
    name: str  # of the source, for messages

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Messages, Images]:
        """The messages and the images of a conversation. Raises UsageError."""
        with self.naming(index):
            return self.load(self.rows[index])

    def select_answered(self, number: int) -> list[Conversation]:
        """The conversations, among the first `number`, that end with an answer in text."""
        read = map(self.read, range(min(number, len(self))))
        found = [Conversation(messages, images=images) for messages, images in read]
        return [chat for chat in found if chat.is_answered]

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Adds the number of a conversation in its source to an error."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"--data {self.name}, conversation {self.rows[index] + 1}: {error}") from None


def load_vision_chats(
    data: str, messages_column: str, images_column: str, max_samples: int | None = None
) -> tuple[VisionChats, VisionChats]:
    """(training conversations, evaluation conversations) with images. If the source has only one part, one conversation
    in twenty is held out. Raises UsageError for missing data, or a missing column.

    Args:
        data: "shapes" (drawn images, with questions about them); a .jsonl or .parquet file; or a Hub id.
        messages_column: name of the column with lists of messages. Their content is a text, in which `<image>` may
            stand for an image, or a list of parts such as {"type": "image"} and {"type": "text", "text": "Why?"}.
        images_column: name of the column with the images of a conversation in order: images of `datasets`, or paths
            from the folder of the file. It is not needed if each part holds its image: {"type": "image", "path": ...}
        max_samples: read at most this many conversations of each part, as a stream.
    """
    if data == "shapes":
        check_not_streamed(data, max_samples)
        chats = shapes()
        cut = len(chats) // HELD_OUT
        parts = range(cut, len(chats)), range(cut)
        return VisionChats(parts[0], chats.__getitem__, data), VisionChats(parts[1], chats.__getitem__, data)

    def has_answers(table: Table) -> bool:
        return messages_column in table.column_names and any(map(_may_have_an_answer, table.values(messages_column)))

    tables = load_tables(data, ADVICE, max_samples, has_answers)
    splits = [_Rows(data, table, messages_column, images_column) for table in tables]
    numbers = [split.find_answered(data) for split in splits]
    if len(splits) == 1 and len(numbers[0]) < 2:
        raise UsageError(f"--data {data} has one conversation: expected 2 or more")
    numbers = divide(numbers, HELD_OUT)
    return VisionChats(numbers[0], splits[0], data), VisionChats(numbers[1], splits[-1], data)


class _Rows:
    """The conversations in a table with these columns. `data`: for messages, relative paths. Raises UsageError."""

    def __init__(self, data: str, table: Table, messages: str, images: str):
        self.folder = folder_of(data)
        self.rows, self.messages, self.images, self.opener = table, messages, images, Opener()
        table.check_columns({"--messages_column": messages})
        if images not in table.column_names:
            if of_images := [name for name, kind in table.kinds.items() if holds_images(kind)]:
                raise UsageError(f"--data {data} has no column {images}: use --images_column {' or '.join(of_images)}")
            say(f"--data {data} has no column {images}: the run uses the images in parts of its messages")
        table.say_unread(messages, images)

    def find_answered(self, data: str) -> list[int]:
        """The numbers of conversations with an answer; prints how many others. Raises UsageError if there is none."""
        found = [number for number, value in enumerate(self.rows.values(self.messages)) if _may_have_an_answer(value)]
        if not found:
            raise UsageError(f"--data {data}: no message has the role assistant and a weight above 0: nothing to learn")
        if missing := len(self.rows) - len(found):
            say(f"--data {data}: {missing:,} of {len(self.rows):,} conversations have no answer: left out")
        return found

    def __call__(self, number: int) -> tuple[Messages, Images]:
        row = self.rows[number]
        if isinstance(images := row.get(self.images), str) and images.startswith("["):
            images = json_of(row, self.images, list)
        given = [] if images is None else images if isinstance(images, list) else [images]
        if isinstance(messages := row[self.messages], str):
            messages = json_of(row, self.messages, list)
        messages, given = with_parts(messages, given)
        return messages, [_open(image, self.folder, self.opener) for image in given]


def _open(image: Any, folder: Path, opener: Opener) -> Image.Image:
    """An image, a path, or a dict with "bytes" or "path", as `datasets` has it, in RGB. Raises UsageError."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and (found := NO_PATH.match(image)):
        what = "a web address" if "://" in found[0] else "base64"
        raise UsageError(f"an image is {what}, {image[:40]} ...: expected the path of a file")
    path = str(local_path(image, folder)) if isinstance(image, str) else ""
    return opener(path or image, path[:200] or "an image").convert("RGB")


def _may_have_an_answer(messages: Any) -> bool:
    given = [one for one in (messages if isinstance(messages, list) else ()) if isinstance(one, dict)]
    names = [name for one in given if one.get("weight") != 0 for name in (one.get("role"), one.get("from"))]
    return not given or any(name in ("assistant", "gpt") for name in names)


def with_parts(messages: Any, images: list[Any]) -> tuple[Messages, list[Any]]:
    """(messages whose contents are lists of parts, their images in order). Images without a place in a message come
    before the first question. Raises UsageError if there are no messages, or not as many images as places."""
    messages = as_messages(messages)
    contents = [_content(one) for one in messages]
    if not messages:
        raise UsageError(EXPECTED)
    if not any(_is_image(part) for content in contents for part in content):
        contents = [[piece for part in content for piece in _split(part["text"])] for content in contents]
    shown = [part for content in contents for part in content if _is_image(part)]
    if not shown and images:
        first = next((at for at, one in enumerate(messages) if one["role"] == "user"), 0)
        shown = [{"type": "image"} for _ in images]
        contents[first] = shown + contents[first]
    plain = [
        [{"type": "image"} if _is_image(part) else {"type": "text", "text": part["text"]} for part in content]
        for content in contents
    ]
    texts = [[part for part in content if not _is_image(part)] for content in plain]
    said = [one | ({"content": text} if "content" in one else {}) for one, text in zip(messages, texts)]
    check_messages([one for one in said if "content" in one or one["role"] == "assistant"])  # a question may be images
    return [one | {"content": content} for one, content in zip(messages, plain)], _match_images(shown, images)


def _match_images(shown: list[dict[str, Any]], images: list[Any]) -> list[Any]:
    """The image of each part that shows one: its own, the one with its index, or the next one of the column."""
    found, left = [], iter(images)
    for part in shown:
        if (own := next((part[name] for name in PATHS if part.get(name)), None)) is None:
            if others := sorted(part.keys() - {"type", "index", *PATHS}):
                raise UsageError(f'an image has {others[0]}: expected {{"type": "image", "path": "a file"}}')
            if "index" in part and part["index"] not in range(len(images)):
                raise UsageError(f"an image has the index {part['index']!r}, but its row has {len(images)} images")
            own = images[int(part["index"])] if "index" in part else next(left, None)
        found.append(own)
    is_left = next(left, None) is not None and not any("index" in part for part in shown)
    if is_left or any(image is None for image in found):
        num_open = sum(not any(map(part.get, PATHS)) for part in shown)  # the others have their own image
        what = f"its messages have {num_open} places for images, but its column has {len(images)} images"
        raise UsageError(f"{what}: expected the same number, none of them empty (--images_column names the column)")
    return found


def _content(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message, without empty entries. Raises UsageError."""
    content, expected = message.get("content"), '{"type": "image"}, or {"type": "text", "text": "Why?"}'
    content = [{"type": "text", "text": content}] if isinstance(content, str) else [] if content is None else content
    content = content if isinstance(content, list) else [content]
    for part in content:
        given = part if isinstance(part, dict) else {}
        is_text = isinstance(given.get("text"), str) and given.get("type") in (None, "text")
        if not _is_image(given) and (not is_text or any(map(given.get, (*PATHS, "image_url")))):
            raise UsageError(f"a part of a message is {str(part)[:60]}: expected {expected}")
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _is_image(part: dict[str, Any]) -> bool:
    return part.get("type") == "image"


def _split(text: str) -> list[dict[str, Any]]:
    """A text as parts: a mark in it is an image."""
    pieces = filter(None, re.split(f"({MARK})", text))
    return [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces]


COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle")
FACTS = {"colour of grass?": "green", "colour of the sky?": "blue", "shape of a wheel?": "circle"}


def shapes(number: int = 4000) -> list[tuple[Messages, Images]]:
    """Conversations about no, one or two drawn images, in a fixed random order. The answers are colours and shapes."""
    generator = random.Random(0)
    chats = []
    for chat in range(number):
        things = [(generator.choice([*COLOURS]), generator.choice(SHAPES)) for _ in range(generator.choice((1, 1, 2)))]
        images = [_draw(*thing, generator) for thing in things]
        messages: Messages = []
        for which, (colour, shape) in zip(("first", "second"), things):
            ask, reply = generator.choice((("colour", colour), ("shape", shape)))
            messages += _turn(f"{ask} of the {which}?", reply, len(images) if not messages else 0)
        if chat % 10 == 9:
            question = generator.choice([*FACTS])
            messages, images = _turn(question, FACTS[question], 0), []
        chats.append((messages, images))
    return chats


def _turn(question: str, reply: str, num_images: int) -> Messages:
    asked: list[dict[str, str]] = [{"type": "image"}] * num_images
    return [
        {"role": "user", "content": [*asked, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": reply}]},
    ]


def _draw(colour: str, shape: str, generator: random.Random) -> Image.Image:
    width, height = generator.randint(32, 64), generator.randint(32, 64)
    light = generator.randint(200, 255)
    image = Image.new("RGB", (width, height), (light, light, light))
    size = generator.randint(min(width, height) * 2 // 3, min(width, height) - 2)
    left, top = generator.randint(0, width - size), generator.randint(0, height - size)
    draw, box, fill = ImageDraw.Draw(image), (left, top, left + size - 1, top + size - 1), COLOURS[colour]
    if shape == "circle":
        draw.ellipse(box, fill)
    elif shape == "square":
        draw.rectangle(box, fill)
    else:
        draw.polygon([(left + size // 2, top), (left, top + size - 1), (left + size - 1, top + size - 1)], fill)
    return image
