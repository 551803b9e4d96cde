"""Promise: the loss per pixel of docs/your-model.md counts each pixel that is not ignored once."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate_recipes.common.data import Batch
from support.runs import ROOT


def test_each_pixel_counts_once() -> None:
    section = (ROOT / "docs" / "your-model.md").read_text().partition("## Images of several sizes")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "nn": nn, "F": F, "Batch": Batch}
    exec(code[1], names)
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "image": torch.randn(3, height, width, generator=generator),
            "label": torch.randint(0, 4, (height, width), generator=generator),
        }
        for height, width in ((5, 9), (8, 6), (2, 3))
    ]
    samples[0]["label"][2] = names["IGNORED"]
    model = nn.Conv2d(3, 4, kernel_size=1)
    batch = names["pad_images"](samples)
    assert batch["image"].shape == (3, 3, 8, 9) and batch["weight"].tolist() == [36, 48, 6]
    values = names["forward_step"](model, batch)
    logits = torch.cat([model(sample["image"]).flatten(1) for sample in samples], 1).T
    labels = torch.cat([sample["label"].flatten() for sample in samples])
    kept = labels != names["IGNORED"]
    expected = {
        "loss": F.cross_entropy(logits[kept], labels[kept]),
        "accuracy": (logits.argmax(1) == labels)[kept].float().mean(),
    }
    for name, mean in expected.items():
        torch.testing.assert_close((values[name] * batch["weight"]).sum() / batch["weight"].sum(), mean)
