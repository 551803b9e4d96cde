"""Optimizers that users bring, and their habits."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def norm_of_all_gradients(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    norms = [float(other.grad.norm()) for other in group["params"] if other.grad is not None]
    return step / (1e-3 + sum(norm**2 for norm in norms) ** 0.5)


def counter_in_the_group(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    group["count"] = group.get("count", 0) + 1
    return step / group["count"]


def number_in_the_state(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    optimizer.state[weight]["count"] = optimizer.state[weight].get("count", 0) + 1
    return step / optimizer.state[weight]["count"]


def numbers_in_the_group(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    """A tuple, as betas are, and a list that grows."""
    first, second = group.setdefault("pair", (1.0, 2))
    group["pair"] = first / 2, second + 1
    group.setdefault("history", []).append(second)
    return step * first / len(group["history"])


def number_or_tensor(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    """A tensor of the shape of a matrix, a number for a vector, whole or not."""
    state = optimizer.state[weight]
    state["sum"] = state.get("sum", 1) + (step.abs() if weight.ndim > 1 else 0.5)
    return step / state["sum"]


def state_of_all(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    optimizer.state["all"] = {"count": optimizer.state.get("all", {}).get("count", 0) + 1}
    return step / optimizer.state["all"]["count"]


def orthogonal(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    return step / (1e-6 + torch.linalg.matrix_norm(weight.grad, 2)) if weight.ndim == 2 else step


def lars(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    of_weight, of_gradient = weight.norm(), weight.grad.norm()
    return step * (of_weight / of_gradient) if of_weight > 0 and of_gradient > 0 else step


def lars_without_branches(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    if weight.ndim < 2:
        return step
    of_weight, of_gradient = weight.norm(), weight.grad.norm()
    return step * torch.where(of_gradient > 0, of_weight / of_gradient, torch.ones_like(of_weight))


def centralized_gradient(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    return step - step.mean(tuple(range(1, step.ndim)), keepdim=True) if step.ndim > 1 else step


def variance_of_all_gradients(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    total = sum(other.grad.square().sum() for other in group["params"] if other.grad is not None)
    return step / (1e-3 + total.sqrt())


# (optimizer, group, weight, what plain SGD takes from the weight) -> what to take from it
SGD_HABITS: dict[str, Callable[[Any, dict, Tensor, Tensor], Tensor]] = {
    "norm_of_each_weight": lambda optimizer, group, weight, step: step * float(weight.norm()),
    "norm_of_all_gradients": norm_of_all_gradients,
    "momentum_by_id": lambda optimizer, group, weight, step: optimizer.by_id[id(weight)].mul_(0.9).add_(step),
    "weights_in_an_attribute": lambda optimizer, group, weight, step: step,
    "state_from_the_constructor": lambda optimizer, group, weight, step: (
        step + 0.01 * (weight - optimizer.state[weight]["start"])
    ),
    "noise_in_the_step": lambda optimizer, group, weight, step: step + 1e-3 * torch.randn_like(weight),
    "counter_in_an_attribute": lambda optimizer, group, weight, step: step / optimizer.count,
    "counter_in_the_group": counter_in_the_group,
    "number_in_the_state": number_in_the_state,
    "numbers_in_the_group": numbers_in_the_group,
    "number_or_tensor": number_or_tensor,
    "state_of_all": state_of_all,
    "rate_of_each_weight": lambda optimizer, group, weight, step: step * getattr(weight, "rate", 1.0),
    "sign": lambda optimizer, group, weight, step: step.sign() * group["lr"],
    "orthogonal": orthogonal,
    "lars": lars,
    "lars_without_branches": lars_without_branches,
    "centralized_gradient": centralized_gradient,
    "variance_of_all_gradients": variance_of_all_gradients,
}


class Sgd(torch.optim.Optimizer):
    """Plain SGD with one habit."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, habit: str = ""):
        super().__init__(params, {"lr": lr})
        self.habit, self.count = habit, 0
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self.own_weights = weights if habit == "weights_in_an_attribute" else []
        self.by_id = {id(weight): torch.zeros_like(weight) for weight in weights}
        if habit == "state_from_the_constructor":
            for weight in weights:
                self.state[weight]["start"] = weight.detach().clone()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += self.habit == "counter_in_an_attribute"
        for group in self.param_groups:
            for weight in self.own_weights or group["params"]:
                if weight.grad is not None:
                    weight -= SGD_HABITS[self.habit](self, group, weight, weight.grad * group["lr"])


class MyMuon(torch.optim.Muon):
    """A subclass with another name."""


class MyAdafactor(torch.optim.Adafactor):
    """A subclass with another name."""


class MyRprop(torch.optim.Rprop):
    """A subclass with another name."""


def hooked_sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(weights, lr=3e-2)

    def scale(optimizer: torch.optim.Optimizer, *others: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad /= weight.grad.norm() + 1e-3

    optimizer.register_step_pre_hook(scale)
    return optimizer


class Lookahead(torch.optim.SGD):
    """Every second step goes half of the way back (Zhang et al. 2019). The slow weights are in the state."""

    def __init__(self, weights: Iterable[nn.Parameter]):
        super().__init__(weights, lr=3e-2)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("slow", weight.detach().clone())
        super().step()
        self.count += 1
        if self.count % 2 == 0:
            for group in self.param_groups:
                for weight in group["params"]:
                    slow = self.state[weight]["slow"]
                    slow += 0.5 * (weight - slow)
                    weight.copy_(slow)


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al. 2021), which takes two gradients per step."""

    def first_step(self) -> None:
        """Climbs."""

    def second_step(self) -> None:
        """Goes back, and down."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM requires a closure"


