"""The lines that end a run whose first steps are not those of one process."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..layout import Layout
from ..parallel.kind import Seen
from ..parallel.kinds import kinds_of, wrapper_of
from ..parallel.setup import Setup
from .compare import Gap, Key
from .first_pass import FirstPass
from .reference import Reference
from .trace import Step


def verdict(
    gaps: Mapping[Key, Gap],
    number: int,
    steps: Sequence[Step],
    reference: Reference,
    setup: Setup,
    first_pass: FirstPass,
) -> str:
    """Names the first of these differences, the first layer in which it shows, and its likely cause. `steps` are what
    step `number` did in each process, the main process first."""
    order, alone, plan = ("value", "eval", "norm", "weight", "replica"), reference.steps[number], setup.plan
    first = min(gaps, key=lambda key: (order.index(key[0]), key != ("value", "loss")))
    lines = [f"{plan.layout} does not give the result of one process: in step {number + 1}, {gaps[first].text}"]
    layer = _first_other_layer(steps[0].outputs, alone.outputs, setup.model) if first[0] == "value" else None
    if layer is not None:
        lines.append(f"  the first layer whose output differs is {layer}")
    sample = _other_sample(steps, alone, [ids.tolist() for _, ids in plan.global_micro_batches(number)])
    values = any(what in ("value", "eval") for what, _ in gaps)
    seen = Seen(
        at_once=values and number == min(reference.steps),
        only_weights=not values and ("norm", "") not in gaps,
        draws=first_pass.draws,
        optimizer=type(setup.optimizer).__name__,
    )
    own = _cause_in_the_recipe(sample, first_pass, getattr(setup.accelerator, "asked", {}), values)
    pairs = [pair for what, name in gaps if what == "weight" and (pair := reference.sharing.get(name))]
    if own is None and pairs:
        own = (
            f"{' and '.join(pairs[0])} share their data, but are two weights, and the config gives each its own: make "
            "them one, as in b.weight = a.weight"
        )
    cause = own or _cause_in_the_layout(seen, plan.layout)
    return "\n".join([*lines, f"  likely cause: {cause}", "  --check_steps 0 trains without this check"])


def _first_other_layer(outputs: Mapping[str, Any], alone: Mapping[str, Any], model: nn.Module) -> str | None:
    """The first layer whose output differs in the first micro-batch, with its class; None if none does."""
    for name, (shape, norm) in alone.items():
        other = outputs.get(name)
        if other is not None and other[0] == shape and not math.isclose(other[1], norm, rel_tol=1e-3, abs_tol=1e-6):
            return f"{name} ({type(model.get_submodule(name)).__name__})"
    return None


def _other_sample(steps: Sequence[Step], alone: Step, ids: list[list[int]]) -> str | None:
    """Names a sample that a process read with another content than the main process alone; None if there is none."""
    for step in steps:
        for row, batch in step.samples.items():
            for name, sums in batch.items():
                for sample, here, there in zip(ids[row], sums, alone.samples[row].get(name, [])):
                    if here != there:
                        return f'"{name}" of sample {sample}'
    return None


def _cause_in_the_recipe(
    other_sample: str | None, first: FirstPass, asked: Mapping[str, str], values: bool
) -> str | None:
    """What the recipe does that no layout can make equal, and what to type; None if nothing was seen."""
    if other_sample is not None:
        return (
            f"{other_sample} has another content when it is read again: let the dataset draw from the generators of "
            "torch, numpy or random, which are seeded for each sample, and not from one of its own"
        )
    if first.written:
        return (
            f"the forward pass changes {first.written[0]}, and each process sees other samples: do it outside the "
            "forward pass"
        )
    for what, place in asked.items() if values else ():
        if "gather" in what or "reduce" in what:
            return (
                f"forward_step calls {what} ({place}): return the values of its own samples; losses and metrics are "
                "means over the samples of all processes already"
            )
        return (
            f"forward_step asks for {what} ({place}): leave that out; the loss is the mean over the samples of all "
            "processes already"
        )
    if first.own_generators and values:
        return (
            f"forward_step or the model draws from a generator of its own, {first.own_generators[0]}: draw from those "
            "of torch, numpy or random, which are seeded for each micro-batch"
        )
    if first.keeps and values:
        return (
            f"forward_step changes {first.keeps[0]} at each call, and the processes call it less often than one does: "
            "let it have a third argument, step: it is the number of the optimizer step"
        )
    return None


def _cause_in_the_layout(seen: Seen, layout: Layout) -> str:
    """What the differences point to, and what to type."""
    for kind in kinds_of(layout):
        if cause := kind.likely_cause(seen):
            return cause
    if seen.at_once:
        return (
            "forward_step or the model depends on the process, or on what it did before: make it a function of the "
            "model's weights and the batch"
        )
    if not seen.only_weights:
        return (
            "not all gradients pass through the model that forward_step is given: call model(...), not model.module, "
            "one of its layers or a model from outside; and use no hooks on gradients"
        )
    return (
        f"{seen.optimizer} does not get each weight whole, or keeps weights beside param_groups and state; or "
        f"forward_step takes gradients itself, as a penalty does: type {wrapper_of(layout).elsewhere}"
    )
