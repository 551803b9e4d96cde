"""Predict the class of each pixel of an image: a small SegFormer from scratch, or a pretrained transformers model.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/segmentation.py

Data: canvases with one to three of scikit-learn's handwritten digits. Or a folder with the sub-folders images and
masks, parquet files, or a Hub id.
Expect: a mean IoU of 0.54 on canvases with held-out digits, and the right class for 93 % of the pixels.
Time: a minute and a half on two CPU cores.

To train on your own masks, or to continue from a pretrained model; and to try the exported model:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/segmentation.py --data path/to/folder \\
        --model_name_or_path path/or/hub-id --learning_rate 6e-5 --mirror --num_workers 2
    python recipes/segmentation.py --predict path/to/image.png
"""

import random
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSemanticSegmentation, SegformerConfig, SegformerForSemanticSegmentation

from accelerate_recipes import Schedule, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, Examples, Metrics
from accelerate_recipes.common.tasks.models.encoder import freeze_key_biases
from accelerate_recipes.common.tasks.models.pretrained import exported_pipeline, freeze_unused, load
from accelerate_recipes.common.tasks.reading.image_decoding import Opener
from accelerate_recipes.common.tasks.reading.labelled import config_of_classes, names_of, with_classes
from accelerate_recipes.common.tasks.reading.mixture import Sources
from accelerate_recipes.common.tasks.vision.augmentation import VaryingFlags
from accelerate_recipes.common.tasks.vision.cropped_images import Preprocessing
from accelerate_recipes.common.tasks.vision.images import ImageDataset, load_images
from accelerate_recipes.common.tasks.vision.masked_images import Masked, MaskedImages, load_masked_images


