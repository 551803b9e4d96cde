"""accelerate-recipes data: what a model gets of the data, before anything is trained."""

import json
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.catalog import find_recipe
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.data import page, show


def data(script: Path, flags: Sequence[str], samples: int, output: Path | None, as_json: bool) -> None:
    """Prints what a model gets of the data.

    Args:
        script: a recipe.
        flags: of the recipe.
        samples: how many samples of the first step to show.
        output: for an HTML page.
        as_json: print JSON, and nothing else.

    Raises:
        UsageError: no such recipe, one that does not get to its call of `fit`, or no page can be written.
    """
    if output is not None:
        page.check(output)
    script = script if script.is_file() else find_recipe(str(script))
    found = at_fit(script, flags, "accelerate_recipes.data.look:look", {QUESTION: json.dumps(samples)})
    if "refused" in found:
        raise UsageError(found["refused"])
    if as_json:
        print_json(found)
    else:
        show.show(found)
    if output is not None:
        page.write(output, f"{script.stem}: what the model gets", found)
        if not as_json:
            print(f"\n{output}: these facts and samples, with images, for a browser")
