"""What a user brings: a model, an optimizer, data and a forward_step. Each config trains them as one process does, or
they are refused in one line, at the start or in the step that meets it."""

import hashlib
import os
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch import distributed as dist

from common.cpu_group import CpuGroup
from common.data.batches import Batch, ForwardStep, MapDataset, fetch
from common.errors import UsageError
from common.plan import Plan
from common.random_state import random_state_kept

# On DTensors, which FSDP2 makes of the weights, they fail in the first step (torch 2.13).
WHOLE_ONLY = ("Adafactor", "Muon", "Rprop")
# Each number's step depends on the gradients of that number alone, so that they may step on pieces of the weights.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def freeze_what_is_not_trained(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Freezes the weights that the optimizer was not given: else their gradients pile up, and count in the norm that
    clips. Raises UsageError for a weight that the model lacks, which the processes would not share."""
    given = {weight for group in optimizer.param_groups for weight in group["params"]}
    strange = given - set(model.parameters())
    if strange:
        raise UsageError(
            f"the optimizer was given a weight of shape {tuple(strange.pop().shape)} that is none of "
            f"{type(model).__name__}: hand fit one module that holds all weights"
        )
    left = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad and weight not in given]
    for _, weight in left:
        weight.requires_grad_(False)
    if left:
        accelerator.print(
            f"{len(left)} of {len(list(model.parameters()))} weights are frozen, as the optimizer was not given them: "
            f"{left[0][0]}{', ...' * (len(left) > 1)}"
        )


def check_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer that would not do under this config what it does on one process."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS calls the model several times a step, which fit does not: take another optimizer")
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        raise UsageError(f"{name} has a tensor as learning rate: give it a float")
    if accelerator.scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError("fused=True hides from the loss scaling of fp16 which steps were skipped: remove it")
    if accelerator.distributed_type == DistributedType.FSDP and name in WHOLE_ONLY:
        raise UsageError(f"{name} steps on whole weights only: type --config_file accelerate_configs/ddp.yaml")
    is_known = type(optimizer).__module__.startswith("torch.optim") and name in ELEMENTWISE
    if accelerator.distributed_type == DistributedType.DEEPSPEED and not (
        is_known or getattr(optimizer, "elementwise", False)
    ):
        raise UsageError(
            f"{name} under DeepSpeed, which steps on flat pieces of the weights: type --config_file "
            f"accelerate_configs/fsdp2.yaml, or, if its step of each number depends on the gradients of that number "
            f"alone, write elementwise = True into the class {name}"
        )


def say_what_depends_on_the_layout(accelerator: Accelerator, model: nn.Module, plan: Plan) -> None:
    """One line for each kind of layer whose result is another on another number of processes."""
    if plan.micro_batch_size == plan.config.batch_size:
        return
    sees = f"sees {plan.micro_batch_size} of {plan.config.batch_size} samples at a time: the result depends on the"
    modules = list(model.modules())
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        accelerator.print(
            f"this model has BatchNorm, which {sees} number of processes; GroupNorm or LayerNorm avoid that"
        )
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in modules):
        accelerator.print(
            "this model has dropout, which draws other numbers on another number of processes: losses agree on average "
            "only"
        )


def choose_wrapped_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Tells Accelerate which layers FSDP gathers one at a time: those that the config file names, or those of
    `_no_split_modules` that are there and do not hold the input embedding, which Accelerate shards by itself.

    Raises:
        UsageError: a class of the config file that the model lacks, or a weight that FSDP cannot gather.
    """
    named = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in named.split(",") if name not in present] if named else []
    if missing:
        raise UsageError(
            f"fsdp_transformer_layer_cls_to_wrap names {missing[0]}, but the model's layers are "
            f"{', '.join(sorted(present))}"
        )
    embedding = _embedding(model, "input")
    classes = named.split(",") if named else getattr(model, "_no_split_modules", None) or []
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    whole = {type(layer).__name__ for layer in layers if any(module is embedding for module in layer.modules())}
    kept = sorted({type(layer).__name__ for layer in layers} - whole)
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = kept
    if not kept:
        accelerator.print(
            f"{type(model).__name__} names no layers in _no_split_modules: FSDP gathers the whole model at once, "
            "which saves less memory"
        )
    _check_shared_weights(model, [layer for layer in layers if type(layer).__name__ in kept])


def _check_shared_weights(model: nn.Module, layers: list[nn.Module]) -> None:
    """Raises UsageError for a weight of two modules that FSDP gathers apart: layers, and the input embedding, which
    Accelerate gathers with the output embedding where they are tied."""
    group_of = {module: layer for layer in layers for module in layer.modules()}
    ends = [_embedding(model, end) for end in ("input", "output")]
    if getattr(ends[0], "weight", None) is not getattr(ends[1], "weight", 0):
        ends = ends[:1]
    group_of |= {module: model for module in ends if module is not None}
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(weight, []).append((path, module))
    for sharing in owners.values():
        if len({group_of.get(module) for _, module in sharing}) > 1:
            raise UsageError(
                f"{sharing[0][0]} and {sharing[-1][0]} share a weight, which FSDP cannot gather with both: type "
                "--config_file accelerate_configs/ddp.yaml, or name no layers in _no_split_modules that share one"
            )


