"""accelerate-recipes doctor: checks this machine, a config, and whether a recipe runs with it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate_recipes.catalog import find_config, find_recipe
from accelerate_recipes.common.errors import UsageError, join_advice
from accelerate_recipes.console import print_json, print_table
from accelerate_recipes.doctor import machine, rules
from accelerate_recipes.doctor.asked import Answer, ask
from accelerate_recipes.doctor.config import Config, read
from accelerate_recipes.doctor.finding import Finding, findings, words
from accelerate_recipes.doctor.fix import fix, path_of_copy, write
from accelerate_recipes.doctor.launched import refusal_of
from accelerate_recipes.paths import check_file, check_new_file, is_path, text_of


def check(
    config: Path | None, script: Path | None, as_json: bool, flags: Sequence[str] = (), fixes: bool = False
) -> int:
    """Prints the facts of the machine and all findings.

    Args:
        config: a config file of Accelerate, or the name of one of ours; None checks the machine alone.
        script: a recipe, or the name of one of ours; None checks the config alone.
        as_json: print the findings as a JSON list of {"what", "why", "type"}, and nothing else.
        flags: of the recipe.
        fixes: write a copy of the config in which the edits of the findings are made, and print these and the findings
            that are left; as JSON, {"changed": findings, "left": findings, "file": the copy or None}.

    Returns:
        The exit code: 1 with findings, else 0.

    Raises:
        UsageError: a file that does not exist, or a config that is no YAML mapping; a copy that exists.
    """
    config = _existing(config, find_config)
    script = _existing(script, find_recipe)
    if script is not None and not re.search(r"\bfit\(", text_of(script, "", "use the path of a recipe")):
        raise UsageError(f"{script} does not call fit, where doctor looks at a recipe: leave it out")
    if fixes and config is None:
        raise UsageError("--fix needs a config file: use its path")
    copy = path_of_copy(config) if fixes and config else None
    if copy is not None:
        check_new_file(copy, "")
    here = machine.look()
    given = read(config, here) if config else None
    if not as_json:
        print_table(("this machine", ""), here.rows())
        print()
    found = findings(rules.MACHINE, here)
    made: list[Finding] = []
    look = partial(of_config, script=script, flags=flags)
    if given is None:
        found += findings(rules.MACHINE_WITHOUT_CONFIG, here)
    elif copy is None:
        found += look(given)
    else:
        fixed, made, left = fix(given, look)
        found += left
        if made:
            write(replace(fixed, path=copy))
    (_print_json if as_json else _print)(found, made, copy)
    return 1 if found else 0


def _existing(path: Path | None, find: Callable[[str], Path]) -> Path | None:
    """A path that exists; a word without a suffix is a name. Raises UsageError."""
    if path is not None and len(path.parts) == 1 and not path.suffix and not is_path(str(path)):
        return find(path.name)
    if path is not None:
        check_file(path, "", "use the path of a file, or accelerate-recipes list for the names of ours")
    return path


def of_config(
    config: Config, script: Path | None = None, flags: Sequence[str] = (), ask: Callable[..., Answer] = ask
) -> Iterator[Finding]:
    """The findings of a config, and of a recipe under it: those of the rules, then those of the loop, which takes
    seconds."""
    found = findings(rules.CONFIG, config)
    yield from found
    if not config.is_for_the_loop:
        return
    try:
        answer = ask(config, script, flags)
    except UsageError as error:
        command = " ".join(["python", str(script or "YOUR_RECIPE.py"), *flags])
        why = "doctor runs a recipe up to this call to look at its model and data; a run would end there, too"
        yield Finding(str(error), why, f"{command}, to see all of its output")
        return
    yield from (_of_the_loop(error, config) for error in answer["refusals"])
    if not found:  # most files that the launcher refuses have a finding that says more
        yield from map(refusal_of, answer["of_the_launcher"])
    yield from findings(rules.RECIPE, config, answer["facts"])


def _of_the_loop(error: UsageError, config: Config) -> Finding:
    """A refusal of the loop as a finding, without edits that remove what the file lacks."""
    edits = [edit for edit in error.edits if edit.value is not None or edit.key in config.section(edit.section)]
    by_hand = (
        error.beside if edits else join_advice(error.instead, error.beside).removeprefix("use ").removeprefix("run ")
    )
    return Finding(error.what, "a run ends with this line", *edits, by_hand or "what the line says" * (not edits))


def _print_json(found: list[Finding], made: list[Finding], copy: Path | None) -> None:
    left, changed = ([finding.as_dict() for finding in some] for some in (found, made))
    print_json(left if copy is None else {"changed": changed, "left": left, "file": str(copy) if made else None})


def _print(found: list[Finding], made: list[Finding], copy: Path | None) -> None:
    if copy is not None:
        print(f"wrote {copy}, without comments" if made else "nothing that --fix could change")
        for finding in made:
            print(f"\n{finding.what}\n  why   {finding.why}\n  done  {'; '.join(words(finding.edits))}")
            if finding.by_hand:
                print(f"  type  {finding.by_hand}")
        print("\nleft to you:\n" if found else "")
    for finding in found:
        print(f"{finding.what}\n  why   {finding.why}\n  type  {finding.type}\n")
    print(f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "no findings")
