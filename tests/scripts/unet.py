"""A U-Net as one would write it: ReLU, max pooling, biases before GroupNorm, Adam. Rounding errors flip its ReLUs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 16
    learning_rate: float = 3e-3
    max_steps: int | None = 20
    log_every: int = 1


class Discs(Dataset):
    """Noisy images of a bright disc, and the mask of the disc."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        centers = torch.rand(size, 2, 1, 1, generator=generator) * 24 + 4
        grid = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij"))
        self.masks = ((grid - centers).square().sum(1) < 30).float()
        self.images = self.masks.unsqueeze(1) + torch.randn(size, 1, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "mask": self.masks[index]}


class Double(nn.Sequential):
    def __init__(self, num_in: int, num_out: int):
        first = nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(4, num_out), nn.ReLU()
        second = nn.Conv2d(num_out, num_out, 3, padding=1), nn.GroupNorm(4, num_out), nn.ReLU()
        super().__init__(*first, *second)


class UNet(nn.Module):
    _no_split_modules = ["Double"]

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = Double(1, 8), Double(8, 16), Double(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge2, self.merge1, self.head = Double(32, 16), Double(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.down1(image)
        second = self.down2(F.max_pool2d(first, 2))
        hidden = self.bottom(F.max_pool2d(second, 2))
        hidden = self.merge2(torch.cat([self.up2(hidden), second], 1))
        return self.head(self.merge1(torch.cat([self.up1(hidden), first], 1))).squeeze(1)


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch["image"])
    loss = F.binary_cross_entropy_with_logits(logits, batch["mask"], reduction="none").flatten(1).mean(1)
    found, mask = logits > 0, batch["mask"] > 0
    return {
        "loss": loss,
        "accuracy": (found == mask).float().flatten(1).mean(1),
        "overlap": (found & mask).float().flatten(1).sum(1),
        "union": (found | mask).float().flatten(1).sum(1),
        "found": found,
    }


def summarize(means: dict[str, float]) -> dict[str, float]:
    """The intersection over union of all pixels of the set, which is no mean over images."""
    iou = means["overlap"] / max(means["union"], 1e-9)
    return {"loss": means["loss"], "accuracy": means["accuracy"], "iou": iou}


def main(config: Config) -> None:
    accelerator = start(config)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, Discs(256, seed=1), Discs(40, seed=2), config, summarize=summarize)


if __name__ == "__main__":
    run(main, Config)
