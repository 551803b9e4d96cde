"""A recipe that begins something, --what, at step 4, after the checked steps."""

import copy
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from samples import WIDTH, Samples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from accelerate_recipes import RunConfig, fit, flag, run, start
from accelerate_recipes.common.data import Batch

BEGIN = 3
NOW: dict[str, Any] = {"step": 0}
HANDLES: list[Any] = []  # of what a forward_step did once


def is_late() -> bool:
    return NOW["step"] >= BEGIN


class Normed(torch.autograd.Function):
    """Changes nothing but the gradient, by all of its features."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm(dim=-1, keepdim=True))


def other_units(wide: Tensor, what: str) -> Tensor:
    if what == "width":  # of all units, later of some
        wide = wide.clone()
        wide[..., 12 if is_late() else 32 :] = 0
    if what == "rolled":
        wide = wide.roll(3 if is_late() else 0, -1)
    if what == "mean_of_units":  # from the first step on, then without effect
        return wide - (0.5 if is_late() else 0.0) * wide.mean(-1, keepdim=True)
    return wide * torch.linspace(1, 0.2, wide.shape[-1]) if what == "ramp" and is_late() else wide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.size = 0.0
        self.register_buffer("active", torch.zeros(()))

    def forward(self, hidden: Tensor, what: str) -> Tensor:
        if what == "detached" and is_late():  # only the last block trains now
            hidden = hidden.detach()
        wide = F.gelu(self.up(self.norm(hidden)))
        if what == "dropout" and is_late():
            wide = F.dropout(wide, 0.3, self.training)
        if what == "cap" and is_late():
            wide = wide * (2 / wide.norm(dim=-1, keepdim=True)).clamp(max=1)
        if what == "units" and self.training:  # from the first step on
            self.active += (wide.detach() > 0).sum()
        if what == "own_gradient" and is_late():
            wide = Normed.apply(wide)
        wide = other_units(wide, what)
        if what == "mean_of_samples" and self.training and is_late():
            self.active.copy_(wide.detach().mean())
        if what == "saves_itself" and is_late():
            self.active.fill_(NOW["step"])
        self.activity = wide.pow(2).mean(-1)
        if is_late():
            self.size = hidden.pow(2).mean(-1).detach() if what == "own_momentum" else hidden.pow(2).mean(-1)
        return hidden + self.down(wide)


class SavesItself(Block):
    """As FakeQuantize of torch.ao does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}active"] = self.active if keep_vars else self.active.detach()


