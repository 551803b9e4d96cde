"""Checks of the user's data and forward_step, at the start or in the step that shows the problem."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..cpu_group import CpuGroup
from ..data.batches import fetch
from ..data.sets import Batch, ForwardStep, MapDataset, NumberedStep, as_numbered_step
from ..errors import UsageError
from ..weights.on_disk import first_elements


def freeze_what_is_not_trained(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Freezes the weights that the optimizer was not given: otherwise their gradients accumulate and count in the
    clipping norm. Says what is frozen. Returns the numbers of weights, for the run card."""
    given = {weight for group in optimizer.param_groups for weight in group["params"]}
    weights = list(model.parameters())
    frozen = {weight for weight in weights if not weight.requires_grad}
    left = {weight for weight in weights if weight.requires_grad and weight not in given}
    for weight in left:
        weight.requires_grad_(False)
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    line = f"trainable: {trained:,} of {total:,} weights"
    for what, those in (("frozen", frozen), ("frozen, as the optimizer was not given them", left)):
        if those:
            sizes = _sizes(model, those)
            first, *others = sorted(sizes, key=lambda name: -sizes[name])
            line += f"; {what}: {first} ({sizes[first]:,}){f' and {len(others)} more' * bool(others)}"
    if trained < total:
        accelerator.print(line)
    return {"num_weights": total, "num_trained_weights": trained}


def _sizes(module: nn.Module, weights: set[nn.Parameter], name: str = "") -> dict[str, int]:
    """{name: number of elements} of the largest parts of a module that have only these weights."""
    own = set(module.parameters())
    if name and own and own <= weights:
        return {name: sum(weight.numel() for weight in own)}
    plain = [(key, weight) for key, weight in module.named_parameters(recurse=False) if weight in weights]
    found = {f"{name}.{key}".lstrip("."): weight.numel() for key, weight in plain}
    for key, part in module.named_children():
        found |= _sizes(part, weights, f"{name}.{key}".lstrip("."))
    return found


