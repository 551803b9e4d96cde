"""Batches of a dataset on the device: fetched by this process or by workers."""

import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.queues import Queue
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ..accidents import advice, lost_worker
from ..config import RunConfig
from ..errors import UsageError, WorkerError, annotate_errors, list_samples, trace_of
from ..failure import line_of
from ..plan import Samples
from ..seeds import CPU, generator_states, seed_batch, seed_sample
from .collate import collate
from .sets import Batch, Collated, CollateFn, InMemoryDataset, MapDataset

MAX_BYTES_ON_DEVICE = 2**30  # larger datasets stay in the CPU's memory


def batches(
    dataset: MapDataset, samples: Iterable[Samples], device: torch.device, config: RunConfig
) -> Iterator[Batch]:
    """Fetches batches and moves them to the device. Raises UsageError if samples are not dicts, or cannot be combined
    into a batch.

    Args:
        dataset: map-style; samples are dicts of tensors, numbers or strings. If it has `__getitems__`,
            each batch is one call with a list of ids. The call returns a list of samples, or the
            batch: a dict of tensors of shape (batch, ...). `__getitem__` may draw random numbers: they
            are a function of `--seed`, the epoch and the sample. The draws of `__getitems__` and a
            `collate_fn` are a function of `--seed`, the epoch and the samples of the micro-batch.
        samples: (epoch, ids) of each batch.
        device: for the tensors of a batch; strings stay on the CPU.
        config: `--seed` and `--num_workers`, the processes that fetch ahead; with 0 this process fetches.
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
            worker_init_fn=_start_worker,
            pin_memory=device.type != "cpu",
        )
        fetched = _from_workers(loader)
    else:
        fetched = (fetch(dataset, ids, config.seed, epoch) for epoch, ids in wanted)
    return (_move(batch, device) for batch in fetched)


def resident(dataset: Any, device: torch.device) -> Any:
    """The dataset on the device if it is small and in memory; otherwise the dataset itself."""
    if device.type == "cpu" or not _reads_rows(dataset) or dataset.num_bytes > MAX_BYTES_ON_DEVICE:
        return dataset
    return dataset.to(device)


def _reads_rows(dataset: Any) -> TypeGuard[InMemoryDataset]:
    """Whether only `rows` and `transform` make a sample: a subclass may have overridden its indexing."""
    kind, own = type(dataset), InMemoryDataset
    return isinstance(dataset, own) and (kind.__getitem__, kind.__getitems__) == (own.__getitem__, own.__getitems__)


def _from_rows(dataset: InMemoryDataset, sample_ids: Iterable[torch.Tensor], device: torch.device) -> Iterator[Batch]:
    is_resident = dataset.device.type != "cpu"
    for ids in sample_ids:
        ids = _send(ids, device) if is_resident else ids
        yield dataset.transform(_move(dataset.rows(ids), device))


def fetch(dataset: MapDataset, ids: list[int], seed: int = 0, epoch: int = 0) -> Batch:
    """The samples of these ids as a batch on the CPU. Raises UsageError like `batches`."""
    collate_fn: CollateFn = dataset.collate_fn if isinstance(dataset, Collated) else default_collate
    dataset = dataset.samples if isinstance(dataset, Collated) else dataset
    if hasattr(dataset, "__getitems__"):
        seed_batch(seed, epoch, ids)
        with annotate_errors(lambda: list_samples(ids)):
            samples = dataset.__getitems__(ids)
    else:
        samples = [_sample(dataset, index, seed, epoch) for index in ids]
    seed_batch(seed, ~epoch, ids)
    return collate(samples, len(ids), collate_fn)


def draws_for_batches(dataset: MapDataset) -> bool:
    """Whether `__getitems__` or the `collate_fn` draws random numbers: they depend on the samples of a micro-batch."""
    collate_fn = dataset.collate_fn if isinstance(dataset, Collated) else default_collate
    inner = dataset.samples if isinstance(dataset, Collated) else dataset
    before = generator_states(CPU)
    samples = _read(inner, 0)
    if not hasattr(inner, "__getitems__"):
        before = generator_states(CPU)
    collate(samples, 1, collate_fn)
    return generator_states(CPU) != before


def keeps_draws(dataset: MapDataset) -> bool:
    """Whether a sample draws random numbers only when it is first read."""
    inner = dataset.samples if isinstance(dataset, Collated) else dataset
    states, last = list[Any](), len(inner) - 1  # the recipe may have read the first samples
    for _ in range(2):
        seed_sample(0, 0, last)
        start = generator_states(CPU)
        _read(inner, last)
        states.append(generator_states(CPU) != start)
    return states == [True, False]


def _read(inner: MapDataset, index: int) -> Any:
    return inner.__getitems__([index]) if hasattr(inner, "__getitems__") else [inner[index]]


def _sample(dataset: MapDataset, index: int, seed: int, epoch: int) -> Any:
    seed_sample(seed, epoch, index)
    with annotate_errors(lambda: list_samples([index])):
        return dataset[index]


class _Fetching(Dataset):
    """A DataLoader worker indexes this dataset with (epoch, ids) and gets a batch."""

    def __init__(self, dataset: MapDataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, wanted: tuple[int, list[int]]) -> Batch | UsageError | WorkerError:
        epoch, ids = wanted
        try:
            return fetch(self.dataset, ids, self.seed, epoch)
        except Exception as error:
            return _failure_of(error)


def _failure_of(error: Exception) -> UsageError | WorkerError:
    """A worker sends this instead of a batch, because the DataLoader would wrap the error in its own traceback."""
    if (line := advice(error)) is not None or isinstance(error, UsageError):
        return UsageError(line or str(error))
    return WorkerError(line_of(error), trace_of(error))


def _start_worker(number: int) -> None:
    """Runs first in a worker: makes it send an error when it cannot send a batch. Without shared memory or open files,
    Python's queue would drop the batch, and the run would wait for it forever.

    A worker whose parent process has already ended would wait forever, too: torch's watchdog starts later, and takes
    the parent at that time for the original parent."""
    main = multiprocessing.parent_process()
    if main is not None and multiprocessing.get_start_method() == "fork" and os.getppid() != main.pid:
        os._exit(1)
    # The message of a worker is (number of the batch, batch). If it cannot send a batch, it sends the reason.
    kind: Any = Queue
    kind._on_queue_feeder_error = lambda queue, error, message: queue.put((message[0], _failure_of(error)))


def _from_workers(loader: DataLoader[Any]) -> Iterator[Batch]:
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    batches: Any = iter(loader)
    if before is not None and threading.current_thread() is threading.main_thread():
        # When a worker ends, torch's handler raises an error wherever this process is, even in code that swallows it.
        # The DataLoader itself checks its workers every five seconds.
        signal.signal(signal.SIGCHLD, before)
    try:
        for batch in batches:
            if isinstance(batch, UsageError | WorkerError):
                raise type(batch)(*batch.args)  # a copy, not held by this frame: a cycle would keep the loader
            yield batch
    except (RuntimeError, OSError, EOFError):  # torch's own; or of a connection to the worker, which sends files
        if (code := _exit_code(batches._workers)) is None:
            raise
        raise UsageError(lost_worker(signal.strsignal(-code) if code < 0 else f"exit code {code}")) from None


def _exit_code(workers: list[Any]) -> int | None:
    """The exit code of a worker that has failed or fails within a second, or None; negative for a signal."""
    deadline = time.monotonic() + 1
    while not any(worker.exitcode for worker in workers):  # other workers may end normally in the meantime
        alive = [worker.sentinel for worker in workers if worker.exitcode is None]
        if (left := deadline - time.monotonic()) < 0 or not multiprocessing.connection.wait(alive, left):
            return None
    return next(int(worker.exitcode) for worker in workers if worker.exitcode)


def _move(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device; strings stay on the CPU."""
    if device.type == "cpu":
        return batch
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return batch | {name: _send(tensor, device) for name, tensor in tensors.items()}


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. A copy from pinned memory without gaps does not block the CPU."""
    if tensor.device.type == "cpu":
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)
