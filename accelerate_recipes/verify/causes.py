"""Why a recipe or script does not give one result: what a look at it, or at what its processes did, shows.

common/check/ finds causes in the first steps of a run, from inside. This is for a difference that shows later.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from accelerate_recipes.common import seeds
from accelerate_recipes.common.data.batches import fetch
from accelerate_recipes.common.data.sets import Collated, as_numbered_step
from accelerate_recipes.verify.compare import Difference
from accelerate_recipes.verify.trace import Trace

NAMED = 3  # layers in a message


def evidence(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    forward_step: Any,
    train_set: Any,
    eval_set: Any,
    config: Any,
    **options: Any,
) -> dict[str, Any]:
    """Reads samples and runs `forward_step` a few times; takes the arguments of `fit`.

    Returns:
        batch_norm: names of layers that compute statistics over the batch.
        random_samples: keys of a sample that differ when it is read twice.
        random_loss: whether two forward passes on the same batch, with the same seed, differ.
        draws: whether a forward pass draws random numbers, also without dropout.
        depends_on_batch: the metrics of a sample that change with the other samples of its batch.
    """
    modules = dict(model.named_modules())
    found: dict[str, Any] = {
        "batch_norm": [
            name
            for name, module in modules.items()
            if isinstance(module, torch.nn.modules.batchnorm._NormBase)
            and module.training
            and getattr(module, "running_mean", None) is not None
        ],
    }
    ids = list(range(min(len(train_set), max(4, config.batch_size // 2 * 2))))
    if collate_fn := options.get("collate_fn"):
        train_set = Collated(train_set, collate_fn)
    batch, again = fetch(train_set, ids), fetch(train_set, ids)
    found["random_samples"] = sorted(name for name, value in batch.items() if not _equal(value, again[name]))
    model.train()

    device, values_of = torch.device("cpu"), as_numbered_step(forward_step)

    def values(given: Any) -> Any:
        seeds.seed_forward(0, 0, 0, device)
        before = seeds.generator_states(device)
        with torch.no_grad():
            returned = values_of(model, given, 0)
        found["draws"] = seeds.generator_states(device) != before
        return returned

    whole, repeated = values(batch), values(batch)
    found["random_loss"] = not all(_equal(value, repeated[name]) for name, value in whole.items())
    model.eval()  # without dropout
    whole, half = values(batch), values(fetch(train_set, ids[: len(ids) // 2]))
    found["depends_on_batch"] = [
        name for name, value in whole.items() if not torch.allclose(value[: len(half[name])], half[name], rtol=1e-3)
    ]
    return found


def likely_cause(found: dict[str, Any], difference: Difference) -> str:
    """One line about the most likely cause of a difference, and what to do. `found`: what `evidence` returned."""
    unknown = "none found: model, data and forward_step look independent of the number of processes"
    return next(_causes_in_the_recipe(found, difference), unknown)


def _causes_in_the_recipe(found: dict[str, Any], difference: Difference) -> Iterator[str]:
    """The likeliest first."""
    if difference.learning_rate:
        yield (
            "the learning rate depends on the number of processes: set it without asking how many there are; "
            "--batch_size already counts all processes"
        )
    if samples := ", ".join(found["random_samples"]):
        yield (
            f"the dataset draws random numbers ({samples} of a sample differs when it is read twice): make them a "
            "function of the sample's id"
        )
    if layers := found["batch_norm"]:
        yield f"BatchNorm ({_some(layers)}) sees the samples of one process: use GroupNorm or LayerNorm"
    if found["random_loss"]:
        yield (
            "forward_step returns other values for the same batch and seed: it keeps a state, or draws from a "
            "generator of its own; the generators of torch, numpy and random are seeded"
        )
    if found["draws"]:
        yield (
            "forward_step draws random numbers, such as noise, which depend on the micro-batch: let the dataset draw "
            "them in __getitem__, as recipes/diffusion.py does, or keep one --micro_batch_size"
        )
    if losses := ", ".join(found["depends_on_batch"]):
        yield (
            f"{losses} of a sample depends on the other samples of its batch, such as a mean inside forward_step (a "
            'mean of means): return one value per sample, and their weights as "weight" of the batch; give fit a loss '
            "that compares samples as batch_loss"
        )
    if difference.first_step is None:
        yield (
            "losses and evaluations agree, only weights differ: a weight whose true gradient is zero, such as the key "
            "bias of attention, gets steps of rounding noise from Adam"
        )


def likely_cause_of_script(run: Trace, reference: Trace, difference: Difference) -> str:
    """The same of a script on plain Accelerate."""
    unknown = "none found: samples, learning rates and parts of each step agree"
    return next(chain(_causes_in_the_loader(run, reference, difference), _causes_in_the_step(run)), unknown)


def _causes_in_the_loader(run: Trace, reference: Trace, difference: Difference) -> Iterator[str]:
    """What else than one process the processes read or schedule; the likeliest first."""
    facts, size, at = run.facts, run.facts["processes"], difference.first_step or 1
    if facts["num_processes"] != size or facts["distributed_type"] == "NO":
        yield f"the {size} processes train alone: Accelerate runs {facts['distributed_type']} in each"
    rows = [each.facts["gathered"] for each in (run, reference)]
    if difference.first_step is None and difference.tensor is None and rows[0] != rows[1]:
        yield (
            f"the evaluation gathers {rows[0]} rows under DDP and {rows[1]} in one process: gather keeps what fills up "
            "the last batch; call gather_for_metrics"
        )
    if facts["divided_twice"]:
        yield "the loader has a DistributedSampler, and prepare divides its samples again: leave out the sampler"
    ids, expected = (each.values.get((at, "samples"), []) for each in (run, reference))
    first, expected_first = (each.values.get((1, "samples"), []) for each in (run, reference))
    if len(ids) > len(expected) and (set(ids) == set(expected) or (at > 1 and len(first) == len(expected_first))):
        yield (
            f"step {at} takes {len(ids)} samples under DDP and {len(expected)} in one process: prepare fills up the "
            "last batch of an epoch with other samples (even_batches): set drop_last=True in the loader"
            f"{', and a batch no larger than the data' * (at == 1)}"
        )
    if len(ids) != len(expected):
        yield (
            f"a step takes {len(ids)} samples under DDP and {len(expected)} in one process: divide the batch size of "
            "the loader by accelerator.num_processes, or give Accelerator "
            "dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True); --split_batches "
            "sets both, to show what lies behind"
        )
    if facts["repeats_an_epoch"] and not reference.facts["repeats_an_epoch"]:
        yield "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch"
    if ids != expected:
        yield (
            "steps take other samples than in one process: seed the shuffling in a generator of its own, or by "
            "DataLoaderConfiguration(use_seedable_sampler=True), as --split_batches does"
        )
    rates = [(step, "learning_rate") for step in range(1, at + 1)]
    if any(run.values.get(rate) != reference.values.get(rate) for rate in rates):
        yield (
            f"the schedule is elsewhere after the same step: a prepared scheduler advances {size} times per step; "
            "create the Accelerator with step_scheduler_with_optimizer=False, or do not prepare the scheduler"
        )


def _causes_in_the_step(run: Trace) -> Iterator[str]:
    """What is wrong in a step on the same samples; the likeliest first."""
    facts = run.facts
    if step := facts["parts_at"]:
        yield (
            f"the processes have different weights after step {step}: gradients are not averaged in each step (local "
            "steps, no_sync, a backward pass beside the prepared model)"
        )
    if source := facts["data_draw"]:
        yield (
            f"the dataset or its collate_fn draws random numbers (from {source}), other ones in each process: only the "
            "ids of the samples agree; make the numbers a function of the sample's id, or draw none, to compare"
        )
    if facts["comm_hook"] or facts["hooked"]:
        yield "a hook changes gradients in each process before or while they are averaged: remove it to compare"
    if facts["draws"]:
        yield (
            "the forward pass draws random numbers (dropout, noise), which differ in each process: losses agree on "
            "average only; set dropout to 0, or draw in the dataset, to compare"
        )
    if facts["has_unequal_parts"]:
        yield (
            "micro-batches have different numbers of tokens, but the mean of each counts the same: divide the sum of "
            "each by the number of tokens of the whole step"
        )
    if layers := [name for name in facts["layers"] if "BatchNorm" in name]:
        yield f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm"


def cause_of_other_repetition(again: Trace, single: Trace) -> str:
    """Why one process does not repeat itself."""
    if any(again.values.get(key) != single.values.get(key) for key in single.values if key[1] == "samples"):
        return "one process takes other samples when it runs again: seed the shuffling, with set_seed at the start"
    if "own" in (single.facts["data_draw"] or ""):
        return (
            "one process has other losses when it runs again on samples with the same ids: the dataset or its "
            "collate_fn draws from a generator of its own (as numpy's default_rng, albumentations), which set_seed "
            "does not reach: seed it by the sample's id"
        )
    return (
        "one process has other losses when it runs again on the same samples: call set_seed before the model is "
        "built; weights, dropout and noise are drawn"
    )


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
