"""Conversations with images as samples and batches for a vision-language model of transformers.

Each processor makes its own tensors. A test with two images shows what they mean: a tensor has a number for each token,
one row for the sample, or rows for each image.
"""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ...data import Batch, pad_to_longest
from ...data.sets import ListDataset
from ...errors import UsageError, first_line
from ..models.causal_lm import IGNORED, find_trained_places
from ..models.tokenization import adds_special_tokens
from .conversations import answer_spans, reach_into, render
from .vision_chats import Images, Messages, VisionChats

NUM_LOOKED_AT = 16  # conversations at the start
ROWS = "number of rows of "  # begins the name of a tensor with the number of rows of another that are not padding
NOT_OF_IMAGES = ("input_ids", "attention_mask", "offset_mapping")


class VisionEncoder:
    """Makes samples and batches with a processor.

    A sample is {"tokens", "labels": int64 of shape (length,), "places": of the trained labels, "weight": their number,
    and the tensors that the processor makes of images}. A label is the next token, or `IGNORED`. Raises UsageError if
    the template or the processor cannot be used.

    Args:
        processor: of transformers, with a chat template, an image processor and a fast tokenizer.
        image_token: id of the token that stands for a part of an image.
        max_length: tokens of a conversation beyond this number are cut.
    """

    def __init__(self, processor: Any, image_token: int, max_length: int):
        self.processor, self.image_token, self.max_length = processor, image_token, max_length
        if not hasattr(processor, "image_processor"):
            raise UsageError(f"{type(processor).__name__} does not process images: use recipes/finetune.py")
        small, wide = Image.new("RGB", (48, 48), "white"), Image.new("RGB", (96, 48), "grey")
        both = self._process(render(_asking(2), processor), [small, wide])
        length = both["input_ids"].shape[1]
        # Special tokens that stand for an image: in a text, the model would look for one more.
        without = self._process(render(_asking(0), processor), [])["input_ids"][0].tolist()
        found = {*both["input_ids"][0].tolist()} - {*without}
        added = processor.tokenizer.added_tokens_decoder.items()
        self._marks = [str(token) for number, token in added if number in found and token.special]
        of_images = {name: value for name, value in both.items() if name not in NOT_OF_IMAGES}
        # Lists: the order of a set, and so of a sample's tensors, would differ between processes.
        self.of_tokens = [name for name, value in of_images.items() if value.shape == (1, length)]
        others = [name for name in of_images if name not in self.of_tokens]
        self.of_sample = [name for name in others if len(of_images[name]) == 1]
        self.of_rows = [name for name in others if name not in self.of_sample]
        # The values for a sample without images; 0 for a number of images.
        shown = {name: of_images[name][0] if name in self.of_sample else of_images[name] for name in others}
        self._without = {name: one.new_zeros((0, *one.shape[1:]) if one.ndim else ()) for name, one in shown.items()}
        self._blank = self.sample(_asking(1), [small], is_cut=False)
        self.shown = self._process(render(_asking(1), processor), [small])  # a model's arguments for one image
        del self.shown["offset_mapping"]
        if (padding := processor.tokenizer.pad_token_id) is None:
            raise UsageError("the tokenizer has no token for padding: give it a pad_token")
        self._pad = pad_to_longest({"tokens": padding, "labels": IGNORED, "places": -1}, None)
        self._check(small, wide)

    def _process(self, text: str | list[str], images: Any, **options: Any) -> dict[str, Tensor]:
        texts, images = ([text], [images]) if isinstance(text, str) else (text, images)
        options |= {"add_special_tokens": adds_special_tokens(self.processor, texts[0])}
        options |= {"return_tensors": "pt", "return_offsets_mapping": True}
        try:
            return dict(self.processor(text=texts, images=images if any(images) else None, **options))
        except Exception as error:  # any of dozens of types
            raise UsageError(f"{type(self.processor).__name__} refuses it ({first_line(error)})") from None

    def sample(self, messages: Messages, images: Images, is_cut: bool = True) -> dict[str, Any]:
        """A conversation's sample, cut to `max_length` if `is_cut`. Raises UsageError, also if nothing is trained."""
        found, trained = self._encode(messages, images)
        whole, kept = found["input_ids"][0], slice(self.max_length if is_cut else None)
        if is_cut and (whole[self.max_length :] == self.image_token).any():
            last = int((whole == self.image_token).nonzero()[-1]) + 1
            raise UsageError(f"its images end at token {last}: use --max_length {last} or more, or smaller images")
        if is_cut and not trained[kept].any():
            first = int(trained.int().argmax()) + 1
            advice = f"its first answer begins at token {first}: use --max_length {first} or more"
            raise UsageError(advice if trained.any() else "no token of its answers is trained: remove it")
        tokens = whole[kept]
        labels = tokens.roll(-1).masked_fill(~trained[kept].roll(-1), IGNORED)
        labels[-1] = IGNORED
        sample = {"tokens": tokens, "labels": labels, "places": find_trained_places(labels)}
        for name in self.of_tokens:
            sample[name] = found[name][0, kept] if name in found else torch.zeros_like(tokens)
        for name, nothing in self._without.items():
            value = found.get(name)
            sample[name] = nothing if value is None else value[0] if name in self.of_sample else value
        sample |= {ROWS + name: torch.tensor(len(sample[name])) for name in self.of_rows}
        return sample | {"weight": float((labels != IGNORED).sum())}

    def _encode(self, messages: Messages, images: Images) -> tuple[dict[str, Tensor], Tensor]:
        """(what the processor returns, whether each token is trained).

        The processor puts many tokens in the place of an image, so positions in the text count from its end. If an
        image follows answers, the answers are found in the conversation up to the last of them.
        """
        shown = [sum(part["type"] == "image" for part in message["content"]) for message in messages]
        texts = [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
        if mark := next((mark for mark in self._marks if any(mark in text for text in texts)), ""):
            raise UsageError(f"a text has {mark}, which the processor writes for an image: remove it")
        if any(number and message["role"] == "assistant" for number, message in zip(shown, messages)):
            raise UsageError("an answer has an image, which a model cannot learn to write: move it to a question")
        after = max((turn + 1 for turn, number in enumerate(shown) if number), default=0)
        text, spans = answer_spans(messages, self.processor, after)
        found = self._process(text, images)
        places, plain = found.pop("offset_mapping")[0], self.processor.tokenizer
        ends = plain(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if not ends or len(places) < 2:
            raise UsageError("it has fewer than two tokens: remove it")
        gained = int(places[:, 1].max()) - ends[-1][1]  # a special token has no place
        moved = [range(span.start + gained, span.stop + gained) for span in spans]
        trained = torch.tensor(reach_into(moved, places.tolist()))
        trained[0] = False  # no token comes before it
        if answers := [turn for turn in range(after) if messages[turn]["role"] == "assistant"]:
            end = answers[-1] + 1
            earlier, flags = self._encode(messages[:end], images[: sum(shown[:end])])
            last = int(flags.nonzero()[-1]) + 1 if flags.any() else 0
            if not found["input_ids"][0, :last].equal(earlier["input_ids"][0, :last]):
                raise UsageError("its tokens change if another turn follows: end it before its last image")
            trained[:last] |= flags[:last]
        return found, trained

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        """A batch of samples, padded. A batch without images gets one, after the end of its shortest sample, where no
        label sees it: all processes then compute the same layers, as FSDP2 and ZeRO need."""
        if not any(sample[name].numel() for sample in samples for name in self._without if sample[name].ndim):
            shortest = min(range(len(samples)), key=lambda row: len(samples[row]["tokens"]))
            samples = [self._add_blank_image(one) if row == shortest else one for row, one in enumerate(samples)]
        columns = {name: _of_one_size([sample[name] for sample in samples]) for name in self._without}
        return self._pad([s | {name: columns[name][row] for name in columns} for row, s in enumerate(samples)])

    def _add_blank_image(self, sample: dict[str, Any]) -> dict[str, Any]:
        blank = self._blank
        longer = {name: torch.cat([sample[name], blank[name]]) for name in ("tokens", *self.of_tokens)}
        labels = torch.cat([sample["labels"], torch.full_like(blank["labels"], IGNORED)])
        images = {name: blank[name] for name in (*self._without, *(ROWS + name for name in self.of_rows))}
        return sample | longer | images | {"labels": labels}

    def _check(self, small: Image.Image, wide: Image.Image) -> None:
        """Raises UsageError if a batch of `collate` is not what the processor makes of several samples."""
        chats, images = [_asking(2), _asking(1, "Why?")], [[small, wide], [wide]]
        texts = [render(messages, self.processor) for messages in chats]
        # The last one has no images. The processor does not get it: some refuse an empty list.
        own = self.collate([self.sample(*both, is_cut=False) for both in [*zip(chats, images), (_asking(0), [])]])
        others = (*self.of_tokens, *self._without, *(ROWS + name for name in self.of_rows))
        own = unpad({name: own[name] for name in others})
        expected = self._process(texts, images, padding=True, padding_side="right")
        for name, value in own.items():
            if not torch.equal(expected[name], value if name in self.of_rows else value[:2]):
                raise UsageError(f"{type(self.processor).__name__} pads {name} in its own way: use another model")


def _of_one_size(values: list[Tensor]) -> list[Tensor]:
    """The values with zeros after the end of each dimension but the first, up to the largest size."""
    if values[0].ndim < 2:
        return values
    sizes = [max(size) for size in zip(*(value.shape[1:] for value in values))]
    gaps = [[size - own for size, own in zip(sizes, value.shape[1:])] for value in values]
    return [F.pad(value, [end for gap in reversed(own) for end in (0, gap)]) for value, own in zip(values, gaps)]


def _asking(num_images: int, text: str = "What?") -> Messages:
    return [{"role": "user", "content": [{"type": "image"}] * num_images + [{"type": "text", "text": text}]}]


def unpad(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the rows of all images after each other, without padding, as a model takes them."""
    found = {name: value for name, value in given.items() if not name.startswith(ROWS)}
    for name, counts in given.items():
        if name.startswith(ROWS):
            value = found[name.removeprefix(ROWS)]
            is_row = torch.arange(value.shape[1], device=value.device) < counts.unsqueeze(1)
            found[name.removeprefix(ROWS)] = value[is_row]
    return found


class VisionDataset(ListDataset):
    """One conversation per sample, encoded when it is read."""

    def __init__(self, chats: VisionChats, encoder: VisionEncoder):
        self.samples, self.encoder = chats, encoder

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.samples.naming(index):
            return self.encoder.sample(*self.samples.load(self.samples.rows[index]))

    def facts(self) -> str:
        """The share of trained tokens in the first conversations, and how many are cut, to print. Raises UsageError."""
        samples = [self[index] for index in range(min(NUM_LOOKED_AT, len(self)))]
        lengths = [len(sample["tokens"]) for sample in samples]
        num_trained = sum(sample["weight"] for sample in samples)
        num_full = sum(length == self.encoder.max_length for length in lengths)
        trained = f"{100 * num_trained / sum(lengths):.0f} % of tokens trained; longest {max(lengths):,}"
        return f"first {len(samples)} conversations: {trained}; {num_full:,} of --max_length or more (cut)"
