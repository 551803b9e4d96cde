"""A recipe that writes the ids of the training samples of each process, and means over the evaluated ids."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.evaluation import evaluate_set
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.step.setup import Setup


class Recording(Dataset):
    """Samples {"id": index, "x": [index / size]}, with a "weight" if `weighted`; `fetched` has the ids in order."""

    def __init__(self, size: int, weighted: bool = False):
        self.size, self.weighted, self.fetched = size, weighted, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        self.fetched.append(index)
        sample = {"id": index, "x": torch.tensor([index / self.size])}
        return sample | ({"weight": 1 + index % 3} if self.weighted else {})


@dataclass(kw_only=True)
class Config(RunConfig):
    weighted: bool = flag(False, "samples have weights 1, 2 and 3")


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    ids = batch["id"].double()
    return {"loss": (model(batch["x"]).squeeze(-1) - batch["x"].squeeze(-1) ** 2) ** 2, "id": ids, "id_squared": ids**2}


def main(config: Config) -> None:
    accelerator = start(config)
    train_set = Recording(50, config.weighted)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, train_set, Recording(5, config.weighted), config)
    rank = accelerator.process_index
    (Path(config.output_dir) / f"train_ids_{rank}.txt").write_text(" ".join(map(str, train_set.fetched)))

    plan = Plan.of(config, accelerator.layout, 50)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    engine = prepare(Setup(accelerator, model, optimizer, forward_step, plan))
    evaluated = {}
    for size in (1, 7, 359):
        eval_set = Recording(size)
        metrics, _ = evaluate_set(engine, eval_set, lambda: False, keeps=False)
        evaluated[size] = [metrics["id"], metrics["id_squared"], len(eval_set.fetched)]
    (Path(config.output_dir) / f"evaluated_{rank}.json").write_text(json.dumps(evaluated))


if __name__ == "__main__":
    run(main, Config)
