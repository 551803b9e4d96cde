"""Runs a script on plain Accelerate unchanged, and records what Accelerate does: started by plain.py."""

import importlib.util
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType
from torch.overrides import TorchFunctionMode
from torch.utils.data import DistributedSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accelerate_recipes.common.check.reference import perturb
from accelerate_recipes.common.checkpoint.format import write_tensors
from accelerate_recipes.common.seeds import CPU, generator_states, restore_generators

ARGUMENTS = "transformers.training_args"
MOST_WAIT_S = 60  # for a process that does not end
FACTS = {"draws": False, "divided_twice": False, "gathered": 0, "by_trainer": False}  # before a script runs


@dataclass
class Watcher:
    """Records the steps of one process."""

    folder: Path  # for the records of each process, and the weights of the first one
    num_steps: int  # the script takes this many optimizer steps, and then one evaluation
    moves: bool  # whether the weights start one rounding error away
    splits: bool  # whether loaders divide each batch, in a seeded order (`--split_batches`)
    facts: dict[str, Any] = field(default_factory=lambda: dict(FACTS))
    steps: list[dict[str, Any]] = field(default_factory=list)
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    grad_norm: float | None = None
    model: torch.nn.Module | None = None
    optimizer: Any = None
    batch: dict[str, Any] = field(default_factory=dict)  # the last one that a loader gave to the script
    newest: list[Any] = field(default_factory=list)  # the sample ids of each batch that the newest iterator asked for
    num_iterators: int = 0
    is_inside: bool = False  # a prepared loader, which reads ahead from a loader of torch
    is_over: bool = False  # all steps are taken
    is_gathering: bool = False
    fills: list[int] = field(default_factory=list)  # rows of each gathered tensor that pad a last batch
    slicing: ExitStack = field(default_factory=ExitStack)  # while it is open, `_cut` sees what the script indexes
    newest_loader: Any = None  # the prepared one that gave the last batch
    training_loaders: list[Any] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)  # of the first batch for training
    states: list[Any] = field(default_factory=list)  # of the generators, when a loader gave the last batch
    read: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # (loader, batch) since the last step
    prepared: list[Any] = field(default_factory=list)  # what `prepare` returned

    def install(self) -> None:
        """Puts itself between the script and Accelerate."""
        for target, name, wrapper in (
            (Accelerator, "prepare", self._prepare),
            (Accelerator, "backward", self._backward),
            (Accelerator, "clip_grad_norm_", self._clip),
            *((Accelerator, name, self._gather) for name in ("gather", "gather_for_metrics")),
            *((Accelerator, name, self._save) for name in ("save_state", "save_model", "save")),
            (AcceleratedOptimizer, "step", self._step),
            *((kind, "__iter__", self._iterate) for kind in (DataLoaderShard, DataLoaderDispatcher)),
            (_BaseDataLoaderIter, "__init__", self._begin),
            (_BaseDataLoaderIter, "_next_index", self._next_index),
            (_BaseDataLoaderIter, "__next__", self._next),
        ):
            own = getattr(target, name)  # defaults, because the loop changes both; no method takes their names
            setattr(target, name, lambda this, *given, _to=wrapper, _own=own, **named: _to(_own, this, *given, **named))
        for kind in (DataLoaderShard, DataLoaderDispatcher):
            kind.dataset = property(self._dataset)

    def keep_global_batch(self, parts: int, module: Any) -> None:
        """Lets the processes of a Trainer with these TrainingArguments share one process's batch, as micro-batches."""
        arguments = module.TrainingArguments
        number, finish = int(os.environ.get("WORLD_SIZE", 1)) * parts, arguments.__post_init__

        def divided(own: Any) -> None:
            if (size := own.per_device_train_batch_size) % number:
                raise ValueError(f"per_device_train_batch_size {size} does not divide into {number}: use a multiple")
            own.per_device_train_batch_size = size // number
            own.gradient_accumulation_steps *= parts
            self.facts["by_trainer"] = True
            finish(own)

        arguments.__post_init__ = divided

    def end(self) -> None:
        """Ends the process after the same step or evaluation as the others, which may still need its messages."""
        self.finish()
        (self.folder / f"ended_{os.environ.get('RANK', 0)}").touch()
        deadline, number = time.monotonic() + MOST_WAIT_S, int(os.environ.get("WORLD_SIZE", 1))
        while len([*self.folder.glob("ended_*")]) < number and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)

    def finish(self) -> None:
        """Writes the records and the weights."""
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 and self.model is not None:
            tensors = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
            write_tensors(self.folder / "model.safetensors", tensors)
        self.facts["data_draw"] = _drawn_by(self.training_loaders[0], self.first_ids) if self.first_ids else None
        content = self.facts | {"steps": self.steps, "filled": bool(self.fills)}
        (self.folder / f"process_{rank}.json").write_text(json.dumps(content), encoding="utf-8")

    def _prepare(self, original: Callable[..., Any], accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
        for thing in objects:
            if isinstance(thing, torch.nn.Module) and self.model is None:
                self.model = thing
                self.facts["layers"] = sorted({type(module).__name__ for module in thing.modules()})
                if self.moves:
                    perturb(thing, 1)
            sampler = getattr(thing, "sampler", None)
            self.facts["divided_twice"] |= isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
        handler = getattr(accelerator, "ddp_handler", None)
        self.facts["comm_hook"] = getattr(handler, "comm_hook", None) not in (None, DDPCommunicationHookType.NO)
        self.facts["distributed_type"] = accelerator.distributed_type.name
        self.facts["num_processes"] = accelerator.num_processes
        if self.splits:
            accelerator.dataloader_config.split_batches = accelerator.dataloader_config.use_seedable_sampler = True
        prepared = original(accelerator, *objects, **options)
        # Kept until the process ends: DDP's reducer, if freed after the process group, waits for gloo's thread and
        # keeps Python's lock, for which that thread may wait (torch 2.13).
        self.prepared.append(prepared)
        return prepared

    def _backward(self, original: Callable[..., Any], accelerator: Accelerator, loss: Any, **options: Any) -> Any:
        if self.is_over:
            self.end()
        self.facts["draws"] |= bool(self.states) and self.states != _generator_states()
        if self.newest_loader is not None and self.newest_loader not in self.training_loaders:
            self.training_loaders.append(self.newest_loader)
            self.first_ids = self.first_ids or self.batch.get("ids") or []
        read = [batch for loader, batch in self.read if loader is self.newest_loader]
        place = len(self.micro_batches)
        # A Trainer reads all micro-batches of a step first, and each gives its part of the loss.
        batch = read[place] if self.facts["by_trainer"] and place < len(read) else self.batch
        self.micro_batches.append({"loss": loss.item(), **batch})
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
            if not self.steps:
                self.facts["hooked"] = any(getattr(weight, "_backward_hooks", None) for weight in self._weights())
            step = {"learning_rate": float(learning_rate), "grad_norm": self.grad_norm}
            norms = [float(weight.detach().double().norm()) for weight in self._weights()]
            self.steps.append(step | {"micro_batches": self.micro_batches, "weights": math.hypot(*norms)})
            if self.facts["by_trainer"]:
                for part in self.micro_batches:
                    part["loss"] *= len(self.micro_batches)
            self.micro_batches, self.read = [], []
            if len(self.steps) >= self.num_steps:
                self.finish()
                self.is_over = True
                if not self.training_loaders:  # no loader can end the training
                    self.end()
        return result

    def _weights(self) -> list[torch.Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def _gather(self, original: Callable[..., Any], accelerator: Accelerator, *arguments: Any, **options: Any) -> Any:
        """Counts the rows that an evaluation gathers."""
        outermost, self.is_gathering = not self.is_gathering, True  # one of them calls the other
        result = original(accelerator, *arguments, **options)
        self.is_gathering = not outermost
        is_evaluation = self.newest_loader is not None and self.newest_loader not in self.training_loaders
        if is_evaluation and self.training_loaders and outermost:  # Trainer gathers numbers before its first step
            rows = [len(tensor) for tensor in _tensors(result) if tensor.ndim]
            self.facts["gathered"] += sum(rows)
            state = accelerator.gradient_state
            if state.end_of_dataloader and state.remainder > 0:
                self.fills += [number - state.remainder for number in rows if number > state.remainder]
                self.slicing.close()
                self.slicing.enter_context(_Slicing(self._cut))
        return result

    def _cut(self, tensor: torch.Tensor, key: Any, result: torch.Tensor) -> None:
        """Does not count the rows that the script itself cuts off: the padding of a last batch."""
        is_slice = self.fills and isinstance(key[0] if isinstance(key, tuple) and key else key, slice)
        if is_slice and (number := len(tensor) - len(result)) in self.fills:
            self.fills.remove(number)
            self.facts["gathered"] -= number

    def _dataset(self, loader: Any) -> Any:
        """If a script asks a loader for its dataset when an evaluation ends, it cuts off the padding of the last batch
        by the dataset's length: perhaps from arrays or texts, which are not visible here."""
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if self.fills and loader not in self.training_loaders and caller not in ("torch", "accelerate"):
            self.facts["gathered"] -= sum(self.fills)
            self.fills = []
        return loader.base_dataloader.dataset

    def _save(self, original: Callable[..., Any], accelerator: Accelerator, *arguments: Any, **options: Any) -> None:
        """Saves nothing: a watched script must not write into its folders."""
        if self.is_over:
            self.end()

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        if self.is_over and loader in self.training_loaders:  # the next epoch
            self.end()
        batches = original(loader)
        position, ids = getattr(loader, "skip_batches", 0), None
        while not (self.is_over and loader in self.training_loaders):
            self.is_inside = True
            batch = next(batches, None)
            self.is_inside = False
            if batch is None:
                return
            ids, self.newest_loader = (self.newest if ids is None else ids), loader
            self._given(batch, ids[position] if position < len(ids) else None)
            position += 1
            yield batch

    def _begin(self, original: Callable[..., Any], iterator: Any, loader: Any) -> None:
        iterator.watched, iterator.num_given = [], 0
        self.newest, self.num_iterators = iterator.watched, self.num_iterators + 1
        original(iterator, loader)

    def _next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        ids = original(iterator)
        iterator.watched.append(ids)
        return ids

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        iterator.num_given += 1
        if not self.is_inside:
            self.newest_loader = None
            self._given(batch, iterator.watched[iterator.num_given - 1])
        return batch

    def _given(self, batch: Any, ids: Any) -> None:
        self.slicing.close()
        ids = [ids] if isinstance(ids, int) else ids
        width = max((tensor.shape[1] for tensor in _tensors(batch) if tensor.ndim > 1), default=None)
        labels = (value for value in _tensors(batch) if not value.is_floating_point() and bool((value == -100).any()))
        numbers = (int((each != -100).sum()) for each in labels)  # of labels that count: losses ignore -100
        ids = ids if isinstance(ids, list) and all(isinstance(number, int) for number in ids) else None
        self.batch = {"epoch": self.num_iterators, "ids": ids, "tokens": next(numbers, None), "width": width}
        self.read.append((self.newest_loader, self.batch))
        self.states = _generator_states()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if hasattr(value, "keys") else value if isinstance(value, tuple | list) else []
    return [tensor for item in values for tensor in _tensors(item)]


def _generator_states() -> list[Any]:
    """States that change when a forward pass draws random numbers."""
    return generator_states(torch.device("cuda") if torch.cuda.is_initialized() else CPU)


def _drawn_by(loader: Any, ids: list[int]) -> str | None:
    """The generator that a loader's dataset or collate_fn draws from. Reads the samples twice, and once more
    with the state of the first time. None if they draw from none, or the samples cannot be read by their ids."""
    with suppress(Exception):  # watching must not end the script
        fetch = _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, False).fetch
        with restore_generators(CPU):
            before, first, after = generator_states(CPU), fetch(ids), generator_states(CPU)
        with restore_generators(CPU):
            if not _equal(first, fetch(ids)):
                return "its own generator"
        return None if after == before else "the generators that set_seed seeds"
    return None


def _equal(value: Any, other: Any) -> bool:
    tensors, others = _tensors(value), _tensors(other)
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others)) if tensors else bool(value == other)


