"""Why a recipe or script does not give one result: what a look at it, or at what its processes did, shows.

common/check/ finds causes in the first steps of a run, from inside. This is for a difference that shows later.
"""

from typing import Any

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
    *others: Any,
    **keywords: Any,
) -> dict[str, Any]:
    """Reads samples and runs `forward_step` a few times; takes the arguments of `fit`.

    Returns:
        batch_norm: names of layers that compute statistics over the batch.
        random_samples: keys of a sample that differ when it is read twice.
        random_loss: whether two forward passes on the same batch, with the same seed, differ.
        draws: whether a forward pass draws random numbers, also without dropout.
        depends_on_batch: the metrics of a sample that change with the other samples of its batch.
    """
    import torch

    from accelerate_recipes.common import seeds
    from accelerate_recipes.common.data.batches import fetch
    from accelerate_recipes.common.data.sets import Collated, numbered

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
    if collate_fn := keywords.get("collate_fn"):
        train_set = Collated(train_set, collate_fn)
    batch, again = fetch(train_set, ids), fetch(train_set, ids)
    found["random_samples"] = sorted(name for name, value in batch.items() if not _equal(value, again[name]))
    model.train()

    device, values_of = torch.device("cpu"), numbered(forward_step)

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
    """One line about the most likely cause of a difference, and what to do."""
    samples, losses = ", ".join(found["random_samples"]), ", ".join(found["depends_on_batch"])
    causes: list[tuple[Any, str]] = [
        (
            difference.learning_rate,
            "the learning rate depends on the number of processes: set it without asking how many there are; "
            "--batch_size already counts all processes",
        ),
        (
            samples,
            f"the dataset draws random numbers ({samples} of a sample differs when it is read twice): make them a "
            "function of the sample's id",
        ),
        (
            found["batch_norm"],
            f"BatchNorm ({_some(found['batch_norm'])}) sees the samples of one process: use GroupNorm or LayerNorm",
        ),
        (
            found["random_loss"],
            "forward_step returns other values for the same batch and seed: it keeps a state, or draws from a "
            "generator of its own; the generators of torch, numpy and random are seeded",
        ),
        (
            found["draws"],
            "forward_step draws random numbers, such as noise, which depend on the micro-batch: let the dataset draw "
            "them in __getitem__, as recipes/diffusion.py does, or keep one --micro_batch_size",
        ),
        (
            losses,
            f"{losses} of a sample depends on the other samples of its batch, such as a mean inside forward_step (a "
            'mean of means): return one value per sample, and their weights as "weight" of the batch; give fit a loss '
            "that compares samples as batch_loss",
        ),
        (
            difference.first_step is None,
            "losses and evaluations agree, only weights differ: a weight whose true gradient is zero, such as the key "
            "bias of attention, gets steps of rounding noise from Adam",
        ),
    ]
    return _first(causes) or "none found: model, data and forward_step look independent of the number of processes"


def cause_of_other_repetition(again: Trace, single: Trace) -> str:
    """Why one process does not repeat itself."""
    if any(again.values.get(key) != single.values.get(key) for key in single.values if key[1] == "samples"):
        return "one process takes other samples when it runs again: seed the shuffling, with set_seed at the start"
    return (
        "one process has other losses when it runs again on the same samples: call set_seed before the model is "
        "built; weights, dropout and noise are drawn"
    )


def likely_cause_of_script(run: Trace, reference: Trace, difference: Difference) -> str:
    """One line about the most likely cause of a difference, and what to do."""
    facts, size, at = run.facts, run.facts["processes"], difference.first_step or 1
    (first, expected_first), (ids, expected) = _samples(run, reference, 1), _samples(run, reference, at)
    rates, expected_rates = (
        [each.values.get((step, "learning_rate")) for step in range(1, at + 1)] for each in (run, reference)
    )
    layers = [name for name in facts["layers"] if "BatchNorm" in name]
    kind, gathered, expected_gathered = facts["distributed_type"], facts["gathered"], reference.facts["gathered"]
    causes: list[tuple[Any, str]] = [
        (
            facts["num_processes"] != size or kind == "NO",
            f"the {size} processes train alone: Accelerate runs {kind} in each",
        ),
        (
            difference.first_step is None and difference.tensor is None and gathered != expected_gathered,
            f"the evaluation gathers {gathered} rows under DDP and {expected_gathered} in one process: gather keeps "
            "what fills up the last batch; call gather_for_metrics",
        ),
        (
            facts["divided_twice"],
            "the loader has a DistributedSampler, and prepare divides its samples again: leave out the sampler",
        ),
        (
            at > 1 and len(first) == len(expected_first) and len(ids) > len(expected),
            f"step {at} takes {len(ids)} samples under DDP and {len(expected)} in one process: prepare fills up "
            "the last batch of an epoch with other samples (even_batches): set drop_last=True in the loader",
        ),
        (
            len(ids) != len(expected),
            f"a step takes {len(ids)} samples under DDP and {len(expected)} in one process: divide the batch "
            "size of the loader by accelerator.num_processes",
        ),
        (
            facts["repeats_an_epoch"] and not reference.facts["repeats_an_epoch"],
            "under DDP each epoch has the same order: call set_epoch on the sampler or loader before each epoch",
        ),
        (ids != expected, "steps take other samples than in one process: seed the shuffling in a generator of its own"),
        (
            rates != expected_rates,
            f"the schedule is elsewhere after the same step: a prepared scheduler advances {size} times per step; "
            "create the Accelerator with step_scheduler_with_optimizer=False, or do not prepare the scheduler",
        ),
        (
            facts["parts_at"],
            f"the processes have different weights after step {facts['parts_at']}: gradients are not averaged in each "
            "step (local steps, no_sync, a backward pass beside the prepared model)",
        ),
        (
            facts["comm_hook"] or facts["hooked"],
            "a hook changes gradients in each process before or while they are averaged: remove it to compare",
        ),
        (
            facts["draws"],
            "the forward pass draws random numbers (dropout, noise), which differ in each process: losses agree on "
            "average only; set dropout to 0, or draw in the dataset, to compare",
        ),
        (
            facts["has_unequal_parts"],
            "micro-batches have different numbers of tokens, but the mean of each counts the same: divide the sum of "
            "each by the number of tokens of the whole step",
        ),
        (layers, f"{', '.join(layers)} sees only the samples of one process: use GroupNorm or LayerNorm"),
    ]
    return _first(causes) or "none found: samples, learning rates and parts of each step agree"


def _samples(run: Trace, reference: Trace, step: int) -> list[list[int]]:
    """The sample ids of a step in both; empty where there are none."""
    return [each.values.get((step, "samples"), []) for each in (run, reference)]


def _first(causes: list[tuple[Any, str]]) -> str | None:
    """The text of the first condition that holds."""
    return next((text for condition, text in causes if condition), None)


def _equal(value: Any, other: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
