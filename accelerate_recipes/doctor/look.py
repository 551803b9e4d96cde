"""What doctor finds in a config, and in a recipe under it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from accelerate_recipes.common.errors import UsageError, join_advice
from accelerate_recipes.doctor import rules
from accelerate_recipes.doctor.asked import Answer, ask
from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Finding, findings
from accelerate_recipes.doctor.launched import refusal_of


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
