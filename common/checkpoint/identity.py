"""The settings that a resumed run must share with its checkpoint, and those that it may change."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from ..config import RunConfig
from ..cpu_group import CpuGroup
from ..data.mixture import Mixture
from ..data.sets import MapDataset
from ..layout import Layout
from ..plan import Plan
from .samples import evaluation_facts, other_sample, training_facts


def describe(layout: Layout) -> str:
    """A description for the terminal, for example "2 processes (FSDP2)"."""
    processes = layout.num_processes
    return f"{processes} process{'es' * (processes > 1)} ({layout})"


def identity(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_set: MapDataset,
    eval_sets: Mapping[str, MapDataset],
    group: CpuGroup,
) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint, and what a few samples of its data are. A
    collective."""
    config = asdict(plan.config)
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples,
        "optimizer": type(optimizer).__name__,
        "base": getattr(getattr(model, "peft_adapter", None), "base_digest", None),
        "mixture": _mixture(plan),
        "sampler": None if plan.sampler is None else _digest(plan.epoch_order(0).tolist()),
        "samples": training_facts(plan, train_set, group),
        "eval_samples": evaluation_facts(plan, eval_sets, group),
    }


def _mixture(plan: Plan) -> dict[str, list[int]] | None:
    """{source: [samples in an epoch, of so many]}; None without a mixture."""
    mixture = getattr(plan.sampler, "__self__", None)
    if not isinstance(mixture, Mixture):
        return None
    return {name: [count, size] for name, count, size in zip(mixture.names, mixture.counts, mixture.sizes)}


def differences(identity: dict[str, Any], there: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, its value in a checkpoint, its value here) of those that differ. A checkpoint may have more. The data
    may have moved to another path, if their samples are the same."""
    ours, theirs = identity["samples"], there.get("samples", {})
    moved = ours.keys() & theirs.keys() and other_sample(ours, theirs) is None
    compared = identity.keys() - {"samples", "eval_samples", *(["data"] if moved else [])}
    return [
        (name, there.get(name), identity[name])
        for name in identity
        if name in compared and there.get(name) != identity[name]
    ]


def other_data(identity: dict[str, Any], there: dict[str, Any]) -> str | None:
    """Where the training data first differ from those of a checkpoint; None if they do not, or if it has no record."""
    found = other_sample(identity["samples"], there.get("samples", {}))
    return found and f'"{found[1]}" of sample {found[0]} differs'


def other_evaluation(identity: dict[str, Any], there: dict[str, Any]) -> bool:
    """Whether samples of an evaluation set differ from those of a checkpoint."""
    theirs = there.get("eval_samples", {})
    return any(other_sample(ours, theirs.get(name, {})) for name, ours in identity["eval_samples"].items())


def own_flags(plan: Plan) -> dict[str, str]:
    """{flag: value} of the flags that the recipe adds to the shared ones."""
    shared = {field.name for field in fields(RunConfig)}
    return {name: str(value) for name, value in asdict(plan.config).items() if name not in shared}


def other_flags(plan: Plan, content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(flag of the recipe, its value in the manifest of a checkpoint, its value here) of those that differ."""
    before = content["own_flags"]
    return [(name, before[name], value) for name, value in own_flags(plan).items() if before.get(name, value) != value]


def curve(plan: Plan) -> str:
    """A digest of the learning-rate schedule, at the same steps for runs of any length: a constant one, for example,
    does not follow another curve in a longer run."""
    steps = [*range(16), *(2**power for power in range(4, 24))]
    if plan.schedule is not None:  # one of the recipe's own may end with the run
        steps = [min(step, plan.num_steps - 1) for step in steps]
    return _digest([plan.factor_at(step) for step in steps])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
