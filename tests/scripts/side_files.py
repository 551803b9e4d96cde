"""A recipe whose `export` fails from one of its calls on, or reads the weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 4
    max_steps: int | None = 4
    learning_rate: float = 1e-2
    log_every: int = 2
    fails: int = flag(99, "number of the first call of export that fails, from 0")
    reads: bool = flag(False, "whether export writes the norm of a weight")
    width: int = flag(1, "millions of elements of a weight that takes no memory, because it is one that is expanded")


class Pairs(TensorDataset):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.tensors[0][index]}


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["x"]).square().mean(1)}


def main(config: Config) -> None:
    accelerator = start(config)
    model, calls = nn.Linear(3, 3), []
    if config.width > 1:
        model.scale = nn.Parameter(torch.ones(1).expand(config.width * 10**6), requires_grad=False)

    def export(folder: Path) -> None:
        calls.append(folder)
        (folder / "labels.txt").write_text("zero")
        if len(calls) > config.fails:
            raise ValueError("the words are gone")
        (folder / "words.txt").write_text(f"{float(model.weight.norm()):.4f}" if config.reads else "one two")

    data = Pairs(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, data, data, config, export=export)


if __name__ == "__main__":
    run(main, Config)
