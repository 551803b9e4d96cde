"""A recipe that writes how many bytes of tensors each process holds before each of its forward passes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelerate_recipes import RunConfig, fit, run, start
from accelerate_recipes.common.data import Batch
from benchmarks.memory import live_bytes
from recipes.linear_regression import TableDataset


@dataclass(kw_only=True)
class Config(RunConfig):
    max_steps: int | None = 2
    batch_size: int = 16
    micro_batch_size: int | None = 1
    check_steps: int = 0


class Layer(nn.Linear):
    pass


class Network(nn.Sequential):
    _no_split_modules = ["Layer"]
    tp_plan = {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"}


def main(config: Config) -> None:
    accelerator = start(config)
    generator = torch.Generator().manual_seed(0)
    dataset = TableDataset(torch.rand(32, 256, generator=generator), torch.rand(32, generator=generator))
    model = Network(*(Layer(256, 256) for _ in range(4)), nn.Linear(256, 1))
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    lines = [str(num_bytes)]

    def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            lines.append(str(live_bytes()))
        return {"loss": (model(batch["features"]).squeeze(-1) - batch["target"]) ** 2}

    fit(accelerator, model, torch.optim.SGD(model.parameters(), 0.01), forward_step, dataset, dataset, config)
    (config.output_dir / f"held_{accelerator.process_index}.txt").write_text(" ".join(lines))


if __name__ == "__main__":
    run(main, Config)
