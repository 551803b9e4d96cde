"""Differences between the steps of all processes and those of one, and what may have caused them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Kind
from ..plan import Plan
from .alone import Step
from .first_pass import FirstPass

TOLERANCE = 1e-5
TIMES_FLOOR = 4  # a difference up to this many times what rounding does to one process is noise
# ("value", its name), ("eval", its name), ("norm", ""), ("weight", its name), ("replica", name of a weight)
Key = tuple[str, str]
Values = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Gap:
    """A relative difference, and how to say it."""

    size: float
    text: str = ""


def value_gaps(step: Step, alone: Step, plan: Plan, number: int, rank: int = 0) -> dict[Key, Gap]:
    """The largest difference of each value of `forward_step`, relative to the value or to a larger mean."""
    training = _value_gaps(step.values, alone.values, plan, number, rank, "value", "")
    return training | _value_gaps(step.evaluated, alone.evaluated, plan, number, rank, "eval", " in evaluation")


def _value_gaps(
    found: Values, alone: Values, plan: Plan, number: int, rank: int, kind: str, when: str
) -> dict[Key, Gap]:
    gaps: dict[Key, Gap] = {}
    ids = [ids.tolist() for _, ids in plan.global_micro_batches(number)]
    for row, values in found.items():
        expected = alone[row]
        if values.keys() != expected.keys():
            text = f"forward_step returns {', '.join(values)} in process {rank}, {', '.join(expected)} on one process"
            return {(kind, next(iter(values.keys() ^ expected.keys()))): Gap(math.inf, text)}
        for name, value in values.items():
            other = expected[name]
            scale = other.abs().clamp(min=max(float(other.abs().mean()), 1e-30))
            sizes = (value - other).abs() / scale
            sizes[value == other] = 0.0  # also infinities
            at = int(sizes.nan_to_num(math.inf).argmax())
            size = float(sizes.nan_to_num(math.inf)[at])
            if size > gaps.get((kind, name), Gap(-1.0)).size:
                text = (
                    f'"{name}" of sample {ids[row][at]}{when} is {float(value[at]):.7g} in process {rank}, '
                    f"{float(other[at]):.7g} on one process"
                )
                gaps[kind, name] = Gap(size, text)
    return gaps


def norm_gap(norm: float, expected: float) -> Gap:
    """The relative difference of the norm of the gradient."""
    text = f"the norm of the gradient is {norm:.7g}, {expected:.7g} on one process"
    return Gap(abs(norm - expected) / max(abs(expected), 1e-30), text)


def weight_gap(name: str, weight: Tensor, expected: Tensor, initial: Tensor) -> Gap:
    """The difference of a weight relative to its update since the first step, beyond what its type can hold."""
    found, right, first = map(exact, (weight, expected, initial))
    rounding = sum(torch.finfo(tensor.dtype).eps for tensor in (weight, expected) if not is_whole_number(tensor))
    slack = rounding * float(right.norm())
    update, distance = float((right - first).norm()), float((found - right).norm())
    size = max(0.0, distance - slack) / max(update, slack, 1e-30)
    return Gap(size, f"the update of {name} differs by {size:.2g} of its size from that on one process")


def exact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in a type that adds no rounding."""
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def is_whole_number(tensor: Tensor) -> bool:
    """Whether the type has no rounding."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def replica_gaps(fingerprints: Sequence[Mapping[Any, tuple[float, float]]], updates: Mapping[str, float]) -> dict:
    """The differences between processes that hold the same part of a weight.

    Args:
        fingerprints: of each process, {(name of the weight, range): (sum, norm) of the part}.
        updates: {name of the weight: norm of its update}.
    """
    gaps: dict[Key, Gap] = {}
    first: dict[Any, tuple[float, float]] = {}
    for rank, parts in enumerate(fingerprints):
        for key, (total, norm) in parts.items():
            expected = first.setdefault(key, (total, norm))[0]
            slack = torch.finfo(torch.float32).eps * norm
            size = max(0.0, abs(total - expected) - slack) / max(updates.get(key[0], 0.0), slack, 1e-30)
            if size > gaps.get(("replica", key[0]), Gap(-1.0)).size:
                gaps["replica", key[0]] = Gap(size, f"process {rank} has another {key[0]} than the processes before it")
    return gaps


def first_other_layer(outputs: Mapping[str, Any], alone: Mapping[str, Any], model: nn.Module) -> str | None:
    """The first layer whose output differs in the first micro-batch, with its class; None if none does."""
    for name, (shape, norm) in alone.items():
        other = outputs.get(name)
        if other is not None and other[0] == shape and not math.isclose(other[1], norm, rel_tol=1e-3, abs_tol=1e-6):
            return f"{name} ({type(model.get_submodule(name)).__name__})"
    return None


def likely_cause(
    gaps: Mapping[Key, Gap], is_first_step: bool, other_sample: str | None, first: FirstPass, kind: Kind, optimizer: str
) -> str:
    """What the differences point to, and what to type.

    Args:
        gaps: the differences that are no noise.
        is_first_step: whether they are in the first step.
        other_sample: names a sample that a process read with another content; None if there is none.
        first: what the first forward pass does.
        kind: of the run's layout.
        optimizer: name of its class.
    """
    elsewhere = "type --config_file accelerate_configs/ddp.yaml"
    values = any(what == "value" for what, _ in gaps)
    at_once = values and is_first_step
    random = "draws random numbers, or " if first.draws else ""
    written = first.written[0] if first.written else None
    causes: list[tuple[Any, str]] = [
        (
            other_sample,
            f"{other_sample} has another content when it is read again: let the dataset draw from the generators of "
            "torch, numpy or random, which are seeded for each sample, and not from one of its own",
        ),
        (
            written,
            f"the forward pass changes {written}, and each process sees other samples: do it outside the forward pass",
        ),
        (
            at_once and kind == Kind.PIPELINE,
            f"something beside the layers {random}changes hidden states, logits or losses, which a pipeline cannot "
            "divide: type --config_file accelerate_configs/fsdp2.yaml, and remove --pipeline_stages",
        ),
        (
            at_once and kind == Kind.TENSOR,
            f"something between two layers of the tp_plan {random}needs all features, as softmax, norms and means do: "
            f"leave these layers out of the tp_plan, or {elsewhere}",
        ),
        (
            at_once,
            "forward_step or the model depends on the process, or on what it did before: make it a function of the "
            "model's weights and the batch",
        ),
        (
            ("norm", "") in gaps or values,
            "not all gradients pass through the model that forward_step is given: call model(...), not model.module, "
            "one of its layers or a model from outside; and use no hooks on gradients",
        ),
        (kind == Kind.DDP, f"{optimizer} changes weights in another way in each process: let gradients alone decide"),
    ]
    shards = f"{optimizer} does not get each weight whole, or keeps weights beside param_groups and state: {elsewhere}"
    return next((text for condition, text in causes if condition), shards)
