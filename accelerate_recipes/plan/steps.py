"""Takes training steps on tensors without data, with the run's own engine, and records what they hold and do."""

import os
import warnings
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from accelerate_recipes.common.data.batches import batches
from accelerate_recipes.common.data.sets import as_numbered_step
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.launch import start
from accelerate_recipes.common.layout import Layout
from accelerate_recipes.common.parallel import deepspeed
from accelerate_recipes.common.parallel.chain import find_cut
from accelerate_recipes.common.parallel.schedules import shortest
from accelerate_recipes.common.parallel.stages import Cut, copied
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.common.weights.shards import local
from accelerate_recipes.doctor.asked import remove_variables
from accelerate_recipes.plan.estimates import StepFacts, Zero
from accelerate_recipes.plan.fakes import make_fake, processes
from accelerate_recipes.plan.hardware import Gpu
from accelerate_recipes.plan.tracker import Tracker


def dry_run(setup: Setup, gpu: Gpu, last: bool) -> StepFacts:
    """Measures what a process of a run holds and does. DeepSpeed's own code does not run on such tensors: under
    DeepSpeed, measures the undivided model in one process, and adds what zero.py needs to know. `setup`: of the run;
    `gpu`: for the time of operations; `last`: whether this is the last process, and not the first."""
    model, optimizer, plan = setup.model, setup.optimizer, setup.plan
    layout, zero = plan.layout, None
    # The first micro-batches of this process, with their data; all others follow from these.
    stream = batches(setup.train_set, plan.micro_batches(0), torch.device("cpu"), plan.config)
    first = [next(stream) for _ in range(_numbers(setup)[1])]
    number, dtype = layout.num_processes, None
    if "DeepSpeed" in layout.strategies:
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        zero = Zero(deepspeed.zero_stage(layout.environment), deepspeed.offloads(layout.environment), trained)
        plan = replace(plan, layout=replace(layout, strategies=Layout().strategies, environment=Environment()))
        number, dtype = 1, torch.bfloat16 if layout.precision == "bf16" else None
        remove_variables()
    mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker(gpu, plan.config.tf32, layout.ep)
    with warnings.catch_warnings(action="ignore"), processes(number, number - 1 if last else 0):
        accelerator = _accelerator(plan.layout)
        with mode, tracker.track_freed_storages(), tracker:
            make_fake(model, optimizer, dtype)
            setup = replace(setup, accelerator=accelerator, plan=plan)
            return replace(_run_steps(setup, mode, tracker, first), zero=zero)


def _numbers(setup: Setup) -> tuple[int, int]:
    """Two numbers of micro-batches. The difference between their steps predicts steps with other numbers."""
    plan = setup.plan
    if setup.batch_loss is not None:
        return plan.accumulation, plan.accumulation
    return shortest(plan.config.pipeline_schedule, plan.layout.pp, plan.accumulation)


def _run_steps(setup: Setup, mode: FakeTensorMode, tracker: Tracker, batches: list[dict[str, Any]]) -> StepFacts:
    model, optimizer, plan = setup.model, setup.optimizer, setup.plan
    weights = sum(weight.nbytes for weight in model.parameters())
    updated = sum(weight.nbytes for group in optimizer.param_groups for weight in group["params"])
    engine = prepare(setup)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(_num_bytes([local(each.grad) for each in trained if each.grad is not None]))
    )
    batches = [tree_map_only(Tensor, mode.from_tensor, batch) for batch in batches]
    module, one = engine.model, batches[: _numbers(setup)[0]]
    held = _num_bytes([local(tensor) for tensor in [*module.parameters(), *module.buffers()]])
    engine.step(0, one, True)  # it makes the optimizer's state
    more, peak, more_flops = first, _, flops = tracker.track(lambda: engine.step(1, batches, False))
    if len(one) < len(batches):
        first, _, flops = tracker.track(lambda: engine.step(2, one, False))
    # How often a step does what `more` adds to `first`.
    passes = (plan.accumulation - len(one)) // max(1, len(batches) - len(one))
    before, forward = tracker.held, 0
    if plan.layout.pp == 1:
        forward = tracker.track(lambda: engine.forward_step(engine.model, batches[0], 0))[1] - before
    slots = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    slots_per_weight = sum(slot.nbytes for slot in slots) / sum(weight.nbytes for weight in trained)
    return StepFacts(
        zero=None,
        weights=held,
        gradients=max(gradients),
        optimizer=_num_bytes([local(slot) for slot in slots]),
        slots_per_weight=slots_per_weight,
        forward=forward,
        peak=peak,
        first=first,
        more=more,
        flops=flops + passes * (more_flops - flops),
        passes=passes,
        # A checkpoint has all weights, and the optimizer state of all trained weights.
        saved=round(weights + updated * slots_per_weight),
    )


def cut_without_values(setup: Setup, gpu: Gpu) -> Cut:
    """The cut of the model of a setup, on tensors without data: without the rehearsal, which compares values."""
    setup, forward_step = replace(setup, model=copied(setup.model)), as_numbered_step(setup.forward_step)
    mode, tracker, batch = FakeTensorMode(allow_non_fake_inputs=True), Tracker(gpu, False), setup.first_batch()
    with processes(1, 0), mode, tracker, torch.no_grad():
        make_fake(setup.model.train(), None, None)
        batch = tree_map_only(Tensor, mode.from_tensor, batch)
        passes = nullcontext(lambda model: forward_step(model, batch, 0))
        cut, _ = find_cut(setup, lambda _: passes, lambda: tracker.num_draws)
    return cut


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def _accelerator(layout: Layout) -> Any:
    """The accelerator that `start` would make, for processes that do not exist."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with redirect_stdout(StringIO()):
        start.prepare_rehearsal(layout, timedelta(minutes=1))
        with start.mesh_of_accelerate(layout):
            # bf16 has the same size; a CPU has no fp16.
            accelerator = Accelerator(mixed_precision="bf16" if layout.precision == "fp16" else None)
    PartialState._shared_state["device"] = AcceleratorState._shared_state["device"] = torch.device("cpu")  # not cpu:0
    return accelerator
