"""accelerate-recipes verify: does a recipe give one result under every config?"""

from pathlib import Path
from typing import Annotated

import typer

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, Flags
from accelerate_recipes.paths import check_file, check_folder, check_new_file


def verify(
    script: Annotated[Path, typer.Argument(help="a recipe")],
    flags: Flags = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps (default: 20)", min=4, max=10_000)] = None,
    config: Annotated[list[str] | None, typer.Option(help="config by name or path; repeatable (default: all)")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="check only the next steps of this checkpoint")] = None,
    output: Annotated[Path | None, typer.Option(help="folder of the certificate (default: verified/<script>)")] = None,
    accelerate: Annotated[bool, typer.Option("--accelerate", help="run your own Accelerate script, unchanged")] = False,
    split_batches: Annotated[
        bool, typer.Option("--split_batches", help="with --accelerate: split each batch, in a seeded order")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="only record the first steps of one process here")] = None,
    against: Annotated[Path | None, typer.Option(help="compare one process with this record or certificate")] = None,
    as_json: AsJson = False,
) -> int:
    """Check that a recipe gives the same result under every config; if not, name the likely cause.

    Example: accelerate-recipes verify recipes/mnist.py --config ddp --config fsdp2 -- --model mlp
    """
    from accelerate_recipes.verify import against as single
    from accelerate_recipes.verify import checkpoint as of_run
    from accelerate_recipes.verify import plain, recipe

    if split_batches and (not accelerate or checkpoint or against or record):
        raise UsageError("--split_batches needs --accelerate, and no --record, --against, --checkpoint: remove it")
    if checkpoint is not None:
        if accelerate or against or record or output or steps:
            raise UsageError("--checkpoint takes --config, --json and flags of the recipe: remove the others")
        return of_run.run(script, flags or [], checkpoint, config, as_json)
    if against is not None:
        if accelerate or config or flags or output or record:
            raise UsageError("--against runs one process, with the flags of the record: remove all but --json")
        return single.run(script, against, as_json)
    if record is not None:
        if config or output:
            raise UsageError("--record runs one process: remove --config and --output")
        return single.record(script, flags or [], steps or 20, record, accelerate, as_json)
    if not accelerate:  # which also takes the name of a module
        check_file(script, "", "use the path of a recipe")
    folder = output or Path("verified") / script.stem
    check_folder(folder, name := "--output" if output else "")
    if (earlier := folder / "certificate.json").exists():
        check_new_file(earlier, name, f'{script.name}"')
    if accelerate:
        return plain.verify_watched(script, flags or [], steps or 20, folder, as_json, split_batches)
    return recipe.verify_recipe(script, flags or [], steps or 20, config, folder, as_json)
