"""Checks and sums the values that `forward_step` returns."""

from typing import Any

import torch
from torch import Tensor

from ..data.sets import Batch, ForwardStep, NumberedStep, as_numbered_step
from ..errors import UsageError


def check_values(forward_step: ForwardStep, size: int, has_batch_loss: bool, has_examples: bool) -> NumberedStep:
    """Wraps `forward_step` to raise UsageError unless each metric has one value for each of `size` samples, and all
    calls return the same names: those in training, and those in evaluation, which may have its own metrics. Orders
    the names, so that all processes sum up the same metrics. With a `batch_loss`, the values may have more dimensions,
    of the same sizes in all calls; so may predictions, whose sizes may differ from call to call. With `examples`,
    numbers may be predictions, too, such as probabilities."""
    known: dict[tuple[bool, bool], dict[str, Any]] = {}  # {(in training, with gradients): {name: (shape, dtype)}}
    values_of = as_numbered_step(forward_step)

    def checked_values(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        # A recipe may ask for either; the first pass of a batch_loss trains without gradients.
        mode = (model.training, torch.is_grad_enabled())
        values = values_of(model, batch, number)
        if has_batch_loss:
            _check_values(values, size)
        else:
            check_metrics(values, size, "forward_step", has_examples)
        if mode not in known:
            names = sorted(values, key=lambda name: (name != "loss", name))
            known[mode] = {name: (values[name].shape, values[name].dtype) for name in names}
        first = known[mode]
        if values.keys() != first.keys():
            raise UsageError(
                f"forward_step returns {', '.join(values)}, and {', '.join(first)} for another batch: return the same "
                "names for each batch; evaluation (not model.training) may have its own names"
            )
        for name, value in values.items():
            shape, dtype = first[name]
            expected = shape if has_batch_loss else shape[:1]
            if value.ndim != len(shape) or value.shape[: len(expected)] != expected or value.dtype != dtype:
                raise UsageError(
                    f'"{name}" has shape {tuple(value.shape)} of {value.dtype}, and {tuple(shape)} of {dtype} in '
                    "another batch: return one shape and type for each batch: a mean over the tokens, or .float()"
                )
        return {name: values[name] for name in first}

    return checked_values


def check_metrics(values: Any, size: int, source: str, has_examples: bool = False) -> None:
    """Raises UsageError unless `source` returned {metric: one value for each of `size` samples}, with a "loss".
    Integers and booleans may have more dimensions: they are predictions, such as the class of each pixel. So may
    values other than the loss if `examples` uses them."""
    if not isinstance(values, dict) or "loss" not in values:
        given = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise UsageError(f'{source} returns {given}: expected a dict with "loss" of shape ({size},)')
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise UsageError(f'"{name}" is a {type(value).__name__}: expected a tensor of shape ({size},)')
        may_be_prediction = not value.is_floating_point() or (has_examples and name != "loss")
        if value.shape != (size,) and not (may_be_prediction and value.shape[:1] == (size,)):
            raise UsageError(
                f'"{name}" has shape {tuple(value.shape)}: expected ({size},), one value per example; use '
                f"{_advice(name, value, size)}"
            )
    if torch.is_grad_enabled() and not values["loss"].requires_grad:
        raise UsageError('"loss" has no gradient: compute it from the model output, without detach or no_grad')


def _check_values(values: Any, size: int) -> None:
    """Raises UsageError unless `forward_step` returned values for `batch_loss`: a row for each of `size` samples."""
    if not isinstance(values, dict) or "loss" in values or not values:
        given = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise UsageError(
            f"forward_step returns {given}: with batch_loss, expected a dict of its inputs, such as vectors of "
            f'shape ({size}, ...), and "loss" from batch_loss'
        )
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (size,):
            given = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise UsageError(
                f'"{name}" {given}: expected a tensor of shape ({size}, ...); expand values that all samples share, '
                f"such as a temperature, to ({size},)"
            )
    if torch.is_grad_enabled() and not any(value.requires_grad for value in values.values()):
        raise UsageError(
            f"{', '.join(values)}: none has a gradient: compute them from the model output, without detach or no_grad"
        )


def _advice(name: str, value: Tensor, size: int) -> str:
    if value.shape == (size, 1):
        return ".squeeze(-1)"
    advice = "a reduction that keeps the batch dimension"
    if value.ndim == 0:
        advice = 'reduction="none", or leave out mean()'
    elif value.shape[0] == size:
        squares = ".squeeze(-1) on the model output, if (batch, 1) against (batch,) made (batch, batch); else "
        advice = f"{squares * (value.shape == (size, size))}.flatten(1).mean(1)"
    if name != "loss":
        more = "for a metric without a value per example, such as a confusion matrix, give fit examples="
    elif value.ndim == 0:
        more = "for a transformers model, take the logits, not its .loss, which is a mean"
    else:
        more = 'if some elements are ignored, the mean over the others, and their number as "weight" of the batch'
    return f"{advice}; {more}"


def weighted(values: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """(the sum of a micro-batch's losses, 0-dim; its other metrics, without integers such as class ids), each times its
    weight if the batch has weights."""
    loss = values["loss"]
    metrics = {name: value.detach() for name, value in values.items() if name != "loss" and is_metric(value)}
    if (weight := batch.get("weight")) is None:
        return loss.sum(), metrics
    return (loss * weight).sum(), {name: value * weight for name, value in metrics.items()}


def is_metric(value: Tensor) -> bool:
    """Whether a value of `forward_step` is a number to take means of, and not a class id or a mask."""
    return value.ndim == 1 and (value.is_floating_point() or value.dtype == torch.bool)
