"""accelerate-recipes doctor: checks this machine, a config, and whether a recipe runs with it."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from accelerate_recipes.catalog import find_config, find_recipe, mapping_in
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, Flags, print_json, print_table
from accelerate_recipes.doctor.finding import Finding, findings, words
from accelerate_recipes.paths import check_file, is_path, text_of


def check(
    config: Annotated[Path | None, typer.Argument(help="a config file of Accelerate")] = None,
    recipe: Annotated[Path | None, typer.Argument(help="the recipe to run with it")] = None,
    flags: Flags = None,
    fix: Annotated[bool, typer.Option("--fix", help="write a corrected copy next to the config")] = False,
    as_json: AsJson = False,
) -> int:
    """Check this machine, a config, and whether a recipe runs with it. Exit code 1 if it finds a mistake.

    Example: accelerate-recipes doctor accelerate_configs/ddp.yaml recipes/mnist.py
    """
    from accelerate_recipes.doctor import machine, rules
    from accelerate_recipes.doctor.asked import of_config
    from accelerate_recipes.doctor.config_file import Config
    from accelerate_recipes.doctor.fix import fixed, path_of_copy, write

    config, script = _existing(config, find_config), _existing(recipe, find_recipe)
    if script is not None and not re.search(r"\bfit\(", text_of(script, "", "use the path of a recipe")):
        raise UsageError(f"{script} does not call fit, so doctor cannot check it: remove it")
    if fix and config is None:
        raise UsageError("--fix needs a config file: use its path")
    copy = path_of_copy(config) if fix and config else None
    here = machine.look()
    given = Config(config, mapping_in(config), here) if config else None
    if not as_json:
        print_table(("this machine", ""), here.rows())
        print()
    found = findings(rules.MACHINE, here)
    made: list[Finding] = []
    look = partial(of_config, script=script, flags=flags or [])
    if given is None:
        found += findings(rules.MACHINE_WITHOUT_CONFIG, here)
    elif copy is None:
        found += look(given)
    else:
        better, made, left = fixed(given, look)
        found += left
        if made:
            write(replace(better, path=copy))
    if as_json:
        changed, remaining = (
            [{"what": finding.what, "why": finding.why, "type": finding.type} for finding in some]
            for some in (made, found)
        )
        of_fix = {"changed": changed, "left": remaining, "file": str(copy) if made else None}
        print_json(remaining if copy is None else of_fix)
    else:
        _print(found, made, copy)
    return 1 if found else 0


def _existing(path: Path | None, find: Callable[[str], Path]) -> Path | None:
    """The path of a file; a word without a suffix is the name of one of ours. Raises UsageError if missing."""
    if path is not None and len(path.parts) == 1 and not path.suffix and not is_path(str(path)):
        return find(path.name)
    if path is not None:
        check_file(path, "", "use the path of a file, or a name from accelerate-recipes list")
    return path


def _print(found: list[Finding], made: list[Finding], copy: Path | None) -> None:
    if copy is not None:
        print(f"wrote {copy}, without comments" if made else "nothing for --fix to change")
        for finding in made:
            print(f"\n{finding.what}\n  why   {finding.why}\n  done  {'; '.join(words(finding.edits))}")
            if finding.by_hand:
                print(f"  type  {finding.by_hand}")
        print("\nleft to you:\n" if found else "")
    for finding in found:
        print(f"{finding.what}\n  why   {finding.why}\n  type  {finding.type}\n")
    print(f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "no findings")