def check_weights(accelerator: Accelerator, model: nn.Module) -> None:
    """Raises UsageError for a weight that FSDP or DeepSpeed cannot divide, or would silently cast."""
    names = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed"}
    who = names.get(accelerator.distributed_type)
    if who is None:
        return
    # FSDP in bf16 and DeepSpeed hold all weights in one precision, which has no imaginary part.
    casts = who == "DeepSpeed" or accelerator.mixed_precision != "no"
    for name, weight in model.named_parameters():
        if weight.ndim == 0:
            raise UsageError(f"{name} has no dimension that {who} could divide: give it the shape (1,)")
        if weight.numel() == 0:
            raise UsageError(f"{name} has no elements, of which {who} needs some: leave it out of the model")
        if casts and weight.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise UsageError(
                f"{name} is {_name(weight)}, which {who} would cast: type "
                "--config_file accelerate_configs/ddp.yaml, or make it float32"
            )
    others = sorted({_name(weight) for weight in model.parameters()} - {"float32"})
    if casts and others:
        accelerator.print(f"{who} trains and exports in float32 what this model holds in {', '.join(others)}")


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _embedding(model: nn.Module, end: str) -> nn.Module | None:
    try:
        return getattr(model, f"get_{end}_embeddings")()  # of a transformers model
    except (AttributeError, NotImplementedError):
        return None


def checked(forward_step: ForwardStep, size: int) -> ForwardStep:
    """The same, which raises UsageError unless it gives one value of each metric for each of `size` samples."""

    def step(model: Any, batch: Batch) -> dict[str, Tensor]:
        values = forward_step(model, batch)
        if not isinstance(values, dict) or "loss" not in values:
            given = ", ".join(values) if isinstance(values, dict) else type(values).__name__
            raise UsageError(f'forward_step returns {given}: expected a dict with "loss" of shape ({size},)')
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise UsageError(f'"{name}" is a {type(value).__name__}: expected a tensor of shape ({size},)')
            if value.shape != (size,):
                raise UsageError(
                    f'"{name}" has shape {tuple(value.shape)}: expected ({size},), one value per example; type '
                    f"{_advice(value, size)}"
                )
        if torch.is_grad_enabled() and not values["loss"].requires_grad:
            raise UsageError('"loss" has no gradient: compute it from what the model gives, without detach or no_grad')
        return values

    return step


def _advice(value: Tensor, size: int) -> str:
    if value.ndim == 0:
        return 'reduction="none"'
    if value.shape == (size, 1):
        return ".squeeze(-1)"
    if value.shape == (size, size):
        return ".squeeze(-1) at what the model gives: (batch, 1) against (batch,) makes (batch, batch)"
    return ".flatten(1).mean(1)" if value.shape[0] == size else "what keeps the dimension of the batch"


def check_all_used(model: nn.Module, loss: Tensor, rank: int) -> int | None:
    """Raises UsageError for a weight that this forward pass did not use. One process leaves it as it is; DDP and FSDP
    wait for its gradient, and ZeRO decays it.

    Returns:
        A number that identifies the path through the model: equal paths give equal numbers. None if the path is hidden.
    """
    used, seen, waiting, way = set(), set(), [loss.grad_fn], 0
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():  # which hides what is in it
            return None
        way = zlib.crc32(node.name().encode(), way)
        if hasattr(node, "variable"):  # a weight, at which the graph ends
            used.add(node.variable)
        waiting += [following for following, _ in node.next_functions]
    weights = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
    if len(used) >= len(weights):  # FSDP computes with weights of its own, which have no names
        return way
    unused = [name for weight, name in weights.items() if weight not in used]
    what = unused[0] if len(unused) + len(used) == len(weights) else f"{len(weights) - len(used)} of its weights"
    raise UsageError(
        f"the forward pass of process {rank} does not use {what}: freeze what no pass uses, with requires_grad_(False) "
        "or by leaving it out of the optimizer; for what other passes use, such as experts, add 0 * weight.sum() to "
        "each loss"
    )


def check_same_way(first: int | None, way: int | None, rank: int) -> int | None:
    """Raises UsageError if a forward pass took another way through the model than the first one, or than that of
    another process: ZeRO adds up gradients in the order in which they come, and would add those of different weights.

    Args:
        first: what the call before returned; None in the first one, for which all processes meet.
        way: as `check_all_used` gives it.
        rank: of this process, for the line.
    """
    if first is None:
        ways: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(ways, way)
        first = ways[0]
    if way is not None and way != first:
        raise UsageError(
            f"the forward pass of process {rank} takes another way through the model than other passes do, as experts "
            "make it, which ZeRO cannot follow: type --config_file accelerate_configs/ddp.yaml"
        )
    return first


def check_same_start(model: nn.Module, datasets: Iterable[MapDataset], group: CpuGroup) -> None:
    """Raises UsageError, in all processes, if one has other weights or data than the first.

    Compared are up to 64 numbers of each weight, and the length and the first sample of each set.
    """
    if group.size == 1:
        return
    facts = {f"the weight {name}": _sample(tensor) for name, tensor in model.state_dict().items()}
    for kind, dataset in zip(("training", "evaluation"), datasets):
        facts[f"the length of the {kind} set"] = str(len(dataset))
        with random_state_kept():
            facts[f"the first sample of the {kind} set"] = _digest(fetch(dataset, [0]))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(group.all_gather(digest))) == 1:
        return
    found = group.all_gather(facts)
    for rank, other in enumerate(found):
        for what in [name for name in {**found[0], **other} if found[0].get(name) != other.get(name)]:
            raise UsageError(
                f"process {rank} starts with another value of {what} than process 0: build model and data the same in "
                "each process; start(config) seeds all alike, so do not seed by rank"
            )


def _sample(tensor: Tensor) -> str:
    """Of up to 64 of its numbers, spread over all."""
    flat = tensor.detach().flatten()
    values = flat[:: max(1, flat.numel() // 64)][:64]
    return f"{tuple(tensor.shape)} {tensor.dtype} {values.tolist()}"


def _digest(batch: Batch) -> str:
    text = repr({name: _sample(value) if isinstance(value, Tensor) else value for name, value in batch.items()})
    return hashlib.sha256(text.encode()).hexdigest()
