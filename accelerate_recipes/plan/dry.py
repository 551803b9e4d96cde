"""A dry run of some training steps: one process of N, on tensors without data. `measure` runs at a recipe's `fit`."""

import os
import pickle
import sys
import traceback
from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import DynamicOutputShapeException

from accelerate_recipes.common.check.reference import MAX_SECONDS, why_not_checked
from accelerate_recipes.common.environment import Environment
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.parallel.schedules import cost
from accelerate_recipes.common.parallel.strategies import PIPELINE, layout_of, with_plans
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.doctor import asked
from accelerate_recipes.plan.ask import Case
from accelerate_recipes.plan.estimates import Facts, NoPlan, RunFacts
from accelerate_recipes.plan.hardware import Gpu
from accelerate_recipes.plan.steps import cut_without_values, dry_run

NOT_ASKED = NoPlan(failed="another of its kind fits")


def measure(question: tuple[Gpu, list[Case]], *arguments: Any, **options: Any) -> list[list[Facts | NoPlan]]:
    """Takes a GPU, cases with their final configs, and the arguments of `fit`. Returns what the first process does, and
    for a pipeline also what the last one does. Each runs in its own process."""
    (gpu, cases), answers, found = question, list[list[Facts | NoPlan]](), set[int | None]()
    for case in cases:
        if case.kind is not None and case.kind in found:
            answers.append([NOT_ASKED])
            continue
        answers.append([_answer(case, last, gpu, arguments, options) for last in (False, True)[: case.stages]])
        steps = [None if isinstance(end, NoPlan) else end[1] for end in answers[-1]]
        if all(step and not step.zero and step.peak <= gpu.usable for step in steps):
            found.add(case.kind)
    return answers


def _answer(case: Case, last: bool, gpu: Gpu, arguments: Any, options: Any) -> Facts | NoPlan:
    reader, writer = os.pipe()
    if child := os.fork():  # a dry run changes the model, and pretends to be a process of many
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            sent = stream.read()
        os.waitpid(child, 0)
        return pickle.loads(sent) if sent else NoPlan(failed="its process ended early")
    try:
        answer: Facts | NoPlan = _measure(case, last, gpu, *arguments, **options)
    except DynamicOutputShapeException:
        answer = NoPlan(failed="its shapes depend on values, as with images or experts")
    except UsageError as error:
        answer = NoPlan(refused=[str(error)])
    except BaseException as error:  # what a recipe or torch raises on tensors without data
        traceback.print_exc(file=sys.stderr)
        answer = NoPlan(failed=f"{type(error).__name__}: {error}".splitlines()[0])
    with os.fdopen(writer, "wb") as stream:
        stream.write(pickle.dumps(answer))
    os._exit(0)


def _measure(case: Case, last: bool, gpu: Gpu, *arguments: Any, **options: Any) -> Facts | NoPlan:
    *given, config = arguments
    config = replace(config, **case.flags)
    setup = asked.of_any_size(*given, config, **options)
    told = asked.refusals_of(setup, config, str(case.config), True, [], False)
    if lines := [*map(str, told["refusals"]), *told["of_the_launcher"]]:
        return NoPlan(refused=lines)
    check_steps = config.check_steps
    config = replace(config, pipeline_stages=case.stages, check_steps=0, compile=False)
    layout = replace(layout_of(Environment.read(), config), device="cpu")
    setup = replace(setup, plan=setup.plan.under(config, layout))
    why_not = why_not_checked(layout.precision, sum(each.nbytes for each in setup.model.parameters()), gpu.usable)
    run, offloads = _run(setup, check_steps, why_not), layout.environment.is_true("fsdp_offload_params")
    if layout.pp > 1:
        if setup.batch_loss is not None:
            return NoPlan(failed="its batch_loss needs what other stages compute")
        setup = replace(setup, plans={PIPELINE.name: cut_without_values(setup, gpu)})
    step = dry_run(with_plans(setup), gpu, last)
    if offloads:  # to the CPU's memory: a GPU holds what is gathered
        peak = max(step.peak - step.weights - step.gradients - step.optimizer, step.forward)
        step = replace(step, weights=0, gradients=0, optimizer=0, peak=peak)
    return run, step


def _run(setup: Setup, check_steps: int, why_not_checked: str | None) -> RunFacts:
    plan, options = setup.plan, setup.options
    config, layout, last = plan.config, plan.layout, plan.num_steps - 1
    waits = cost(config.pipeline_schedule, layout.pp, plan.accumulation)
    steps = sorted({0, min(config.warmup_steps, last), last // 2, last})  # they show a schedule
    return RunFacts(
        layout=str(layout),
        num_processes=layout.num_processes,
        num_machines=layout.environment.num_machines,
        precision=layout.precision,
        data_parallel=layout.data_parallel_size,
        batch_size=config.batch_size,
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        stages=layout.pp,
        idle=waits.idle,
        live=max(waits.live),
        num_steps=plan.num_steps,
        steps_per_epoch=plan.steps_per_epoch,
        num_samples=plan.num_samples,
        save_every=config.save_every,
        keep_checkpoints=config.keep_checkpoints,
        learning_rates={str(step): plan.factor_at(step) * config.learning_rate for step in steps},
        tf32=config.tf32,
        flops_per_sample=options.get("flops_per_sample"),
        tokens_per_sample=options.get("tokens_per_sample"),
        check_steps=min(check_steps, plan.num_steps) if layout.num_processes > 1 else 0,
        longest_check=MAX_SECONDS,
        why_not_checked=why_not_checked,
    )
