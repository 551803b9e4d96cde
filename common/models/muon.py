"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of hidden layers, and AdamW for all
other weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from common.models.parameter_groups import parameter_groups

MOMENTUM = 0.95
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW
NUM_ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # of Jordan's Newton-Schulz iteration


class Muon(torch.optim.Optimizer):
    """Steps of equal size in all directions of a matrix.

    Muon makes the averaged gradient of each matrix nearly orthogonal. Its steps are scaled to the size of AdamW's (Liu
    et al. 2025, Moonlight), so that one learning rate and one weight decay serve both. AdamW trains embeddings, the
    head, weights of another number of dimensions, and biases. Whole weights are needed: a shard has other directions.

    Args:
        model: its trained weights get a step. The head is that of `get_output_embeddings`, if the model has it.
        learning_rate: of both.
        weight_decay: of both; the same weights as in `parameter_groups` decay.
    """

    def __init__(self, model: nn.Module, learning_rate: float, weight_decay: float):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        ends = {module.weight for module in model.modules() if isinstance(module, nn.Embedding) or module is head}
        groups = []
        for group in parameter_groups(model, weight_decay):
            hidden = [weight for weight in group["params"] if weight.ndim == 2 and weight not in ends]
            others = [weight for weight in group["params"] if weight.ndim != 2 or weight in ends]
            groups += [group | {"params": hidden, "is_hidden": True}, group | {"params": others, "is_hidden": False}]
        super().__init__([group for group in groups if group["params"]], {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Changes all weights that have a gradient. It takes no closure."""
        assert closure is None
        for group in self.param_groups:
            update = _muon if group["is_hidden"] else _adamw
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update(weight.grad, self.state[weight]), alpha=-group["lr"])


def _muon(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The update of a matrix, with the root mean square of AdamW's: about 0.2."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    average = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
    return 0.2 * max(gradient.shape) ** 0.5 * orthogonalized(gradient.lerp(average, MOMENTUM))


def _adamw(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    if not state:
        state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(gradient)}
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    state["step"] += 1
    average = state["exp_avg"].lerp_(gradient, 1 - BETAS[0])
    square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - BETAS[1])
    unbiased, unbiased_square = ((1 - beta ** state["step"].item()) for beta in BETAS)
    return average / unbiased / ((square / unbiased_square).sqrt() + EPSILON)


def orthogonalized(matrix: Tensor) -> Tensor:
    """A matrix with the singular vectors of `matrix` and singular values between about 0.7 and 1.2, except those that
    are nearly zero. Shape and type are those of `matrix`.

    The iteration runs in float32. torch.optim.Muon runs it in bf16: there a rounding error of a gradient becomes one of
    a per cent of the step, and the result depends on the number of processes.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = (matrix.T if is_tall else matrix).float()
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return (found.T if is_tall else found).to(matrix.dtype)
