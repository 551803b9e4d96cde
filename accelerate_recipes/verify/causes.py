"""Why a recipe does not give one result: what a look at its model, data and `forward_step` shows."""

import random
from typing import Any

from accelerate_recipes.verify.compare import Difference

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
        dropout: names of dropout layers that are on.
        random_samples: keys of a sample that differ when it is read twice.
        random_loss: whether two forward passes on the same batch differ, or draw random numbers.
        depends_on_batch: the metrics of a sample that change with the other samples of its batch.
    """
    import torch

    modules = dict(model.named_modules())
    is_exact = getattr(config, "exact_dropout", False)
    found: dict[str, Any] = {
        "batch_norm": [
            name
            for name, module in modules.items()
            if isinstance(module, torch.nn.modules.batchnorm._NormBase)
            and module.training
            and getattr(module, "running_mean", None) is not None
        ],
        "dropout": [
            name
            for name, module in modules.items()
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0 and not is_exact
        ],
    }
    ids = list(range(min(len(train_set), max(4, config.batch_size // 2 * 2))))
    fetch = _batches().fetch
    if collate_fn := keywords.get("collate_fn"):
        train_set = _batches().Collated(train_set, collate_fn)
    batch, again = fetch(train_set, ids), fetch(train_set, ids)
    found["random_samples"] = sorted(name for name, value in batch.items() if not _equal(value, again[name]))
    before = _random_state()
    model.train()
    with torch.no_grad():
        values = forward_step(model, batch)
        has_drawn = not _equal(before, _random_state())
        repeated = forward_step(model, batch)
        half = forward_step(model, fetch(train_set, ids[: len(ids) // 2]))
    differs = has_drawn or not all(_equal(value, repeated[name]) for name, value in values.items())
    found["random_loss"] = differs and not is_exact
    found["depends_on_batch"] = [
        name for name, value in values.items() if not torch.allclose(value[: len(half[name])], half[name], rtol=1e-3)
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
            found["dropout"],
            f"dropout ({_some(found['dropout'])}) draws its masks for each micro-batch, and the sizes of micro-batches "
            "differ between these runs: add --exact_dropout to the recipe's flags",
        ),
        (
            found["random_loss"],
            "forward_step draws random numbers for each micro-batch, and the sizes of micro-batches differ between "
            "these runs: remove the noise to verify the rest",
        ),
        (
            losses,
            f"{losses} of a sample depends on the other samples of its batch, such as a mean inside forward_step (a "
            'mean of means): return one value per sample, and their weights as "weight" of the batch',
        ),
        (
            difference.first_step is None,
            "losses and evaluations agree, only weights differ: a weight whose true gradient is zero, such as the key "
            "bias of attention, gets steps of rounding noise from Adam",
        ),
    ]
    unknown = "none found: model, data and forward_step look independent of the number of processes"
    return next((text for condition, text in causes if condition), unknown)


def _batches() -> Any:
    import importlib

    return importlib.import_module("common.data.batches")  # the recipe's own


def _equal(value: Any, other: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def _random_state() -> list[Any]:
    import numpy
    import torch

    state: Any = numpy.random.get_state()
    return [torch.get_rng_state(), random.getstate(), state[1].tolist(), state[2]]


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
