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
        return (
            "the learning rate depends on the number of processes: do not compute it from that number; "
            "--batch_size already counts all processes"
        )
    if found_by_check or said:
        return found_by_check or said[0]
    if difference.first_step is None:
        return (
            "losses and evaluations agree, only weights differ: a weight whose true gradient is zero, such as the key "
            "bias of attention, gets steps of rounding noise from Adam"
        )
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
        else "each process evaluates all samples, or repeats its loss as for a whole batch (loss.repeat); a mean can "
        "stay the same, but a sum changes"
    )
    ids, expected = (each.values.get((at, "samples"), []) for each in (run, reference))
    first, expected_first = (len(each.values.get((1, "samples"), [])) for each in (run, reference))
    ends = zip_longest(facts["epochs"], reference.facts["epochs"], fillvalue=math.inf)
    end = next((min(pair) for pair in ends if pair[0] != pair[1]), math.inf)
    fills = len(ids) > len(expected) and ({*ids} == {*expected} or (at > 1 and first == expected_first))
    repeats = facts["repeats_an_epoch"] and not reference.facts["repeats_an_epoch"]
    rates = [(step, "learning_rate") for step in range(1, at + 1)]
    return {
        f"the {size} processes train alone: Accelerate runs {facts['distributed_type']} in each": is_alone,
        f"the evaluation gathers {rows[0]} rows under DDP and {rows[1]} in one process: {why}": is_padded,
        "the loader has a DistributedSampler, and prepare divides its samples again: remove the sampler": is_divided,
        f"only one of the two runs ends an epoch after step {end}: each process decides by its own value, such as the "
        "loss of its samples; gather the value from all processes first": first == expected_first and end < at,
        f"step {at} takes {len(ids)} samples under DDP and {len(expected)} in one process: prepare fills up the last "
        "batch of an epoch with other samples (even_batches): set drop_last=True in the loader"
        f"{', and a batch no larger than the data' * (at == 1)}": fills,
        f"a step takes {len(ids)} samples under DDP and {len(expected)} in one process: divide the batch size of the "
        "loader by accelerator.num_processes, or give Accelerator dataloader_config=DataLoaderConfiguration("
        "split_batches=True, use_seedable_sampler=True); --split_batches sets both, to show what else "
        "differs": len(ids) != len(expected),
        "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch": repeats,
        "the steps take different samples than one process: give the sampler its own seeded generator, or use "
        "DataLoaderConfiguration(use_seedable_sampler=True), as --split_batches does": ids != expected,
        f"the learning rate differs after the same step: a prepared scheduler advances {size} times per step; create "
        "the Accelerator with step_scheduler_with_optimizer=False, or do not prepare the "
        "scheduler": any(run.values.get(rate) != reference.values.get(rate) for rate in rates),
    }


def _causes_in_the_step(facts: Mapping[str, Any]) -> dict[str, Any]:
    """{cause: whether it applies}, in a step on the same samples; the likeliest first."""
    hooked = facts["comm_hook"] or facts["hooked"]
    layers = [name for name in facts.get("layers", ()) if "BatchNorm" in name]
    return {
        f"the processes have different weights after step {facts['parts_at']}: gradients are not averaged in each step "
        "(local steps, no_sync, a backward pass outside the prepared model)": facts["parts_at"],
        f"the dataset or its collate_fn draws random numbers (from {facts['data_draw']}), which differ in each "
        "process: only the ids of the samples agree; make the numbers a function of the sample's id, or draw none, to "
        "compare": facts["data_draw"],
        "a hook changes gradients in each process before or while they are averaged: remove it to compare": hooked,
        "the forward pass draws random numbers (dropout, noise), which differ in each process: losses agree only on "
        "average; set dropout to 0, or draw in the dataset, to compare": facts["draws"],
        "micro-batches have different numbers of tokens, but the mean of each counts the same: divide the sum of each "
        "by the number of tokens of the whole step": facts["has_unequal_parts"],
        f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm": layers,
        "each process pads its samples to a different length, and the loss depends on it, as a softmax or mean over "
        "positions does: pad to one length, or leave padded positions out of the loss": facts["has_widths"],
    }


def cause_of_other_repetition(again: Trace, single: Trace) -> str:
    """Why one process does not repeat its result."""
    if any(again.values.get(key) != single.values.get(key) for key in single.values if key[1] == "samples"):
        return "one process takes different samples when it runs again: seed the shuffling, with set_seed at the start"
    if "own" in (single.facts["data_draw"] or ""):
        return (
            "one process gives different losses when it runs again on samples with the same ids: the dataset or its "
            "collate_fn has its own random generator (such as numpy's default_rng or albumentations), which set_seed "
            "does not reach: seed it by the sample's id"
        )
    return (
        "one process gives different losses when it runs again on the same samples: call set_seed before you build "
        "the model, because weights, dropout and noise are random"
    )