class NeedsClosure(torch.optim.SGD):
    """Says that its closure may be left out, as LBFGS of many packages does, and fails without it."""

    def step(self, closure: Any = None) -> float:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return float(loss)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023). The update of an element depends on the gradients of that element alone."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    weight -= group["lr"] * torch.lerp(weight.grad, mean, 0.9).sign()
                    mean.lerp_(weight.grad, 0.01)


def clips_gradients(model: nn.Module) -> torch.optim.Optimizer:
    """Adaptive gradient clipping (Brock et al. 2021), by a hook that closes over the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-2)

    def clip(*others: Any) -> None:
        for weight in model.parameters():
            if weight.grad is not None:
                most = 0.01 * weight.detach().norm().clamp(min=1e-3) / weight.grad.norm().clamp(min=1e-6)
                weight.grad.mul_(most.clamp(max=1.0))

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clips_weights(model: nn.Module) -> torch.optim.Optimizer:
    """As in the Wasserstein GAN (Arjovsky et al. 2017), by a hook that closes over the model."""
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)

    @torch.no_grad()
    def clip(*others: Any) -> None:
        for weight in model.parameters():
            weight.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clip)
    return optimizer


def rates_by_weights(model: nn.Module) -> torch.optim.Optimizer:
    """Sets the rate by the weights after each step, in a hook. ZeRO calls such a hook before it copies the weights."""
    optimizer, start = torch.optim.SGD(model.parameters(), lr=1e-2), model.get_parameter("head.bias").detach().clone()

    def follow(*others: Any) -> None:
        has_moved = bool((model.get_parameter("head.bias") != start).any())
        optimizer.param_groups[0]["dampening"] = 0.5 * has_moved

    optimizer.register_step_post_hook(follow)
    optimizer.param_groups[0]["momentum"] = 0.9
    return optimizer


def rates_by_attribute(model: nn.Module) -> torch.optim.Optimizer:
    for weight in model.get_submodule("stem").parameters():
        vars(weight)["rate"] = 0.1
    return Sgd(model.parameters(), lr=3e-2, habit="rate_of_each_weight")


def matrices(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.ndim == 2]


ZOO: dict[str, Build] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=3e-2, momentum=0.9, nesterov=True),
    "amsgrad": lambda weights: torch.optim.Adam(weights, lr=3e-3, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.9, eps=1e-3),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-2),
}
OF_TORCH = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "LBFGS")
HABITS: dict[str, Build] = {
    **{habit: (lambda weights, habit=habit: Sgd(weights, lr=3e-2, habit=habit)) for habit in SGD_HABITS},
    **{name: (lambda weights, name=name: getattr(torch.optim, name)(weights, lr=1e-2)) for name in OF_TORCH},
    "Muon": lambda weights: torch.optim.Muon(matrices(weights), lr=1e-3),
    "subclass_of_muon": lambda weights: MyMuon(matrices(weights), lr=1e-3),
    "subclass_of_adafactor": lambda weights: MyAdafactor(weights, lr=1e-2),
    "subclass_of_rprop": lambda weights: MyRprop(weights, lr=1e-3),
    "hook_before_the_step": hooked_sgd,
    "lookahead": Lookahead,
    "lion": lambda weights: Lion(weights, lr=1e-2),
    "plain_sgd": lambda weights: torch.optim.SGD(weights, lr=3e-2),
    "sparse_adam": lambda weights: torch.optim.SparseAdam(weights, lr=3e-3),
    "closure_or_nothing": lambda weights: NeedsClosure(weights, lr=3e-2),
}


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights are an average in evaluation, and between it and the last iterate in training (Defazio et al.
    2024): x and y, while z is in the state."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, beta: float = 0.9):
        super().__init__(weights, {"lr": lr, "beta": beta, "num_steps": 0, "trains": True})

    @torch.no_grad()
    def switch(self, trains: bool) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["trains"] != trains else []:
                if "z" in self.state[weight]:
                    weight.lerp_(self.state[weight]["z"], 1 - group["beta"] if trains else 1 - 1 / group["beta"])
            group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            share, rate = 1 / group["num_steps"], group["lr"]
            for weight in group["params"]:
                if weight.grad is not None:
                    z = self.state[weight].setdefault("z", weight.detach().clone())
                    weight.lerp_(z, share).add_(weight.grad, alpha=rate * (group["beta"] * (1 - share) - 1))
                    z.sub_(weight.grad, alpha=rate)


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ScheduleFree(model.parameters(), lr=3e-2)
    model.switch = optimizer.switch  # type: ignore[assignment]
    return optimizer


OF_MODEL: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    one.__name__: one for one in (clips_gradients, clips_weights, rates_by_attribute, rates_by_weights, schedule_free)
}


def of_earlier_steps(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(weights, lr=3e-2, momentum=0.9)
    for weight in weights:
        weight.grad = 0.1 * weight.detach()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


OTHERS: dict[str, Build] = {
    "of_earlier_steps": of_earlier_steps,
    "initial_sums": lambda weights: torch.optim.Adagrad(weights, lr=3e-2, initial_accumulator_value=0.1),
    "head_only": lambda weights: torch.optim.AdamW(weights[-2:], lr=3e-3),
    "strange_weight": lambda weights: torch.optim.AdamW([*weights, nn.Parameter(torch.zeros(3))], lr=3e-3),
    "two": lambda weights: [torch.optim.SGD(weights[:2], lr=3e-2), torch.optim.SGD(weights[2:], lr=3e-2)],  # type: ignore
    "sam": lambda weights: Sam(weights, lr=3e-2),
    "tensor_rate": lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(3e-3)),
}
