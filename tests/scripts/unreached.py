"""A recipe with a layer whose output is rounded, so that no gradient reaches it; layers that start at zero, so that
others have no gradient in the first step; a frozen layer, and one that the optimizer is not given. With `--left_out`, a
layer whose weights each step of the optimizer leaves out; with `--stops_at`, steps that leave out all."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from recipes.linear_regression import TableDataset


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    max_steps: int | None = 12
    log_every: int = 1
    weight_decay: float = 0.1  # it moves weights without a gradient
    optimizer: str = flag("AdamW", "or SGD, which has no state")
    left_out: bool = flag(False, "the layer inner is in a group with a learning rate of 0")
    stops_at: int = flag(100, "the number of the first step that finds no gradients")


class Net(nn.Module):
    _no_split_modules = ["Linear"]
    tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)  # as adaLN-zero
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.rounded, self.frozen, self.left = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for weight in (*self.gate.parameters(), *self.lora_b.parameters()):
            nn.init.zeros_(weight)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(x)))
        hidden = hidden + self.gate(x) * self.inner(hidden) + self.lora_b(self.lora_a(x))
        return (hidden + torch.round(self.rounded(x)) + self.frozen(x) + self.left(x)).mean(1)


def main(config: Config) -> None:
    accelerator = start(config)
    generator = torch.Generator().manual_seed(0)
    dataset = TableDataset(torch.rand(64, 8, generator=generator), torch.rand(64, generator=generator))
    model = Net()

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": (model(batch["features"]) - batch["target"]) ** 2}

    given = [weight for name, weight in model.named_parameters() if not name.startswith(("left", "inner"))]
    rate = 0.0 if config.left_out else config.learning_rate
    groups = [{"params": given}, {"params": [*model.inner.parameters()], "lr": rate}]
    kind = getattr(torch.optim, config.optimizer)
    optimizer = kind(groups, config.learning_rate, weight_decay=config.weight_decay)
    taken: list[int] = []

    def lose_gradients(*args: Any) -> None:
        taken.append(1)
        if len(taken) > config.stops_at:
            optimizer.zero_grad()

    optimizer.register_step_pre_hook(lose_gradients)
    fit(accelerator, model, optimizer, forward_step, dataset, dataset, config)


if __name__ == "__main__":
    run(main, Config)