def check_values(forward_step: ForwardStep, size: int, has_batch_loss: bool = False) -> NumberedStep:
    """Wraps `forward_step` to raise UsageError unless each metric has one value for each of `size` samples, and all
    calls return the same names: those in training, and those in evaluation, which may have metrics of its own. Orders
    the names, so that all processes sum up the same metrics. With a `batch_loss`, the values may have more dimensions,
    of the same sizes in all calls."""
    known: dict[tuple[bool, bool], dict[str, torch.Size]] = {}  # {(in training, with gradients): shapes}
    values_of = as_numbered_step(forward_step)

    def checked_values(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        # A recipe may ask for either; the first pass of a batch_loss trains without gradients.
        shapes = known.setdefault((model.training, torch.is_grad_enabled()), {})
        values = values_of(model, batch, number)
        if has_batch_loss:
            _check_values(values, size)
        else:
            check_metrics(values, size, "forward_step")
        if not shapes:
            shapes.update(
                {name: values[name].shape for name in sorted(values, key=lambda name: (name != "loss", name))}
            )
        if values.keys() != shapes.keys():
            raise UsageError(
                f"forward_step returns {', '.join(values)}, and {', '.join(shapes)} for another batch: return the same "
                "names for each batch; evaluation (not model.training) may have names of its own"
            )
        for name, value in values.items():
            if value.shape != shapes[name]:
                raise UsageError(
                    f'"{name}" has shape {tuple(value.shape)}, and {tuple(shapes[name])} in another batch: return one '
                    "shape for each batch, such as a mean over the tokens"
                )
        return {name: values[name] for name in shapes}

    return checked_values


def knows_what_is_trained(model: nn.Module, values_of: NumberedStep) -> NumberedStep:
    """Wraps `forward_step` to raise UsageError if the set of weights that want a gradient changes: the processes learn
    it when they wrap the model, and would not exchange the gradients of other weights."""
    layers = [layer._parameters for layer in model.modules() if layer._parameters]

    def trained() -> list[bool]:
        return [weight.requires_grad for layer in layers for weight in layer.values() if weight is not None]

    first = trained()

    def same_weights(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        values = values_of(model, batch, number)
        if torch.is_grad_enabled() and trained() != first:
            raise UsageError(
                f"the weights that want a gradient are not those of the start in step {number + 1}, and the processes "
                "would not exchange the gradients of new ones: set requires_grad before fit, and train each phase in a "
                "run of its own, or use --config_file accelerate_configs/single.yaml"
            )
        return values

    return same_weights


def check_metrics(values: Any, size: int, source: str) -> None:
    """Raises UsageError unless `source` returned {metric: one value for each of `size` samples}, with a "loss".
    Integers and booleans may have more dimensions: they are predictions, such as the class of each pixel."""
    if not isinstance(values, dict) or "loss" not in values:
        given = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise UsageError(f'{source} returns {given}: expected a dict with "loss" of shape ({size},)')
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise UsageError(f'"{name}" is a {type(value).__name__}: expected a tensor of shape ({size},)')
        is_prediction = not value.is_floating_point() and value.shape[:1] == (size,)
        if value.shape != (size,) and not is_prediction:
            raise UsageError(
                f'"{name}" has shape {tuple(value.shape)}: expected ({size},), one value per example; use '
                f"{_advice(name, value, size)}"
            )
    if torch.is_grad_enabled() and not values["loss"].requires_grad:
        raise UsageError('"loss" has no gradient: compute it from the model output, without detach or no_grad')


def _check_values(values: Any, size: int) -> None:
    """Raises UsageError unless `forward_step` returned values for `batch_loss`: a row for each of `size` samples."""
    if not isinstance(values, dict) or "loss" in values or not values:
        given = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise UsageError(
            f"forward_step returns {given}: with batch_loss, expected a dict of what that needs, such as vectors of "
            f'shape ({size}, ...), and "loss" from batch_loss'
        )
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (size,):
            given = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise UsageError(
                f'"{name}" {given}: expected a tensor of shape ({size}, ...); expand what all samples share, such as '
                f"a temperature, to ({size},)"
            )
    if torch.is_grad_enabled() and not any(value.requires_grad for value in values.values()):
        raise UsageError(
            f"{', '.join(values)}: none has a gradient: compute them from the model output, without detach or no_grad"
        )


def check_no_weights(loss: Tensor, values: Iterable[Tensor]) -> None:
    """Raises UsageError if a loss has gradients for other tensors than these values: they would be lost."""
    others = (used_weights([loss]) or set()) - set(values)
    if others:
        raise UsageError(
            f"batch_loss uses a weight of shape {tuple(others.pop().shape)} that is not among its values: return it "
            "from the model and from forward_step, expanded to (batch, ...)"
        )


def _advice(name: str, value: Tensor, size: int) -> str:
    """What to type for a value of a wrong shape."""
    if value.shape == (size, 1):
        return ".squeeze(-1)"
    advice = "a reduction that keeps the batch dimension"
    if value.ndim == 0:
        advice = 'reduction="none", or leave out mean()'
    elif value.shape[0] == size:
        squares = ".squeeze(-1) on the model output, if (batch, 1) against (batch,) made (batch, batch); else "
        advice = f"{squares * (value.shape == (size, size))}.flatten(1).mean(1)"
    if name != "loss":
        more = "what has no value per example, such as a confusion matrix: return predictions, and give fit examples="
    elif value.ndim == 0:
        more = "of a transformers model take the logits, not its .loss, which is a mean"
    else:
        more = 'if some elements are ignored, the mean over the others, and their number as "weight" of the batch'
    return f"{advice}; {more}"


def check_all_used(model: nn.Module, values: Sequence[Tensor], rank: int) -> None:
    """Raises UsageError for a weight that none of these values of a forward pass depends on. A single process leaves
    such a weight unchanged; DDP and FSDP wait for its gradient, and ZeRO applies weight decay to it."""
    used = used_weights(values)
    weights = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
    if used is None or len(used) >= len(weights):  # FSDP computes with gathered copies, which have no names
        return
    unused = [name for weight, name in weights.items() if weight not in used]
    what = unused[0] if len(unused) + len(used) == len(weights) else f"{len(weights) - len(used)} of its weights"
    raise not_used(f"the forward pass of process {rank} does not use {what}")


def not_used(what: str) -> UsageError:
    return UsageError(
        f"{what}: freeze weights that no pass uses, with requires_grad_(False) or by leaving them out of the "
        "optimizer; if only some passes use a weight, as with layerdrop, set that to 0, or as with experts add 0 * "
        "weight.sum() to each loss"
    )


def used_weights(values: Sequence[Tensor], through_checkpoints: bool = False) -> set[Tensor] | None:
    """The leaves of their graph; None if activation checkpointing hides some, unless they do not matter."""
    used, seen, waiting = set(), set(), [value.grad_fn for value in values]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name() and not through_checkpoints:
            return None
        if hasattr(node, "variable"):
            used.add(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return used


def check_same_start(
    model: nn.Module, train_set: MapDataset, eval_sets: Mapping[str, MapDataset], group: CpuGroup
) -> None:
    """Raises UsageError in all processes if the weights or data of one process differ from those of process 0, or an
    evaluation set gives another sample when it is read again; of a training set, the first steps show it.

    Compares up to 64 elements of each weight, and the length and up to four samples of each dataset. Of a weight that
    is still on disk, these are its first ones.
    """
    if group.size == 1:
        return
    weights = model.state_dict(keep_vars=True)
    facts = {f"the weight {name}": _sample(first_elements(tensor)) for name, tensor in weights.items()}
    datasets = {"training": train_set} | {
        f"evaluation{f' {name}' * bool(name)}": eval_set for name, eval_set in eval_sets.items()
    }
    changing = None
    for kind, dataset in datasets.items():
        facts[f"the length of the {kind} set"] = str(len(dataset))
        for place in sorted({len(dataset) * part // 4 for part in range(4)}):
            facts[f"sample {place} of the {kind} set"] = _digest(fetch(dataset, [place]))
        if kind != "training" and facts[f"sample 0 of the {kind} set"] != _digest(fetch(dataset, [0])):
            changing = kind
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    digests, found = zip(*group.all_gather((digest, changing)))
    for kind in filter(None, found):
        raise UsageError(
            f"sample 0 of the {kind} set has another content when it is read again: let the set draw from the "
            "generators of torch, numpy or random, which are seeded for each sample, and not from one of its own"
        )
    if len(set(digests)) == 1:
        return
    first, *others = group.all_gather(facts)
    for rank, other in enumerate(others, start=1):
        for what in [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise UsageError(
                f"process {rank} starts with another value of {what} than process 0: build the same model and data in "
                "each process; start(config) gives all processes the same seed, so do not seed by rank"
            )


def _sample(tensor: Tensor) -> str:
    """Shape, dtype and up to 64 evenly spaced elements, as text."""
    flat = tensor.detach().flatten()
    values = flat[:: max(1, flat.numel() // 64)][:64]
    return f"{tuple(tensor.shape)} {tensor.dtype} {values.tolist()}"


def _digest(batch: Batch) -> str:
    text = repr({name: _sample(value) if isinstance(value, Tensor) else value for name, value in batch.items()})
    return hashlib.sha256(text.encode()).hexdigest()
