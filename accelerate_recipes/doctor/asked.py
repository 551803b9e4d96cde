"""What a run would refuse: the loop's own checks, called under the variables that `accelerate launch` would set.

`refusals` runs in the process of a recipe; without a recipe, in this one.
"""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.common.errors import UsageError, first_line
from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.launched import launched, remove_variables
from accelerate_recipes.matrix import PIPELINES


class Answer(TypedDict):
    """What a run would refuse.

    Attributes:
        refusals: of the loop.
        of_the_launcher: the lines of those of `accelerate launch`.
        facts: of the recipe: its num_workers, the sample_bytes of the tensors of a sample, its micro_batch_size.
    """

    refusals: list[UsageError]
    of_the_launcher: list[str]
    facts: dict[str, int]


def ask(config: Config, script: Path | None, flags: Sequence[str]) -> Answer:
    """Asks for the refusals of a config, and of a recipe under it.

    Args:
        config: the processes have GPUs if its machine has.
        script: a recipe; None asks about the config alone.
        flags: of the recipe.

    Raises:
        UsageError: the recipe ended before it called `fit`, or nothing can read a value of the file.
    """
    if script is not None:
        return at_fit(script, flags, f"{__name__}:refusals", question(config))
    before = dict(os.environ)
    os.environ |= question(config)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the launcher says which defaults it takes
            return refusals()
    except Exception as error:  # a word in place of a number, for example
        line = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"the loop does not reach its call of fit: {line}") from None
    finally:
        os.environ.clear()
        os.environ |= before


def question(config: Config) -> dict[str, str]:
    """The variable that `refusals` reads: the config file, whether there is a GPU, flags for what the file should say,
    and whether to take passes of the model."""
    return {QUESTION: json.dumps([str(config.path), bool(config.machine.gpus), config.likely_flags, True])}


def refusals(
    accelerator: Any = None,
    model: Any = None,
    optimizer: Any = None,
    forward_step: Any = None,
    train_set: Any = None,
    eval_set: Any = None,
    config: Any = None,
    **options: Any,
) -> Answer:
    """What a run under the config would refuse. Takes the arguments of `fit`, or none."""
    from accelerate_recipes import RunConfig
    from accelerate_recipes.common.data.mixture import by_source
    from accelerate_recipes.common.data.sets import check_datasets
    from accelerate_recipes.common.environment import Environment
    from accelerate_recipes.common.launch.checks import check_device, launch_checks
    from accelerate_recipes.common.parallel.strategies import layout_of, model_checks, with_plans
    from accelerate_recipes.common.plan import Plan
    from accelerate_recipes.common.step.checks import check_given
    from accelerate_recipes.common.step.setup import Setup

    path, has_gpu, likely, takes_passes = json.loads(os.environ[QUESTION])
    flags = config or RunConfig(pipeline_stages=2 if Path(path).stem in PIPELINES else 1)
    found: list[UsageError] = []
    if config is not None:
        try:
            check_given(model, optimizer, {"forward_step": forward_step, "options": options})
            samples, _ = check_datasets(train_set, eval_set, options.get("collate_fn"))
            _give_sizes(accelerator, model, optimizer, forward_step, samples, config)
        except UsageError as error:  # what else is wrong cannot be asked
            return {"refusals": [error], "of_the_launcher": [], "facts": {}}
    facts = {} if config is None else {"num_workers": config.num_workers, "sample_bytes": _num_bytes(train_set[0])}
    remove_variables()
    variables, refused = _launched(Path(path), likely)
    if variables is None:
        return {"refusals": [], "of_the_launcher": refused, "facts": facts}
    os.environ.update(variables)
    try:
        layout = replace(layout_of(Environment.read(), flags), device="cuda" if has_gpu else "cpu")
        # This process runs on the CPU, so the doctor's own rules count the GPUs.
        for of_launch in launch_checks(layout):
            if of_launch is not check_device:
                _note(found, of_launch, layout, flags)
        if not found and config is not None:
            forward_step, sampler = by_source(train_set, eval_set, forward_step, options.get("sampler"))
            sampling = options.get("schedule"), sampler
            try:
                plan = Plan.of(flags, layout, len(train_set), *sampling)
                facts |= {"micro_batch_size": plan.micro_batch_size}
            except UsageError as error:  # what else is wrong shows with a batch that divides
                found.append(error)
                divides = {"batch_size": layout.data_parallel_size * layout.pp, "micro_batch_size": None}
                plan = Plan.of(replace(flags, **divides), layout, len(train_set), *sampling)
            for of_model in model_checks(layout):
                _note(found, of_model, model, optimizer, plan)
            if not found and takes_passes:
                loss = options.get("batch_loss")
                _note(found, with_plans, Setup(accelerator, model, optimizer, forward_step, plan, loss, samples))
    except UsageError as error:
        found.append(error)
    return {"refusals": found, "of_the_launcher": refused, "facts": facts}


def _give_sizes(accelerator: Any, model: Any, optimizer: Any, forward_step: Any, samples: Any, config: Any) -> None:
    """Gives the lazy layers of a model their sizes, as a run does."""
    from accelerate_recipes.common.layout import Layout
    from accelerate_recipes.common.plan import Plan
    from accelerate_recipes.common.step.lazy import with_sizes, without_size
    from accelerate_recipes.common.step.setup import Setup

    if without_size(model):
        plan = Plan.of(config, Layout(), len(samples))
        with_sizes(Setup(accelerator, model, optimizer, forward_step, plan, train_set=samples))


def _launched(path: Path, likely: list[str]) -> tuple[dict[str, str] | None, list[str]]:
    """The launcher's variables, and what it refuses. What else is wrong with a file shows with likely flags."""
    refused: list[str] = []
    for flags in ([], likely):
        try:
            return launched(path, flags), refused
        except Exception as error:  # the launcher raises what it likes
            refused.append(first_line(error))
    return None, refused[:1]


def _note(found: list[UsageError], check: Any, *arguments: Any) -> None:
    try:
        check(*arguments)
    except UsageError as error:
        found.append(error)


def _num_bytes(sample: Any) -> int:
    values = sample.values() if isinstance(sample, dict) else ()
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))
