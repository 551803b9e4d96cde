"""Checks of the user's data and forward_step, at the start or in the step that shows the problem."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..cpu_group import CpuGroup
from ..data.batches import fetch, keeps_draws
from ..data.sets import Batch, MapDataset, NumberedStep
from ..errors import UsageError
from ..weights.on_disk import first_elements
from ..weights.shards import checkpoint_tensors


def freeze_what_is_not_trained(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Freezes the weights that the optimizer was not given: otherwise their gradients accumulate and count in the
    clipping norm. Drops gradients from before `fit`: each config would keep a different part of them. Prints what is
    frozen. Returns the numbers of weights, for the run card. Raises UsageError for one that checkpoints lack."""
    model.zero_grad()
    given = {weight for group in optimizer.param_groups for weight in group["params"]}
    weights = list(model.parameters())
    frozen = {weight for weight in weights if not weight.requires_grad}
    left = {weight for weight in weights if weight.requires_grad and weight not in given}
    for weight in left:
        weight.requires_grad_(False)
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    kept = {*checkpoint_tensors(model).values()}
    for name in [name for name, weight in model.named_parameters() if weight.requires_grad and weight not in kept]:
        raise UsageError(f"the model's own state_dict() leaves {name} out, and checkpoints would, too: return it there")
    line = f"trainable: {trained:,} of {total:,} weights"
    for what, those in (("frozen", frozen), ("frozen, because they are not in the optimizer", left)):
        if those:
            sizes = _sizes(model, those)
            first, *others = sorted(sizes, key=lambda name: -sizes[name])
            line += f"; {what}: {first} ({sizes[first]:,}){f' and {len(others)} more' * bool(others)}"
    if trained < total:
        accelerator.print(line)
    return {"num_weights": total, "num_trained_weights": trained}


def _sizes(module: nn.Module, weights: set[nn.Parameter], name: str = "") -> dict[str, int]:
    """{name: number of elements} of the largest parts of a module whose weights are all among these."""
    own = set(module.parameters())
    if name and own and own <= weights:
        return {name: sum(weight.numel() for weight in own)}
    plain = [(key, weight) for key, weight in module.named_parameters(recurse=False) if weight in weights]
    found = {f"{name}.{key}".lstrip("."): weight.numel() for key, weight in plain}
    for key, part in module.named_children():
        found |= _sizes(part, weights, f"{name}.{key}".lstrip("."))
    return found


