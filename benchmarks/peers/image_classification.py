"""The peer of recipes/image_classification.py: a plain loop with timm's data pipeline, model and optimizer.

Each picture has one colour: both sides cut and mirror it by chance, with draws of their own, and still have the same
pixels. A JPEG of one colour is decoded faster than a photograph.
"""

import json
import sys
from pathlib import Path

import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from shared import BATCH, HELD_OUT, LEARNING_RATE, drawn_order
from timm.data import create_dataset, create_transform
from timm.optim import create_optimizer_v2
from timm.utils import dispatch_clip_grad
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

PEER, CLASSES, SIDE, LEAST_AREA = "timm, a plain loop", ("blue", "green", "red"), 256, 0.6
MODEL, SHAPE = "vit_tiny_patch16_224", {"img_size": 64, "patch_size": 8}
MEAN = STD = (0.5, 0.5, 0.5)


def prepare(folder: Path, steps: int) -> None:
    """Writes a vision transformer of 5 million weights with random ones, and the pictures of so many steps."""
    torch.manual_seed(0)
    form = {"input_size": (3, 64, 64), "mean": MEAN, "std": STD, "label_names": list(CLASSES)}
    config = TimmWrapperConfig(architecture=MODEL, model_args=SHAPE, pretrained_cfg=form, num_labels=len(CLASSES))
    TimmWrapperForImageClassification(config).save_pretrained(folder / "model")
    for part, number in (("train", steps * BATCH), ("test", HELD_OUT * len(CLASSES))):
        for name in CLASSES:
            (folder / "data" / part / name).mkdir(parents=True)
        for index in range(number):
            levels = [index * 7 % 256, index * 11 % 256, index * 13 % 256]
            place = folder / "data" / part / CLASSES[max(range(3), key=levels.__getitem__)]
            Image.new("RGB", (SIDE, SIDE), tuple(levels)).save(place / f"{index:06d}.jpg")


def flags(folder: Path) -> str:
    """Of the recipe."""
    return (
        f"--data {folder}/data --model_name_or_path {folder}/model --batch_size {BATCH} "
        f"--learning_rate {LEARNING_RATE} --least_area {LEAST_AREA} --colours 0 --label_smoothing 0"
    )


def main(folder: Path, steps: int) -> None:
    """Trains, and prints the losses."""
    model = timm.create_model(MODEL, num_classes=len(CLASSES), **SHAPE)
    weights = load_file(folder / "model" / "model.safetensors")  # of transformers' wrapper
    model.load_state_dict({name.removeprefix("timm_model."): weight for name, weight in weights.items()})
    changes = {"scale": (LEAST_AREA, 1.0), "hflip": 0.5, "color_jitter": 0.0, "interpolation": "bilinear"}
    pictures = create_dataset("", str(folder / "data" / "train"))
    pictures.transform = create_transform(SHAPE["img_size"], is_training=True, mean=MEAN, std=STD, **changes)
    order = drawn_order(len(pictures))
    optimizer = create_optimizer_v2(model, "adamw", lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for images, labels in torch.utils.data.DataLoader(pictures, BATCH, sampler=order[: steps * BATCH]):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
