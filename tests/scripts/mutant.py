"""A recipe whose result depends on the number of processes. The flag chooses the mistake.

mutant.py --mistake batch_norm
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    mistake: Literal["none", "batch_norm", "learning_rate", "dropout", "noise", "own_noise", "mean_of_means"] = flag(
        "none", "what makes the results differ"
    )
    batch_size: int = 16
    learning_rate: float = 1e-2


class Sequences(Dataset):
    """Sequences of up to 8 numbers; "length" says how many count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 8, generator=generator)
        self.length = torch.randint(1, 9, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "length": self.length[index]}


def main(config: Config) -> None:
    accelerator = start(config)
    layers = {"batch_norm": nn.BatchNorm1d(16), "dropout": nn.Dropout(0.3)}
    model = nn.Sequential(nn.Linear(8, 16), layers.get(config.mistake, nn.Tanh()), nn.Linear(16, 8))
    own = torch.Generator().manual_seed(0)
    factor = accelerator.num_processes if config.mistake == "learning_rate" else 1
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate * factor)

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        generator = own if config.mistake == "own_noise" else None
        noise = torch.randn(batch["x"].shape, generator=generator) / 10 if "noise" in config.mistake else 0
        losses = (model(batch["x"] + noise) - batch["x"].sin()).square()
        counts = torch.arange(8) < batch["length"].unsqueeze(1)
        if config.mistake == "mean_of_means":
            return {"loss": ((losses * counts).sum() / counts.sum()).expand(len(losses))}
        return {"loss": (losses * counts).sum(1) / batch["length"]}

    fit(accelerator, model, optimizer, forward_step, Sequences(), Sequences(), config)


if __name__ == "__main__":
    run(main, Config)
