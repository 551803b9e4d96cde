"""The peer of recipes/diffusion.py: the loop of diffusers' scripts for flow matching, with the recipe's model.

Both sides draw noise and times by themselves, so that their losses are only alike.
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from shared import HELD_OUT, LEARNING_RATE, drawn_order
from torch.utils.data import DataLoader

from accelerate_recipes.common.tasks.models.diffusion import DiT

PEER = "diffusers' loop"
BATCH, SIDE, CLASSES, CLASS_DROPOUT = 32, 28, ("bright", "dark"), 0.1
PATCH, WIDTH, LAYERS, HEADS = 4, 256, 6, 4


def prepare(folder: Path, steps: int) -> None:
    """Writes the images of so many steps."""
    for part, number in (("train", steps * BATCH), ("test", HELD_OUT * len(CLASSES))):
        for name in CLASSES:
            (folder / "data" / part / name).mkdir(parents=True)
        for index in range(number):
            place = folder / "data" / part / CLASSES[index % 2]
            Image.new("L", (SIDE, SIDE), 40 + index % 7 if index % 2 else 200 + index % 7).save(
                place / f"{index:06d}.png"
            )


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --batch_size {BATCH} --patch_size {PATCH} --hidden_size {WIDTH} --num_layers {LAYERS} "
        f"--num_heads {HEADS} --learning_rate {LEARNING_RATE} --ema_decay 0.99 --num_pictures 0"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    from accelerate import Accelerator
    from datasets import load_dataset
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel, compute_density_for_timestep_sampling
    from torchvision import transforms

    torch.manual_seed(0)
    accelerator, schedule = Accelerator(), FlowMatchEulerDiscreteScheduler()
    model = DiT((1, SIDE, SIDE), len(CLASSES), PATCH, WIDTH, LAYERS, HEADS)
    average = EMAModel(model.parameters(), decay=0.99)
    images = load_dataset("imagefolder", data_dir=str(folder / "data" / "train"), split="train")
    changes = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])

    def decode(rows: dict[str, list]) -> dict[str, list]:
        return {"image": [changes(image.convert("L")) for image in rows["image"]], "label": rows["label"]}

    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    loader = DataLoader(images.with_transform(decode), BATCH, sampler=drawn_order(len(images)))
    model, optimizer, loader, rates = accelerator.prepare(
        model, optimizer, loader, get_scheduler("constant", optimizer)
    )
    losses = []
    while len(losses) < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                clean, noise = batch["image"], torch.randn_like(batch["image"])
                places = compute_density_for_timestep_sampling("logit_normal", len(clean), 0.0, 1.0)
                indices = (places * schedule.config.num_train_timesteps).long()
                sigmas = schedule.sigmas[indices].view(-1, 1, 1, 1)
                labels = batch["label"].masked_fill(torch.rand(len(clean)) < CLASS_DROPOUT, len(CLASSES))
                velocity = model((1 - sigmas) * clean + sigmas * noise, 1 - sigmas.flatten(), labels)
                loss = (velocity.float() - (clean - noise).float()).square().flatten(1).mean(1).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
            losses.append(accelerator.gather(loss.repeat(BATCH)).mean().item())
            if len(losses) == steps:
                break
    print(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
