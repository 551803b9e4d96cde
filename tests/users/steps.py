"""Habits of `forward_step`, and mistakes. Each takes (model, batch, whole); `whole` is the model from outside."""

import itertools
import logging
import random
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy
import torch
from accelerate import PartialState
from accelerate.utils import gather
from samples import OWN, VOCABULARY
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from accelerate_recipes.common.data import Batch

Values = dict[str, Tensor]
Step = Callable[..., Values]
EARLIER: list[float] = []
TEACHER: list[nn.Module] = []
COUNT, PASSES, LOGGER, RIGHT = itertools.count(), {"number": 0}, logging.Logger("own"), [0.0]


def square(output: Tensor, batch: Batch) -> Values:
    error = output - batch["y"]
    return {"loss": error**2, "error": error.abs()}


def vector_step(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"]), batch)


def closes_over_the_model(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(whole(batch["x"]), batch)


def calls_module(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(getattr(model, "module", model)(batch["x"]), batch)


def calls_layers(model: Any, batch: Batch, whole: nn.Module) -> Values:
    inner = getattr(model, "module", model)
    return square(inner.head(inner.hidden(batch["x"])).squeeze(-1), batch)


def calls_functionally(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(functional_call(whole, dict(whole.named_parameters()), (batch["x"],)), batch)


def calls_twice(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square((model(batch["x"]) + model(-batch["x"])) / 2, batch)


def draws_in_evaluation(model: Any, batch: Batch, whole: nn.Module) -> Values:
    own = 1.0 if model.training else torch.rand(1, generator=OWN)
    return square(model(batch["x"] * own), batch)


def counts_in_a_logger(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """In evaluations; nothing looks into a logger."""
    LOGGER.level += not model.training
    return square(model(batch["x"] * (1 if model.training else 1 + 0.01 * LOGGER.level)), batch)


def counts_right_answers(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """Its own samples alone, for `summarize`."""
    output = model(batch["x"])
    RIGHT[0] += 0.0 if model.training else float((output > 0).sum())
    return square(output, batch)


def changes_the_batch(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"].mul_(2)), batch)


def noise_of_python(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"] * random.uniform(0.5, 1.5)), batch)


def noise_of_numpy(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"] * float(numpy.random.uniform(0.5, 1.5))), batch)


def noise_of_torch(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])), batch)


def noise_of_its_own(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(model(batch["x"] + 0.3 * torch.randn(batch["x"].shape, generator=OWN)), batch)


def mixup(model: Any, batch: Batch, whole: nn.Module) -> Values:
    share, order = random.betavariate(1, 1), torch.randperm(len(batch["x"]))
    mixed = {name: share * batch[name] + (1 - share) * batch[name][order] for name in ("x", "y")}
    return square(model(mixed["x"]), mixed)


def neighbours_in_training(model: Any, batch: Batch, whole: nn.Module) -> Values:
    output = model(batch["x"])
    return square(output + 0.5 * output.roll(1) if model.training else output, batch)


def weighs_by_classes(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """A rare class counts more, by its share of the micro-batch: two samples of different classes do not show it."""
    values, label = square(model(batch["x"]), batch), (batch["x"][:, 0] > 0).long()
    return values | {"loss": values["loss"] / torch.bincount(label, minlength=2)[label]}


def switches_weights(model: Any, batch: Batch, whole: nn.Module) -> Values:
    getattr(whole, "switch", bool)(whole.training)  # of the optimizer schedule_free
    return vector_step(model, batch, whole)


def contrast(model: Any, batch: Batch, whole: nn.Module) -> Values:
    output = model(batch["x"])
    scores = -(output.unsqueeze(1) - batch["y"].unsqueeze(0)).abs()
    return {"loss": F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")}


def names_by_data(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch)
    return values | ({"high": batch["y"]} if float(batch["y"].sum()) > 0 else {"low": batch["y"]})


def types_by_process(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """As where one process finds nothing in its part of the evaluation set."""
    values = square(model(batch["x"]), batch)
    score = values["error"].detach()
    return values | {"score": score.long() if PartialState().process_index and not model.training else score}


def types_by_data(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """A score, and the integer 0 where there is nothing to find."""
    values, size = square(model(batch["x"]), batch), len(batch["y"])
    found = float(batch["y"].sum()) > 0
    return values | {"score": values["error"].detach() if found else torch.tensor([0] * size)}


def order_by_data(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch) | {"x": batch["x"][:, 0]}
    return values if float(batch["y"].sum()) > 0 else dict(reversed(values.items()))


def metric_of_evaluation(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch)
    return {"loss": values["loss"]} if model.training else values | {"near": (values["error"] < 0.5).float()}


def metric_without_gradients(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch)
    return values if torch.is_grad_enabled() else values | {"near": (values["error"] < 0.5).float()}


def causal_metric_of_evaluation(model: Any, batch: Batch, whole: nn.Module) -> Values:
    loss = model(batch["tokens"], batch["next"])
    return {"loss": loss} if model.training else {"loss": loss, "near": (loss < 3.46).float()}


def gradient_penalty(model: Any, batch: Batch, whole: nn.Module) -> Values:
    x = batch["x"].clone().requires_grad_()
    output = model(x)
    if not torch.is_grad_enabled():
        return square(output, batch)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return {name: value + 0.1 * slope.square().sum(1) for name, value in square(output, batch).items()}


def counts_its_calls(model: Any, batch: Batch, whole: nn.Module) -> Values:
    vars(counts_its_calls)["number"] = number = vars(counts_its_calls).get("number", 0) + 1
    return {name: value * number for name, value in square(model(batch["x"]), batch).items()}


def means_over_the_batch(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"] - batch["x"].mean(0)), batch)
    return values


def weighs_by_earlier_losses(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch)
    EARLIER.append(float(values["loss"].detach().mean()))
    return {name: value / (sum(EARLIER) / len(EARLIER)) for name, value in values.items()}


def follows_with_a_teacher(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """As in BYOL: the teacher is a moving average of the model, updated in each forward pass."""
    if not TEACHER:
        TEACHER.append(deepcopy(whole).requires_grad_(False))
    output = model(batch["x"])
    with torch.no_grad():
        for slow, fast in zip(TEACHER[0].parameters(), whole.parameters()):
            slow.lerp_(fast, 0.1)
        target = TEACHER[0](batch["x"])
    return {"loss": (output - target - batch["y"]) ** 2}


def divides_by_processes(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": square(model(batch["x"]), batch)["loss"] / PartialState().num_processes}


def divides_by_ranks(model: Any, batch: Batch, whole: nn.Module) -> Values:
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return {"loss": square(model(batch["x"]), batch)["loss"] / size}


def gathers(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """As in Accelerate's examples; what is gathered is shown, not returned."""
    values = square(model(batch["x"]), batch)
    gather(values["error"].detach())
    return values


def returns_what_it_gathers(model: Any, batch: Batch, whole: nn.Module) -> Values:
    values = square(model(batch["x"]), batch)
    return values | {"error": gather(values["error"].detach()).mean().expand(len(batch["x"]))}


def calls_backward(model: Any, batch: Batch, whole: nn.Module) -> Values:
    loss = (model(batch["x"]) - batch["y"]) ** 2
    if torch.is_grad_enabled():
        loss.mean().backward(retain_graph=True)
    return {"loss": loss}


def differentiates_by_a_weight(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """As GradNorm (Chen et al. 2018)."""
    loss, weight = (model(batch["x"]) - batch["y"]) ** 2, whole.get_parameter("head.weight")
    if not torch.is_grad_enabled():
        return {"loss": loss}
    (gradient,) = torch.autograd.grad(loss.sum(), weight, create_graph=True)
    return {"loss": loss + 1e-3 * (weight.detach() - gradient).pow(2).sum()}


def exits_early(model: Any, batch: Batch, whole: nn.Module) -> Values:
    sys.exit()


def unfreezes_late(model: Any, batch: Batch, whole: nn.Module) -> Values:
    """Gradual unfreezing: the stem trains from the ninth pass of all processes on."""
    if torch.is_grad_enabled():
        vars(unfreezes_late)["passes"] = passes = vars(unfreezes_late).get("passes", 0) + 1
        whole.get_submodule("stem").requires_grad_(passes * PartialState().num_processes > 8)
    return square(model(batch["x"]), batch)


def counts_with_an_iterator(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {name: value * (1 + next(COUNT) // 1000) for name, value in square(model(batch["x"]), batch).items()}


def counts_until_late(model: Any, batch: Batch, whole: nn.Module) -> Values:
    PASSES["number"] += 1
    return {name: value * (1 + PASSES["number"] // 1000) for name, value in square(model(batch["x"]), batch).items()}


def follows_the_step(model: Any, batch: Batch, step: int, whole: nn.Module) -> Values:
    return {name: value * (1 + step) for name, value in square(model(batch["x"]), batch).items()}


def not_a_number_for_some(model: Any, batch: Batch, whole: nn.Module) -> Values:
    far = (batch["y"] > 2).float()
    return square(model(batch["x"]), batch) | {"share": far / far}


def mapped(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return square(torch.func.vmap(lambda x: model(x.unsqueeze(0)).squeeze(0))(batch["x"]), batch)


def casts_by_itself(model: Any, batch: Batch, whole: nn.Module) -> Values:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch["x"])
    return square(output.float(), batch)


def causal_step(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": model(batch["tokens"], batch["next"])}


def causal_twice(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": model(batch["tokens"], batch["next"]) + model(batch["tokens"].flip(1), batch["next"])}


def causal_margin(model: Any, batch: Batch, whole: nn.Module) -> Values:
    first, second = model(batch["tokens"], batch["next"]), model(batch["next"], batch["tokens"])
    return {"loss": F.relu(1 + first - second)}


def causal_random_tokens(model: Any, batch: Batch, whole: nn.Module) -> Values:
    masked = torch.where(torch.rand(batch["tokens"].shape) < 0.2, 0, batch["tokens"])
    return {"loss": model(masked, batch["next"])}


def causal_changed_in_place(model: Any, batch: Batch, whole: nn.Module) -> Values:
    batch["tokens"].add_(1).remainder_(VOCABULARY)
    return {"loss": model(batch["tokens"], batch["next"])}


def causal_auxiliary(model: Any, batch: Batch, whole: nn.Module) -> Values:
    embedding = whole.get_input_embeddings().weight
    return {"loss": model(batch["tokens"], batch["next"]) + embedding.square().mean()}


def causal_shifted(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": model(batch["tokens"][:, 1:], batch["next"][:, 1:])}


def causal_weighted(model: Any, batch: Batch, whole: nn.Module) -> Values:
    return {"loss": model(batch["tokens"], batch["next"]) * (1 + batch["label"])}


HABITS: dict[str, Step] = {
    one.__name__: one
    for one in (
        closes_over_the_model,
        calls_module,
        counts_in_a_logger,
        counts_right_answers,
        draws_in_evaluation,
        calls_layers,
        calls_functionally,
        calls_twice,
        changes_the_batch,
        noise_of_python,
        noise_of_numpy,
        noise_of_torch,
        noise_of_its_own,
        mixup,
        neighbours_in_training,
        weighs_by_classes,
        switches_weights,
        contrast,
        names_by_data,
        types_by_data,
        types_by_process,
        order_by_data,
        metric_of_evaluation,
        metric_without_gradients,
        gradient_penalty,
        counts_its_calls,
        means_over_the_batch,
        weighs_by_earlier_losses,
        follows_with_a_teacher,
        divides_by_processes,
        divides_by_ranks,
        gathers,
        returns_what_it_gathers,
        calls_backward,
        differentiates_by_a_weight,
        exits_early,
        unfreezes_late,
        counts_with_an_iterator,
        counts_until_late,
        follows_the_step,
        not_a_number_for_some,
        mapped,
        casts_by_itself,
        causal_twice,
        causal_metric_of_evaluation,
        causal_margin,
        causal_random_tokens,
        causal_changed_in_place,
        causal_auxiliary,
        causal_shifted,
        causal_weighted,
    )
}


def mistaken(mistake: Callable[[Tensor, Batch], Any]) -> Step:
    """A step that returns what `mistake` makes of the error of each sample."""
    return lambda model, batch, whole: mistake(model(batch["x"]) - batch["y"], batch)


MISTAKES: dict[str, Step] = {
    "column": mistaken(lambda error, batch: {"loss": error.square().unsqueeze(-1)}),
    "square": mistaken(lambda error, batch: {"loss": (error.unsqueeze(-1) - batch["y"]).square()}),
    "mean": mistaken(lambda error, batch: {"loss": error.square().mean()}),
    "no_loss": mistaken(lambda error, batch: {"error": error}),
    "no_dict": mistaken(lambda error, batch: error),
    "metric": mistaken(lambda error, batch: {"loss": error.square(), "accuracy": error.mean()}),
    "number": mistaken(lambda error, batch: {"loss": error.square(), "accuracy": 0.5}),
    "detached": mistaken(lambda error, batch: {"loss": error.square().detach()}),
    "values_of_tokens": mistaken(lambda error, batch: {"loss": F.relu(batch["x"][:, :6]) * error.unsqueeze(-1)}),
}
