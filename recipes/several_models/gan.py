"""Train a generative adversarial network on digits, both parts in one step.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/several_models/gan.py

The loss is the sum of both losses, and each part gets only the gradient of its own loss. The dataset draws the noise,
so it is the same on any number of processes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.vision.images import ImageDataset, load_images

NOISE = 16


@dataclass(kw_only=True)
class Config(RunConfig):
    data: str = "digits"
    epochs: int = 20
    learning_rate: float = 1e-3
    generator_learning_rate: float = flag(1e-3, "peak learning rate of the generator", above=0)
    max_grad_norm: float = 0.0  # the norm of both parts together would couple them


class WithNoise(Dataset):
    """Images from -1 to 1, each with noise for the generator: new noise in each epoch."""

    def __init__(self, images: ImageDataset):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": 2 * self.images[index]["image"].flatten() - 1, "noise": torch.randn(NOISE)}


class GAN(nn.Module):
    _no_split_modules = ["Sequential"]

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.GELU(), nn.Linear(128, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(noise)
        real_score, fake_score = self.discriminator(image), self.discriminator(fake.detach())
        judged = self.discriminator(fake) - fake_score + fake_score.detach()
        return real_score.squeeze(-1), fake_score.squeeze(-1), judged.squeeze(-1)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    real_score, fake_score, judged = model(batch["image"], batch["noise"])
    discriminator = F.softplus(-real_score) + F.softplus(fake_score)
    generator = F.softplus(-judged)
    return {
        "loss": discriminator + generator,
        "discriminator": discriminator,
        "generator": generator,
        "told_apart": ((real_score > 0).float() + (fake_score < 0).float()) / 2,
    }


def main(config: Config) -> None:
    accelerator = start(config)
    train_set, eval_set = (WithNoise(images) for images in load_images(config.data))
    model = GAN()
    groups: list[dict[str, Any]] = [
        {"params": list(model.discriminator.parameters())},
        {"params": list(model.generator.parameters()), "lr": config.generator_learning_rate},
    ]
    optimizer = torch.optim.AdamW(groups, config.learning_rate, betas=(0.5, 0.999))
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config)


if __name__ == "__main__":
    run(main, Config)
