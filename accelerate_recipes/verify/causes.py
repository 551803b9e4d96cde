"""Why a recipe does not give one result: what a look at its model, data and `forward_step` shows.

common/check/ finds causes in the first steps of a run, from inside. This is for a difference that shows later.
"""

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
    import torch

    from accelerate_recipes.common import seeds
    from accelerate_recipes.common.data.batches import fetch
    from accelerate_recipes.common.data.sets import Collated, as_numbered_step

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
    unknown = "none found: model, data and forward_step look independent of the number of processes"
    return next((text for condition, text in causes if condition), unknown)


def _equal(value: Any, other: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_equal, value, other))
    return bool(value == other)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
