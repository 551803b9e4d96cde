"""The interface of a dataset, and batches on the device."""

import inspect
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import islice
from multiprocessing.queues import Queue
from numbers import Number
from os import PathLike
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..accidents import advice, lost_worker
from ..config import RunConfig
from ..errors import UsageError, WorkerError, line_of, listed, noted, trace_of
from ..plan import Samples
from ..seeds import CPU, generator_states, seed_batch, seed_sample

MAX_BYTES_ON_DEVICE = 2**30  # larger datasets stay in the CPU's memory

Batch = dict[str, torch.Tensor]
# (model, batch) or (model, batch, number of the optimizer step) -> metrics. A pipeline passes a function as the model.
ForwardStep = Callable[..., dict[str, torch.Tensor]]
NumberedStep = Callable[[Any, Batch, int], dict[str, torch.Tensor]]  # what the loop calls
CollateFn = Callable[[list[Any]], Batch]
Metrics = dict[str, float]
Examples = dict[str, torch.Tensor]  # {name: values of `forward_step` for all samples of an evaluation set}


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


class Collated(Dataset):
    """A dataset with a function of its own that makes a batch of samples."""

    def __init__(self, dataset: MapDataset, collate_fn: CollateFn):
        self.dataset, self.collate_fn = dataset, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def numbered(forward_step: ForwardStep) -> NumberedStep:
    """`forward_step` as the loop calls it. It gets the number of the optimizer step if it has a third argument that is
    called `step`, or that has no default."""
    try:
        third = [*inspect.signature(forward_step).parameters.values()][2:3]
    except ValueError:  # of a function in C
        third = []
    for each in third:
        if each.kind is each.POSITIONAL_OR_KEYWORD and (each.name == "step" or each.default is each.empty):
            return forward_step
    return lambda model, batch, number: forward_step(model, batch)


def checked_datasets(
    train_set: MapDataset, eval_set: MapDataset | Mapping[str, MapDataset], collate_fn: CollateFn | None
) -> tuple[MapDataset, dict[str, MapDataset]]:
    """(training set, {name: evaluation set}), with the `collate_fn`. The name of a single evaluation set is "".

    Raises:
        UsageError: a set has no samples or is not map-style, so that `dataset[index]` does not work.
    """
    eval_sets = dict(eval_set) if isinstance(eval_set, Mapping) else {"": eval_set}
    if not eval_sets:
        raise UsageError("no evaluation set: expected a dataset, or a dict of datasets")
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
            f"the {what} is a {kind}; fit makes batches itself, of --batch_size samples: give it the dataset in it, "
            "and its collate_fn as collate_fn="
        )
    if isinstance(dataset, str | PathLike):
        raise UsageError(
            f'the {what} is a path, {dataset}: give fit the samples there, for example by load_dataset("csv", '
            'data_files=PATH, split="train").with_format("torch"), from datasets'
        )
    if not isinstance(dataset, Dataset) and callable(getattr(dataset, "keys", None)):  # a dict, or a table
        names = ", ".join(map(str, islice(dataset.keys(), 3)))
        raise UsageError(
            f"the {what} is a {kind} of {names}: expected one set, of which dataset[0] is the first sample, such as "
            "dataset[NAME]; a table has one after datasets.Dataset.from_dict(...) or from_pandas(...)"
        )
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style and not hasattr(dataset, "__iter__"):
        raise UsageError(f"the {what} is {kind}: expected a dataset with len(dataset) and dataset[index], a dict")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise UsageError(
            f"{kind} is not a map-style dataset: a run that resumes exactly needs len(dataset) and dataset[index]; "
            "load it without streaming=True, or type convert_stream(dataset, FOLDER), from "
            "accelerate_recipes.common.tasks.streams"
        )
    if len(dataset) == 0:
        raise UsageError(f"{kind} is empty: training and evaluation need samples")


