"""Batches of sequences of different lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from .sets import Batch


def pad_to_longest(
    padding: Mapping[str, float] | None = None,
    mask: str | None = "attention_mask",
    multiple_of: int = 1,
) -> "Padding":
    """A `collate_fn` that pads the first dimension of each tensor to the longest in the batch.

    Args:
        padding: {name: value to pad with}; 0 for other names. For labels, -100 is what losses of torch ignore.
        mask: name of a tensor to add, of shape (batch, length) and type int64: 1 for a position of the sample, 0 for
            padding. It follows the first padded tensor. None adds nothing; a sample's own tensor of this name stays.
        multiple_of: pad to a multiple of this length.

    Returns:
        A function from samples, dicts of tensors and numbers, to a batch. Tensors of one name may differ in their first
        dimension only.
    """
    return Padding(dict(padding or {}), mask, multiple_of)


@dataclass(frozen=True)
class Padding:
    """A `collate_fn`, with the arguments of `pad_to_longest`."""

    padding: Mapping[str, float]
    mask: str | None
    multiple_of: int

    def __call__(self, samples: list[Any]) -> Batch:
        batch: Batch = {}
        for name in samples[0]:
            column = [sample[name] for sample in samples]
            if not isinstance(column[0], Tensor) or column[0].ndim == 0:
                batch[name] = default_collate(column)
                continue
            if self.mask is not None and self.mask not in batch and self.mask not in samples[0]:
                ones = [torch.ones(len(tensor), dtype=torch.int64) for tensor in column]
                batch[self.mask] = _pad(ones, 0, self.multiple_of)
            batch[name] = _pad(column, self.padding.get(name, 0), self.multiple_of)
        return batch


def _pad(column: list[Tensor], value: float, multiple_of: int) -> Tensor:
    longest = -(-max(len(tensor) for tensor in column) // multiple_of) * multiple_of
    padded = column[0].new_full((len(column), longest, *column[0].shape[1:]), value)
    for row, tensor in zip(padded, column):
        row[: len(tensor)] = tensor
    return padded
