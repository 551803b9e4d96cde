"""Classify images of all sizes: a small vision transformer (ViT) from scratch, or a pretrained model of transformers.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/image_classification.py

Data: 3,000 drawn shapes in all colours, sizes and places. Or a folder with a sub-folder for each class, parquet files,
or a Hub id.
Expect: 98 % of the held-out shapes are recognised. confusion.png shows which classes are mixed up.
Time: a quarter of a minute on two CPU cores.

To train on your own images, or to continue from a pretrained model, all of it or only its head:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/image_classification.py --data path/to/folder \\
        --image_size 64 --num_workers 2
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/image_classification.py --data path/to/folder \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-3 --freeze_backbone --epochs 3 --num_workers 2
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.tasks.metrics.class_metrics import Confusion, average_precision, weights_of_classes
from accelerate_recipes.common.tasks.models.encoder import freeze_key_biases
from accelerate_recipes.common.tasks.models.pretrained import freeze_unused, load
from accelerate_recipes.common.tasks.reading.labelled import config_of_classes, names_of, with_classes
from accelerate_recipes.common.tasks.reading.mixture import Sources
from accelerate_recipes.common.tasks.vision.augmentation import AugmentationFlags
from accelerate_recipes.common.tasks.vision.cropped_images import CroppedImages, Preprocessing, load_labelled_images


@dataclass(kw_only=True)
class Config(AugmentationFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "shapes"
    epochs: int = 15
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    weight_decay: float = 0.05
    log_every: int = 50
    eval_every: int | None = 200
    max_samples: int | None = flag(None, "stream a dataset, and use only its first N images", minimum=1)
    class_weights: str | None = flag(None, "balanced, or the weights of classes in the loss, such as cat:2,dog:0.5")
    label_smoothing: float = flag(0.1, "amount of label smoothing, such as 0.1", minimum=0, below=1)
    image_size: int = flag(32, "height and width in pixels; a pretrained model has its own", minimum=1)
    patch_size: int = flag(8, "height and width of a patch in pixels; each patch is a token", minimum=1)
    hidden_size: int = flag(64, "width of the model", minimum=1)
    num_layers: int = flag(4, "layers of the model", minimum=1)
    num_heads: int = flag(4, "attention heads", minimum=1)
    freeze_backbone: bool = flag(False, "train only the head")
    model_name_or_path: str | None = flag(None, "continue from this image classifier (folder or Hub id)")


def make_forward_step(
    label_smoothing: float, num_classes: int, has_several: bool
) -> Callable[[nn.Module, Batch], dict[str, Tensor]]:
    """`forward_step` for images with one class each; with several or none, each class is a separate yes-no question."""

    def loss(logits: Tensor, label: Tensor) -> Tensor:
        if not has_several:
            return F.cross_entropy(logits, label, reduction="none", label_smoothing=label_smoothing)
        smooth = label.lerp(torch.full_like(label, 0.5), label_smoothing)
        return F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").mean(1)

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, label = model(pixel_values=batch["image"]).logits.float(), batch["label"]
        values = {"loss": loss(logits, label)}
        if "share" in batch:  # the image is a mix of two
            values["loss"] = loss(logits, batch["other_label"]).lerp(values["loss"], batch["share"])
        if has_several:
            return values | {
                "accuracy": ((logits > 0) == label.bool()).float().mean(1),
                "probability": logits.sigmoid(),
                "label": label.long(),
            }
        best = logits.topk(min(5, num_classes)).indices
        return values | {
            "accuracy": (best[:, 0] == label).float(),
            "top_5_accuracy": (best == label[:, None]).any(1).float(),
            "predicted": best[:, 0],
            "label": label,
        }

    return forward_step


def build(config: Config, classes: list[str]) -> tuple[Any, Preprocessing]:
    """Returns (model, preprocessing of its images). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        read = partial(load, AutoModelForImageClassification, path, "image classifier", reads=None)
        model = with_classes(read, path, classes)[0]
        form = Preprocessing.of(path)
        freeze_unused(model, pixel_values=torch.zeros(1, 3, form.size, form.size))
        freeze_key_biases(model)
        return model, form
    if config.image_size % config.patch_size or config.hidden_size % config.num_heads:
        raise UsageError(
            f"--patch_size {config.patch_size} must divide --image_size {config.image_size}, and --num_heads "
            f"{config.num_heads} --hidden_size {config.hidden_size}: use multiples"
        )
    shape = ViTConfig(
        image_size=config.image_size,
        patch_size=config.patch_size,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        initializer_range=0.1,  # large models use 0.02, with which a narrow one trains slowly
        qkv_bias=False,  # the keys' bias has a gradient of only rounding errors, which Adam would turn into steps
        **config_of_classes(classes),
    )
    return ViTForImageClassification(shape), Preprocessing(config.image_size)


def main(config: Config) -> Callable[[], None] | None:
    """Trains. Returns a function that only the main process calls afterwards: it plots which classes are mixed up."""
    accelerator = start(config)
    same = "classes", "has_several"
    sources = Sources(config, lambda data: load_labelled_images(data, config.max_samples), same)
    model, form = build(config, sources.train.classes)
    classes = names_of(model.config)  # a pretrained head that has these classes keeps its order
    if config.freeze_backbone:
        model.requires_grad_(False)
        [*model.children()][-1].requires_grad_(True)  # the head
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    several, parts = sources.train.has_several, [part.reorder(classes) for part, _ in sources.parts.values()]
    weights = weights_of_classes(config.class_weights, parts, bool(config.mixup or config.cutmix))
    train_set, eval_set = sources.sets(
        lambda part: CroppedImages(part.reorder(classes), form, config, weights),
        lambda part: CroppedImages(part.reorder(classes), form),
    )
    if several:
        model.config.problem_type = "multi_label_classification"
    forward_step = make_forward_step(config.label_smoothing, len(classes), several)
    confusion = Confusion(classes)
    examples = average_precision if several else confusion
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config, examples=examples, export=form.write)
    return None if several else partial(confusion.write, config.output_dir / "confusion.png")


if __name__ == "__main__":
    run(main, Config)
