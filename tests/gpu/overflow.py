"""A recipe whose gradients overflow in fp16 in its third step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, fit, run, start
from accelerate_recipes.common.data import Batch
from recipes.linear_regression import TableDataset


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 1e-2
    lr_schedule: str = "linear"


def main(config: Config) -> None:
    accelerator = start(config)
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    dataset = TableDataset(features, features.sum(1))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    steps_taken = 0

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        nonlocal steps_taken
        steps_taken += model.training
        loss = (model(batch["features"]).squeeze(-1).float() - batch["target"]) ** 2
        resumed = config.resume_from_checkpoint is not None
        return {"loss": loss * (1e6 if steps_taken == 3 and model.training and not resumed else 1e-2)}

    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, dataset, dataset, config)


if __name__ == "__main__":
    run(main, Config)
