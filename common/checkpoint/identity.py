"""The settings that a resumed run must share with its checkpoint, and those that it may change."""

import hashlib
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..data.mixture import Mixture
from ..layout import Layout
from ..plan import Plan


def described(layout: Layout) -> str:
    """For the terminal, for example "2 processes (FSDP2)"."""
    processes = layout.num_processes
    return f"{processes} process{'es' * (processes > 1)} ({layout})"


def identity(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint."""
    config = asdict(plan.config)
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples,
        "optimizer": type(optimizer).__name__,
        "base": getattr(getattr(model, "peft_adapter", None), "base_digest", None),
        "mixture": _mixture(plan),
        "sampler": None if plan.sampler is None else _digest(plan.epoch_order(0).tolist()),
    }


def _mixture(plan: Plan) -> dict[str, list[int]] | None:
    """{source: [samples in an epoch, of so many]}; None without a mixture."""
    mixture = getattr(plan.sampler, "__self__", None)
    if not isinstance(mixture, Mixture):
        return None
    return {name: [count, size] for name, count, size in zip(mixture.names, mixture.counts, mixture.sizes)}


def differences(identity: dict[str, Any], there: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, its value in a checkpoint, its value here) of those that differ. A checkpoint may have more."""
    return [(name, there.get(name), value) for name, value in identity.items() if there.get(name) != value]


def own_flags(plan: Plan) -> dict[str, str]:
    """{flag: value} of the flags that the recipe adds to the shared ones."""
    shared = {field.name for field in fields(RunConfig)}
    return {name: str(value) for name, value in asdict(plan.config).items() if name not in shared}


def curve(plan: Plan) -> str:
    """A digest of the learning-rate schedule, at the same steps for runs of any length: a constant one, for example,
    does not follow another curve in a longer run."""
    steps = [*range(16), *(2**power for power in range(4, 24))]
    if plan.schedule is not None:  # one of the recipe's own may end with the run
        steps = [min(step, plan.num_steps - 1) for step in steps]
    return _digest([plan.factor_at(step) for step in steps])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
