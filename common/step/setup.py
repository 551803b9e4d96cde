"""The model and optimizer of a run before they are wrapped, and helpers of several strategies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import nn

from ..config import RunConfig
from ..data.batches import fetch
from ..data.mixed import by_source
from ..data.sets import Batch, ForwardStep, MapDataset, NumberedStep, check_datasets
from ..plan import Plan
from ..seeds import CPU, restore_generators
from .batch_loss import BatchLoss, BatchLossFn
from .guards import always_calls, knows_what_is_trained
from .options import FitOptions
from .same_path import SamePath
from .values import check_values


@dataclass(frozen=True)
class Setup:
    """The model, the optimizer and everything else for the steps of a run, before `prepare`."""

    accelerator: Accelerator  # from `start(config)`
    model: nn.Module  # the recipe's module
    optimizer: torch.optim.Optimizer  # over its weights
    forward_step: ForwardStep  # as for `fit`
    plan: Plan  # of the run
    batch_loss: BatchLossFn | None = None  # as for `fit`
    train_set: Any = None  # with its `collate_fn`; None: there are no passes before the run
    eval_sets: Mapping[str, MapDataset] = field(default_factory=dict)  # {name: set}; the name of a single one is ""
    options: FitOptions = field(default_factory=FitOptions)  # of `fit`
    # {strategy: its plan to divide the model}; a plan that exists is not made again
    plans: Mapping[str, Any] = field(default_factory=dict)
    watched: Callable[[NumberedStep], NumberedStep] | None = None  # an observer's wrapper of `forward_step`

    @classmethod
    def of(
        cls,
        accelerator: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward_step: ForwardStep,
        train_set: MapDataset,
        eval_set: MapDataset | Mapping[str, MapDataset],
        config: RunConfig,
        **options: Unpack[FitOptions],
    ) -> "Setup":
        """The setup from the arguments of `fit`. Raises UsageError for data or sizes that no run can use."""
        forward_step, sampler = by_source(train_set, eval_set, forward_step, options.get("sampler"))
        train_set, eval_sets = check_datasets(train_set, eval_set, options.get("collate_fn"))
        plan = Plan.of(config, accelerator.layout, len(train_set), options.get("schedule"), sampler)
        loss = options.get("batch_loss")
        return cls(accelerator, model, optimizer, forward_step, plan, loss, train_set, eval_sets, options)

    @property
    def may_follow_evaluations(self) -> bool:
        """Whether the learning rate may depend on the results of evaluations, which `fit` gives to other functions."""
        return bool(self.options.get("schedule") and {"summarize", "examples"} & {*self.options})

    def first_batch(self, size: int | None = None) -> Batch:
        """The first micro-batch of the run, or its first `size` samples, on the CPU, the same in all processes."""
        epoch, ids = next(self.plan.global_micro_batches(0))
        with restore_generators(CPU):
            return fetch(self.train_set, ids[:size].tolist(), self.plan.config.seed, epoch)

    def check_functions(self, model: nn.Module) -> tuple[NumberedStep, BatchLoss | None]:
        """(forward_step, batch_loss) for this model as wrapped; both raise UsageError for wrong results."""
        plan, keeps = self.plan, bool(self.options.get("examples") or self.plan.config.save_predictions)
        forward_step = check_values(self.forward_step, plan.micro_batch_size, self.batch_loss is not None, keeps)
        if self.plan.layout.num_processes > 1:
            forward_step = knows_what_is_trained(model, forward_step)
            if plan.layout.pp == 1:
                forward_step = always_calls(model, forward_step)
            if plan.layout.data_parallel_size > 1:
                forward_step = SamePath(model, plan).follow(forward_step)
        loss = self.batch_loss
        return forward_step, None if loss is None else BatchLoss(loss, plan, self.accelerator.device)


def compile_if_asked(model: nn.Module, plan: Plan, layers: Sequence[nn.Module] = ()) -> None:
    """Compiles a model in place, to keep the names of the weights: as a whole, or layers that FSDP2 gathers one at a
    time separately, as torchtitan does, because gathering cannot be part of a graph."""
    if not plan.config.compile:
        return
    for module in layers or [model]:
        # Not module.compile(): it silently skips torch's own modules, for example Sequential. Dropout as in eager mode.
        module.forward = torch.compile(module.forward, options={"fallback_random": True})


def say_what_is_cast(accelerator: Accelerator, model: nn.Module, kind: str) -> None:
    """Prints a line if a strategy turns 16-bit weights of a model into float32."""
    if others := sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()} - {"float32"}):
        accelerator.print(f"{kind} trains and exports this model's {', '.join(others)} weights in float32")


def float32_outputs(module: nn.Module, args: tuple, output: Any) -> Any:
    """A forward hook that casts outputs, as Accelerate's autocast under DDP does."""
    return convert_to_fp32(output)
