"""What a dataset must offer, and batches on the device."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from common.errors import UsageError

Batch = dict[str, torch.Tensor]
# (model, batch) -> metrics. Any, as a pipeline calls it with what stands for the model.
ForwardStep = Callable[[Any, Batch], dict[str, torch.Tensor]]


class MapDataset(Protocol):
    """What a dataset must offer, whatever library it is of."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_dataset(dataset: Any) -> None:
    """Raises UsageError unless `dataset` has samples and is map-style: `dataset[index]` works."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"{type(dataset).__name__} is not a map-style dataset: a run that resumes exactly needs "
            "len(dataset) and dataset[index]; load it as one (for `datasets`: without streaming=True)"
        )
    if len(dataset) == 0:
        raise UsageError(f"{type(dataset).__name__} is empty: training and evaluation need samples")


def batches(
    dataset: MapDataset, sample_ids: Iterable[torch.Tensor], device: torch.device, num_workers: int = 0
) -> Iterator[Batch]:
    """Fetches batches and moves them to the device.

    Args:
        dataset: map-style; samples are dicts of tensors, numbers or strings. Where it has `__getitems__`,
            that is called once per batch with a list of ids, and may return the batch itself, a
            dict of tensors of shape (batch, ...), or a list of samples to be stacked.
        sample_ids: one 1-dim int64 tensor per batch.
        device: where the batches go; strings stay where they are.
        num_workers: processes that fetch ahead; 0 fetches in this one.

    Raises:
        UsageError: samples that are no dicts, or that do not make a batch.
    """
    ids = (batch.tolist() for batch in sample_ids)
    fetched: Iterator[Batch]
    if num_workers:
        loader: DataLoader[Batch] = DataLoader(
            _Fetching(dataset), batch_size=None, sampler=ids, num_workers=num_workers, collate_fn=_as_it_is
        )
        fetched = _from_workers(iter(loader))
    else:
        fetched = (fetch(dataset, batch) for batch in ids)
    if device.type == "cpu":
        return fetched
    return ({name: _moved(value, device) for name, value in batch.items()} for batch in fetched)


def fetch(dataset: MapDataset, ids: list[int]) -> Batch:
    """The samples of these ids as a batch, on the CPU. Raises UsageError as `batches`."""
    if hasattr(dataset, "__getitems__"):
        return _collate(dataset.__getitems__(ids), len(ids))
    return _collate([dataset[index] for index in ids], len(ids))


class _Fetching(Dataset):
    """Lets a worker fetch a batch as `fetch` does."""

    def __init__(self, dataset: MapDataset):
        self.dataset = dataset

    def __getitem__(self, ids: list[int]) -> Batch:
        return fetch(self.dataset, ids)


def _as_it_is(batch: Any) -> Any:
    return batch


def _from_workers(batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except UsageError as error:  # the loader has put the worker's traceback before it
        raise UsageError(str(error).strip().splitlines()[-1].partition(": ")[2]) from None


def _moved(value: Any, device: torch.device) -> Any:
    # From pinned memory the copy does not stop the host.
    return value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _collate(samples: Any, size: int) -> Batch:
    """A batch of `size` samples, of which `__getitems__` may have made one already."""
    try:
        batch = samples if isinstance(samples, dict) else default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise UsageError(_why_no_batch(samples, error)) from None
    if not isinstance(batch, dict):
        kind = type(samples[0] if isinstance(samples, list) and samples else samples).__name__
        raise UsageError(f'samples are of the type {kind}: expected dicts, such as {{"image": ..., "label": ...}}')
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.ndim == 0 or len(value) != size or (name == "weight" and value.ndim > 1):
                expected = f"({size},), one number per sample" if name == "weight" else f"({size}, ...)"
                raise UsageError(f'"{name}" of a batch has shape {tuple(value.shape)}: expected {expected}')
        elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UsageError(f'"{name}" of a sample is a {type(value).__name__}: expected a tensor, number or string')
    return batch


def _why_no_batch(samples: Any, error: Exception) -> str:
    dicts = samples if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else []
    for name in dicts[0] if dicts else ():
        if not all(name in sample for sample in dicts):
            return f'"{name}" is not in each sample: expected dicts with the same names'
        shapes = {tuple(sample[name].shape) for sample in dicts if hasattr(sample[name], "shape")}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            return f'"{name}" has shape {first} in one sample and {second} in another: pad them to one shape'
        if any(sample[name] is None for sample in dicts):
            return f'"{name}" is None in a sample: expected a tensor, number or string'
    return f"samples do not make a batch ({str(error).splitlines()[0]})"
