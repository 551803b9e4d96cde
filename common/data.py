"""Data: what a dataset must offer, and batches on the device."""

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader, IterableDataset, default_collate

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
        dataset: map-style; samples are dicts of tensors or numbers. Where it has `__getitems__`,
            that is called once per batch with a list of ids, and may return the batch itself, a
            dict of tensors of shape (batch, ...), or a list of samples to be stacked.
        sample_ids: one 1-dim int64 tensor per batch.
        device: where the batches go.
        num_workers: processes that fetch ahead; 0 fetches in this one.
    """
    fetched: Iterator[Batch]
    if num_workers:
        ids = (batch.tolist() for batch in sample_ids)
        loader: DataLoader[Batch] = DataLoader(
            dataset,  # type: ignore[arg-type]  # torch means any map-style set
            batch_sampler=ids,
            num_workers=num_workers,
            collate_fn=_collate,
        )
        fetched = iter(loader)
    elif hasattr(dataset, "__getitems__"):
        fetched = (_collate(dataset.__getitems__(batch.tolist())) for batch in sample_ids)
    else:
        fetched = (default_collate([dataset[index] for index in batch.tolist()]) for batch in sample_ids)
    if device.type == "cpu":
        return fetched
    # From pinned memory the copy does not stop the host.
    return ({k: v.pin_memory().to(device, non_blocking=True) for k, v in batch.items()} for batch in fetched)


def _collate(samples: Any) -> Batch:
    return samples if isinstance(samples, dict) else default_collate(samples)


def sklearn_file(name: str) -> Path:
    """A data file of scikit-learn, which is real data that every machine has; no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name


def load_splits(data: str, advice: str) -> list[Any]:
    """The training split and, where there is one, the evaluation split of a set of the Hub, or of a
    folder laid out as the Hub stores one, each a `datasets.Dataset`.

    Args:
        data: Hub id or folder.
        advice: what to type instead, for the error.

    Raises:
        UsageError: nothing there, no network, or no training split.
    """
    # The first process of each machine downloads or converts; the others then find it in the cache.
    with PartialState().local_main_process_first():
        splits = _load_dataset(data, advice)
    if "train" not in splits:
        raise UsageError(f"--data {data} has no train split but {', '.join(splits)}")
    evaluation = next((name for name in ("test", "validation", "valid") if name in splits), None)
    return [splits[name] for name in ("train", evaluation) if name]


def _load_dataset(data: str, advice: str) -> dict[str, Any]:
    import datasets  # here, because the import takes seconds

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(data)
    except Exception as error:  # the library raises dozens of kinds, its network stack more
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if Path(data).is_dir():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(
            f"--data {data}: not a folder here, and the Hub gave no such set ({reason}); {advice}"
        ) from None
