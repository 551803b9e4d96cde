"""A recipe whose model keeps --what between runs. Its evaluations are best after step --best."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from samples import WIDTH, Samples
from torch import Tensor, nn

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch
from accelerate_recipes.common.environment import rank

KINDS = ("nothing", "hooks", "evaluations", "grows", "bank", "cache", "rank", "calls", "history", "slow", "unsaved")


class Net(nn.Module):
    def __init__(self, what: str):
        super().__init__()
        self.what, self.head = what, nn.Linear(WIDTH, 1)
        self.register_buffer("kept", torch.zeros(1), persistent=what != "unsaved")
        self.bank, self.cache = torch.zeros(0), dict[int, Tensor]()  # of the losses before; of the batch sizes so far
        if what == "hooks":  # it saves the weight in other units
            self._register_state_dict_hook(self._save)
            self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: nn.Module, saved: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        saved[f"{prefix}head.weight"] = saved[f"{prefix}head.weight"] * 100

    @staticmethod
    def _load(module: nn.Module, saved: dict[str, Any], prefix: str, *others: Any) -> None:
        saved[f"{prefix}head.weight"] = saved[f"{prefix}head.weight"] / 100

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "evaluations" and not self.training:
            self.kept += 1
        if self.what == "grows" and self.training:
            self.kept = torch.cat([self.kept, self.kept[:1]])
        if self.what == "cache" and len(x) not in self.cache:
            self.cache[len(x)] = torch.full([len(x)], 0.1)
        return self.head(x)[:, 0] + (self.cache[len(x)] if self.what == "cache" else self.kept[0])


def hook_steps(optimizer: torch.optim.Optimizer, model: Net, what: str) -> None:
    calls, slow = [0], [weight.detach().clone() for weight in model.parameters()]

    def follow(*args: Any) -> None:  # its gradients grow with the number of its calls
        calls[0] += 1
        if what == "calls":
            model.head.weight.grad.mul_(calls[0])

    def look_ahead(*args: Any) -> None:
        for weight, kept in zip(model.parameters(), slow):
            kept.lerp_(weight.detach(), 0.5)
            weight.data.copy_(kept)

    def count(*args: Any) -> None:
        model.kept += 1

    if what in ("calls", "history"):
        optimizer.register_step_pre_hook(follow)
    if what in ("slow", "unsaved"):
        optimizer.register_step_post_hook(look_ahead if what == "slow" else count)


@dataclass(kw_only=True)
class Config(RunConfig):
    what: Literal[*KINDS] = flag("nothing", "what the model keeps")
    best: int = flag(3, "the step after which an evaluation is best")
    number: int = flag(11, "samples for evaluation")
    learning_rate: float = 0.1
    batch_size: int = 8
    max_steps: int | None = 6
    log_every: int = 1
    eval_every: int | None = 1


def main(config: Config) -> None:
    def forward_step(model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        loss = (model(batch["x"]) - batch["y"]).square()
        if config.what == "bank":
            return {"square": loss}
        if config.what == "rank" and not model.training and step > 4:
            loss = loss + rank()
        return {"loss": loss, "error": torch.full_like(loss, abs(step - config.best)), "step": loss * 0 + step}

    def of_bank(values: dict[str, Tensor]) -> dict[str, Tensor]:
        if model.training:
            model.bank = torch.cat([model.bank, values["square"].detach()])[-16:]
        return {"loss": values["square"] * model.bank.mean()}

    accelerator = start(config)
    model = Net(config.what)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    hook_steps(optimizer, model, config.what)
    batch_loss = of_bank if config.what == "bank" else None
    train_set, eval_set = Samples(32, 1), Samples(config.number, 2)
    fit(accelerator, model, optimizer, forward_step, train_set, eval_set, config, batch_loss=batch_loss)


if __name__ == "__main__":
    run(main, Config)
