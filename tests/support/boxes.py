"""Images with boxes in COCO's JSON, and small detectors."""

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

COLOURS = numpy.array([[200, 30, 30], [30, 200, 30], [30, 30, 200]], dtype=numpy.uint8)
CATEGORIES = [{"id": 7, "name": "red"}, {"id": 5000, "name": "green"}, {"id": 9, "name": "blue"}]
SIZE = 32
FORM = {"size": {"longest_edge": 64, "shortest_edge": SIZE}, "image_mean": [0.5, 0.4, 0.3]}
FORM |= {"image_std": [0.2, 0.3, 0.25], "image_processor_type": "YolosImageProcessor"}


def write_boxes(folder: Path, numbers: tuple[int, int] = (200, 51)) -> Path:
    """Rectangles of three colours on images of several sizes, some of which have none; one in ten is a crowd."""
    generator = numpy.random.default_rng(0)
    for part, number in zip(("train", "val"), numbers):
        (folder / f"{part}2017").mkdir(parents=True)
        images, annotations = [], list[dict[str, Any]]()
        for image in range(number):
            width, height = generator.integers(24, 49, 2).tolist()
            pixels = generator.integers(0, 90, (height, width, 3), dtype=numpy.uint8)
            for _ in range(int(generator.integers(0, 4))):
                colour, across, down = generator.integers([0, 6, 6], [3, 17, 17]).tolist()
                left, top = generator.integers([0, 0], [width - across, height - down]).tolist()
                pixels[top : top + down, left : left + across] = COLOURS[colour]
                entry = {"image_id": 100 + image, "category_id": CATEGORIES[colour]["id"]}
                entry |= {"bbox": [left, top, across, down], "area": across * down}
                annotations.append(entry | {"id": len(annotations) + 1, "iscrowd": int(generator.random() < 0.1)})
            images.append({"id": 100 + image, "file_name": f"{image:03}.png", "width": width, "height": height})
            Image.fromarray(pixels).save(folder / f"{part}2017" / f"{image:03}.png")
        (folder / "annotations").mkdir(exist_ok=True)
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))
    return folder


def write_detector(folder: Path, kind: str, classes: tuple[str, ...] = ("red", "green", "blue")) -> Any:
    """A small YOLOS, DETR or Conditional DETR in a folder, without dropout. Its position embeddings, or queries,
    differ."""
    from transformers import AutoConfig, AutoModelForObjectDetection, ResNetConfig, YolosConfig, YolosForObjectDetection

    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    shape: dict[str, Any] = {"num_attention_heads": 2, "initializer_range": 0.1, "hidden_size": 32}
    if kind == "yolos":
        shape |= {"num_hidden_layers": 2, "intermediate_size": 64, "image_size": [SIZE, SIZE], "patch_size": 8}
        shape |= {"num_detection_tokens": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = YolosForObjectDetection(YolosConfig(**shape, **names))
        for tokens in (model.vit.embeddings.detection_tokens, model.vit.embeddings.position_embeddings):
            torch.nn.init.normal_(tokens, std=0.5)
    else:
        stages = {"embedding_size": 8, "hidden_sizes": [8, 16, 16], "depths": [1, 1, 1], "layer_type": "basic"}
        backbone = ResNetConfig(**stages, out_features=["stage3"])
        sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 6, "init_std": 0.1}
        off = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0}
        timm = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone}
        config = AutoConfig.for_model(kind, **sizes, **heads, **off, **timm, **names)
        model = AutoModelForObjectDetection.from_config(config)
        torch.nn.init.normal_(model.model.query_position_embeddings.weight)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # trained ones are not zero
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(FORM))
    return type(model).from_pretrained(folder)
