"""Find objects in images, with a box around each: a small YOLOS from scratch, or a pretrained transformers model.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/detection.py

Data: canvases with one to four of scikit-learn's handwritten digits. Or COCO's JSON with its images, a folder with a
metadata.jsonl, parquet files, or a Hub id.
Expect: a mAP of 0.60 and a mAP@50 of 0.81 on canvases with held-out digits.
Time: two minutes on two CPU cores.

To train on your own boxes from a pretrained model, and then to try the exported model:

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/detection.py --data path/to/folder \\
        --model_name_or_path path/or/hub-id --learning_rate 1e-5 --mirror --num_workers 2
    python recipes/detection.py --predict path/to/image.png
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from transformers import AutoModelForObjectDetection, YolosConfig, YolosForObjectDetection
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

from accelerate_recipes import Schedule, UsageError, fit, flag, parameter_groups, print_once, run, start
from accelerate_recipes.common.data import Batch, Examples, Metrics
from accelerate_recipes.common.tasks.metrics.box_metrics import make_box_measure
from accelerate_recipes.common.tasks.models.encoder import freeze_key_biases
from accelerate_recipes.common.tasks.models.pretrained import exported_pipeline, load
from accelerate_recipes.common.tasks.reading.image_decoding import Opener
from accelerate_recipes.common.tasks.reading.labelled import config_of_classes, names_of, with_classes
from accelerate_recipes.common.tasks.reading.mixture import Sources
from accelerate_recipes.common.tasks.vision.augmentation import VaryingFlags
from accelerate_recipes.common.tasks.vision.boxed_images import Boxed, BoxedImages, Object, load_boxed_images
from accelerate_recipes.common.tasks.vision.cropped_images import Preprocessing
from accelerate_recipes.common.tasks.vision.images import ImageDataset, load_images


@dataclass(kw_only=True)
class Config(VaryingFlags):
    """The flags of this recipe, and its defaults for the shared flags."""

    data: str = "digits"
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    lr_schedule: Schedule = "cosine"
    least_area: float = 1.0
    mirror: bool = False
    image_column: str = flag("image", "name of the column with the images")
    objects_column: str = flag("objects", "name of the column with the boxes and the classes of each image")
    image_size: int = flag(48, "height and width in pixels; a pretrained model has its own", minimum=8)
    num_queries: int = flag(10, "boxes per image that a model from scratch predicts", minimum=1)
    hidden_size: int = flag(64, "width of the model", minimum=4)
    num_layers: int = flag(4, "layers of the model", minimum=1)
    model_name_or_path: str | None = flag(None, "continue from this DETR or YOLOS (folder or Hub id)")
    predict: str | None = flag(None, "instead of training, try the model in --output_dir on the image at this path")


def canvases(number: int, digits: ImageDataset) -> Boxed:
    """Canvases with one to four digits, each in its own quarter. A box encloses the pixels brighter than 100 of 255."""
    generator, images, objects = random.Random(number), list[Image.Image](), list[list[Object]]()
    for _ in range(number):
        canvas, found = Image.new("L", (48, 48), generator.randint(0, 60)), list[Object]()
        for quarter in generator.sample(range(4), generator.randint(1, 4)):
            row, side = generator.randrange(len(digits)), generator.randint(14, 24)
            digit = Image.fromarray(digits.images[row, 0].numpy()).resize((side, side), Image.Resampling.BILINEAR)
            top, left = (24 * place + generator.randint(0, 24 - side) for place in divmod(quarter, 2))
            canvas.paste(255, (left, top), digit)
            ink: Any = digit.point(lambda level: 255 * (level > 100)).getbbox()
            box = left + ink[0], top + ink[1], ink[2] - ink[0], ink[3] - ink[1]
            found.append((str(int(digits.labels[row])), [*map(float, box)], False))
        images.append(canvas)
        objects.append(found)
    return Boxed(images, objects, [*map(str, range(10))], range(number))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The values of each image that `batch_loss` and the metrics need."""
    found = model(pixel_values=batch["image"])
    values = {"logits": found.logits.float(), "found": found.pred_boxes.float()}
    return values | {name: batch[name] for name in ("boxes", "label", "is_crowd", "size")}


