"""The settings that a resumed run must share with its checkpoint, or may change, and a fingerprint of its data."""

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..cpu_group import CpuGroup
from ..data.batches import batches
from ..data.mixed import Mixture
from ..data.sets import MapDataset
from ..layout import Layout
from ..plan import Plan
from ..seeds import CPU, restore_generators
from ..step.setup import Setup

NUM_SAMPLES = 16
NUM_OF_EVALUATION = 4
NUM_PARTS = 8
# Relative to the root mean square: machines and package versions round differently; a different sample is farther away.
TOLERANCE = 1e-3

Fact = str | list[float]  # a digest of exact values, such as tokens; or the root mean square, and means of parts
Facts = dict[str, dict[str, Fact]]  # {sample id: {name of a tensor or text: what it is}}


def describe(layout: Layout) -> str:
    """A description for the terminal, for example "2 processes (FSDP2)"."""
    processes = layout.num_processes
    return f"{processes} process{'es' * (processes > 1)} ({layout})"


def identity(setup: Setup, group: CpuGroup) -> dict[str, Any]:
    """The settings and a few samples that a resumed run must share with its checkpoint. A collective."""
    plan, config, eval_sets = setup.plan, asdict(setup.plan.config), setup.eval_sets
    mixture = getattr(plan.sampler, "__self__", None)
    some = {name: _some(range(len(each)), NUM_OF_EVALUATION) for name, each in eval_sets.items()}
    # From the training set, with its transforms, and the random numbers that it and its `collate_fn` draw.
    trained = _facts(setup.train_set, known_by(plan), plan.config)
    numbers: dict[str, Facts] = {name: {"all": {"number": str(len(each))}} for name, each in eval_sets.items()}
    evaluated = {name: _facts(eval_sets[name], ids, plan.config) | numbers[name] for name, ids in some.items()}
    return {name: config[name] for name in ("seed", "batch_size", "data", "ema_decay")} | {
        "num_samples": plan.num_samples,
        "optimizer": type(setup.optimizer).__name__,
        "base": getattr(getattr(setup.model, "peft_adapter", None), "base_digest", None),
        # {source: [its samples in an epoch, all its samples]}
        "mixture": {name: [*sizes] for name, *sizes in zip(mixture.names, mixture.counts, mixture.sizes)}
        if isinstance(mixture, Mixture)
        else None,
        "sampler": None if plan.sampler is None else _digest(plan.epoch_order(0).tolist()),
        "samples": group.broadcast(trained),
        "eval_samples": group.broadcast(evaluated),
    }


def differences(identity: dict[str, Any], there: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, its value in a checkpoint, its value here) of each setting that differs. A checkpoint may have more
    settings. The data may have moved to another path, if their samples are the same."""
    ours, theirs = identity["samples"], there.get("samples", {})
    moved = ours.keys() & theirs.keys() and other_sample(ours, theirs) is None
    compared = identity.keys() - {"samples", "eval_samples", *(["data"] if moved else [])}
    return [
        (name, there.get(name), here) for name, here in identity.items() if name in compared and there.get(name) != here
    ]


def own_flags(plan: Plan) -> dict[str, str]:
    """{flag: value} of the flags that the recipe adds to the shared ones, and of those that change each step."""
    shared = {field.name for field in fields(RunConfig)} - {"learning_rate", "weight_decay", "max_grad_norm"}
    return {name: str(value) for name, value in asdict(plan.config).items() if name not in shared}


def other_flags(plan: Plan, content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(flag of the recipe, its value in the manifest of a checkpoint, its value here) of the flags that differ."""
    before = content["own_flags"]
    return [(name, before[name], value) for name, value in own_flags(plan).items() if before.get(name, value) != value]


def curve(plan: Plan) -> str:
    """A digest of the learning-rate schedule, at steps that do not depend on its length."""
    steps = [*range(16), *(2**power for power in range(4, 24))]
    if plan.schedule is not None:  # the recipe's own schedule may end with the run
        steps = [min(step, plan.num_steps - 1) for step in steps]
    return _digest([plan.factor_at(step) for step in steps])


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def known_by(plan: Plan) -> list[int]:
    """The ids of the training samples that identify the data of a checkpoint: 16 that the run draws."""
    return _some(range(plan.num_samples) if plan.sampler is None else plan.epoch_order(0).tolist(), NUM_SAMPLES)


def other_sample(here: Facts, there: Facts) -> tuple[str, str] | None:
    """(id, name) of the first value that differs, or None. Samples that one side lacks do not count."""
    for sample in [sample for sample in here if sample in there]:
        ours, theirs = here[sample], there[sample]
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs or not _is_same(ours[name], theirs[name]):
                return sample, name
    return None


def _some(drawn: Sequence[int], number: int) -> list[int]:
    return sorted({drawn[len(drawn) * part // number] for part in range(number)})


def _facts(dataset: MapDataset, ids: list[int], config: RunConfig) -> Facts:
    """The facts of these samples. Keeps the generators. A sample that cannot be read has none: the step that needs it
    says why. A resumed run reads twice, and leaves out values that then differ, such as unseeded random numbers."""
    with restore_generators(CPU):
        facts = dict(_read(dataset, ids, config))
        if config.resume_from_checkpoint is not None:
            again = dict(_read(dataset, ids, config))
            facts = {key: fact for key, fact in facts.items() if other_sample({key: fact}, again) is None}
    return facts


def _read(dataset: MapDataset, ids: list[int], config: RunConfig) -> Iterator[tuple[str, dict[str, Fact]]]:
    """(id, facts) of each sample. With workers one of them reads: a dataset may open its files at its first
    sample, and processes that share an open file read each other's bytes."""
    config = copy.copy(config)
    config.num_workers = min(config.num_workers, 1)
    stream = batches(dataset, [(0, torch.tensor([index])) for index in ids], CPU, config)
    with suppress(Exception):
        for index, batch in zip(ids, stream):
            yield str(index), {name: _fact(value) for name, value in batch.items()}


def _fact(value: Any) -> Fact:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex() or value.dtype == torch.uint8):
        parts = torch.view_as_real(value) if value.is_complex() else value
        numbers = parts.double().flatten().nan_to_num(0.0, 1.0, -1.0)
        means = [float(part.mean()) for part in numbers.tensor_split(NUM_PARTS) if len(part)]
        return [float(f"{number:.9g}") for number in (len(numbers), math.sqrt(numbers.square().mean()), *means)]
    return _digest((tuple(value.shape), value.long().numpy().tobytes()) if isinstance(value, Tensor) else value)


def _is_same(here: Fact, there: Fact) -> bool:
    if isinstance(here, str) or isinstance(there, str) or len(here) != len(there):
        return here == there
    return here[0] == there[0] and all(abs(one - other) <= TOLERANCE * here[1] for one, other in zip(here, there))
