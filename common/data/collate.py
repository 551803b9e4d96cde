"""Collates samples of equal or different lengths into a batch, or says why they do not fit together."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from ..errors import UsageError
from ..failure import line_of
from .sets import Batch, CollateFn


def collate(samples: Any, size: int, collate_fn: CollateFn) -> Batch:
    """A batch of `size` samples, from a list of samples or from a batch that `__getitems__` made."""
    is_own, first = collate_fn is not default_collate, samples[0] if isinstance(samples, list) and samples else samples
    if not is_own and not isinstance(first, dict):
        raise UsageError(
            f'samples have the type {type(first).__name__}: expected dicts, such as {{"image": ..., "label": ...}}, '
            "or a collate_fn that makes such a dict from a list of samples"
        )
    try:
        batch = samples if isinstance(samples, dict) else collate_fn(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise UsageError(_why_no_batch(samples, error, is_own)) from None
    rows = f"({size}, ...), a row for each sample"
    if not isinstance(batch, dict):
        raise UsageError(f"collate_fn returns a {type(batch).__name__}: expected a dict of tensors of shape {rows}")
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 or len(value) != size or (name == "weight" and value.ndim > 1):
                expected = f"{rows}; pad parts that vary in number, such as the nodes of graphs"
                expected = f"({size},), one number per sample" if name == "weight" else expected
                raise UsageError(f'"{name}" of a batch has shape {tuple(value.shape)}: expected {expected}')
        elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UsageError(_no_tensor(name, value, "batch" if is_own or samples is batch else "sample"))
    if "weight" in batch and isinstance(first, dict) and isinstance(first.get("weight"), Number):
        # 1 and 0.5 give integers or floats, as a batch has them, and processes sum weights of one type.
        return batch | {"weight": batch["weight"].to(torch.float32 if is_own else torch.float64)}
    return batch


def _no_tensor(name: str, value: Any, where: str) -> str:
    inner = value[0] if isinstance(value, list | tuple) and value else value
    instead = 'make it a tensor; .with_format("torch") of datasets does this for lists'
    if isinstance(inner, dict):
        instead = "give each tensor in it its own name, and pad parts that vary in number, such as boxes, with a mask"
    return f'"{name}" of a {where} is a {type(value).__name__}: expected a tensor, number or string: {instead}'


def _why_no_batch(samples: list[Any], error: Exception, is_own: bool) -> str:
    """Why `default_collate`, or the user's own `collate_fn`, could not combine the samples into a batch."""
    dicts = samples if all(isinstance(sample, dict) for sample in samples) else []
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name in dicts[0] if dicts else ():
        if not all(name in sample for sample in dicts):
            return f'"{name}" is not in each sample: expected dicts with the same names'
        values = [sample[name] for sample in dicts]
        if any(value is None for value in values):
            return f'"{name}" is None in a sample: expected a tensor, number or string'
        if all(hasattr(value, "shape") for value in values):
            shapes[name] = sorted({tuple(value.shape) for value in values})
        elif not is_own and not isinstance(values[0], Number | str):
            return _no_tensor(name, values[0], "sample")
    unequal = [name for name, found in shapes.items() if len(found) > 1]
    if is_own and not (unequal and isinstance(error, RuntimeError)):
        return f"collate_fn cannot make a batch of the samples: {line_of(error)}"
    # pad_to_longest pads only the first dimension of tensors.
    tensors = [name for name in unequal if isinstance(dicts[0][name], torch.Tensor)]
    others = [name for name in unequal if name not in tensors or len({shape[1:] for shape in shapes[name]}) > 1]
    for name in (*others, *unequal):
        one, other, *_ = shapes[name]
        how = ", or use collate_fn=pad_to_longest() in the call of fit"
        how = " in the dataset or in a collate_fn, with a mask" if others or is_own else how
        return f'"{name}" has shape {one} in one sample and {other} in another: pad them to one shape{how}'
    return f"samples cannot be combined into a batch ({str(error).splitlines()[0]})"


@dataclass(frozen=True)
class Padding:
    """A `collate_fn` that pads the first dimension of each tensor to the longest in the batch.

    It makes a batch of samples, dicts of tensors and numbers. Tensors of one name may differ in their first dimension
    only.

    Args:
        padding: {name: value to pad with}; 0 for other names. For labels, use -100: torch's losses ignore it.
        mask: name of a tensor to add, of shape (batch, length) and type int64: 1 for a position of the sample, 0 for
            padding. It follows the lengths of the first padded tensor. None adds nothing; a sample's own mask stays.
        multiple_of: pad to a multiple of this length.
        side: where the padding goes: "right", or "left" for a model that reads the last position.
    """

    padding: Mapping[str, float] | None = None
    mask: str | None = "attention_mask"
    multiple_of: int = 1
    side: str = "right"

    def __call__(self, samples: list[Any]) -> Batch:
        batch: Batch = {}
        for name in samples[0]:
            column = [sample[name] for sample in samples]
            if not isinstance(column[0], Tensor) or column[0].ndim == 0:
                batch[name] = default_collate(column)
                continue
            if self.mask is not None and self.mask not in batch and self.mask not in samples[0]:
                batch[self.mask] = self._pad([torch.ones(len(tensor), dtype=torch.int64) for tensor in column], 0)
            batch[name] = self._pad(column, (self.padding or {}).get(name, 0))
        return batch

    def _pad(self, column: list[Tensor], value: float) -> Tensor:
        longest = -(-max(map(len, column)) // self.multiple_of) * self.multiple_of
        full = column[0].new_empty((longest, *column[0].shape[1:]))  # the others are padded to this length
        return pad_sequence([*column, full], True, value, self.side)[:-1]


pad_to_longest = Padding
