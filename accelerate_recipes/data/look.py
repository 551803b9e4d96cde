"""Describes the samples that a model gets, as JSON. `look` runs in the process of a recipe, at its call of `fit`."""

import base64
import io
import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from accelerate_recipes.common.data.facts import data_lines
from accelerate_recipes.common.data.mixed import Mixture
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.seeds import seed_sample
from accelerate_recipes.common.step.setup import Setup

IGNORED = -100  # a label that torch's losses ignore
SECONDS = 5.0  # for looking at many samples
MOST_LOOKED_AT = 2000
NUM_BARS = 10
MOST_NAMED = 20  # values of an integer field
SMALL, LARGE = 96, 256  # pixels a side of a shown image
COLOURS = (1, 3)  # channels of an image
MOST_COLUMNS = 4  # texts of a sample side by side
# Integer tensors that are not tokens.
BESIDE_TOKENS = {"labels", "text_ids", "attention_mask", "positions", "position_ids", "places", "token_type_ids"}


def look(number: int, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Takes the arguments of `fit`. Returns facts about the data, and `number` samples of the first step."""
    accelerator, model, optimizer, forward_step, own, eval_set, config = arguments  # without the collate function
    named = eval_set if isinstance(eval_set, Mapping) else {"": eval_set}
    sources = {"training": own} | {f"evaluation {name}".strip(): part for name, part in named.items()}
    try:
        config = replace(config, micro_batch_size=None)
        setup = Setup.of(accelerator, model, optimizer, forward_step, own, eval_set, config, **options)
        ids, batch = setup.plan.own_samples(0)[0], setup.first_batch()
    except UsageError as error:
        return {"refused": str(error)}
    names = own.names if isinstance(own, Mixture) else []
    tokenizer = _tokenizer(options.get("export"))
    shown = [_sample(batch, row, _raw(own, int(ids[row])), tokenizer, names) for row in range(min(number, len(ids)))]
    return {
        "lines": data_lines(),
        "sizes": {name: _size(part) for name, part in sources.items()},
        "batch": {name: _shape(value) for name, value in batch.items()},
        **_survey(own, names),
        "samples": [{"id": int(ids[row]), "parts": parts} for row, parts in enumerate(shown)],
    }


def _tokenizer(export: Any) -> Any:
    """The tokenizer (alone or in a processor) whose files `export` writes: `export` is its method, or refers to it."""
    held = [getattr(export, "__self__", None), *getattr(export, "args", ())]
    held += [cell.cell_contents for cell in getattr(export, "__closure__", None) or ()]
    return next((one for one in (getattr(each, "tokenizer", each) for each in held) if hasattr(one, "decode")), None)


def _size(dataset: Any) -> dict[str, int]:
    """{source: its samples}, or {"": the samples} of a set of one source."""
    return dict(zip(dataset.names, dataset.sizes)) if isinstance(dataset, Mixture) else {"": len(dataset)}


def _shape(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.") if isinstance(value, Tensor) else "texts"


def _raw(dataset: Any, index: int) -> dict[str, Any]:
    """A sample before the collate function, for the lengths without padding."""
    seed_sample(0, 0, index)
    try:
        sample = dataset[index]
    except Exception:  # a dataset that only has batches
        return {}
    return sample if isinstance(sample, dict) else {}


def _survey(dataset: Any, names: list[str]) -> dict[str, Any]:
    """The lengths and integers of samples from the whole set, as many as the time allows."""
    size, started = len(dataset), time.monotonic()
    step = max(1, size // MOST_LOOKED_AT)
    lengths: dict[str, list[int]] = {}
    values: dict[str, Counter[str]] = {}
    looked_at = 0
    for index in range(0, size, step):
        for name, value in _raw(dataset, index).items():
            if _holds_tokens(name, value):
                lengths.setdefault(name, []).append(len(value))
            elif value.ndim == 0 and not value.is_floating_point() if isinstance(value, Tensor) else type(value) is int:
                values.setdefault(name, Counter())[_text_of(name, value, names)] += 1
        looked_at += 1
        if time.monotonic() - started > SECONDS:
            break
    return {
        "looked_at": looked_at,
        "lengths": {name: _bars(found) for name, found in lengths.items() if len({*found}) > 1},
        "values": {name: found.most_common(MOST_NAMED) for name, found in values.items() if len(found) < looked_at},
    }


def _bars(lengths: list[int]) -> list[tuple[int, int, int]]:
    """(first length, last length, number of samples) of each bar of a histogram."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high + 1 - low) // NUM_BARS))
    counts = Counter((length - low) // width for length in lengths)
    last = (high - low) // width
    return [(low + width * bar, min(high, low + width * (bar + 1) - 1), counts[bar]) for bar in range(last + 1)]


def _sample(batch: dict[str, Any], row: int, raw: dict[str, Any], tokenizer: Any, names: list[str]) -> list[Any]:
    """The parts of a sample: {"name", and "text", "pictures" or "tokens": [[text, is trained, begins a document]]}"""
    mine = {name: value[row] for name, value in batch.items()}
    parts: list[dict[str, Any]] = []
    for name, value in mine.items():
        if not isinstance(value, Tensor):
            parts.append({"name": name, "text": _visible(value)})
        elif value.ndim > 2 and value.is_floating_point() and value.shape[-3] in COLOURS:
            parts.append({"name": name, **_images(value)})
        elif value.ndim == 0:
            parts.append({"name": name, "text": _text_of(name, value, names)})
        elif _holds_tokens(name, value):
            length = _length(name, value, raw, mine)
            columns = value.view(len(value), -1).unbind(1)
            for number, column in enumerate(columns):
                title = name if len(columns) == 1 else f"{name}, {number + 1} of {len(columns)}"
                labels, positions = (_column(mine.get(each), value, number, length) for each in ("labels", "positions"))
                parts.append({"name": title, "tokens": _runs(column[:length], labels, positions, tokenizer)})
        elif name not in BESIDE_TOKENS:
            first = ", ".join(f"{number:.4g}" for number in value.flatten()[:6].tolist())
            parts.append({"name": name, "text": f"{_shape(value)}: {first}{', ...' * (value.numel() > 6)}"})
    return parts


def _holds_tokens(name: str, value: Any) -> bool:
    """Whether a tensor of a sample has tokens, of one text or of several."""
    is_row = isinstance(value, Tensor) and (value.ndim == 1 or (value.ndim == 2 and value.shape[1] <= MOST_COLUMNS))
    return is_row and not value.is_floating_point() and value.dtype != torch.bool and name not in BESIDE_TOKENS


def _length(name: str, value: Tensor, raw: dict[str, Any], sample: dict[str, Any]) -> int:
    """The number of tokens of a sample without padding: from the batch's mask, or from the sample before collation."""
    if (mask := sample.get("attention_mask")) is not None and mask.shape == value.shape:
        return int(mask.sum())
    return len(raw[name]) if isinstance(raw.get(name), Tensor) and raw[name].ndim else len(value)


def _text_of(name: str, value: Any, names: list[str]) -> str:
    number = value.item() if isinstance(value, Tensor) else value
    if name.startswith("source") and isinstance(number, int) and number < len(names):
        return names[number]
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _runs(
    tokens: Tensor, labels: Tensor | None, positions: Tensor | None, tokenizer: Any
) -> list[tuple[str, bool, bool]]:
    """Runs of tokens: (their text, whether the model learns to write them, whether a packed document begins)."""
    borders = [] if positions is None else (positions[1:] == 0).nonzero().flatten().add(1).tolist()
    runs: list[tuple[str, bool, bool]] = []
    for start, end in itertools.pairwise([0, *borders, len(tokens)]):
        ids, trained = tokens[start:end], [False] * (end - start)
        if labels is not None and len(labels) == len(tokens):
            known = labels[start:end] != IGNORED
            # Either each label is the next token, or it is the token (or its class) at the same position.
            is_next = bool((labels[start : end - 1] == ids[1:])[known[:-1]].all())
            is_shifted = is_next and not bool((labels[start:end] == ids)[known].all())
            if is_shifted and known[-1]:  # the last label is not a token of the block
                ids, trained = torch.cat([ids, labels[end - 1 : end]]), [*trained, False]
            for place in known.nonzero().flatten().tolist():
                trained[place + is_shifted] = True
        if positions is not None and (positions[start:end] == 0).all() and not any(trained):
            continue  # padding at the end of a block
        for learns, run in itertools.groupby(range(len(ids)), key=trained.__getitem__):
            places = [*run]
            numbers = ids[places].tolist()
            text = tokenizer.decode(numbers) if tokenizer else " ".join(map(str, numbers)) + " "
            runs.append((_visible(text), learns, start > 0 and places[0] == 0))
    return runs


def _column(value: Any, tokens: Tensor, number: int, length: int) -> Tensor | None:
    """A column of a tensor that has as many values as the tokens; otherwise None, as in an encoder-decoder."""
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(tokens):
        return None
    columns = value.view(len(value), -1)
    return columns[:length, min(number, columns.shape[1] - 1)]


def _visible(text: str) -> str:
    """A text for a terminal: control characters become Python escapes, such as \\x03 for the end of a text."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def _images(pixels: Tensor) -> dict[str, Any]:
    """Images as PNG files, and a text about their values. Black is 0, -1 or the least one, white 1 or the greatest."""
    low, high = pixels.min().item(), pixels.max().item()
    least, most = next(((least, 1.0) for least in (0.0, -1.0) if least <= low and high <= 1), (low, high))
    shades = ((pixels - least) / max(most - least, 1e-9) * 255).round().clamp(0, 255).to(torch.uint8)
    images = [_png(one) for one in shades.flatten(0, -4).unbind()] if pixels.ndim > 3 else [_png(shades)]
    shape = " × ".join(map(str, pixels.shape))
    return {"pictures": images, "text": f"{shape}, values {low:.3g} to {high:.3g}, mean {pixels.mean().item():.3g}"}


def _png(shades: Tensor) -> str:
    image = Image.fromarray(shades.permute(1, 2, 0).squeeze(-1).numpy())
    image = ImageOps.scale(image, max(1, SMALL // max(image.size)), Image.Resampling.NEAREST)
    image.thumbnail((LARGE, LARGE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
