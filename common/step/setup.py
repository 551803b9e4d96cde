"""What takes the steps of a run, before it is wrapped, and what several strategies do with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

from ..data.batches import fetch
from ..data.sets import Batch, ForwardStep, MapDataset, NumberedStep
from ..norms import LOW_PRECISION
from ..plan import Plan
from ..seeds import CPU, restore_generators
from ..weights.shards import is_divided, local
from .batch_loss import BatchLoss, BatchLossFn
from .guards import check_values, knows_what_is_trained

FUSED_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Setup:
    """What takes the steps of a run, before `prepare`.

    Attributes:
        accelerator: from `start(config)`.
        model: the recipe's module.
        optimizer: over its weights.
        forward_step: as for `fit`.
        plan: of the run.
        batch_loss: as for `fit`.
        train_set: for passes before the run; None: there are none.
        plans: {strategy: how it will divide the model}.
        watched: `forward_step` -> one that an observer watches; None: nobody does.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward_step: ForwardStep
    plan: Plan
    batch_loss: BatchLossFn | None = None
    train_set: MapDataset | None = None
    plans: Mapping[str, Any] = field(default_factory=dict)
    watched: Callable[[NumberedStep], NumberedStep] | None = None

    def first_batch(self, size: int | None = None) -> Batch:
        """The first micro-batch of the run, or so many samples of it, on the CPU, the same in all processes."""
        assert self.train_set is not None
        epoch, ids = next(self.plan.global_micro_batches(0))
        with restore_generators(CPU):
            return fetch(self.train_set, ids[:size].tolist(), self.plan.config.seed, epoch)

    def check_functions(self) -> tuple[NumberedStep, BatchLoss | None]:
        """(forward_step, batch_loss), which raise UsageError for wrong results."""
        forward_step = check_values(self.forward_step, self.plan.micro_batch_size, self.batch_loss is not None)
        if self.plan.layout.num_processes > 1:
            forward_step = knows_what_is_trained(self.model, forward_step)
        if self.batch_loss is None:
            return forward_step, None
        return forward_step, BatchLoss(self.batch_loss, self.plan, self.accelerator.device)


def choose_fused_kernels(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer of torch update all weights in one kernel, where torch 2.13 has one that gives the same result.
    Leaves the choice of the recipe, if it made one."""
    kind, options, groups = type(optimizer), optimizer.defaults, optimizer.param_groups
    weights = [weight for group in groups for weight in group["params"]]
    chosen = any(options.get(name) is not None for name in ("fused", "foreach"))
    chosen = chosen or any(options.get(name) for name in ("capturable", "differentiable"))
    # SGD's kernel fails on DTensors, and with momentum if a weight gets its first gradient later than others.
    is_plain = kind is torch.optim.SGD and not any(map(is_divided, weights))
    is_plain = is_plain and not any(group.get("momentum") for group in groups)
    # A fused kernel hides the steps that loss scaling skips.
    if chosen or accelerator.scaler is not None or not (kind in FUSED_ADAM or is_plain):
        return
    if all(map(_fits_fused_kernels, map(local, weights))):
        for settings in (options, *groups):
            settings["fused"] = True


def _fits_fused_kernels(weight: Tensor) -> bool:
    """They ignore the strides of a weight with gaps. Those of the CPU go wrong with 16-bit weights: SGD by whole
    updates from 16 elements on (torch 2.13)."""
    has_gaps = torch.empty_like(weight, device="meta").stride() != weight.stride()
    return weight.is_floating_point() and not has_gaps and not (weight.is_cpu and weight.dtype in LOW_PRECISION)


def exchange_weights(optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Gives an optimizer divided weights in place of its own, {own: divided}, with the state that it has of them."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(weight, weight) for weight in group["params"]]
    for before, after in replaced.items():
        if before in optimizer.state and after is not before:
            optimizer.state[after] = _divided_like(after, optimizer.state.pop(before))
    split_groups_by_mesh(optimizer)


def _divided_like(weight: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """The state that an optimizer made in its constructor, as Adagrad does, divided as the weight now is."""
    if not is_divided(weight):
        return state
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
        if isinstance(value, Tensor) and value.shape == weight.shape
        else value
        for name, value in state.items()
    }


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Splits each parameter group by device mesh: the foreach and fused kernels of the optimizers, the default on
    GPUs, refuse a list of DTensors and plain tensors, or of DTensors on different meshes."""
    for index, group in enumerate(list(optimizer.param_groups)):
        meshes: dict[object, list[nn.Parameter]] = {}
        for weight in group["params"]:
            meshes.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        if len(meshes) > 1:
            group["params"], *others = meshes.values()
            optimizer.param_groups += [group | {"params": weights, "split_from": index} for weights in others]


def follow_split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Gives the groups that were split from another its options: the recipe knows the first of them alone."""
    for group in optimizer.param_groups:
        if "split_from" in group:
            group.update({**optimizer.param_groups[group["split_from"]], "params": group["params"]})


def compile_if_asked(model: nn.Module, plan: Plan, layers: Sequence[nn.Module] = ()) -> None:
    """Compiles in place, to keep the names of the weights.

    Args:
        model: as a whole, unless there are layers.
        plan: of the run.
        layers: that FSDP2 gathers one at a time: each is compiled by itself, as torchtitan does, because gathering
            cannot be part of a graph.
    """
    if not plan.config.compile:
        return
    for module in layers or [model]:
        # Not module.compile(): it silently skips torch's own modules, for example Sequential.
        module.forward = torch.compile(module.forward)


def say_what_is_cast(accelerator: Accelerator, model: nn.Module, kind: str) -> None:
    """Prints a line if a strategy turns 16-bit weights of a model into float32."""
    others = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()} - {"float32"})
    if others:
        accelerator.print(f"{kind} trains and exports this model's {', '.join(others)} weights in float32")


def float32_outputs(module: nn.Module, args: tuple, output: Any) -> Any:
    """A forward hook that casts outputs, as Accelerate's autocast under DDP does."""
    return convert_to_fp32(output)
