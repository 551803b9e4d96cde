"""A recipe in which one process changes one element of a weight, before step `--at`; or, from that step on, the loss is
divided by the number of processes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.weights.shards import local


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 8
    learning_rate: float = 1e-2
    max_steps: int | None = 9
    log_every: int = 2
    save_every: int = 2
    keep_checkpoints: int = 9
    at: int = flag(5, "number of the step, from 0")
    by: float = flag(0.1, "what the element grows by")
    weight: str = flag("norm.weight", "name of the weight")
    divides: bool = flag(False, "divide the loss instead")


class Net(nn.Module):
    """A norm that all processes hold whole, between two layers that tensor parallelism divides."""

    _no_split_modules = ["Linear"]
    tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).mean(1)


class Numbers:
    """64 vectors."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x[0].sin()}


def main(config: Config) -> None:
    accelerator = start(config)
    model = Net()

    def forward_step(given: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        changes = step == config.at and accelerator.process_index == 1 and not config.divides
        if changes and torch.is_grad_enabled():
            with torch.no_grad():
                local(model.get_parameter(config.weight)).view(-1)[0] += config.by
        loss = (given(batch["x"]) - batch["y"]) ** 2
        return {"loss": loss / accelerator.num_processes if config.divides and step >= config.at else loss}

    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, Numbers(), Numbers(), config)


if __name__ == "__main__":
    run(main, Config)
