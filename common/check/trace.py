"""Records what an engine does in its steps, with all processes or with one."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.sets import Batch, NumberedStep
from ..errors import UsageError
from ..layout import Layout
from ..parallel.absent import Absent
from ..parallel.strategies import strategies_of
from ..step.engine import Engine, StepResult
from ..step.guards import check_all_used
from ..step.setup import Setup
from .first_pass import FirstPass, checksums, one_pass
from .modules import ModuleTrace
from .sketch import Sketch


@dataclass
class Step:
    """The parts of an optimizer step that the check compares."""

    ids: dict[int, list[int]] = field(default_factory=dict)  # {micro-batch: of its samples}
    # {micro-batch: {name: what `forward_step` or `batch_loss` returned, float64 on the CPU, (micro_batch, ...)}}
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    # what `forward_step` returned in evaluation, before the first step, for the first micro-batch
    evaluated: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    samples: dict[int, dict[str, list[int]]] = field(default_factory=dict)  # {micro-batch: {name: checksum of each}}
    grad_norm: float = math.nan  # as in StepResult
    weights: dict[str, Sketch] = field(default_factory=dict)  # and buffers after the step; of one process alone
    gradients: dict[str, Sketch] = field(default_factory=dict)  # that the optimizer gets; of one process alone
    # {(name of a weight, range): (a sum, norm) of this process's part}; of several processes
    parts: dict[Any, tuple[float, float]] = field(default_factory=dict)
    modules: ModuleTrace = field(default_factory=ModuleTrace)  # what each module returned


@dataclass
class Observer:
    first_pass: FirstPass | None  # filled by the first forward pass of a first step; None: something else has filled it
    layout: Layout | None = None  # of a run that this one repeats on one process; None: the engine's own
    _step: tuple[Step, Engine, Sequence[Batch]] | None = None  # what it has done so far, and its micro-batches

    def watch(self, setup: Setup) -> Setup:
        """The setup of an engine that this object can watch."""
        return replace(setup, watched=lambda values_of: partial(self._observe, values_of))

    def step(
        self, engine: Engine, number: int, micro_batches: Sequence[Batch], evaluates: str, modules: ModuleTrace | None
    ) -> tuple[Step, StepResult]:
        """Takes a step. Records its modules' outputs, and evaluates its first micro-batch ("before" or "after" it)."""
        own, plan = Step(modules=modules or ModuleTrace()), engine.plan
        own.ids = {plan.row(index): ids.tolist() for index, ids in enumerate(plan.own_samples(number))}
        if evaluates == "before":
            own.evaluated = _evaluated(engine, micro_batches[0], number)
        self._step = own, engine, micro_batches
        try:
            with nullcontext() if modules is None else modules.watch(engine):
                result = engine.step(number, micro_batches, wants_norm=True)
        finally:
            self._step = None
        for index, share in enumerate(engine.shares):
            if (row := plan.row(index)) in own.values:  # not in the first stages of a pipeline
                own.values[row] |= on_cpu(share.metrics)
        own.grad_norm = math.nan if result.grad_norm is None else float(result.grad_norm)
        if evaluates == "after":
            own.evaluated = _evaluated(engine, micro_batches[0], number)
        return own, result

    def _observe(self, values_of: NumberedStep, model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        """A call of `forward_step`. In a pipeline it ends where the next stage begins, except in the last."""
        if self._step is None:
            return values_of(model, batch, number)
        own, engine, micro_batches = self._step
        index = next(index for index, other in enumerate(micro_batches) if other is batch)
        row, first_pass = engine.plan.row(index), self.first_pass
        first_pass = None if own.samples or not isinstance(model, nn.Module) else first_pass
        own.samples[row] = checksums(batch)
        module = engine.module if model is engine.model else model  # in a pipeline, the module of a stage
        is_whole = first_pass is not None and model is engine.model  # in a pipeline, backward passes begin in here
        gradients = [(weight, weight.grad) for weight in module.parameters()] if is_whole else []
        with nullcontext() if first_pass is None else first_pass.watch(module, engine.device):
            values = values_of(model, batch, number)
        if any(weight.grad is not before for weight, before in gradients):
            raise UsageError(
                "forward_step calls backward(): return the loss of each sample; fit computes the gradients"
            )
        if not torch.is_grad_enabled():
            return values
        own.values[row] = on_cpu(values)
        share = engine.shares[index] if engine.shares else None
        if share is None and engine.batch_loss is not None:  # this micro-batch is the whole batch
            with torch.no_grad():
                own.values[row] |= on_cpu(engine.batch_loss(values, number))
        if share is not None:
            share.check_same(values)
        layout = self.layout if self.layout is not None and self.layout.pp == 1 else engine.plan.layout
        if layout.num_processes > 1 and any(strategy.needs_all_weights for strategy in strategies_of(layout)):
            names = ["loss"] if engine.batch_loss is None else list(values if share is None else share.gradients)
            here = [each for each in module.named_parameters() if not isinstance(each[1], Absent)]
            trained = {name: weight for name, weight in here if weight.requires_grad}
            check_all_used(trained, [values[name] for name in names])
        return values


def _evaluated(engine: Engine, batch: Batch, number: int) -> dict[int, dict[str, Tensor]]:
    owners = [(module._buffers, dict(module._buffers)) for module in engine.model.modules()]
    before = [(held, key, each, each.clone()) for held, own in owners for key, each in own.items() if each is not None]
    with one_pass(engine.model, batch) as own:
        values = engine.evaluate(own, number)
    for held, key, buffer, value in before:  # as in metrics that add up
        held[key] = buffer if buffer.equal(value) else buffer.copy_(value)
    values = engine.share_values(values)
    return {0: on_cpu(values)} if engine.plan.row(0) == 0 else {}


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of `forward_step` as float64 on the CPU. Leaves out predictions: rounding errors change a few."""
    compared = {name: value for name, value in values.items() if value.ndim == 1 or value.is_floating_point()}
    return {name: value.detach().double().cpu() for name, value in compared.items()}
