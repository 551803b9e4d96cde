"""The findings of doctor about a config, and about a recipe under it: from its rules, and from the loop's own checks,
with the variables of `accelerate launch`, in the process of a recipe (`refusals`) or in this one."""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch.utils._pytree import tree_leaves

from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.common.config import RunConfig
from accelerate_recipes.common.environment import INHERITED, Environment, without_ranks
from accelerate_recipes.common.errors import UsageError, first_line, join_advice
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.doctor import rules
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import Finding, findings
from accelerate_recipes.doctor.rules.launching import by_hand
from accelerate_recipes.matrix import PIPELINES


class Answer(TypedDict):
    refusals: list[UsageError]  # from the loop
    of_the_launcher: list[str]  # the lines with which `accelerate launch` refuses
    facts: dict[str, int]  # the recipe's num_workers, micro_batch_size and sample_bytes, of the tensors of a sample


def ask(config: Config, script: Path | None, flags: Sequence[str]) -> Answer:
    """Asks for the refusals of a config, and of a recipe under it. `config`: its machine decides whether processes have
    GPUs; `script`: None for none. Raises UsageError if the recipe ends before `fit`, or a value is unreadable."""
    question: list[Any] = [str(config.path), bool(config.machine.gpus), config.likely_flags, True]  # of `refusals_of`
    if script is not None:
        return at_fit(script, flags, f"{__name__}:refusals", question)
    alone = RunConfig(pipeline_stages=2 if config.path.stem in PIPELINES else 1)
    try:
        with without_ranks(), redirect_stderr(io.StringIO()):  # the launcher prints the defaults that it chooses
            return refusals_of(None, alone, *question)
    except Exception as error:  # a word in place of a number, for example
        raise UsageError(f"the loop stops before it calls fit: {type(error).__name__}: {first_line(error)}") from None


def refusals(question: list[Any], *arguments: Any, **options: Any) -> Answer:
    """The refusals of a run under the config. Takes the arguments of `fit`."""
    try:
        setup = of_any_size(*arguments, **options)
    except UsageError as error:  # it hides other mistakes
        return {"refusals": [error], "of_the_launcher": [], "facts": {}}
    return refusals_of(setup, arguments[-1], *question)


def of_any_size(*arguments: Any, **options: Any) -> Setup:
    """`fit`'s arguments, with steps of one sample, which any layout divides. Raises UsageError if no run takes them."""
    from accelerate_recipes.common.step.lazy import with_sizes
    from accelerate_recipes.common.step.refusals import check_given

    accelerator, model, optimizer, forward_step, train_set, eval_set, config = arguments
    check_given(model, optimizer, {"forward_step": forward_step, "options": options})
    one = replace(config, batch_size=1, micro_batch_size=None)
    return with_sizes(Setup.of(accelerator, model, optimizer, forward_step, train_set, eval_set, one, **options))


def refusals_of(
    setup: Setup | None, config: Any, path: str, has_gpu: bool, likely: list[str], takes_passes: bool
) -> Answer:
    """The refusals of a run under the config file at `path`. Changes the variables of this process. `setup`: from
    `of_any_size`; None: asks only about the file; `config`: the flags of the run; `likely`: flags for values that the
    file should have; `takes_passes`: whether to run forward passes of the model."""
    from accelerate_recipes.common.launch.checks import check_device, launch_checks
    from accelerate_recipes.common.parallel.strategies import layout_of, model_checks, with_plans

    found: list[UsageError] = []
    facts = {} if setup is None else {"num_workers": config.num_workers}
    if setup is not None:
        facts["sample_bytes"] = sum(getattr(value, "nbytes", 0) for value in tree_leaves(setup.train_set[0]))
    remove_variables()
    refused: list[str] = []  # by the launcher; with likely flags it also finds other mistakes in the file
    for given in ([], likely):
        try:
            os.environ.update(launched(Path(path), given))
            break
        except Exception as error:  # the launcher may raise anything
            refused.append(first_line(error))
    else:
        return {"refusals": [], "of_the_launcher": refused[:1], "facts": facts}
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
            except UsageError as error:  # a batch size that divides shows other mistakes
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


def _note(found: list[UsageError], check: Any, *arguments: Any) -> None:
    try:
        check(*arguments)
    except UsageError as error:
        found.append(error)


def launched(config: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """The first process's variables, under a config file and flags of `accelerate launch`. Raises its errors."""
    from accelerate.commands import launch  # here, because the import takes seconds

    arguments = launch.launch_command_parser().parse_args(["--config_file", str(config), *flags, "recipe.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    arguments.main_process_port = 0  # any free one: the launcher refuses a port that is in use
    arguments.main_process_ip = arguments.main_process_ip or "127.0.0.1"  # the command line may give it
    if arguments.use_deepspeed:
        _, variables = launch.prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        variables = launch.prepare_multi_gpu_env(arguments)
    else:
        _, variables = launch.prepare_simple_launcher_cmd_env(arguments)
        return variables
    sizes = {"WORLD_SIZE": arguments.num_processes, "GROUP_WORLD_SIZE": arguments.num_machines}
    sizes["LOCAL_WORLD_SIZE"] = arguments.num_processes // arguments.num_machines
    first = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return variables | {name: str(size) for name, size in sizes.items()} | first


def remove_variables() -> None:
    """Removes the variables that a launcher set around this process: a run must not inherit them."""
    for name in filter(INHERITED.match, list(os.environ)):
        del os.environ[name]


def refusal_of(line: str) -> Finding:
    """The finding for a refusal of the launcher that no rule covers."""
    cure = "the missing key, in the file"
    if variable := re.search(r"\$\{?\w+\}?", line):
        cure = by_hand("machine_rank", variable[0])  # the only number that no rule reads
    elif "`--gpu_ids`" in line:
        cure = "gpu_ids: all; or distributed_type: 'NO' for one GPU"
    elif flag := re.search(r"`--(\w+)`", line):
        cure = f"{flag[1]}: with its value, in the file; or --{flag[1]} after accelerate launch"
    return Finding("accelerate launch refuses the file", line, cure)


def of_config(
    config: Config, script: Path | None = None, flags: Sequence[str] = (), ask: Callable[..., Answer] = ask
) -> Iterator[Finding]:
    """The findings about a config and a recipe under it: first from the rules, then from the loop (seconds)."""
    found = findings(rules.CONFIG, config)
    yield from found
    if not config.is_for_the_loop:
        return
    try:
        answer = ask(config, script, flags)
    except UsageError as error:
        command = " ".join(["python", str(script or "YOUR_RECIPE.py"), *flags])
        why = "doctor runs a recipe up to this call to check its model and data; a run would also end there"
        yield Finding(str(error), why, f"{command}, to see all of its output")
        return
    yield from (_of_the_loop(error, config) for error in answer["refusals"])
    if not found:  # usually a rule has found the same mistake, and says more
        yield from map(refusal_of, answer["of_the_launcher"])
    yield from findings(rules.RECIPE, config, answer["facts"])


def _of_the_loop(error: UsageError, config: Config) -> Finding:
    """A refusal of the loop as a finding, without edits that remove keys that the file does not have."""
    edits = [edit for edit in error.edits if edit.value is not None or edit.key in config.section(edit.section)]
    advice = join_advice(error.instead, error.beside).removeprefix("use ").removeprefix("run ")
    typed = error.beside if edits else advice
    return Finding(error.what, "a run would stop with this error", *edits, typed or "what the line says" * (not edits))
