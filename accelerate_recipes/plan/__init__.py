"""accelerate-recipes plan: estimates what a run will need on a cluster, before you pay for it."""

from argparse import SUPPRESS, ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from accelerate_recipes import bundle
from accelerate_recipes.catalog import MOST_PROCESSES, find_config, find_recipe
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, Flags, print_json
from accelerate_recipes.matrix import PIPELINES
from accelerate_recipes.paths import check_file, check_number, is_path


def plan(
    recipe: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Flags = None,
    config: Annotated[list[str] | None, typer.Option(help="config by name or path; repeatable (default: all)")] = None,
    num_processes: Annotated[
        int | None,
        typer.Option("--num_processes", help="GPUs in total (default: the config's)", min=1, max=MOST_PROCESSES),
    ] = None,
    num_machines: Annotated[int | None, typer.Option("--num_machines", help="default: the config's", min=1)] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, such as mixed_precision=bf16")] = None,
    gpu: Annotated[str, typer.Option(help="a name in hardware.json: h100, h200, a100, ...")] = "h100",
    memory: Annotated[float | None, typer.Option(help="memory per GPU in GB (default: the GPU's)")] = None,
    hardware: Annotated[Path | None, typer.Option(help="JSON file with the rates of your machines")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="also plan more GPUs, up to 8,192")] = False,
    hours: Annotated[float | None, typer.Option(help="name the cheapest config that ends in this many hours")] = None,
    as_json: AsJson = False,
) -> int:
    """Estimate what a run will need on a cluster: batch, memory, traffic, time. Exit code 1 if it does not fit.

    Example: accelerate-recipes plan recipes/transformer.py --config fsdp2 --num_processes 2 --gpu h100
    """
    from accelerate_recipes.plan import printing
    from accelerate_recipes.plan.ask import Case, alternatives, count, larger, plans, scale_up
    from accelerate_recipes.plan.estimates import Estimate, NoPlan
    from accelerate_recipes.plan.hardware import read

    rates = read(gpu, memory, hardware)
    check_number(hours, "--hours")
    script = recipe if is_path(str(recipe)) else find_recipe(str(recipe))
    check_file(script, "", "use the path of a recipe")
    parser = ArgumentParser("accelerate-recipes", SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline_stages", "--pipeline-stages", dest="stages", type=int, default=1)
    known, flags = parser.parse_known_args(flags or [])
    changes = dict(_setting(text) for text in settings or ())
    for key in ("num_processes", "num_machines"):  # once, not for each config
        count(changes, key)
    # Without --config: our configs for one machine. The others differ only in the number of machines.
    of_one_machine = [path for path in bundle.configs() if not path.stem.startswith("multi_node")]
    cases = [
        Case(path, num_processes, num_machines, changes, max(known.stages, 2 if path.stem in PIPELINES else 1))
        for path in [find_config(name) for name in config or ()] or of_one_machine
    ]
    found = plans(script, flags, cases, rates)
    one = found[0] if len(found) == 1 else None
    if isinstance(one, NoPlan):
        raise UsageError(printing.why_not(one))
    fitting = [each for each in found if isinstance(each, Estimate) and each.fits]
    rows = {each.config: scale_up(each, rates) for each in fitting} if scaling else {}
    near = (larger if one.fits else alternatives)(cases[0], one, script, flags, rates) if one else []
    if as_json:
        fits = [{"type": text, "peak": each.step.peak, "seconds": each.speed.seconds} for text, each in near]
        curves = {config: [asdict(row) for row in steps] for config, steps in rows.items()}
        told = [each.as_json() for each in found]
        print_json({"gpu": rates.name, "plans": told, "fits_with": fits, "scaling": curves})
        return 0 if fitting else 1
    print(f"{script} on {rates.name} GPUs of {rates.memory_gb:g} GB; times are estimates (docs/plan.md)\n")
    if one:
        printing.show_one(one, rates)
    else:
        printing.show_several(found)
    if one and (near or not fitting):
        printing.show_fitting(near, "fits, too" if fitting else "fits with")
    printing.show_scaling(rows)
    if fitting and (hours is not None or not one):
        rows = rows or {each.config: [each.speed] for each in fitting}
        printing.show_cheapest([(config, row) for config, steps in rows.items() for row in steps], hours)
    return 0 if fitting else 1


def _setting(text: str) -> tuple[str, int | str]:
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        raise UsageError(f"--set {text}: use KEY=VALUE, such as --set mixed_precision=bf16")
    return key, int(value) if value.isdecimal() else value
