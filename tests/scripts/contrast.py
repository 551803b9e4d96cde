"""A recipe whose loss compares all samples of the batch: two towers, a learned temperature and weights of samples."""

import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 32
    learning_rate: float = 1e-2
    max_steps: int | None = 6
    log_every: int = 1
    eval_every: int | None = 3
    width: int = flag(16, "width of the hidden layer")
    num_layers: int = flag(0, "layers in front of both towers")
    dropout: float = flag(0.0, "probability of dropout")
    counts: bool = flag(False, "let the model count its forward passes in a buffer")
    mistake: str = flag("", "which mistake")


class Pairs(Dataset):
    """Samples with two noisy views of a vector of 6 numbers, and a weight; each third weighs nothing."""

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(size)
        self.left = torch.randn(size, 6, generator=generator)
        self.right = self.left + 0.3 * torch.randn(size, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"left": self.left[index], "right": self.right[index], "weight": float(index % 3)}


class Towers(nn.Module):
    """Two vectors and the inverse temperature for each pair."""

    tp_plan = {"body": "colwise", "head": "rowwise"}

    def __init__(self, config: Config):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(config.num_layers))
        self.layers = nn.Sequential(*layers)
        self.body, self.head = nn.Linear(6, config.width), nn.Linear(config.width, 8)
        self.drop = nn.Dropout(config.dropout)
        self.log_scale = nn.Parameter(torch.ones(1))
        self.counts, self.noise = config.counts, torch.Generator().manual_seed(0)
        self.own_noise = config.mistake == "noise"
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training and self.counts:
            self.calls += 1
        if self.training and self.own_noise:
            left = left + torch.randn(left.shape, generator=self.noise)
        left, right = self.layers(torch.cat([left, right])).chunk(2)
        first, second = (F.normalize(self.head(self.drop(torch.tanh(self.body(x)))), dim=-1) for x in (left, right))
        return first, second, self.log_scale.exp().expand(len(left))


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    left, right, scale = model(batch["left"], batch["right"])
    return {"left": left, "right": right, "scale": scale}


def batch_loss(values: dict[str, Tensor]) -> dict[str, Tensor]:
    scores = values["scale"][:, None] * values["left"] @ values["right"].T
    target = torch.arange(len(scores), device=scores.device)
    return {
        "loss": F.cross_entropy(scores, target, reduction="none") + F.cross_entropy(scores.T, target, reduction="none"),
        "accuracy": (scores.argmax(1) == target).float(),
    }


def recall(examples: dict[str, Tensor]) -> dict[str, float]:
    hits = (examples["left"] @ examples["right"].T).argmax(1) == torch.arange(len(examples["left"]))
    return {"recall": float(hits.float().mean())}


def main(config: Config) -> None:
    accelerator = start(config)
    model = Towers(config)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)

    def outside(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch_loss(values | {"scale": model.log_scale.exp().expand(len(values["left"]))})

    steps = {
        "loss": lambda model, batch: {"loss": model(batch["left"], batch["right"])[0].sum(1)},
        "mean": lambda model, batch: {name: value.mean() for name, value in forward_step(model, batch).items()},
        "detached": lambda model, batch: {name: value.detach() for name, value in forward_step(model, batch).items()},
    }

    def writes(values: dict[str, Tensor]) -> dict[str, Tensor]:
        values["left"] -= values["left"].mean(0)
        return batch_loss(values)

    losses = {
        "outside": outside,
        "writes": writes,
        "centres": lambda values: batch_loss(values | {"left": values["left"] - values["left"].mean(0)}),
        "scalar": lambda values: {"loss": batch_loss(values)["loss"].mean()},
    }
    data = (
        model,
        optimizer,
        steps.get(config.mistake, forward_step),
        Pairs(max(100, config.batch_size)),
        Pairs(41),
        config,
    )
    fit(accelerator, *data, examples=recall, batch_loss=losses.get(config.mistake, batch_loss))
    accelerator.print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    run(main, Config)
