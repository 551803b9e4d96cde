"""A run with random numbers, or a weight, from a place where few expect them."""

import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    where: Literal["summarize", "schedule", "evaluation", "shuffled_evaluation", "readings", "weight"] = flag(
        "summarize", "what is unusual"
    )
    max_steps: int | None = 6
    batch_size: int = 8
    micro_batch_size: int | None = 2
    log_every: int = 1
    eval_every: int | None = 3


class Rows:
    """Random rows; an evaluation may draw them anew, change them at the fourth reading, or have them in another order
    in each process."""

    def __init__(self, size: int, where: str):
        self.rows, self.where = torch.randn(size, 8, generator=torch.Generator().manual_seed(1)), where
        self.num_read = [0] * size
        self.generator = torch.Generator().manual_seed(0)
        if where == "shuffled_evaluation":
            self.rows[1:] = self.rows[1:][torch.from_numpy(numpy.random.default_rng().permutation(size - 1))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(8, generator=self.generator) if self.where == "evaluation" else 0
        self.num_read[index] += 1
        changes = self.where == "readings" and self.num_read[index] > 3
        return {"x": self.rows[index] * (1.5 if changes else 1) + noise}


class Net(nn.Module):
    """Two layers, with a weight that the first forward pass makes."""

    _no_split_modules = ["Linear"]

    def __init__(self, makes_weight: bool):
        super().__init__()
        self.first, self.second, self.makes_weight = nn.Linear(8, 16), nn.Linear(16, 8), makes_weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.first(x))
        if self.makes_weight and not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(16, device=x.device))
        return self.second(hidden * self.gain if self.makes_weight else hidden)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": (model(batch["x"]) - batch["x"]).square().mean(1)}


def main(config: Config) -> None:
    accelerator = start(config)
    model = Net(config.where == "weight")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    more: dict[str, Any] = {}
    if config.where == "summarize":
        more["summarize"] = lambda means: means | {"drawn": random.random() + float(torch.rand(()))}
    if config.where == "schedule":
        more["schedule"] = lambda step, num_steps, warmup_steps: 0.5 + random.random()
    sets = Rows(32, ""), Rows(20, config.where)
    fit(accelerator, model, optimizer, forward_step, *sets, config, **more)


if __name__ == "__main__":
    run(main, Config)