def knows_what_is_trained(model: nn.Module, values_of: NumberedStep) -> NumberedStep:
    """Wraps `forward_step` to raise UsageError if the set of weights with requires_grad changes: the processes learn
    it when they wrap the model, and would not exchange the gradients of other weights."""
    layers = [layer._parameters for layer in model.modules() if layer._parameters]

    def trained() -> list[tuple[int, str]]:
        every = ((place, key, weight) for place, layer in enumerate(layers) for key, weight in layer.items())
        return [(place, key) for place, key, weight in every if weight is not None and weight.requires_grad]

    first = trained()

    def same_weights(model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        try:
            return values_of(model, batch, number)
        finally:  # a stage of a pipeline leaves the pass by an exception
            if torch.is_grad_enabled() and trained() != first:
                raise UsageError(
                    f"the weights with requires_grad differ from those at the start in step {number + 1}, and the "
                    "processes would not exchange the gradients of new ones: set requires_grad before fit, and train "
                    "each phase in its own run, or use --config_file accelerate_configs/single.yaml"
                )

    return same_weights


@dataclass
class Calls:
    """A hook that counts calls; not a function, so that a model that has it can be pickled and copied."""

    number: int = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.number += 1


def always_calls(model: nn.Module, values_of: NumberedStep) -> NumberedStep:
    """Wraps `forward_step` to raise UsageError if a pass with gradients does not call the model: the others wait."""
    if isinstance(model, torch.jit.ScriptModule):  # it takes no hooks
        return values_of
    calls = Calls()
    model.register_forward_pre_hook(calls)

    def calling(given: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        calls.number = 0
        values = values_of(given, batch, number)
        if torch.is_grad_enabled() and not calls.number:
            raise UsageError(
                f"forward_step does not call the model that it is given in step {number + 1}, so the processes do not "
                "share gradients: call model(...), not one of its methods or layers, and not a model from outside "
                "forward_step; if only some batches need it, call it for every batch and multiply the result by 0"
            )
        return values

    return calling


def check_all_used(trained: Mapping[str, Tensor], values: Sequence[Tensor]) -> None:
    """Raises UsageError for a trained weight that does not affect these values of a forward pass. One process leaves
    such a weight unchanged; DDP and FSDP wait for its gradient, and ZeRO applies weight decay to it."""
    graph = graph_of(values)
    used, hides = leaves_of(graph), any("CheckpointFunction" in node.name() for node in graph)
    weights = {weight: name for name, weight in trained.items()}
    if hides or len(used) >= len(weights):  # FSDP computes with gathered copies, which have no names
        return
    unused = [name for weight, name in weights.items() if weight not in used]
    what = unused[0] if len(unused) + len(used) == len(weights) else f"{len(weights) - len(used)} of its weights"
    raise not_used(f"a forward pass does not use {what}")


def not_used(what: str) -> UsageError:
    return UsageError(
        f"{what}: freeze weights that no pass uses, with requires_grad_(False) or by leaving them out of the "
        "optimizer; if only some passes use a layer, set layerdrop to 0, or call it in every pass and multiply by 0"
    )


def leaves_of(graph: set[Any]) -> set[Tensor]:
    """The leaves of a graph, except leaves that activation checkpointing hides."""
    return {node.variable for node in graph if hasattr(node, "variable")}


def graph_of(values: Iterable[Tensor]) -> set[Any]:
    seen, waiting = set[Any](), [value.grad_fn for value in values]
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def check_same_order(group: CpuGroup, epoch: int, order: Tensor) -> None:
    """Raises UsageError in all processes if a sampler returns another order in one: some samples would train twice."""
    first, *others = group.all_gather(hashlib.sha256(order.cpu().numpy().tobytes()).digest())
    for rank in [rank for rank, other in enumerate(others, start=1) if other != first]:
        raise UsageError(
            f"the sampler returns another order in process {rank} than in process 0, in epoch {epoch}: use its "
            "arguments, not its own generator, a count of calls, or what the samples of one process have changed"
        )


def check_same_start(
    model: nn.Module, train_set: MapDataset, eval_sets: Mapping[str, MapDataset], group: CpuGroup
) -> None:
    """Raises UsageError in all processes if the weights or data of one process differ from process 0's, or if an
    evaluation set's sample changes when it is read again; for a training set, the first steps show that. Compares up to
    64 elements of each weight (the first ones of a weight on disk), and the length and up to four samples of each
    dataset."""
    datasets = {"training": train_set} | {
        f"evaluation{f' {name}' * bool(name)}": eval_set for name, eval_set in eval_sets.items()
    }
    for kind, dataset in datasets.items():
        if keeps_draws(dataset):
            raise UsageError(
                f"a sample of the {kind} set draws random numbers when it is first read, and keeps them: another "
                "process or worker would keep different ones; draw at each read, or for all samples in the constructor"
            )
    if group.size == 1:
        return
    weights = model.state_dict(keep_vars=True)
    facts = {f"the weight {name}": _sample(first_elements(tensor)) for name, tensor in weights.items()}
    changing = None
    for kind, dataset in datasets.items():
        facts[f"the length of the {kind} set"] = str(len(dataset))
        for place in sorted({len(dataset) * part // 4 for part in range(4)}):
            facts[f"sample {place} of the {kind} set"] = digest(dataset, place)
        if kind != "training" and facts[f"sample 0 of the {kind} set"] != digest(dataset, 0):
            changing = kind
    digests, found = zip(*group.all_gather((hashlib.sha256(repr(facts).encode()).hexdigest(), changing)))
    for kind in filter(None, found):
        raise UsageError(changing_sample(f"sample 0 of the {kind} set"))
    if len(set(digests)) == 1:
        return
    first, *others = group.all_gather(facts)
    for rank, other in enumerate(others, start=1):
        for what in [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise UsageError(
                f"process {rank} starts with a different value of {what} than process 0: build the same model and "
                "data in each process; start(config) gives all processes the same seed, so do not seed by rank"
            )


def changing_sample(which: str) -> str:
    """The line about a sample that is different when it is read again."""
    return (
        f"{which} changes when it is read again: draw from the generators of torch, numpy or random, which are "
        "seeded for each sample, not from your own, and count no readings"
    )


def _sample(tensor: Tensor) -> str:
    """Shape, dtype and up to 64 evenly spaced elements, as text."""
    flat = tensor.detach().flatten()
    return f"{tuple(tensor.shape)} {tensor.dtype} {flat[:: max(1, flat.numel() // 64)][:64].tolist()}"


def digest(dataset: MapDataset, place: int) -> str:
    """A digest of a sample, which reads it."""
    batch = fetch(dataset, [place])
    text = repr({name: _sample(value) if isinstance(value, Tensor) else value for name, value in batch.items()})
    return hashlib.sha256(text.encode()).hexdigest()
