"""Generate images of a class by flow matching (Lipman et al. 2023), with a small diffusion transformer.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/diffusion.py

Data: scikit-learn's 1,797 digits, embedded; or a folder with MNIST's four IDX files, with a sub-folder of images for
each class, or with parquet files; or the Hub id of an image-classification dataset.
Expect: 99 % of 200 images show the requested digit: the nearest training image decides.
Time: a minute and a half on two CPU cores.

To train on MNIST, and to generate more images with the model of an earlier run:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/diffusion.py --data path/to/mnist \\
        --patch_size 4 --epochs 3 --eval_every 5000
    python recipes/diffusion.py --evaluate_only --guidance 3 --num_pictures 5
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, Schedule, fit, flag, load_exported, parameter_groups, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.models.diffusion import DiT
from accelerate_recipes.common.tasks.reading.mixture import Sources
from accelerate_recipes.common.tasks.vision.images import ImageDataset, load_images

NUM_COMPARED = 10_000  # training images, roughly
LEAST_PIXELS = 32  # minimum height of an image in the grid


@dataclass(kw_only=True)
class Config(RunConfig):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "digits"
    epochs: int = 100
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    lr_schedule: Schedule = "cosine"
    log_every: int = 100
    eval_every: int | None = 500
    ema_decay: float = 0.998
    max_samples: int | None = flag(None, "stream a dataset, and use only its first N images", minimum=1)
    patch_size: int = flag(2, "height and width of a patch in pixels; each patch is a token", minimum=1)
    hidden_size: int = flag(96, "width of the model", minimum=1)
    num_layers: int = flag(4, "layers of the model", minimum=1)
    num_heads: int = flag(4, "attention heads", minimum=1)
    class_dropout: float = flag(0.1, "probability of dropping the class of a sample", minimum=0, below=1)
    guidance: float = flag(1.5, "guidance scale; 1: as in the data; above 1: clearer classes", minimum=0)
    num_steps: int = flag(50, "sampling steps from noise to an image", minimum=1)
    num_pictures: int = flag(20, "images of each class that the exported model generates after training", minimum=0)


class NoisyImages(Dataset):
    """Images, each with its random numbers: the noise, the time, and whether the class is dropped.

    They are drawn in `__getitem__`, where they depend only on the seed, the epoch and the sample: they are the same
    under each config and in each evaluation. Drawn in `forward_step`, they would depend on the micro-batch.
    """

    def __init__(self, images: ImageDataset, class_dropout: float):
        self.images, self.class_dropout = images, class_dropout

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        noise, time, chance = torch.randn(self.images.image_shape), torch.randn(()), torch.rand(())
        label = self.images.labels[index] if chance >= self.class_dropout else torch.tensor(self.images.num_classes)
        return {"image": self.images.images[index], "label": label, "noise": noise, "time": time}


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The mean squared error of each image's velocity on its straight path from noise (time 0) to data (time 1)."""
    image, noise = 2 * (batch["image"] / 255) - 1, batch["noise"]
    time = batch["time"].sigmoid()  # more times in the middle (Esser et al. 2024)
    velocity = model(noise.lerp(image, time.view(-1, 1, 1, 1)), time, batch["label"])
    return {"loss": (velocity - (image - noise)).square().flatten(1).mean(1)}


@torch.no_grad()
def generate(model: nn.Module, noise: Tensor, labels: Tensor, no_label: int, config: Config) -> Tensor:
    """Follows the velocities from noise to images, with classifier-free guidance (Ho and Salimans 2022).

    Returns:
        images of the shape of the noise (batch, channels, height, width), in [0, 1]
    """
    images, labels = noise, torch.cat([labels, torch.full_like(labels, no_label)])
    for step in range(config.num_steps):
        times = torch.full(labels.shape, step / config.num_steps, device=noise.device)
        told, untold = model(images.repeat(2, 1, 1, 1), times, labels).chunk(2)
        images = images + (untold + config.guidance * (told - untold)) / config.num_steps
    return (images.clamp(-1, 1) + 1) / 2


def build(config: Config, images: ImageDataset) -> DiT:
    """The model for these images. Raises UsageError for sizes that do not divide evenly."""
    sizes = config.patch_size, config.hidden_size, config.num_layers, config.num_heads
    return DiT(images.image_shape, images.num_classes, *sizes)


def share_recognised(generated: Tensor, labels: Tensor, sources: list[ImageDataset]) -> float:
    """The share of generated images whose nearest image, among about NUM_COMPARED of each source, has their label."""
    every = [range(0, len(images), max(1, len(images) // NUM_COMPARED)) for images in sources]
    known = [images.__getitems__(list(ids)) for images, ids in zip(sources, every)]
    nearest = torch.cdist(generated.flatten(1), torch.cat([one["image"] for one in known]).flatten(1)).argmin(1)
    return (torch.cat([one["label"] for one in known])[nearest] == labels).float().mean().item()


def write_grid(images: Tensor, num_columns: int, path: Path) -> None:
    """Writes images (batch, channels, height, width) in [0, 1] into one file, row by row, enlarged if small."""
    framed = F.pad(images, (1, 1, 1, 1), value=0.5).unflatten(0, (-1, num_columns))
    grid = framed.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # height, width, channels
    image = Image.fromarray((grid * 255).round().byte().squeeze(-1).numpy())
    scale = -(-LEAST_PIXELS // images.shape[2])
    image.resize((scale * image.width, scale * image.height), Image.Resampling.NEAREST).save(path)


def write_images(config: Config, sources: list[ImageDataset], device: torch.device) -> None:
    """Writes images that the exported model generates, one column per class. Prints how many show their class."""
    images = sources[0]
    model = build(config, images)
    load_exported(config.output_dir, model)
    labels = torch.arange(images.num_classes).repeat(config.num_pictures)
    noise = torch.randn(len(labels), *images.image_shape, generator=torch.Generator().manual_seed(config.seed))
    model.to(device).eval()
    generated = generate(model, noise.to(device), labels.to(device), images.num_classes, config).cpu()
    path = config.output_dir / "pictures.png"
    write_grid(generated, images.num_classes, path)
    share = share_recognised(generated, labels, sources)
    print(f"{path}: {share:.0%} of {len(generated)} images show the requested class, by the nearest training image")


def main(config: Config) -> Callable[[], None] | None:
    """Trains. Returns a function that only the main process calls afterwards: it generates images."""
    accelerator = start(config)
    sources = Sources(config, lambda data: load_images(data, config.max_samples), same=("image_shape", "classes"))
    model = build(config, sources.train)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    train_set, eval_set = sources.sets(
        partial(NoisyImages, class_dropout=config.class_dropout),
        partial(NoisyImages, class_dropout=0),
    )
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config)
    known = [train_set for train_set, _ in sources.parts.values()]
    return partial(write_images, config, known, accelerator.device) if config.num_pictures else None


if __name__ == "__main__":
    run(main, Config)
