"""A recipe whose losses, or whose gradients, follow a count that something keeps: where is --where.

With --late the count is used from step 4 on, after the checked steps.
"""

import array
import collections
import contextvars
import csv
import ctypes
import functools
import io
import logging
import multiprocessing
import os
import queue
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from nets import Net
from samples import Samples
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch

CHECKED = 3


class Meter:
    number = 0

    def add(self) -> int:
        self.number += 1
        return self.number


@functools.cache
def cached() -> Meter:
    return Meter()


@functools.lru_cache
def least_recent(key: int = 0) -> Meter:
    return Meter()


def of_items(items: Any, key: Any = 0) -> Callable[[], int]:
    def add() -> int:
        items[key] += 1
        return items[key]

    return add


def in_a_queue() -> Callable[[], int]:
    kept: queue.Queue[int] = queue.Queue()
    kept.put(0)

    def add() -> int:
        number = kept.get() + 1
        kept.put(number)
        return number

    return add


def in_objects() -> Callable[[], int]:
    kept = numpy.array([Meter(), Meter()], dtype=object)
    return lambda: kept[1].add()


def in_a_text() -> Callable[[], int]:
    text = io.StringIO()

    def add() -> int:
        text.write("x")
        return len(text.getvalue())

    return add


def in_a_module() -> Callable[[], int]:
    module = types.ModuleType("made")
    module.number = 0  # type: ignore[attr-defined]

    def add() -> int:
        module.number += 1
        return module.number

    return add


def in_a_context() -> Callable[[], int]:
    variable = contextvars.ContextVar("variable", default=0)

    def add() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    return add


def in_a_thread() -> Callable[[], int]:
    local = threading.local()
    local.number = 0

    def add() -> int:
        local.number += 1
        return local.number

    return add


def in_rows() -> Callable[[], int]:
    rows = csv.reader(io.StringIO("\n".join(map(str, range(1, 40)))))
    return lambda: int(next(rows)[0])


def in_bits() -> Callable[[], int]:
    bits = numpy.random.PCG64(0)
    return lambda: bits.random_raw() % 7


def in_an_array() -> Callable[[], int]:
    kept = torch.zeros(1)
    seen = kept.numpy()  # which shares its memory

    def add() -> int:
        kept.add_(1)
        return int(seen[0])

    return add


def in_a_file() -> Callable[[], int]:
    path = Path(tempfile.mkdtemp()) / "number"
    path.write_text("0")

    def add() -> int:
        path.write_text(str(int(path.read_text()) + 1))
        return int(path.read_text())

    return add


def in_the_environment() -> Callable[[], int]:
    os.environ["NUMBER_OF_STEPS"] = "0"

    def add() -> int:
        os.environ["NUMBER_OF_STEPS"] = str(int(os.environ["NUMBER_OF_STEPS"]) + 1)
        return int(os.environ["NUMBER_OF_STEPS"])

    return add


def in_a_logger() -> Callable[[], int]:
    logger: Any = logging.getLogger("steps")
    logger.number = 0

    def add() -> int:
        logger.number += 1
        return logger.number

    return add


def weakly() -> Callable[[], int]:
    key = Meter()
    meters = weakref.WeakKeyDictionary({key: Meter()})
    return lambda: meters[key].add()


def decorated() -> Callable[[], int]:
    kept = {"number": 0}

    @torch.no_grad()
    def add() -> int:
        kept["number"] += 1
        return kept["number"]

    return add


COUNTERS: dict[str, Callable[[], Callable[[], int]]] = {
    "cached": lambda: lambda: cached().add(),
    "least_recent": lambda: lambda: least_recent().add(),
    "user_dict": lambda: of_items(collections.UserDict({0: 0})),
    "chain_map": lambda: of_items(collections.ChainMap({0: 0}, {})),
    "bytes": lambda: of_items(bytearray(8)),
    "numbers": lambda: of_items(array.array("q", [0])),
    "ctypes": lambda: of_items((ctypes.c_long * 1)()),
    "shared_array": lambda: of_items(multiprocessing.Array("i", 1)),
    "namespace": lambda: of_items(vars(types.SimpleNamespace(number=0)), "number"),
    "objects": in_objects,
    "text": in_a_text,
    "module": in_a_module,
    "queue": in_a_queue,
    "context": in_a_context,
    "thread": in_a_thread,
    "array": in_an_array,
    "bits": in_bits,
    "rows": in_rows,
    "weak": weakly,
    "decorated": decorated,
    "file": in_a_file,
    "environment": in_the_environment,
    "logger": in_a_logger,
}


def momentum(weight: Tensor) -> None:
    kept = [torch.zeros_like(weight)]

    def hook(gradient: Tensor) -> Tensor:
        kept[0] = 0.9 * kept[0] + gradient
        return kept[0]

    weight.register_hook(hook)


def running_norm(weight: Tensor) -> None:
    kept = [1.0]

    def hook(changed: Tensor) -> None:
        kept[0] = 0.5 * kept[0] + 0.5 * float(changed.grad.norm())
        changed.grad.div_(kept[0])

    weight.register_post_accumulate_grad_hook(hook)


def of_the_step(optimizer: Any, *others: Any) -> None:
    for group in optimizer.param_groups:
        for number, weight in enumerate(group["params"]):
            NORMS[number] = 0.5 * NORMS.get(number, 1.0) + 0.5 * float(weight.grad.norm())
            weight.grad.div_(NORMS[number])


NORMS: Any = collections.UserDict()
HOOKS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "hooks_clip": lambda model, _: [each.register_hook(lambda g: g.clamp(-0.05, 0.05)) for each in model.parameters()],
    "hooks_clip_late": lambda model, _: [each.register_hook(lambda g: g.clamp(-5, 5)) for each in model.parameters()],
    "hooks_momentum": lambda model, _: [*map(momentum, model.parameters())],
    "hooks_after": lambda model, _: [*map(running_norm, model.parameters())],
    "hook_of_the_step": lambda _, optimizer: optimizer.register_step_pre_hook(of_the_step),
    "hook_of_all_steps": lambda *_: register_optimizer_step_pre_hook(of_the_step),
}


@dataclass(kw_only=True)
class Config(RunConfig):
    where: str = flag("cached", "what keeps the count; or several names, with commas")
    late: bool = flag(False, "use it after the checked steps alone")
    batch_size: int = 8
    micro_batch_size: int | None = 2
    max_steps: int | None = 6
    log_every: int = 1


def main(config: Config) -> None:
    accelerator = start(config)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    names = config.where.split(",")
    for name in HOOKS.keys() & names:
        HOOKS[name](model, optimizer)
    counts = [COUNTERS[name]() for name in names if name in COUNTERS] or [lambda: 1]
    seen = {"step": -1, "number": 0}

    def forward_step(model: Any, batch: Batch, step: int) -> dict[str, Tensor]:
        if model.training and step != seen["step"]:  # once a step, however many micro-batches there are
            seen.update(step=step, number=sum(count() for count in counts) / len(counts))
        factor = 1.0 if config.late and step < CHECKED else 1.0 / (1 + seen["number"])
        return {"loss": (model(batch["x"]) - batch["y"]) ** 2 * factor}

    fit(accelerator, model, optimizer, forward_step, Samples(32, 1), Samples(11, 2), config)


if __name__ == "__main__":
    run(main, Config)
