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
from typing import TYPE_CHECKING, Any, TypedDict

from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.common.errors import UsageError, first_line
from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.launched import launched, remove_variables
from accelerate_recipes.matrix import PIPELINES

if TYPE_CHECKING:
    from accelerate_recipes.common.step.setup import Setup


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
    from accelerate_recipes import RunConfig

    alone = RunConfig(pipeline_stages=2 if config.path.stem in PIPELINES else 1)
    before = dict(os.environ)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the launcher says which defaults it takes
            return refusals_of(None, alone, *json.loads(question(config)[QUESTION]))
    except Exception as error:  # a word in place of a number, for example
        line = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"the loop does not reach its call of fit: {line}") from None
    finally:
        os.environ.clear()
        os.environ |= before


def question(config: Config) -> dict[str, str]:
    """The variable that `refusals` reads: what `refusals_of` takes beside the description of a run."""
    return {QUESTION: json.dumps([str(config.path), bool(config.machine.gpus), config.likely_flags, True])}


def refusals(*arguments: Any, **options: Any) -> Answer:
    """What a run under the config would refuse. Takes the arguments of `fit`."""
    try:
        setup = of_any_size(*arguments, **options)
    except UsageError as error:  # what else is wrong cannot be asked
        return {"refusals": [error], "of_the_launcher": [], "facts": {}}
    return refusals_of(setup, arguments[-1], *json.loads(os.environ[QUESTION]))


def of_any_size(*arguments: Any, **options: Any) -> "Setup":
    """What the arguments of `fit` describe, with steps of one sample: a launched layout may divide another batch than
    one process. Raises UsageError for what no layout can train."""
    from accelerate_recipes.common.step.checks import check_given
    from accelerate_recipes.common.step.lazy import with_sizes
    from accelerate_recipes.common.step.setup import Setup

    accelerator, model, optimizer, forward_step, train_set, eval_set, config = arguments
    check_given(model, optimizer, {"forward_step": forward_step, "options": options})
    one = replace(config, batch_size=1, micro_batch_size=None)
    return with_sizes(Setup.of(accelerator, model, optimizer, forward_step, train_set, eval_set, one, **options))


def refusals_of(
    setup: "Setup | None", config: Any, path: str, has_gpu: bool, likely: list[str], takes_passes: bool
) -> Answer:
    """What a run under the config would refuse. Changes the variables of this process.

    Args:
        setup: from `of_any_size`; None: asks about the config file alone.
        config: the flags of the run.
        path: of the config file.
        has_gpu: whether the machine has one.
        likely: flags for what the file should say.
        takes_passes: whether to take passes of the model.
    """
    from accelerate_recipes.common.environment import Environment
    from accelerate_recipes.common.launch.checks import check_device, launch_checks
    from accelerate_recipes.common.parallel.strategies import layout_of, model_checks, with_plans

    found: list[UsageError] = []
    facts = {} if setup is None else {"num_workers": config.num_workers, "sample_bytes": _num_bytes(setup.train_set[0])}
    remove_variables()
    variables, refused = _launched(Path(path), likely)
    if variables is None:
        return {"refusals": [], "of_the_launcher": refused, "facts": facts}
    os.environ.update(variables)
    try:
        layout = replace(layout_of(Environment.read(), config), device="cuda" if has_gpu else "cpu")
        # This process runs on the CPU, so the doctor's own rules count the GPUs.
        for of_launch in launch_checks(layout):
            if of_launch is not check_device:
                _note(found, of_launch, layout, config)
        if not found and setup is not None:
            try:
                plan = setup.plan.under(config, layout)
                facts |= {"micro_batch_size": plan.micro_batch_size}
            except UsageError as error:  # what else is wrong shows with a batch that divides
                found.append(error)
                divides = {"batch_size": layout.data_parallel_size * layout.pp, "micro_batch_size": None}
                plan = setup.plan.under(replace(config, **divides), layout)
            for of_model in model_checks(layout):
                _note(found, of_model, setup.model, setup.optimizer, plan)
            if not found and takes_passes:
                _note(found, with_plans, replace(setup, plan=plan))
    except UsageError as error:
        found.append(error)
    return {"refusals": found, "of_the_launcher": refused, "facts": facts}


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
