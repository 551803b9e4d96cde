"""A dry run of some training steps: one process of N, on tensors without data.

`measure` runs in the process of a recipe, at its call of `fit`, whose `common/` it imports.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from accelerate_recipes.at_fit import QUESTION
from accelerate_recipes.doctor import asked
from accelerate_recipes.doctor.launched import set_variables
from accelerate_recipes.plan.hardware import Gpu
from accelerate_recipes.plan.steps import DryRun


def measure(*arguments: Any, **keywords: Any) -> list[dict[str, Any]]:
    """Takes the arguments of `fit`. Answers each question of the variable, in a process of its own.

    A question is {"config": path of a file, "stages": of a pipeline, "flags": {name: value} to change, "gpu": its
    rates, "last": whether to take the place of the last process}. An answer is {"refused": the run's lines},
    {"failed": a line}, or what the run holds, does and sends.
    """
    return [_answered(question, arguments, keywords) for question in json.loads(os.environ[QUESTION])]


def _answered(question: dict[str, Any], arguments: Any, keywords: Any) -> dict[str, Any]:
    reader, writer = os.pipe()
    if child := os.fork():  # a dry run changes the model, and pretends to be a process of many
        os.close(writer)
        with os.fdopen(reader) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"failed": "its process ended early"}
    try:
        answer = _measured(question, *arguments, **keywords)
    except DynamicOutputShapeException:
        answer = {"failed": "its shapes depend on values, as with pictures or experts"}
    except BaseException as error:  # what a recipe or torch raises on tensors without data
        if type(error).__name__ == "UsageError":  # of the recipe's `common`
            answer = {"refused": [str(error)]}
        else:
            traceback.print_exc(file=sys.stderr)
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    with os.fdopen(writer, "w") as stream:
        stream.write(json.dumps(answer))
    os._exit(0)


def _measured(
    question: dict[str, Any],
    accelerator: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward_step: Any,
    train_set: Any,
    eval_set: Any,
    config: Any,
    *others: Any,
    **keywords: Any,
) -> dict[str, Any]:
    from common.check.alone import MAX_SECONDS
    from common.check.reference import why_not_checked
    from common.data.batches import checked_datasets
    from common.data.mixture import by_source
    from common.environment import is_true
    from common.parallel.kinds import layout_of
    from common.plan import Plan

    config = replace(config, **question["flags"])
    with _asked(question):
        told = asked.refusals(accelerator, model, optimizer, forward_step, train_set, eval_set, config, **keywords)
    if lines := [*told["lines"], *told["of_the_launcher"]]:
        return {"refused": lines}
    set_variables(Path(question["config"]))
    check_steps, gpu = config.check_steps, Gpu(**question["gpu"])
    config = replace(config, pipeline_stages=question["stages"], check_steps=0, compile=False)
    layout = replace(layout_of(config), device="cpu")
    forward_step, sampler = by_source(train_set, eval_set, forward_step, keywords.get("sampler"))
    train_set, _ = checked_datasets(train_set, eval_set, keywords.get("collate_fn"))
    plan = Plan.of(config, layout, len(train_set), keywords.get("schedule"), sampler)
    run = DryRun(plan, forward_step, keywords.get("batch_loss"), gpu, question.get("last", False))
    offloads = is_true("FSDP_OFFLOAD_PARAMS")
    whole = sum(weight.nbytes for weight in model.parameters())
    check = {
        "check_steps": min(check_steps, plan.num_steps) if layout.num_processes > 1 else 0,
        "longest_check": MAX_SECONDS,
        "why_not_checked": why_not_checked(layout.precision, whole, gpu.usable),
    }
    answer = run.measured(model, optimizer, train_set)
    if offloads:  # to the CPU's memory: a GPU holds what is gathered
        parts = {name: answer[name] for name in ("weights", "gradients", "optimizer")}
        answer |= dict.fromkeys(parts, 0)
        answer["peak"] = max(answer["peak"] - sum(parts.values()), answer["forward"])
    return _facts(plan, layout, keywords) | check | answer


def _facts(plan: Any, layout: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """The arithmetic of the run."""
    from common.environment import num_machines

    config, last = plan.config, plan.num_steps - 1
    steps = sorted({0, min(config.warmup_steps, last), last // 2, last})  # they show a schedule
    return {
        "layout": str(layout),
        "num_processes": layout.num_processes,
        "num_machines": num_machines(),
        "precision": layout.precision,
        "data_parallel": layout.data_parallel_size,
        "batch_size": config.batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "accumulation": plan.accumulation,
        "stages": layout.stages,
        "num_steps": plan.num_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "num_samples": plan.num_samples,
        "save_every": config.save_every,
        "keep_checkpoints": config.keep_checkpoints,
        "learning_rates": {step: plan.factor_at(step) * config.learning_rate for step in steps},
        "tf32": config.tf32,
        "flops_per_sample": keywords.get("flops_per_sample"),
        "tokens_per_sample": keywords.get("tokens_per_sample"),
    }


@contextmanager
def _asked(question: dict[str, Any]) -> Iterator[None]:
    """The doctor's question, with the variables as before afterwards."""
    before = dict(os.environ)
    os.environ[QUESTION] = json.dumps([question["config"], True, []])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
