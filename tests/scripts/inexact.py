"""A model under tensor parallelism, in which one process computes gradients of whole weights differently, as
kernels of GPUs do. With --average, they are averaged as on GPUs."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common import loop
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.parallel.tensor import average_whole_weights

prepare = loop.prepare


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    max_steps: int | None = 4
    log_every: int = 2
    check_steps: int = 0
    average: bool = flag(False, "average the gradients of whole weights")


class Samples(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sin().sum()}


def forward_step(model: Any, batch: Batch) -> dict[str, Tensor]:
    return {"loss": (model(batch["x"]).squeeze(-1) - batch["y"]) ** 2}


def prepare_and_average(*args: Any) -> Any:
    engine = prepare(*args)
    group, _ = distributed.new_subgroups(2)  # tensor parallelism is innermost
    average_whole_weights(engine, group)
    return engine


def main(config: Config) -> None:
    if config.average:
        loop.prepare = prepare_and_average
    accelerator = start(config)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    if int(os.environ.get("RANK", 0)) == 1:
        model[0].weight.register_hook(lambda gradient: gradient * 1.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(accelerator, model, optimizer, forward_step, Samples(), Samples(), config)


if __name__ == "__main__":
    run(main, Config)
