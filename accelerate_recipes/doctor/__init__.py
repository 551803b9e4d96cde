"""accelerate-recipes doctor: checks this machine, a config, and whether a recipe runs with it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from accelerate_recipes.catalog import find_config, find_recipe
from accelerate_recipes.console import print_json, print_table
from accelerate_recipes.doctor import machine, rules
from accelerate_recipes.doctor.asked import ask
from accelerate_recipes.doctor.config import Config, read
from accelerate_recipes.doctor.finding import Finding, findings
from accelerate_recipes.errors import UsageError


def check(config: Path | None, script: Path | None, as_json: bool, flags: Sequence[str] = ()) -> int:
    """Prints the facts of the machine and all findings.

    Args:
        config: a config file of Accelerate, or the name of one of ours; None checks the machine alone.
        script: a recipe, or the name of one of ours; None checks the config alone.
        as_json: print the findings as a JSON list of {"what", "why", "type"}, and nothing else.
        flags: of the recipe.

    Returns:
        The exit code: 1 with findings, else 0.

    Raises:
        UsageError: a file that does not exist, or a config that is no YAML mapping.
    """
    config = _existing(config, find_config)
    script = _existing(script, find_recipe)
    if script is not None and not re.search(r"\bfit\(", script.read_text(encoding="utf-8")):
        raise UsageError(f"{script} does not call fit, where doctor looks at a recipe: leave it out")
    here = machine.look()
    read_config = read(config, here) if config else None
    if not as_json:
        print_table(("this machine", ""), here.rows())
        print()
    found = [*findings(rules.MACHINE, here)]
    if read_config is None:
        found += findings(rules.MACHINE_WITHOUT_CONFIG, here)
    else:
        found += _of_config(read_config, script, flags)
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        _print(found)
    return 1 if found else 0


def _existing(path: Path | None, find: Callable[[str], Path]) -> Path | None:
    """A path that exists; a word without a suffix is a name. Raises UsageError."""
    if path is None or path.is_file():
        return path
    if len(path.parts) == 1 and not path.suffix:
        return find(path.name)
    raise UsageError(f"{path}: no such file; type the path of a file, or accelerate-recipes list for the names of ours")


def _of_config(config: Config, script: Path | None, flags: Sequence[str]) -> list[Finding]:
    found = findings(rules.CONFIG, config)
    if not config.is_for_the_loop:
        return found
    try:
        answer = ask(config.path, bool(config.machine.gpus), script, flags)
    except UsageError as error:
        command = " ".join(["python", str(script), *flags])
        why = "doctor runs a recipe up to this call to look at its model and data; a run would end there, too"
        return [*found, Finding(str(error), why, f"{command}, to see all of its output")]
    # Most files that the launcher refuses have a finding that says more.
    found += answer.refusals if answer.refusals or found else answer.of_the_launcher
    return found + findings(rules.RECIPE, config, answer.facts)


def _print(found: list[Finding]) -> None:
    for finding in found:
        print(f"{finding.what}\n  why   {finding.why}\n  type  {finding.type}\n")
    print(f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "no findings")
