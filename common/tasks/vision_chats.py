"""Conversations with pictures: their messages, and the pictures in order."""

import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageOps

from ..errors import UsageError
from .sources import hold_out, load_splits

Messages = list[dict[str, Any]]  # [{"role": ..., "content": [{"type": "image"} or {"type": "text", "text": ...}]}]
Pictures = list[Image.Image]  # in RGB
HELD_OUT = 20  # one conversation in so many is for evaluation, if the source has no evaluation part
MARK = "<image>"  # a picture in the text of a message
PATHS = ("image", "path", "url")  # names under which a part of a message holds its picture
ADVICE = "type --data shapes for the embedded conversations, or the path of a .jsonl file"


@dataclass(frozen=True)
class VisionChats:
    """Conversations that are read one by one.

    Attributes:
        rows: their numbers in the source.
        load: the messages and the pictures of the conversation with a number.
        name: of the source, for messages.
    """

    rows: Sequence[int]
    load: Callable[[int], tuple[Messages, Pictures]]
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Messages, Pictures]:
        """The messages and the pictures of a conversation. Raises UsageError."""
        with self.naming(index):
            return self.load(self.rows[index])

    @contextmanager
    def naming(self, index: int) -> Iterator[None]:
        """Adds the number of a conversation to an error in it."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"--data {self.name}, conversation {self.rows[index] + 1}: {error}") from None


def load_vision_chats(
    data: str, messages_column: str, images_column: str, max_samples: int | None = None
) -> tuple[VisionChats, VisionChats]:
    """Loads conversations with pictures.

    Args:
        data: "shapes" (drawn pictures, with questions about them); a .jsonl or .parquet file; or a Hub id.
        messages_column: name of the column with lists of messages. Their content is a text, in which `<image>` may
            stand for a picture, or a list of parts such as {"type": "image"} and {"type": "text", "text": "Why?"}.
        images_column: name of the column with the pictures of a conversation in order: images of `datasets`, or paths
            from the folder of the file. It is not needed if each part holds its picture: {"type": "image", "path": ...}
        max_samples: read so many conversations of each part as a stream.

    Returns:
        (training conversations, evaluation conversations). If the source has only one part, one conversation in twenty
        is held out.

    Raises:
        UsageError: no data, or no such column.
    """
    if data == "shapes":
        if max_samples is not None:
            raise UsageError("--max_samples reads a data set of the Hub or a file: type --data, too")
        chats = shapes()
        cut = len(chats) // HELD_OUT
        parts = range(cut, len(chats)), range(cut)
        return VisionChats(parts[0], chats.__getitem__, data), VisionChats(parts[1], chats.__getitem__, data)
    path = Path(data).expanduser()
    columns = path.parent if path.is_file() else path, messages_column, images_column
    splits = load_splits(data, ADVICE, max_samples)
    loads = [_of_split(data, split, *columns) for split in splits]
    if len(splits) == 2:
        return VisionChats(range(len(splits[0])), loads[0], data), VisionChats(range(len(splits[1])), loads[1], data)
    if len(splits[0]) < 2:
        raise UsageError(f"--data {data} has one conversation: expected 2 or more")
    rest, held_out = (ids.sort().values.tolist() for ids in hold_out(len(splits[0]), HELD_OUT))
    return VisionChats(rest, loads[0], data), VisionChats(held_out, loads[0], data)


def _of_split(
    data: str, split: Any, folder: Path, messages_column: str, images_column: str
) -> Callable[[int], tuple[Messages, Pictures]]:
    names = split.column_names
    if messages_column not in names:
        raise UsageError(
            f"--data {data} has no column {messages_column}: type --messages_column with one of {', '.join(names)}"
        )

    def load(number: int) -> tuple[Messages, Pictures]:
        row = split[number]
        pictures = row.get(images_column)
        given = [] if pictures is None else pictures if isinstance(pictures, list) else [pictures]
        messages, given = with_parts(row[messages_column], given)
        return messages, [opened(picture, folder) for picture in given]

    return load


def with_parts(messages: Any, pictures: list[Any]) -> tuple[Messages, list[Any]]:
    """(messages whose contents are lists of parts, their pictures in order).

    Args:
        messages: as `load_vision_chats` takes them.
        pictures: of the column. If no message says where they stand, they come before the first text.

    Raises:
        UsageError: no messages, or another number of pictures than the messages have places for.
    """
    if not isinstance(messages, list) or not all(isinstance(one, dict) and one.get("role") for one in messages):
        raise UsageError('expected a list of messages such as {"role": "user", "content": "Why?"}')
    found: list[Any] = []
    given = [{"role": one["role"], "content": list(_parts(one.get("content"), found))} for one in messages]
    places = [part for one in given for part in one["content"] if part["type"] == "image"]
    if not places and given:
        given[0]["content"][:0] = [{"type": "image"} for _ in pictures]
        found = [None for _ in pictures]
    left = iter(pictures)
    found = [next(left, None) if picture is None else picture for picture in found]
    if any(picture is None for picture in found) or next(left, None) is not None:
        raise UsageError(
            f"places for pictures in its messages: {len(found)}, pictures: {len(pictures)}: expected as many"
        )
    return given, found


def _parts(content: Any, found: list[Any]) -> Iterator[dict[str, str]]:
    """The parts of a message. Adds to `found` the picture of each, or None if the part does not hold it."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image":
            found.append(next((part[name] for name in PATHS if part.get(name)), None))
            yield {"type": "image"}
        elif kind == "text" and isinstance(part.get("text"), str):
            for number, text in enumerate(part["text"].split(MARK)):
                if number:
                    found.append(None)
                    yield {"type": "image"}
                if text:
                    yield {"type": "text", "text": text}
        else:
            raise UsageError(
                f'a part of a message is {str(part)[:60]}: expected {{"type": "image"}}, or {{"type": "text", "text": '
                '"Why?"}'
            )