class LateNet(nn.Module):
    _no_split_modules = ["Block"]  # FSDP2 gathers each by itself

    def __init__(self, what: str):
        super().__init__()
        self.temperature = 1.0  # of evaluations
        self.register_buffer("total", torch.zeros(()))  # of an evaluation, as torchmetrics has it
        self.what, self.stem, self.head = what, nn.Linear(WIDTH, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(SavesItself() if what == "saves_itself" else Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        what = self.what if is_late() else ""
        hidden = first = self.stem(x)
        if what == "early_exit" and hidden.norm() < 1e9:
            return self.head(hidden).squeeze(-1)
        kept = list[Tensor]()
        for number, block in enumerate(self.blocks):
            if what != "skipped_layer" or number != 1:
                hidden = block(hidden, self.what)
                kept.append(block.activity)
            if (what == "once_more" or (what == "for_some" and x.sum() > 0)) and number == 1:
                hidden = block(hidden, self.what)
            if what == "between":  # the stages of a pipeline
                hidden = 0.9 * hidden
        if what == "skip_connection":
            hidden = hidden + torch.where(first > 0, first, 0)
        self.penalty: Any = sum(kept) if what == "list" else 0.0
        if what in ("activity", "size"):
            name = "activity" if what == "activity" else "size"
            self.penalty = sum(getattr(block, name) for block in self.blocks)
        output = self.head(hidden).squeeze(-1) + 0.1 * self.penalty
        if self.what == "total" and not self.training:
            self.total += output.mean()
        return output if self.training else output * self.temperature


def change_once(model: Any, what: str) -> None:
    if what == "new_hook" and not HANDLES:
        HANDLES.append(model.blocks[2].register_forward_hook(lambda module, args, output: 0.9 * output))
    if what == "frozen" and not HANDLES:
        HANDLES.append(model.blocks[2].requires_grad_(False))


def change_more(whole: nn.Module, batch: Batch, output: Tensor, step: int) -> float:
    """Changes the batch, or the mode of the model until an evaluation ends. Returns a factor for the output."""
    if whole.what == "batch" and step >= BEGIN:
        batch["y"] = 2 * batch["y"]
        if not whole.training:
            batch["weight"] = 1.0 + (output.detach() > 0).float()
    if whole.what == "eval_mode" and step == 1 and whole.training:
        whole.eval()
    return 0.8 if whole.what == "eval_mode" and not whole.training else 1.0


def penalty(model: Any, given: Tensor, output: Tensor, whole: Any) -> Tensor:
    what = getattr(whole, "what", "")
    if what == "gradient_penalty" and model.training:
        given = given.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return 0.1 * slope.pow(2).sum(-1)
    if what == "teacher":  # an average of weights that begins late copies the model, too
        HANDLES[:] = HANDLES or [copy.deepcopy(whole).requires_grad_(False)]
        return 0.1 * (output - HANDLES[0](given).detach()) ** 2
    return torch.zeros(())


def forward_step(model: Any, batch: Batch, step: int, whole: nn.Module, captured: list[Tensor]) -> dict[str, Tensor]:
    NOW["step"], what = step, whole.what if step >= BEGIN else ""
    change_once(model, what)
    output = model(batch["x"])
    more = penalty(model, batch["x"], output, whole if what else None)
    if what == "second_view":
        output = output - model(-batch["x"])
    if what == "neighbours":
        output = output + 0.5 * output.roll(1)
    if what == "target":
        with torch.no_grad():
            more = model(-batch["x"]).abs()
    if what in ("penalty", "penalty_of_trained"):
        weights = (
            whole.parameters() if what == "penalty" else filter(lambda each: each.requires_grad, model.parameters())
        )
        more = 1e-2 * sum(weight.pow(2).sum() for weight in weights)
    if what in ("one_layer", "first_layer"):
        more = whole.blocks[2 if what == "one_layer" else 0](whole.stem(batch["x"]), "").mean(1)
    if what == "of_the_other_stage":
        more = 1e-2 * captured[0].pow(2).sum()
    if what == "captured":
        more = 1e-2 * sum(weight.pow(2).sum() for weight in captured)
    if what == "factor":  # of the gradient of a process, which its loss does not show
        output = output.detach() + (output - output.detach()) * (1 + 0.5 * float(os.environ.get("RANK", 0)))
    if whole.what == "running_mean" and model.training:  # from the first step on
        NOW["mean"] = 0.9 * NOW.get("mean", 0.0) + 0.1 * float(output.detach().mean())
        more = 0.1 * (output - NOW["mean"]) ** 2
    output = output * change_more(whole, batch, output, step)
    if what == "number":
        more = torch.tensor(1e-3 * float(whole.blocks[0].up.weight.norm()))
    is_measured = whole.what == "measured" and not model.training
    measured = {"activity": whole.blocks[0].activity * float(step >= BEGIN)} if is_measured else {}
    return measured | {"loss": (output - batch["y"]) ** 2 + more}


def note(means: dict[str, float]) -> dict[str, float]:
    NOW.setdefault("losses", []).append(means["loss"])
    return means


def set_temperature(means: dict[str, float], model: nn.Module) -> dict[str, float]:
    """A number that the next evaluations use."""
    model.temperature = 1 + 0.1 * means["loss"]
    return means


def read_total(means: dict[str, float], model: nn.Module) -> dict[str, float]:
    total = float(model.total)
    model.total.zero_()
    return means | {"total": total}


def only_largest(module: Any, args: Any, output: Tensor) -> Tensor:
    """Keeps the largest units, from step 4 on."""
    return output * (output >= output.topk(8, -1).values[..., -1:]) if is_late() else output


def lower_momentum(means: dict[str, float], optimizer: Any) -> dict[str, float]:
    optimizer.param_groups[0]["momentum"] *= 0.5
    return means


def shrink_head(means: dict[str, float], model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        model.head.weight.mul_(0.8 if is_late() else 1.0)
    return means


def shrink_groups(optimizer: Any, *others: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"] if is_late() else ():
                weight.mul_(0.9)


def hook(module: Any, args: Any, output: Tensor, model: nn.Module) -> Tensor:
    if not is_late():
        return output
    return output / (1 + torch.sqrt(sum(weight.pow(2).sum() for weight in model.parameters())))


def clip(optimizer: Any, *others: Any, model: nn.Module) -> None:
    if is_late():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def follow_the_loss(optimizer: Any, *others: Any, model: nn.Module) -> None:
    """Each process by its own samples: a clean gradient in all of them, and an update that differs."""
    if is_late():
        optimizer.param_groups[0]["momentum"] = min(0.9, float(model.size.mean()))


def shrink_weights(*others: Any, weights: list[Tensor]) -> None:
    for weight in weights if is_late() else ():
        weight.data.mul_(0.9)


def freeze_head(*others: Any, model: nn.Module) -> None:
    """As DINO does with its last layer."""
    for weight in model.head.parameters() if is_late() else ():
        weight.grad = None


def mask_weights(*others: Any, model: nn.Module) -> None:
    for weight in model.parameters() if is_late() else ():
        weight.data.mul_(0.9)


def prune_once(*others: Any, model: nn.Module) -> None:
    """Renames the weight."""
    if is_late() and not HANDLES:
        HANDLES.append(prune.l1_unstructured(model.blocks[1].up, "weight", amount=0.4))


def shrink(optimizer: Any, *others: Any, what: str) -> None:
    """Changes gradients by their norms, or by random numbers."""
    for weight in (weight for group in optimizer.param_groups for weight in group["params"] if is_late()):
        weight.grad.mul_(0.1 / float(weight.grad.norm()) if what == "norm_in_step" else torch.rand_like(weight.grad))


@dataclass(kw_only=True)
class Config(RunConfig):
    what: str = flag("nothing", "what begins")
    batch_size: int = 8
    micro_batch_size: int | None = 2
    max_steps: int | None = 6
    log_every: int = 1
    eval_every: int | None = 3


def main(config: Config) -> None:
    accelerator = start(config)
    model = LateNet(config.what)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    if config.what == "norm_in_a_hook":
        model.register_forward_hook(partial(hook, model=model))
    if config.what == "clipping":
        optimizer.register_step_pre_hook(partial(clip, model=model))
    if config.what == "captured_weights":  # which FSDP2 replaces
        optimizer.register_step_pre_hook(partial(shrink_weights, weights=[*model.parameters()]))
    if config.what == "no_gradient":
        optimizer.register_step_pre_hook(partial(freeze_head, model=model))
    if config.what == "limits":
        optimizer.register_step_pre_hook(lambda *others: nn.utils.clip_grad_value_(model.parameters(), 0.05))
    masks, prunes = partial(mask_weights, model=model), partial(prune_once, model=model)
    after_step = {"masks": masks, "pruned": prunes, "groups": shrink_groups}
    if config.what == "hook_of_units":
        model.blocks[0].up.register_forward_hook(only_largest)
    if config.what in after_step:
        optimizer.register_step_post_hook(after_step[config.what])
    if config.what == "own_momentum":
        optimizer.register_step_pre_hook(partial(follow_the_loss, model=model.blocks[0]))
    if config.what in ("norm_in_step", "noise_in_step"):
        optimizer.register_step_pre_hook(partial(shrink, what=config.what))
    values = partial(forward_step, whole=model, captured=[*model.parameters()])
    # As torch's ReduceLROnPlateau: evaluations, which all processes share, set the rate of later steps.
    follows: Any = {"summarize": note, "schedule": lambda step, *others: 0.5 ** len(NOW.get("losses", []))}
    after_evaluation: dict[str, Any] = {
        "momentum": partial(lower_momentum, optimizer=optimizer),
        "total": partial(read_total, model=model),
        "temperature": partial(set_temperature, model=model),
        "head": partial(shrink_head, model=model),
    }
    options = {"summarize": after_evaluation[config.what]} if config.what in after_evaluation else {}
    options = follows if config.what == "plateau" else options
    fit(accelerator, model, optimizer, values, Samples(32, 1), Samples(11, 2), config, **options)


if __name__ == "__main__":
    run(main, Config)
