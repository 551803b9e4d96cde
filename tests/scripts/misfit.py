"""A recipe with one mistake, which `--case` chooses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from accelerate_recipes import RunConfig, UsageError, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.vision.images import ImageDataset

CASES = (
    "none",
    "iterable",
    "batch_norm",
    "dropout",
    "sync_batch_norm",
    "nan",
    "crash",
    "one_process",
    "late",
    "frozen",
    "memory",
    "put",
)


@dataclass(kw_only=True)
class Config(RunConfig):
    case: Literal[CASES] = flag("none", "kind of mistake")


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Batch]:
        yield {"image": torch.zeros(1, 4, 4), "label": torch.tensor(0)}


def main(config: Config) -> None:
    accelerator = start(config)
    images = torch.randint(0, 256, (64, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    dataset = ImageDataset(images, torch.arange(64) % 2, num_classes=2)
    norms = {"batch_norm": nn.BatchNorm1d(8), "sync_batch_norm": nn.SyncBatchNorm(8), "dropout": nn.Dropout(0.5)}
    middle = norms.get(config.case, nn.ReLU())
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), middle, nn.Linear(8, 2))
    if config.case == "one_process" and accelerator.process_index == 1:
        raise UsageError("this process alone has a problem")

    if config.case == "frozen":
        model[1].requires_grad_(False)
        model[1].register_buffer("third", torch.tensor([1 / 3]))

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
        if config.case == "late" and accelerator.process_index == 1:
            raise UsageError("this process alone has a problem later")
        if config.case == "crash" and accelerator.process_index == 1:
            raise ZeroDivisionError("a bug in a recipe")
        if config.case == "memory":
            torch.empty(10**15)
        if config.case == "put":
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))  # has no deterministic kernel
        return {"loss": loss * torch.nan if config.case == "nan" else loss}

    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    train_set = Stream() if config.case == "iterable" else dataset
    fit(accelerator, model, optimizer, forward_step, train_set, dataset, config)


if __name__ == "__main__":
    run(main, Config)