class _Slicing(TorchFunctionMode):
    """Calls `then` with each tensor that the script indexes in a `with` block, the key and the result. If
    `Tensor.__getitem__` were replaced, `torch.tensor` would mistake 0-d tensors for sequences, and fail."""

    def __init__(self, then: Callable[..., None]):
        super().__init__()
        self.then = then

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.Tensor.__getitem__:
            self.then(*arguments, result)
        return result


@dataclass(eq=False)
class _Imported(MetaPathFinder):
    """Calls `then` with the module of this name as soon as something imports it."""

    name: str
    then: Callable[[Any], Any]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), self.then(module))
        return spec


def _main(folder: str, num_steps: str, how: str, script: str, *flags: str) -> None:
    watcher = Watcher(Path(folder), int(num_steps), "moved" in how, "split" in how)
    watcher.install()
    sys.meta_path.insert(0, _Imported(ARGUMENTS, partial(watcher.keep_global_batch, 2 if "accumulated" in how else 1)))
    sys.argv = [script, *flags]
    try:
        if Path(script).is_file():
            sys.path[0] = str(Path(script).resolve().parent)  # as python sets it for a script
            runpy.run_path(script, run_name="__main__")
        else:
            sys.path[0] = str(Path.cwd())  # as python -m does
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except StopIteration:  # of a script that asks for a batch with `next` after the last step
        if not watcher.is_over:
            raise
    watcher.end()


if __name__ == "__main__":
    _main(*sys.argv[1:])
