"""Images with masks, and a small SegFormer."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

COLOURS = torch.tensor([[200, 30, 30], [30, 200, 30], [30, 30, 200], [150, 150, 30]], dtype=torch.uint8)
CLASSES, SIZE, IGNORED = len(COLOURS), 16, 255
FORM = {"size": {"height": SIZE, "width": SIZE}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.25]}


def write_masks(folder: Path, numbers: tuple[int, int] = (200, 51)) -> Path:
    """Squares of four colours on a ground of one, with noise; the first row does not count."""
    generator = torch.Generator().manual_seed(0)

    def draw(*limits: int) -> list[int]:
        return [int(torch.randint(limit, (), generator=generator)) for limit in limits]

    for part, number in zip(("train", "test"), numbers):
        for kind in ("images", "masks"):
            (folder / part / kind).mkdir(parents=True)
        for name in range(number):
            mask = torch.full((SIZE, SIZE), draw(CLASSES)[0])
            for _ in range(3):
                colour, top, left = draw(CLASSES, SIZE - 4, SIZE - 4)
                mask[top : top + 6, left : left + 6] = colour
            noise = torch.randint(40, (SIZE, SIZE, 3), generator=generator)
            mask[0], image = IGNORED, COLOURS[mask] + noise.byte()
            Image.fromarray(image.numpy()).save(folder / part / "images" / f"{name:03}.png")
            Image.fromarray(mask.byte().numpy()).save(folder / part / "masks" / f"{name:03}.png")
    return folder


def write_segformer(folder: Path, num_labels: int = CLASSES) -> Any:
    """A small SegFormer in a folder, whose BatchNorm has statistics."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    shape = {"hidden_sizes": [8, 16], "depths": [2, 2], "sr_ratios": [2, 1], "num_attention_heads": [1, 2]}
    shape |= {"patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
    config = SegformerConfig(num_encoder_blocks=2, num_labels=num_labels, initializer_range=0.1, **shape)
    config.classifier_dropout_prob = config.drop_path_rate = 0.0
    model = SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm.running_mean.uniform_(-0.2, 0.2)
    model.decode_head.batch_norm.running_var.uniform_(0.5, 2)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(FORM))
    return SegformerForSemanticSegmentation.from_pretrained(folder)  # in evaluation: BatchNorm keeps its statistics
