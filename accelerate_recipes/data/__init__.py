"""accelerate-recipes data: shows the samples that a model gets, before you train."""

from pathlib import Path
from typing import Annotated

import typer

from accelerate_recipes.catalog import find_recipe
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, Flags, print_json
from accelerate_recipes.paths import check_new_file, write_file
from accelerate_recipes.templates import render


def data(
    recipe: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Flags = None,
    samples: Annotated[int, typer.Option(help="how many samples of the first step to show", min=0, max=1000)] = 4,
    output: Annotated[Path | None, typer.Option(help="an HTML page, with the images")] = None,
    as_json: AsJson = False,
) -> None:
    """Show your data as the model gets it: sizes, lengths, skipped rows, the first samples. Does not train.

    Example: accelerate-recipes data recipes/finetune.py --output data.html -- --data chats.jsonl
    """
    from accelerate_recipes.at_fit import at_fit
    from accelerate_recipes.data.show import facts, has_marks, show

    if output is not None:
        check_new_file(output, "--output", "what the model gets</title>")
    script = recipe if recipe.is_file() else find_recipe(str(recipe))
    found = at_fit(script, flags or [], "accelerate_recipes.data.look:look", samples)
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
            print(f"\n{output}: the same facts and samples, with images; open it in a browser")
