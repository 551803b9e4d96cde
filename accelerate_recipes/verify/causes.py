"""Likely causes of different results, from the lines that runs print and from the steps of their processes."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from accelerate_recipes.verify.differences import Difference, Trace


def likely_cause(difference: Difference, found_by_check: str | None, said: Sequence[str]) -> str:
    """One line about the most likely cause of a difference, and what to do. `found_by_check`: what a run named
    when its own check ended it; `said`: the lines in which runs say what their results depend on."""
    if difference.learning_rate:
        return "the learning rate depends on the number of processes: do not scale it (--batch_size counts them all)"
    if found_by_check or said:
        return found_by_check or said[0]
    if difference.first_step is None:
        return "only weights differ: Adam turns rounding noise into steps where a gradient is zero, as of a key bias"
    return "none found: the runs' own checks name nothing that depends on the number of processes"


def likely_cause_of_script(run: Trace, reference: Trace, difference: Difference) -> str:
    """As `likely_cause`, for a script on plain Accelerate."""
    causes = _causes_in_the_loader(run, reference, difference) | _causes_in_the_step(run.facts)
    unknown = "none found: samples, learning rates and parts of each step agree"
    return next((cause for cause, applies in causes.items() if applies), unknown)


def _causes_in_the_loader(run: Trace, reference: Trace, difference: Difference) -> dict[str, Any]:
    """{cause: whether it applies}, in reading and in schedules; the likeliest first."""
    facts, size, at = run.facts, run.facts["processes"], difference.first_step or 1
    is_alone, is_divided = facts["num_processes"] != size or facts["distributed_type"] == "NO", facts["divided_twice"]
    rows = [each.facts["gathered"] for each in (run, reference)]
    is_padded = difference.first_step is None and difference.tensor is None and rows[0] != rows[1]
    why = (
        "gather keeps the padding of the last batch; call gather_for_metrics"
        if facts["filled"]
        else "each process evaluates all samples, or repeats its loss (loss.repeat): a sum counts them several times"
    )
    ids, expected = (each.values.get((at, "samples"), []) for each in (run, reference))
    first, expected_first = (len(each.values.get((1, "samples"), [])) for each in (run, reference))
    ends = zip_longest(facts["epochs"], reference.facts["epochs"], fillvalue=math.inf)
    end = next((min(pair) for pair in ends if pair[0] != pair[1]), math.inf)
    fills = len(ids) > len(expected) and ({*ids} == {*expected} or (at > 1 and first == expected_first))
    repeats = facts["repeats_an_epoch"] and not reference.facts["repeats_an_epoch"]
    rates = [(step, "learning_rate") for step in range(1, at + 1)]
    counts = f"{len(ids)} samples under DDP and {len(expected)} in one process"
    return {
        f"the {size} processes train alone: Accelerate runs {facts['distributed_type']} in each": is_alone,
        f"the evaluation gathers {rows[0]} rows under DDP and {rows[1]} in one process: {why}": is_padded,
        "the loader has a DistributedSampler, and prepare divides its samples again: remove the sampler": is_divided,
        f"only one run ends an epoch after step {end}: each process decides by its own value, such as its loss: gather "
        "the value from all processes first": first == expected_first and end < at,
        f"step {at} takes {counts}: prepare fills up the last batch of an epoch (even_batches): set drop_last=True in "
        f"the loader{', and a batch no larger than the data' * (at == 1)}": fills,
        f"a step takes {counts}: divide the loader's batch size by accelerator.num_processes, or give Accelerator "
        "dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True); --split_batches "
        "shows what else differs": len(ids) != len(expected),
        "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch": repeats,
        "the steps take different samples than one process: give the sampler its own seeded generator, or use "
        "DataLoaderConfiguration(use_seedable_sampler=True), as --split_batches does": ids != expected,
        f"a prepared scheduler advances {size} times per step: set step_scheduler_with_optimizer=False in Accelerator, "
        "or do not prepare it": any(run.values.get(rate) != reference.values.get(rate) for rate in rates),
    }


def _causes_in_the_step(facts: Mapping[str, Any]) -> dict[str, Any]:
    """{cause: whether it applies}, in a step on the same samples; the likeliest first."""
    hooked = facts["comm_hook"] or facts["hooked"]
    layers = [name for name in facts.get("layers", ()) if "BatchNorm" in name]
    return {
        f"the processes have different weights after step {facts['parts_at']}: gradients are not averaged in each step "
        "(local steps, no_sync, backward outside the prepared model)": facts["parts_at"],
        f"the dataset or its collate_fn draws random numbers (from {facts['data_draw']}), which differ in each "
        "process: to compare, compute them from the sample's id, or draw none": facts["data_draw"],
        "a hook changes gradients in each process before or while they are averaged: remove it to compare": hooked,
        "the forward pass draws random numbers (dropout, noise), which differ in each process: to compare, set dropout "
        "to 0, or draw in the dataset": facts["draws"],
        "micro-batches have different numbers of tokens, but count the same: divide the sum of each by the number of "
        "tokens of the whole step": facts["has_unequal_parts"],
        f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm": layers,
        "each process pads its samples to a different length, which changes the loss: pad to one length, or leave "
        "padding out of the loss": facts["has_widths"],
    }


def cause_of_other_repetition(again: Trace, single: Trace) -> str:
    """Why one process does not repeat its result."""
    if any(again.values.get(key) != single.values.get(key) for key in single.values if key[1] == "samples"):
        return "one process takes different samples when it runs again: seed the shuffling, with set_seed at the start"
    if "own" in (single.facts["data_draw"] or ""):
        return "the dataset or its collate_fn has its own random generator, unseeded: seed it by the sample's id"
    return "one process gives different losses when it runs again: call set_seed before you build the model"
