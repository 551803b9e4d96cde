"""accelerate-recipes plan: what a run will take on a cluster, before anything is spent."""

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from accelerate_recipes import bundle
from accelerate_recipes.catalog import find_config, find_recipe
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.matrix import PIPELINES
from accelerate_recipes.paths import check_file, check_number, is_path
from accelerate_recipes.plan import plot, show
from accelerate_recipes.plan.ask import Case, alternatives, larger, plans, scale_up
from accelerate_recipes.plan.facts import Estimate, NoPlan
from accelerate_recipes.plan.hardware import Gpu


def plan(
    script: Path,
    flags: Sequence[str],
    configs: Sequence[str],
    num_processes: int | None,
    num_machines: int | None,
    settings: Sequence[str],
    gpu: Gpu,
    scaling: bool,
    hours: float | None,
    page: Path | None,
    as_json: bool,
) -> int:
    """Prints a plan for one config, or a table for several.

    Args:
        script: a recipe.
        flags: of the recipe.
        configs: names or paths; empty: all of ours for one machine.
        num_processes, num_machines: instead of those of the configs.
        settings: "key=value", instead of the configs'.
        gpu: to plan for.
        scaling: also with more GPUs.
        hours: the most that the run may take; the cheapest row is named.
        page: for a plot of the scaling.
        as_json: print JSON, and nothing else.

    Returns:
        The exit code: 1 if no config fits, else 0.

    Raises:
        UsageError: no such recipe or config, the only config is refused, or no plot can be written.
    """
    plot.check(page, scaling)
    check_number(hours, "--hours")
    script = script if is_path(str(script)) else find_recipe(str(script))
    check_file(script, "", "use the path of a recipe")
    flags, stages = _without_stages(flags)
    changes = dict(_setting(text) for text in settings)
    paths = [find_config(name) for name in configs] or _of_one_machine()
    cases = [
        Case(path, num_processes, num_machines, changes, max(stages, 2 if path.stem in PIPELINES else 1))
        for path in paths
    ]
    found = plans(script, flags, cases, gpu)
    one = found[0] if len(found) == 1 else None
    if isinstance(one, NoPlan):
        raise UsageError(show.why_not(one))
    fitting = [each for each in found if isinstance(each, Estimate) and each.fits]
    rows = {each.config: scale_up(each, gpu) for each in fitting} if scaling else {}
    near = (larger if one.fits else alternatives)(cases[0], one, script, flags, gpu) if one else []
    if as_json:
        fits = [{"type": text, "peak": each.step.peak, "seconds": each.speed.seconds} for text, each in near]
        curves = {config: [asdict(row) for row in steps] for config, steps in rows.items()}
        told = [each.as_json() for each in found]
        print_json({"gpu": gpu.name, "plans": told, "fits_with": fits, "scaling": curves})
        return 0 if fitting else 1
    print(f"{script} on {gpu.name} GPUs of {gpu.memory_gb:g} GB; times are estimates (docs/plan.md)\n")
    if one:
        show.show_one(one, gpu)
    else:
        show.show_several(found)
    if one and (near or not fitting):
        show.show_fitting(near, "fits, too" if fitting else "fits with")
    show.show_scaling(rows)
    if page is not None:
        plot.write(page, rows, script.stem)
    if fitting and (hours is not None or not one):
        rows = rows or {each.config: [each.speed] for each in fitting}
        show.show_cheapest([(config, row) for config, steps in rows.items() for row in steps], hours)
    return 0 if fitting else 1


def _without_stages(flags: Sequence[str]) -> tuple[list[str], int]:
    """The flags without `--pipeline_stages`, and its value."""
    parser = ArgumentParser("accelerate-recipes", SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline_stages", "--pipeline-stages", type=int, default=1)
    known, rest = parser.parse_known_args(flags)
    return rest, known.pipeline_stages


def _of_one_machine() -> list[Path]:
    """Those of ours that are not for several machines: the others differ in the number of machines alone."""
    return [path for path in bundle.configs() if not path.stem.startswith("multi_node")]


def _setting(text: str) -> tuple[str, int | str]:
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        raise UsageError(f"--set {text}: use KEY=VALUE, such as --set mixed_precision=bf16")
    return key, int(value) if value.isdecimal() else value
