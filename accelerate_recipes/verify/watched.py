"""Runs a script on plain Accelerate unchanged, and writes down what Accelerate does: started by watch.py."""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter


class Watcher:
    """What one process does, step by step.

    Args:
        folder: for the records of each process, and the weights of the first one.
        num_steps: the script ends after so many optimizer steps.
    """

    def __init__(self, folder: Path, num_steps: int):
        self.folder, self.num_steps = folder, num_steps
        self.facts: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.micro_batches: list[dict[str, Any]] = []
        self.grad_norm: float | None = None
        self.model: torch.nn.Module | None = None
        self.optimizer: Any = None
        self.batch: dict[str, Any] = {}  # the last one that a loader gave to the script
        self.newest: list[Any] = []  # the sample ids of each batch of the newest iterator
        self.num_iterators = 0
        self.is_inside = False  # a prepared loader, which reads ahead from a loader of torch

    def install(self) -> None:
        """Puts itself between the script and Accelerate."""
        for target, name, wrapper in (
            (Accelerator, "prepare", self._prepare),
            (Accelerator, "backward", self._backward),
            (Accelerator, "clip_grad_norm_", self._clip),
            (AcceleratedOptimizer, "step", self._step),
            (DataLoaderShard, "__iter__", self._iterate),
            (DataLoaderDispatcher, "__iter__", self._iterate),
            (_BaseDataLoaderIter, "__init__", self._begin),
            (_BaseDataLoaderIter, "_next_index", self._next_index),
            (_BaseDataLoaderIter, "__next__", self._next),
        ):
            setattr(target, name, _bound(wrapper, getattr(target, name)))

    def finish(self) -> None:
        """Writes the records and the weights."""
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 and self.model is not None:
            from safetensors.torch import save_file

            tensors = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            save_file({name: value.contiguous() for name, value in tensors.items()}, self.folder / "model.safetensors")
        content = self.facts | {"steps": self.steps}
        (self.folder / f"process_{rank}.json").write_text(json.dumps(content))

    def _prepare(self, original: Callable[..., Any], accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
        for thing in objects:
            if isinstance(thing, torch.nn.Module) and self.model is None:
                self.model = thing
                self.facts["layers"] = sorted({type(module).__name__ for module in thing.modules()})
                self.facts["drops"] = any(
                    getattr(module, "p", 0) > 0 and "Dropout" in type(module).__name__ for module in thing.modules()
                )
        self.facts["distributed_type"] = accelerator.distributed_type.name
        self.facts["num_processes"] = accelerator.num_processes
        return original(accelerator, *objects, **options)

    def _backward(
        self, original: Callable[..., Any], accelerator: Accelerator, loss: torch.Tensor, **options: Any
    ) -> Any:
        self.micro_batches.append({"loss": loss.item(), **self.batch})
        return original(accelerator, loss, **options)

    def _clip(self, original: Callable[..., Any], accelerator: Accelerator, *arguments: Any, **options: Any) -> Any:
        norm = original(accelerator, *arguments, **options)
        if isinstance(norm, torch.Tensor) and accelerator.sync_gradients:
            self.grad_norm = norm.item()
        return norm

    def _step(self, original: Callable[..., Any], optimizer: AcceleratedOptimizer, *arguments: Any) -> Any:
        learning_rate = optimizer.param_groups[0]["lr"]
        result = original(optimizer, *arguments)
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer and optimizer.gradient_state.sync_gradients:
            step = {"learning_rate": float(learning_rate), "grad_norm": self.grad_norm}
            self.steps.append(step | {"micro_batches": self.micro_batches})
            self.micro_batches = []
            if len(self.steps) >= self.num_steps:
                self.finish()
                os._exit(0)  # every process ends after the same step
        return result

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        batches = original(loader)
        position, ids = getattr(loader, "skip_batches", 0), None
        while True:
            self.is_inside = True
            batch = next(batches, None)
            self.is_inside = False
            if batch is None:
                return
            ids = self.newest if ids is None else ids
            self._given(batch, ids[position] if position < len(ids) else None)
            position += 1
            yield batch

    def _begin(self, original: Callable[..., Any], iterator: Any, loader: Any) -> None:
        iterator.watched, iterator.given = [], []
        self.newest = iterator.given
        self.num_iterators += 1
        original(iterator, loader)

    def _next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        ids = original(iterator)
        iterator.watched.append(ids)
        return ids

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        position = len(iterator.given)
        ids = iterator.watched[position] if position < len(iterator.watched) else None
        iterator.given.append(ids)
        if not self.is_inside:
            self._given(batch, ids)
        return batch

    def _given(self, batch: Any, ids: Any) -> None:
        ids = [ids] if isinstance(ids, int) else ids
        plain = isinstance(ids, list) and all(isinstance(number, int) for number in ids)
        self.batch = {"epoch": self.num_iterators, "ids": ids if plain else None, "tokens": _num_tokens(batch)}


def _bound(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper as a method in place of the original."""
    return lambda this, *arguments, **options: wrapper(original, this, *arguments, **options)


def _num_tokens(batch: Any) -> int | None:
    """The number of positions that count in the loss, if the batch says so: labels other than -100, or a mask."""
    named = batch if isinstance(batch, dict) or hasattr(batch, "keys") else {}
    values = list(named.values()) if named else list(batch) if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and bool((value == -100).any()):
            return int((value != -100).sum())
    mask = next((named[name] for name in named if "mask" in name), None)
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else None


def _main(folder: str, num_steps: str, script: str, *flags: str) -> None:
    watcher = Watcher(Path(folder), int(num_steps))
    watcher.install()
    sys.path[0] = str(Path(script).resolve().parent)  # as python sets it for a script
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    watcher.finish()


if __name__ == "__main__":
    _main(*sys.argv[1:])