def batches(
    dataset: MapDataset, samples: Iterable[Samples], device: torch.device, config: RunConfig
) -> Iterator[Batch]:
    """Fetches batches and moves them to the device.

    Args:
        dataset: map-style; samples are dicts of tensors, numbers or strings. If it has `__getitems__`,
            each batch is one call with a list of ids. The call returns a list of samples, or the
            batch: a dict of tensors of shape (batch, ...). `__getitem__` may draw random numbers: they
            are a function of `--seed`, the epoch and the sample. What `__getitems__` and a
            `collate_fn` draw is a function of `--seed`, the epoch and the samples of the micro-batch.
        samples: (epoch, ids) of each batch.
        device: for the tensors of a batch; strings stay on the CPU.
        config: `--seed` and `--num_workers`, the processes that fetch ahead; with 0 this process fetches.

    Raises:
        UsageError: samples are not dicts, or cannot be combined into a batch.
    """
    if _reads_rows(dataset) and not config.num_workers:
        return _from_rows(resident(dataset, device), (ids for _, ids in samples), device)
    wanted = ((epoch, ids.tolist()) for epoch, ids in samples)
    fetched: Iterator[Batch]
    if config.num_workers:
        loader: DataLoader[Batch] = DataLoader(
            _Fetching(dataset, config.seed),
            batch_size=None,
            sampler=wanted,
            num_workers=config.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
            pin_memory=device.type != "cpu",
        )
        fetched = _from_workers(loader)
    else:
        fetched = (fetch(dataset, ids, config.seed, epoch) for epoch, ids in wanted)
    return (_moved(batch, device) for batch in fetched)


def resident(dataset: Any, device: torch.device) -> Any:
    """The dataset on the device if it is small and in memory; else the dataset itself."""
    if device.type == "cpu" or not _reads_rows(dataset) or dataset.num_bytes > MAX_BYTES_ON_DEVICE:
        return dataset
    return dataset.to(device)


def _reads_rows(dataset: Any) -> TypeGuard[InMemoryDataset]:
    """Whether `rows` and `transform` are all that makes a sample: a subclass may have overridden its indexing."""
    kind, own = type(dataset), InMemoryDataset
    return isinstance(dataset, own) and all(
        getattr(kind, name) is getattr(own, name) for name in ("__getitem__", "__getitems__")
    )


def _from_rows(dataset: InMemoryDataset, sample_ids: Iterable[torch.Tensor], device: torch.device) -> Iterator[Batch]:
    is_resident = dataset.device.type != "cpu"
    for ids in sample_ids:
        ids = _sent(ids, device) if is_resident else ids
        yield dataset.transform(_moved(dataset.rows(ids), device))


def fetch(dataset: MapDataset, ids: list[int], seed: int = 0, epoch: int = 0) -> Batch:
    """The samples of these ids as a batch on the CPU. Raises UsageError like `batches`."""
    collate_fn: CollateFn = dataset.collate_fn if isinstance(dataset, Collated) else default_collate
    dataset = dataset.dataset if isinstance(dataset, Collated) else dataset
    if hasattr(dataset, "__getitems__"):
        seed_batch(seed, epoch, ids)
        with noted(lambda: listed(ids)):
            samples = dataset.__getitems__(ids)
    else:
        samples = [_sample(dataset, index, seed, epoch) for index in ids]
    seed_batch(seed, ~epoch, ids)
    return _collate(samples, len(ids), collate_fn)


def draws_for_batches(dataset: MapDataset) -> bool:
    """Whether `__getitems__` or the `collate_fn` draws random numbers: they depend on the samples of a micro-batch."""
    collate_fn = dataset.collate_fn if isinstance(dataset, Collated) else default_collate
    inner = dataset.dataset if isinstance(dataset, Collated) else dataset
    before = generator_states(CPU)
    samples = inner.__getitems__([0]) if hasattr(inner, "__getitems__") else [inner[0]]
    if not hasattr(inner, "__getitems__"):
        before = generator_states(CPU)
    _collate(samples, 1, collate_fn)
    return generator_states(CPU) != before


def _sample(dataset: MapDataset, index: int, seed: int, epoch: int) -> Any:
    seed_sample(seed, epoch, index)
    with noted(lambda: listed([index])):
        return dataset[index]


class _Fetching(Dataset):
    """A DataLoader worker indexes this dataset with (epoch, ids) and gets a batch."""

    def __init__(self, dataset: MapDataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, wanted: tuple[int, list[int]]) -> "Batch | _Failed":
        epoch, ids = wanted
        try:
            return fetch(self.dataset, ids, self.seed, epoch)
        except Exception as error:
            return _failed(error)


@dataclass(frozen=True)
class _Failed:
    """What a worker sends instead of a batch: the loader would put its own traceback around the error."""

    line: str
    trace: str | None


