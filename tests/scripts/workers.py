"""A recipe whose workers of a loader fail.

workers.py --fault killed --num_workers 1
"""

import errno
import os
import signal
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch


@dataclass(kw_only=True)
class Config(RunConfig):
    batch_size: int = 4
    max_steps: int | None = 8
    check_steps: int = 0
    hang_timeout: float = 60.0
    size: int = flag(4, "numbers of a sample")
    fault: Literal["none", "killed", "files"] = flag("none", "what a worker of process 0 does in its third batch")


class Unsendable(str):
    """Fails on the way to the main process, as a tensor does where all files that a worker may open are open."""

    def __reduce__(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Numbers(Dataset):
    def __init__(self, config: Config):
        self.config, self.num_batches = config, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("batches are made at once")

    def __getitems__(self, ids: list[int]) -> dict[str, Any]:
        self.num_batches += get_worker_info() is not None
        if self.num_batches == 3 and os.environ.get("RANK", "0") == "0":
            if self.config.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.config.fault == "files":
                return {"x": torch.ones(len(ids), self.config.size), "name": [Unsendable("a") for _ in ids]}
        return {"x": torch.ones(len(ids), self.config.size)}


def forward_step(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": model(batch["x"][:, :4]).squeeze(-1) ** 2}


def main(config: Config) -> None:
    accelerator = start(config)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    fit(accelerator, model, optimizer, forward_step, Numbers(config), Numbers(config), config)


if __name__ == "__main__":
    run(main, Config)
