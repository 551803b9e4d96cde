"""A recipe with one habit of ordinary training code that may go wrong on several processes.

habits.py --habit NAME
"""

import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.functional import dropout as dropout_by_name
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset, WeightedRandomSampler, default_collate
from zoo import VOCABULARY, WIDTH, Block, Net, Samples, tied

from common import RunConfig, fit, flag, run, start
from common.data import Batch

OWN = torch.Generator().manual_seed(3)
NUMPY_OWN = numpy.random.default_rng(3)


# Habits of forward_step. Each takes (model, batch), and `whole` is the model from outside.


def square(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    error = output - batch["y"]
    return {"loss": error**2, "error": error.abs()}


def plain(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"]), batch)


def closes_over_the_model(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(whole(batch["x"]), batch)


def calls_module(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(getattr(model, "module", model)(batch["x"]), batch)


def calls_layers(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    inner = getattr(model, "module", model)
    return square(inner.head(inner.blocks[0](inner.stem(batch["x"]))).squeeze(-1), batch)


def calls_functionally(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(functional_call(whole, dict(whole.named_parameters()), (batch["x"],)), batch)


def calls_twice(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square((model(batch["x"]) + model(-batch["x"])) / 2, batch)


def changes_the_batch(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"].mul_(2)), batch)


def noise_of_python(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"] * random.uniform(0.5, 1.5)), batch)


def noise_of_numpy(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"] * float(numpy.random.uniform(0.5, 1.5))), batch)


def noise_of_torch(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])), batch)


def noise_of_its_own(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return square(model(batch["x"] + 0.3 * torch.randn(batch["x"].shape, generator=OWN)), batch)


def mixup(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    share, order = random.betavariate(1, 1), torch.randperm(len(batch["x"]))
    mixed = {name: share * batch[name] + (1 - share) * batch[name][order] for name in ("x", "y")}
    return square(model(mixed["x"]), mixed)


def contrast(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    output = model(batch["x"])
    scores = -(output.unsqueeze(1) - batch["y"].unsqueeze(0)).abs()
    return {"loss": F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")}


def names_by_data(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    values = square(model(batch["x"]), batch)
    return values | ({"high": batch["y"]} if float(batch["y"].sum()) > 0 else {"low": batch["y"]})


def order_by_data(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    values = square(model(batch["x"]), batch) | {"x": batch["x"][:, 0]}
    return values if float(batch["y"].sum()) > 0 else dict(reversed(values.items()))


def gradient_penalty(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    x = batch["x"].clone().requires_grad_()
    output = model(x)
    if not torch.is_grad_enabled():
        return square(output, batch)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return {name: value + 0.1 * slope.square().sum(1) for name, value in square(output, batch).items()}


def counts_its_calls(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    vars(counts_its_calls)["number"] = number = vars(counts_its_calls).get("number", 0) + 1
    return {name: value * number for name, value in square(model(batch["x"]), batch).items()}


def means_over_the_batch(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    values = square(model(batch["x"] - batch["x"].mean(0)), batch)
    return values


def weighs_by_earlier_losses(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    values = square(model(batch["x"]), batch)
    EARLIER.append(float(values["loss"].detach().mean()))
    return {name: value / (sum(EARLIER) / len(EARLIER)) for name, value in values.items()}


def follows_with_a_teacher(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    """As in BYOL: the teacher is a moving average of the model, updated in each forward pass."""
    if not TEACHER:
        TEACHER.append(deepcopy(whole).requires_grad_(False))
    output = model(batch["x"])
    with torch.no_grad():
        for slow, fast in zip(TEACHER[0].parameters(), whole.parameters()):
            slow.lerp_(fast, 0.1)
        target = TEACHER[0](batch["x"])
    return {"loss": (output - target - batch["y"]) ** 2}


EARLIER: list[float] = []
TEACHER: list[nn.Module] = []

STEPS = {
    one.__name__: one
    for one in (
        plain,
        closes_over_the_model,
        calls_module,
        calls_layers,
        calls_functionally,
        calls_twice,
        changes_the_batch,
        noise_of_python,
        noise_of_numpy,
        noise_of_torch,
        noise_of_its_own,
        mixup,
        contrast,
        names_by_data,
        order_by_data,
        gradient_penalty,
        counts_its_calls,
        means_over_the_batch,
        weighs_by_earlier_losses,
        follows_with_a_teacher,
    )
}

# Habits of models. "between" is what a block does between its two layers, which tensor parallelism divides.


class Between(Block):
    def __init__(self, between: Callable[[Tensor], Tensor], widens: int = 1):
        super().__init__()
        self.between = between
        self.up = nn.Linear(WIDTH, widens * 2 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.between(self.up(self.norm(hidden))))


def between(function: Callable[[Tensor], Tensor], widens: int = 1) -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList(Between(function, widens) for _ in range(2))
    model._no_split_modules = ["Between"]
    return model


def gated(hidden: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


def track(model: nn.Module, hidden: Tensor) -> Tensor:
    return 0.9 * model.mean + 0.1 * hidden.detach().mean(0) if model.training else model.mean


def running_mean(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean.copy_(track(model, hidden))
    return hidden - model.mean


def new_buffer(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean = track(model, hidden)
    return hidden - model.mean


def codebook(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean.copy_(track(model, hidden))
    return hidden + (model.mean - hidden).detach() * 0.5


def counter(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.mean += model.training
    return hidden * (1 + 0.1 * model.mean)


def python_counter(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    model.calls += model.training
    return hidden * (1 + 0.1 * model.calls)


def max_norm(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden + model.extra((x[:, 0].abs() * 10).long().clamp(max=VOCABULARY - 1))


def clamp(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.stem.weight.clamp_(-0.1, 0.1)
    return hidden


def vae(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden + 0.3 * torch.randn_like(hidden) * model.training


def drop_path(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    kept = (torch.rand(len(x), 1) > 0.3).float() if model.training else 1.0
    return hidden * kept


def layer_drop(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    return hidden if model.training and random.random() < 0.5 else model.extra(hidden)


def cache(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = hidden.detach().mean(0)
    return hidden - model.kept


def queue(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in MoCo: compares with the last samples, and puts these in their place."""
    similar = hidden @ model.queue.clone().t()
    if model.training:
        model.queue.copy_(torch.cat([hidden.detach(), model.queue])[: len(model.queue)])
    return hidden + similar.mean(1, keepdim=True) * 0.1


def normalized_weight(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in many heads for face recognition."""
    model.extra.weight.data = F.normalize(model.extra.weight.data)
    return model.extra(hidden)


def centers(model: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """As in the center loss: a mean for each class, from the samples that a process sees."""
    label = (x[:, 0] > 0).long()
    if model.training:
        for number in (0, 1):
            if (label == number).any():
                model.queue[number].lerp_(hidden[label == number].detach().mean(0), 0.5)
    return hidden - model.queue[label]


class Scale(nn.Module):
    """A number, as a weight without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scale * hidden


# What a model does before its head: (model, hidden states, x) -> hidden states; and the layer "extra" that it has.
AROUND: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    "batch_norm": (lambda model, hidden, x: model.extra(hidden), lambda: nn.BatchNorm1d(WIDTH)),
    "spectral_norm": (lambda model, hidden, x: model.extra(hidden), lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "max_norm": (max_norm, lambda: nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)),
    "layer_drop": (layer_drop, lambda: nn.Linear(WIDTH, WIDTH)),
    "called_on_its_output": (lambda model, hidden, x: model.extra(model.extra(hidden)), lambda: nn.LayerNorm(WIDTH)),
    "scalar_weight": (lambda model, hidden, x: model.extra(hidden), Scale),
    "unused_layer": (lambda model, hidden, x: hidden, lambda: nn.Linear(WIDTH, WIDTH)),
    "running_mean": (running_mean, nn.Identity),
    "new_buffer": (new_buffer, nn.Identity),
    "codebook": (codebook, nn.Identity),
    "counter": (counter, nn.Identity),
    "python_counter": (python_counter, nn.Identity),
    "clamp": (clamp, nn.Identity),
    "queue": (queue, nn.Identity),
    "centers": (centers, nn.Identity),
    "normalized_weight": (normalized_weight, lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "vae": (vae, nn.Identity),
    "drop_path": (drop_path, nn.Identity),
    "cache": (cache, nn.Identity),
    "detached_copy": (
        lambda model, hidden, x: hidden + F.linear(hidden, model.stem.weight.detach().clone()),
        nn.Identity,
    ),
    "topk": (lambda model, hidden, x: hidden * (hidden >= hidden.topk(8).values[:, -1:]), nn.Identity),
}


class Around(Net):
    """Does something before its head."""

    def __init__(self, habit: str):
        super().__init__()
        self.before_head, build = AROUND[habit]
        self.extra, self.calls, self.kept = build(), 0, None
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.before_head(self, hidden, x)).squeeze(-1)


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Net()
    for weight in model.parameters():
        weight.register_hook(hook)
    return model


def shared_data() -> nn.Module:
    model = Net()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return model


def strided() -> nn.Module:
    model = Net()
    model.stem.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return model


def mixed_types() -> nn.Module:
    model = Net()
    model.head.to(torch.float64)
    model.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    return model


def backward_hooked() -> nn.Module:
    model = Net()
    model.stem.register_full_backward_hook(lambda module, given, taken: tuple(one and one * 2 for one in given))
    return model


def hidden_hooked() -> nn.Module:
    model = Net()
    model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda name=name: Around(name)) for name in AROUND},
    "softmax_between": lambda: between(lambda hidden: hidden.softmax(-1)),
    "norm_between": lambda: between(lambda hidden: F.layer_norm(hidden, hidden.shape[-1:])),
    "gate_between": lambda: between(gated, widens=2),
    "mean_between": lambda: between(lambda hidden: hidden - hidden.mean(-1, keepdim=True)),
    "noise_between": lambda: between(lambda hidden: hidden + 0.3 * torch.randn_like(hidden)),
    "alpha_dropout_between": lambda: between(nn.AlphaDropout(0.3)),
    "dropout_by_name_between": lambda: between(lambda hidden: dropout_by_name(hidden, 0.3)),
    "flip_between": lambda: between(lambda hidden: hidden.flip(-1)),
    "gradients_clamped_by_hooks": lambda: hooked(lambda gradient: gradient.clamp(-0.01, 0.01)),
    "gradients_doubled_by_hooks": lambda: hooked(lambda gradient: 2 * gradient),
    "weights_that_share_memory": shared_data,
    "transposed_weight": strided,
    "mixed_types": mixed_types,
    "backward_hook": backward_hooked,
    "hook_on_hidden_states": hidden_hooked,
}

# Habits of data and samplers.


class DrawsForBatches(Samples):
    def __getitems__(self, ids: list[int]) -> list[dict[str, Any]]:
        return [self[index] | {"x": self.x[index] + 0.3 * torch.randn(WIDTH)} for index in ids]


class OwnGenerator(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"x": self.x[index] + 0.3 * torch.randn(WIDTH, generator=OWN)}


class DrawsForSamples(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(WIDTH)
        return super().__getitem__(index) | {"x": self.x[index] + noise}


class ChangesItsSamples(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.x[index] += 0.1
        return super().__getitem__(index)


DATA: dict[str, Callable[..., Dataset]] = {
    "draws_for_batches": DrawsForBatches,
    "dataset_with_its_own_generator": OwnGenerator,
    "draws_for_samples": DrawsForSamples,
    "changes_its_samples": ChangesItsSamples,
}


def masked(samples: list[dict[str, Any]]) -> Batch:
    batch = default_collate(samples)
    return batch | {"x": batch["x"] * (torch.rand(batch["x"].shape) > 0.2)}


SAMPLERS: dict[str, Callable[[int, torch.Generator], Any]] = {
    "weighted_sampler": lambda epoch, generator: list(WeightedRandomSampler([1.0, 2.0] * 16, 32)),
    "numpy_sampler": lambda epoch, generator: numpy.random.permutation(32),
    "global_sampler": lambda epoch, generator: torch.randperm(32),
    "sampler_of_its_own": lambda epoch, generator: NUMPY_OWN.permutation(32),
}

# Habits of optimizers.


def norm_of_all_gradients(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    norms = [float(other.grad.norm()) for other in group["params"] if other.grad is not None]
    return step / (1e-3 + sum(norm**2 for norm in norms) ** 0.5)


def counter_in_the_group(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    group["count"] = group.get("count", 0) + 1
    return step / group["count"]


def number_in_the_state(optimizer: Any, group: dict, weight: Tensor, step: Tensor) -> Tensor:
    optimizer.state[weight]["count"] = optimizer.state[weight].get("count", 0) + 1
    return step / optimizer.state[weight]["count"]


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


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{habit: (lambda weights, habit=habit: Sgd(weights, lr=3e-2, habit=habit)) for habit in SGD_HABITS},
    "subclass_of_muon": lambda weights: MyMuon([weight for weight in weights if weight.ndim == 2], lr=1e-2),
    "subclass_of_adafactor": lambda weights: MyAdafactor(weights, lr=1e-2),
    "subclass_of_rprop": lambda weights: MyRprop(weights, lr=1e-3),
    "hook_before_the_step": hooked_sgd,
    "lookahead": lambda weights: Lookahead(weights),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2),
}


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


# Habits of causal language models, for pipelines.


def causal_plain(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["next"])}


def causal_twice(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["next"]) + model(batch["tokens"].flip(1), batch["next"])}


def causal_margin(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    first, second = model(batch["tokens"], batch["next"]), model(batch["next"], batch["tokens"])
    return {"loss": F.relu(1 + first - second)}


def causal_random_tokens(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    masked = torch.where(torch.rand(batch["tokens"].shape) < 0.2, 0, batch["tokens"])
    return {"loss": model(masked, batch["next"])}


def causal_changed_in_place(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    batch["tokens"].add_(1).remainder_(VOCABULARY)
    return {"loss": model(batch["tokens"], batch["next"])}


def causal_auxiliary(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    embedding = whole.get_input_embeddings().weight
    return {"loss": model(batch["tokens"], batch["next"]) + embedding.square().mean()}


def causal_shifted(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"][:, 1:], batch["next"][:, 1:])}


def causal_weighted(model: Any, batch: Batch, whole: nn.Module) -> dict[str, Tensor]:
    return {"loss": model(batch["tokens"], batch["next"]) * (1 + batch["label"])}


CAUSAL = {
    one.__name__: one
    for one in (
        causal_plain,
        causal_twice,
        causal_margin,
        causal_random_tokens,
        causal_changed_in_place,
        causal_auxiliary,
        causal_shifted,
        causal_weighted,
    )
}


def hidden_scaled() -> nn.Module:
    model = tied()
    model.model.norm.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def embeddings_scaled() -> nn.Module:
    model = tied()
    forward = model.model.forward

    def scaled(input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **named: Any) -> Any:
        embedded = model.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return forward(inputs_embeds=3 * embedded, **named)

    model.model.forward = scaled
    return model


CAUSAL_MODELS = {"causal_hook_on_hidden_states": hidden_scaled, "causal_scaled_embeddings": embeddings_scaled}

HABITS = [*STEPS, *MODELS, *DATA, *SAMPLERS, *OPTIMIZERS, *CAUSAL, *CAUSAL_MODELS, "masks_of_collate_fn"]


@dataclass(kw_only=True)
class Config(RunConfig):
    habit: str = flag("plain", "which habit")
    batch_size: int = 8
    micro_batch_size: int | None = 2
    max_steps: int | None = 5
    log_every: int = 1
    eval_every: int | None = 3


def main(config: Config) -> None:
    accelerator = start(config)
    habit = config.habit
    assert habit in HABITS
    is_causal = habit.startswith("causal")
    model = (tied if is_causal else Net)() if habit not in MODELS | CAUSAL_MODELS else (MODELS | CAUSAL_MODELS)[habit]()
    weights = list(model.parameters())
    build = OPTIMIZERS.get(habit, lambda weights: torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.1))
    step = CAUSAL.get(habit, causal_plain) if is_causal else STEPS.get(habit, plain)
    data = DATA.get(habit, Samples)
    fit(
        accelerator,
        model,
        build(weights),
        lambda given, batch: step(given, batch, model),
        data(32, seed=1),
        Samples(11, seed=2),
        config,
        collate_fn=masked if habit == "masks_of_collate_fn" else None,
        sampler=SAMPLERS.get(habit),
    )


if __name__ == "__main__":
    run(main, Config)