def _failed(error: Exception) -> _Failed:
    if (line := advice(error)) is not None or isinstance(error, UsageError):
        return _Failed(line or str(error), None)
    return _Failed(line_of(error), trace_of(error))


def _start_worker(number: int) -> None:
    """Runs first in a worker. Python's queue would drop a batch that it cannot send, for want of shared memory or open
    files: the run would wait for it for ever."""
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]


def _send_failure(queue: Any, error: Exception, message: tuple[int, Any]) -> None:
    """Sends in place of a batch why it could not be sent. The message of a worker is (number of the batch, batch)."""
    queue.put((message[0], _failed(error)))


def _as_it_is(batch: Any) -> Any:
    return batch


def _from_workers(loader: DataLoader[Any]) -> Iterator[Batch]:
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    batches: Any = iter(loader)
    if before is not None and threading.current_thread() is threading.main_thread():
        # Torch's handler raises an error wherever this process is when a worker ends, also where others swallow it. The
        # loader looks itself, every five seconds.
        signal.signal(signal.SIGCHLD, before)
    try:
        for batch in batches:
            if isinstance(batch, _Failed):
                raise UsageError(batch.line) if batch.trace is None else WorkerError(batch.line, batch.trace)
            yield batch
    except (RuntimeError, OSError, EOFError):  # torch's own; or of a connection to the worker, which sends files
        if (code := _exit_code(batches._workers)) is None:
            raise
        raise UsageError(lost_worker(signal.strsignal(-code) if code < 0 else f"exit code {code}")) from None


def _exit_code(workers: list[Any]) -> int | None:
    """That of a worker that has failed, or does within a second; None if none has. Negative: the number of a signal."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        for worker in workers:
            if worker.exitcode:
                return int(worker.exitcode)
        time.sleep(0.05)
    return None


def _moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device; strings stay on the CPU."""
    if device.type == "cpu":
        return batch
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return batch | {name: _sent(tensor, device) for name, tensor in tensors.items()}


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. A copy from pinned memory without gaps does not block the CPU."""
    if tensor.device.type == "cpu":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _collate(samples: Any, size: int, collate_fn: CollateFn) -> Batch:
    """A batch of `size` samples, from a list of samples or from a batch that `__getitems__` made."""
    is_own, first = collate_fn is not default_collate, samples[0] if isinstance(samples, list) and samples else samples
    if not is_own and not isinstance(first, dict):
        raise UsageError(
            f'samples are of the type {type(first).__name__}: expected dicts, such as {{"image": ..., "label": ...}}, '
            "or a collate_fn that makes such a dict of a list of samples"
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
                expected = f"{rows}; pad what differs in number, such as the nodes of graphs"
                expected = f"({size},), one number per sample" if name == "weight" else expected
                raise UsageError(f'"{name}" of a batch has shape {tuple(value.shape)}: expected {expected}')
        elif not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UsageError(_no_tensor(name, value, "batch" if is_own or samples is batch else "sample"))
    return batch


def _no_tensor(name: str, value: Any, where: str) -> str:
    inner = value[0] if isinstance(value, list | tuple) and value else value
    instead = 'make it a tensor; of datasets, .with_format("torch") does so with lists'
    if isinstance(inner, dict):
        instead = "give each tensor in it a name of its own, and pad what differs in number, such as boxes, with a mask"
    return f'"{name}" of a {where} is a {type(value).__name__}: expected a tensor, number or string: {instead}'


def _why_no_batch(samples: list[Any], error: Exception, is_own: bool) -> str:
    """Why `default_collate`, or a `collate_fn` of the user's own, made no batch of samples."""
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
        return f"collate_fn makes no batch of the samples: {line_of(error)}"
    # What pad_to_longest cannot pad: the first dimension of tensors may differ, and no other.
    tensors = [name for name in unequal if isinstance(dicts[0][name], torch.Tensor)]
    others = [name for name in unequal if name not in tensors or len({shape[1:] for shape in shapes[name]}) > 1]
    for name in (*others, *unequal):
        one, other, *_ = shapes[name]
        how = ", or type collate_fn=pad_to_longest() in the call of fit"
        how = " in the dataset or in a collate_fn, with a mask" if others or is_own else how
        return f'"{name}" has shape {one} in one sample and {other} in another: pad them to one shape{how}'
    return f"samples do not make a batch ({str(error).splitlines()[0]})"
