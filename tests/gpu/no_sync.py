"""A recipe that fails if a step makes the CPU wait for the GPU, from step 3 to step 17 of 20."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import RunConfig, fit, run, start
from common.data import Batch
from common.data.images import load_images


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of all recipes."""


def main(config: Config) -> None:
    accelerator = start(config)
    train_set, eval_set = load_images("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    num_passes = 0

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        nonlocal num_passes
        num_passes += 1
        if num_passes in (3, 18):
            torch.cuda.set_sync_debug_mode("error" if num_passes == 3 else "default")
        return {"loss": F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")}

    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config)


if __name__ == "__main__":
    run(main, Config)
