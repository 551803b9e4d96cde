"""A recipe with a bug in its own code.

bugs.py --bug shape
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


class Data(Dataset):
    def __init__(self, bug: str):
        self.bug = bug

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.bug == "item" and index == 37:
            raise ValueError("bad image")
        if self.bug == "file" and index == 37:
            Path("/nowhere/37.png").read_bytes()
        label = 9 if self.bug == "label" and index == 37 else index % 3
        return {"x": torch.full((4,), index / 64), "label": label}


class Net(nn.Module):
    def __init__(self, bug: str):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(9 if bug == "shape" else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")}


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    max_steps: int | None = 16
    bug: str = flag("none", "which")


def main(config: Config) -> None:
    accelerator = start(config)
    if config.bug == "early":
        Path("/nowhere/data.csv").read_text()
    model = Net(config.bug)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(accelerator, model, optimizer, forward_step, Data(config.bug), Data("none"), config)


if __name__ == "__main__":
    run(main, Config)