@dataclass(kw_only=True)
class Config(VaryingFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "digits"
    epochs: int = 6
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    weight_decay: float = 0.01
    log_every: int = 50
    mirror: bool = False
    image_column: str = flag("image", "name of the column with the images, or of their folder without its s")
    mask_column: str = flag("mask", "name of the column with the masks, or of their folder without its s")
    ignored_class: int = flag(255, "mask value of the pixels that do not count; -1: none", minimum=-1)
    class_names: str | None = flag(None, "path of a JSON file with {number in the masks: name}")
    image_size: int = flag(32, "height and width in pixels; a pretrained model has its own", minimum=8)
    hidden_size: int = flag(32, "width of the first of three stages; each next one is twice as wide", minimum=4)
    num_layers: int = flag(2, "layers of a stage", minimum=1)
    model_name_or_path: str | None = flag(None, "continue from this model (folder or Hub id)")
    predict: str | None = flag(None, "instead of training, try the model in --output_dir on the image at this path")


def canvases(number: int, digits: ImageDataset, ignored: int) -> Masked:
    """One to three digits on a canvas; the faint edges of a digit do not count."""
    generator, images, masks = random.Random(number), list[Image.Image](), list[numpy.ndarray]()
    for _ in range(number):
        levels = numpy.full((32, 32), generator.randint(0, 60), numpy.uint8)
        mask = numpy.zeros((32, 32), numpy.int32)
        for _ in range(generator.randint(1, 3)):
            row, side = generator.randrange(len(digits)), generator.randint(14, 20)
            digit = Image.fromarray(digits.images[row, 0].numpy()).resize((side, side), Image.Resampling.BILINEAR)
            ink, top, left = numpy.asarray(digit), generator.randrange(33 - side), generator.randrange(33 - side)
            here = slice(top, top + side), slice(left, left + side)
            levels[here] = numpy.maximum(levels[here], ink)
            is_edge, label = (ink > 60) & (mask[here] == 0), 1 + int(digits.labels[row])
            mask[here] = numpy.where(ink > 100, label, numpy.where(is_edge, ignored, mask[here]))
        images.append(Image.fromarray(levels))
        masks.append(mask)
    return Masked(images, masks, {0: "ground"} | {1 + digit: str(digit) for digit in range(10)}, range(number))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of each image: the mean over its pixels that count, whose number is its "weight"."""
    mask = batch["mask"]
    logits = F.interpolate(model(pixel_values=batch["image"]).logits.float(), mask.shape[1:], mode="bilinear")
    losses = F.cross_entropy(logits, mask, reduction="none").flatten(1).sum(1)
    values = {"loss": losses / batch["weight"].clamp(min=1)}
    if not model.training:
        predicted, counts, size = logits.argmax(1), mask >= 0, logits.shape[1]
        found = num_pixels(predicted, counts, size), num_pixels(mask, counts, size)
        values["pixels"] = torch.stack([*found, num_pixels(mask, predicted == mask, size)], 1)
    return values


def num_pixels(classes: Tensor, counts: Tensor, num_classes: int) -> Tensor:
    """The number of pixels of each class in each image, of those that count: (batch, classes)."""
    zeros = torch.zeros(len(classes), num_classes, dtype=torch.int64, device=classes.device)
    return zeros.scatter_add_(1, (classes * counts).flatten(1), counts.flatten(1).long())


def measures(examples: Examples) -> Metrics:
    """The mean IoU and the share of right pixels, over the whole evaluation set. A class's IoU is the share of pixels
    that have it and are predicted to, among those that have it or are predicted to."""
    predicted, labelled, right = examples["pixels"].sum(0).double()
    either = predicted + labelled - right
    return {"mean_iou": float((right / either)[either > 0].mean()), "accuracy": float(right.sum() / labelled.sum())}


def freeze_statistics(model: nn.Module) -> None:
    """Freezes BatchNorm's statistics in training: those of a batch would depend on the number of processes."""

    def forward(self: Any, values: Tensor) -> Tensor:
        mean, var = (each.to(self.weight.dtype) for each in (self.running_mean, self.running_var))
        return F.batch_norm(values, mean, var, self.weight, self.bias, eps=self.eps)

    layers: list[Any] = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.forward = MethodType(forward, layer)  # a method: a copy of the model then uses its own


def build(config: Config, classes: list[str]) -> tuple[Any, Preprocessing]:
    """Returns (model, preprocessing of its images). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        read = partial(load, AutoModelForSemanticSegmentation, path, "model for segmentation", reads=None)
        model = with_classes(read, path, classes)[0]
        print_once("frozen: the statistics of BatchNorm")
        form = Preprocessing.of(path)
        freeze_unused(model, pixel_values=torch.zeros(1, 3, form.size, form.size))
    else:
        width, three = config.hidden_size, {"sr_ratios": [2, 1, 1], "num_attention_heads": [1, 2, 4]}
        three |= {"hidden_sizes": [width, 2 * width, 4 * width], "depths": [config.num_layers] * 3}
        three |= {"patch_sizes": [3] * 3, "strides": [2] * 3, "mlp_ratios": [2] * 3}
        dropout = {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
        others = {"initializer_range": 0.1 * (32 / width) ** 0.5, "decoder_hidden_size": 2 * width}
        shape = SegformerConfig(num_encoder_blocks=3, **three, **dropout, **others, **config_of_classes(classes))
        model, form = SegformerForSemanticSegmentation(shape), Preprocessing(config.image_size)
    freeze_key_biases(model)
    freeze_statistics(model)
    return model, form


def predict(config: Config, path: str) -> None:
    """Prints the share of each class in an image, and draws the classes in colours."""
    segment, image = exported_pipeline("image-segmentation", config.output_dir), Opener()(path, path)
    segments, hues = segment(image.convert("RGB")), numpy.zeros(image.size[::-1], numpy.uint8)
    for number, found in enumerate(segments):
        is_here = numpy.asarray(found["mask"]) > 0
        hues[is_here] = 256 * number // len(segments)
        print_once(f"{found['label']}: {is_here.mean():.1%}")
    bands = Image.fromarray(hues), Image.new("L", image.size, 200), image.convert("L")
    Image.merge("HSV", bands).convert("RGB").save(config.output_dir / "predicted.png")


def main(config: Config) -> None:
    """Trains the model, or finds the classes in an image."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator, ignored = start(config), config.ignored_class

    def load_masked(data: str) -> tuple[Masked, Masked]:
        if data == "digits":
            train, held_out = load_images(data)
            return canvases(4000, train, ignored), canvases(500, held_out, ignored)
        return load_masked_images(data, config.image_column, config.mask_column, ignored, config.class_names)

    sources = Sources(config, load_masked, ("classes",))
    model, form = build(config, [*sources.train.classes.values()])
    make = partial(MaskedImages, names=names_of(model.config), form=form, ignored=ignored)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    sets = sources.sets(partial(make, flags=config), make)
    export = partial(form.write, processor="BeitImageProcessor")  # SegFormer's is equal, but needed torchvision
    fit(accelerator, model, optimizer, forward_step, *sets, config, examples=measures, export=export)


if __name__ == "__main__":
    run(main, Config)