def opened(picture: Any, folder: Path) -> Image.Image:
    """A picture in RGB, upright. Raises UsageError.

    Args:
        picture: an image, a path, or a dict with "bytes" or "path", as `datasets` has it.
        folder: of relative paths.
    """
    name = "a picture"
    try:
        if isinstance(picture, dict):
            picture = io.BytesIO(picture["bytes"]) if picture.get("bytes") else picture.get("path")
        if isinstance(picture, str):
            name, picture = picture, folder / Path(picture).expanduser()
        image = picture if isinstance(picture, Image.Image) else Image.open(picture)
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, AttributeError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or "no image that can be read"
        raise UsageError(f"{name}: {reason}: type the path of a picture, such as a PNG file") from None


COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
SHAPES = ("circle", "square", "triangle")
FACTS = {"colour of grass?": "green", "colour of the sky?": "blue", "shape of a wheel?": "circle"}


def shapes(number: int = 4000) -> list[tuple[Messages, Pictures]]:
    """Conversations about one or two drawn pictures of several sizes, in a fixed random order. The answers are colours
    and shapes; one conversation in ten has no picture."""
    generator = random.Random(0)
    chats = []
    for chat in range(number):
        things = [(generator.choice([*COLOURS]), generator.choice(SHAPES)) for _ in range(generator.choice((1, 1, 2)))]
        pictures = [_drawn(*thing, generator) for thing in things]
        messages: Messages = []
        for which, (colour, shape) in zip(("first", "second"), things):
            ask, reply = generator.choice((("colour", colour), ("shape", shape)))
            messages += _turn(f"{ask} of the {which}?", reply, len(pictures) if not messages else 0)
        if chat % 10 == 9:
            question = generator.choice([*FACTS])
            messages, pictures = _turn(question, FACTS[question], 0), []
        chats.append((messages, pictures))
    return chats


def _turn(question: str, reply: str, num_pictures: int) -> Messages:
    asked: list[dict[str, str]] = [{"type": "image"}] * num_pictures
    return [
        {"role": "user", "content": [*asked, {"type": "text", "text": question}]},
        {"role": "assistant", "content": [{"type": "text", "text": reply}]},
    ]


def _drawn(colour: str, shape: str, generator: random.Random) -> Image.Image:
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
