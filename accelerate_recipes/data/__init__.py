"""accelerate-recipes data: what a model gets of the data, before anything is trained."""

import json
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.catalog import find_recipe
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_json
from accelerate_recipes.data.show import facts, has_marks, show
from accelerate_recipes.paths import check_new_file, write_file
from accelerate_recipes.templates import render


def data(script: Path, flags: Sequence[str], samples: int, output: Path | None, as_json: bool) -> None:
    """Prints what a model gets of the data.

    Args:
        script: a recipe.
        flags: of the recipe.
        samples: how many samples of the first step to show.
        output: for an HTML page, which loads nothing.
        as_json: print JSON, and nothing else.

    Raises:
        UsageError: no such recipe, one that does not get to its call of `fit`, or no page can be written.
    """
    if output is not None:
        check_new_file(output, "--output")
    script = script if script.is_file() else find_recipe(str(script))
    found = at_fit(script, flags, "accelerate_recipes.data.look:look", {QUESTION: json.dumps(samples)})
    if "refused" in found:
        raise UsageError(found["refused"])
    if as_json:
        print_json(found)
    else:
        show(found)
    if output is not None:
        title = f"{script.stem}: what the model gets"
        page = render("data.html", title=title, facts=facts(found), has_marks=has_marks(found), found=found)
        write_file(output, page)
        if not as_json:
            print(f"\n{output}: these facts and samples, with images, for a browser")
