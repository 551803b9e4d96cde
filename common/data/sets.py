"""The interface of a dataset and of a step, and what `fit` accepts as a dataset."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from itertools import islice
from os import PathLike
from typing import Any, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import UsageError

Batch = dict[str, torch.Tensor]
# (model, batch) or (model, batch, number of the optimizer step) -> metrics. A pipeline passes a function as the model.
ForwardStep = Callable[..., dict[str, torch.Tensor]]
NumberedStep = Callable[[Any, Batch, int], dict[str, torch.Tensor]]  # what the loop calls
CollateFn = Callable[[list[Any]], Batch]
Metrics = dict[str, float]
Examples = dict[str, torch.Tensor]  # {name: values of `forward_step` for all samples of an evaluation set}


def copied_batch(batch: Batch) -> Batch:
    """A copy, which `forward_step` may change."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


class MapDataset(Protocol):
    """A map-style dataset from any library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class InMemoryDataset(Dataset):
    """A dataset whose samples are rows of tensors in memory. A batch is one indexing operation per tensor. It must not
    draw random numbers.

    Without `--num_workers`, `batches` calls `rows` where the tensors are, and `transform` on the model's device. On a
    GPU it moves small datasets there as a whole, and large ones batch by batch.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> Batch:
        """The samples of these ids as stored. `ids`: int64 of shape (batch,), on the device of the data."""

    def transform(self, batch: Batch) -> Batch:
        """Turns the result of `rows` into what the model gets. Runs on the model's device, except in a worker."""
        return batch

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, ids: list[int]) -> Batch:
        return self.transform(self.rows(torch.tensor(ids)))

    def to(self, device: torch.device) -> Self:
        """A copy with its tensors on the device."""
        moved = copy(self)
        vars(moved).update({name: tensor.to(device) for name, tensor in self._tensors().items()})
        return moved

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self._tensors().values())).device

    @property
    def num_bytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


class ListDataset(Dataset):
    """A dataset whose `samples` are in a list, or in another dataset."""

    samples: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Collated(ListDataset):
    """A dataset with its own function to make a batch of samples."""

    def __init__(self, samples: MapDataset, collate_fn: CollateFn):
        self.samples, self.collate_fn = samples, collate_fn


def as_numbered_step(forward_step: ForwardStep) -> NumberedStep:
    """`forward_step` as the loop calls it: a third argument gets the step's number, if it is `step` or required."""
    with suppress(ValueError):  # of a function in C
        for each in [*inspect.signature(forward_step).parameters.values()][2:3]:
            if each.kind is each.POSITIONAL_OR_KEYWORD and (each.name == "step" or each.default is each.empty):
                return forward_step
    return lambda model, batch, number: forward_step(model, batch)


def check_datasets(
    train_set: MapDataset, eval_set: MapDataset | Mapping[str, MapDataset], collate_fn: CollateFn | None
) -> tuple[MapDataset, dict[str, MapDataset]]:
    """(training set, {name: evaluation set}), with the `collate_fn`. The name of a single evaluation set is "". Raises
    UsageError if a set has no samples or is not map-style, so that `dataset[index]` does not work."""
    eval_sets = dict(eval_set) if isinstance(eval_set, Mapping) else {"": eval_set}
    if not eval_sets:
        raise UsageError("no evaluation set", "expected a dataset, or a dict of datasets")
    _check(train_set, "training set")
    for dataset in eval_sets.values():
        _check(dataset, "evaluation set")
    if collate_fn is None:
        return train_set, eval_sets
    return Collated(train_set, collate_fn), {name: Collated(dataset, collate_fn) for name, dataset in eval_sets.items()}


def _check(dataset: Any, what: str) -> None:
    kind = "None" if dataset is None else type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"the {what} is a {kind}; fit makes batches itself, of --batch_size samples",
            "pass its dataset, and its collate_fn as collate_fn=",
        )
    if isinstance(dataset, str | PathLike):
        raise UsageError(
            f"the {what} is a path, {dataset}",
            'give fit the samples there, for example by load_dataset("csv", data_files=PATH, '
            'split="train").with_format("torch"), from datasets',
        )
    if not isinstance(dataset, Dataset) and callable(getattr(dataset, "keys", None)):  # a dict, or a table
        names = ", ".join(map(str, islice(dataset.keys(), 3)))
        raise UsageError(
            f"the {what} is a {kind} of {names}",
            "expected a single set, where dataset[0] is the first sample, such as dataset[NAME]; turn a table into one "
            "with datasets.Dataset.from_dict(...) or from_pandas(...)",
        )
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style and not hasattr(dataset, "__iter__"):
        raise UsageError(f"the {what} is {kind}", "expected a dataset with len(dataset) and dataset[index], a dict")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UsageError(
            f"{kind} is not a map-style dataset",
            "a run that resumes exactly needs len(dataset) and dataset[index]; load it without streaming=True, or "
            "type convert_stream(dataset, FOLDER), from accelerate_recipes.common.tasks.streams",
        )
    if len(dataset) == 0:
        raise UsageError(f"{kind} is empty", "training and evaluation need samples")