def make_batch_loss(config: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """DETR's loss for a model's config, averaged over the boxes, or the predictions, of the global batch."""
    matcher = HungarianMatcher(config.class_cost, config.bbox_cost, config.giou_cost)
    criterion = ImageLoss(matcher, config.num_labels, config.eos_coefficient, [])
    weights = {"loss_ce": 1, "loss_bbox": config.bbox_loss_coefficient, "loss_giou": config.giou_loss_coefficient}

    def batch_loss(values: dict[str, Tensor]) -> dict[str, Tensor]:
        found, counts = values["found"], (values["label"] >= 0) & ~values["is_crowd"]
        if not found.isfinite().all():  # boxes cannot be matched, and this loss ends the run
            return {"loss": found.flatten(1).sum(1)}
        each = zip(values["label"], values["boxes"].detach(), counts)
        right = [{"class_labels": label[own], "boxes": boxes[own]} for label, boxes, own in each]
        outputs = {"logits": values["logits"], "pred_boxes": found}
        given = outputs, right, matcher(outputs, right), max(1, int(counts.sum()))
        terms = criterion.to(found.device).loss_labels(*given) | criterion.loss_boxes(*given)
        return {"loss": torch.stack([weights[name] * term for name, term in terms.items()]).sum().expand(len(found))}

    return batch_loss


def measures(measure: Callable[..., Metrics], examples: Examples) -> Metrics:
    """pycocotools' metrics for all boxes of the whole evaluation set, each with its most probable class."""
    halves = (examples[name].double().chunk(2, -1) for name in ("found", "boxes"))
    corners = [torch.cat([centres - sizes / 2, sizes], -1) for centres, sizes in halves]
    found, right = (each * examples["size"].repeat(1, 2)[:, None] for each in corners)  # in pixels
    score, label = examples["logits"].softmax(-1)[..., :-1].max(-1)
    return measure(found, label, score, right, examples["label"], examples["is_crowd"])


def build(config: Config, classes: list[str]) -> tuple[Any, Preprocessing]:
    """Returns (model, preprocessing of its images). Raises UsageError for wrong sizes or a wrong path."""
    if path := config.model_name_or_path:
        read = partial(load, AutoModelForObjectDetection, path, "model for object detection", reads=None)
        model = with_classes(read, path, classes)[0]
        if model.loss_type != "ForObjectDetection":
            raise UsageError(f"--model_name_or_path {path} is a {type(model).__name__}: use a DETR or YOLOS")
        freeze_key_biases(model)
        for name, weight in model.named_parameters():
            if any(f"decoder.layers.0.self_attn.{part}_proj" in name for part in "qk"):
                weight.requires_grad_(False)  # DETR's first values are all equal: the gradient is rounding error
        return model, Preprocessing.of(path)
    side, width = config.image_size, config.hidden_size
    if side % 8 or width % 4:
        raise UsageError(f"--image_size {side} must be a multiple of 8, and --hidden_size {width} of 4")
    sizes: Any = {"image_size": [side, side], "patch_size": 8, "num_detection_tokens": config.num_queries}
    sizes |= {"num_hidden_layers": config.num_layers, "hidden_size": width, "intermediate_size": 2 * width}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.1 * (64 / width) ** 0.5, **config_of_classes(classes)}
    model = YolosForObjectDetection(YolosConfig(qkv_bias=False, use_mid_position_embeddings=False, **sizes))
    nn.init.normal_(model.vit.embeddings.detection_tokens, std=0.5)  # zeros would make all predictions the same
    nn.init.normal_(model.vit.embeddings.position_embeddings, std=0.5)
    return model, Preprocessing(side)


def predict(config: Config, path: str) -> None:
    """Prints the objects in an image, and draws their boxes."""
    detect, image = exported_pipeline("object-detection", config.output_dir), Opener()(path, path).convert("RGB")
    for found in detect(image):
        print_once(f"{found['label']}: {found['score']:.1%}, {found['box']}")
        ImageDraw.Draw(image).rectangle([*found["box"].values()], outline="red")
    image.save(config.output_dir / "predicted.png")


def main(config: Config) -> None:
    """Trains the model, or finds the objects in an image."""
    if config.predict is not None:
        return predict(config, config.predict)
    accelerator, measure = start(config), make_box_measure()

    def load_boxed(data: str) -> tuple[Boxed, Boxed]:
        if data != "digits":
            return load_boxed_images(data, config.image_column, config.objects_column)
        train, held_out = load_images(data)
        return canvases(4000, train), canvases(500, held_out)

    sources = Sources(config, load_boxed, ("classes",))
    most = max(1, *(len(found) for parts in sources.parts.values() for part in parts for found in part.objects))
    model, form = build(config, sources.train.classes)
    if most > (room := getattr(model.config, "num_queries", 0) or model.config.num_detection_tokens):
        advice = "" if config.model_name_or_path else f": use --num_queries {most}"
        print_once(f"an image has {most} objects, but the model finds at most {room}{advice}")
    make = partial(BoxedImages, names=names_of(model.config), form=form, most=most)
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), config.learning_rate)
    sets = sources.sets(partial(make, flags=config), make)
    examples, loss = partial(measures, measure), make_batch_loss(model.config)
    export = partial(form.write, processor="YolosImageProcessor")
    fit(accelerator, model, optimizer, forward_step, *sets, config, examples=examples, export=export, batch_loss=loss)


if __name__ == "__main__":
    run(main, Config)
