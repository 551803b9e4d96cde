"""Makes a project from a recipe. It owns the recipe, the configs and a test, and imports the rest from this package."""

import json
import re
import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from accelerate_recipes import bundle, distribution
from accelerate_recipes.catalog import find_config, find_of, find_recipe, mapping_in
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, print_json
from accelerate_recipes.matrix import flags_for
from accelerate_recipes.paths import check_new_folder
from accelerate_recipes.templates import render

SINGLE_FILES = bundle.RECIPES / "single_file"
SINGLE_FILE_CONFIGS = ("single", "ddp", "fsdp2", "deepspeed_zero2")  # their docstrings list these as verified
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where names differ


def make(
    recipe: Annotated[str, typer.Argument(help="name of a recipe, such as mnist")],
    folder: Annotated[Path, typer.Argument(help="the folder to make; it must be empty or absent")],
    config: Annotated[list[str] | None, typer.Option(help="config by name or path; repeatable (default: ddp)")] = None,
    own_loop: Annotated[bool, typer.Option("--own_loop", help="also write the loop, as loop.py")] = False,
    single_file: Annotated[bool, typer.Option("--single_file", help="one script, without this package")] = False,
    vendor: Annotated[bool, typer.Option("--vendor", help="also copy the package, so that you can change it")] = False,
    as_json: AsJson = False,
) -> None:
    """Make your own project from a recipe: the recipe, configs and a test. It imports the rest.

    Example: accelerate-recipes new mnist my_project --config ddp --config fsdp2
    """
    if own_loop + single_file + vendor > 1:
        raise UsageError("--own-loop, --single-file and --vendor make different projects: use one of them")
    files = sorted(SINGLE_FILES.glob("*.py"))
    script = find_of(files, recipe, "recipe as a single file") if single_file else find_recipe(recipe)
    chosen = [find_config(name) for name in dict.fromkeys(config or ["ddp"])]
    if len({path.name for path in chosen}) < len(chosen):
        raise UsageError("--config names two files with the same name, but a project needs different names: rename one")
    for path in chosen:
        _check_pair(script, path)
        if not re.fullmatch(r"[\w.-]+\.yaml", path.name):
            raise UsageError(f"--config {path}: rename it: use letters, digits, - and _, and the ending .yaml")
    if not str(folder).isprintable():
        raise UsageError(f"{str(folder)!r} cannot be typed after cd: use another name")
    check_new_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".new_") as scratch:
            project = Path(scratch) / folder.resolve().name
            _write(project, script, chosen, own_loop, vendor)
            made = sorted(str(path.relative_to(project)) for path in project.rglob("*") if path.is_file())
            if folder.exists():  # empty; perhaps the user's current folder
                for path in project.iterdir():
                    path.rename(folder / path.name)
            else:
                project.rename(folder)  # as a whole, or not at all
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}): use another folder") from None
    commands = [f"cd {shlex.quote(str(folder))}", "make train", "make test"]
    if as_json:
        print_json({"folder": str(folder), "files": made, "commands": commands})
    else:
        own = [name for name in made if not name.startswith("accelerate_recipes/")]
        lines = [f"{folder}/", *(f"  {name}" for name in own), *["  accelerate_recipes/"] * vendor]
        print("\n".join([*lines, "", "Type:", *(f"  {command}" for command in commands)]))


def _check_pair(script: Path, config: Path) -> None:
    if script.parent == SINGLE_FILES and config.stem not in SINGLE_FILE_CONFIGS:
        raise UsageError(f"--config {config.stem} is not for single files: use one of {', '.join(SINGLE_FILE_CONFIGS)}")
    if flags_for(script.stem, config.stem) is None:
        fitting = [path.stem for path in bundle.configs() if flags_for(script.stem, path.stem) is not None]
        raise UsageError(f"--config {config.stem}: {script.name} does not support it; use one of {', '.join(fitting)}")


def _write(project: Path, script: Path, configs: list[Path], own_loop: bool, vendor: bool) -> None:
    """Writes all files of a project into a new folder."""
    is_alone = script.parent == SINGLE_FILES
    for name, content in _own_files(script, configs, own_loop).items():
        _new_file(project / name).write_text(content, encoding="utf-8")
    if vendor:
        for name, source in distribution.files().items():
            shutil.copy(source, _new_file(project / name))
    wheel = None if is_alone or vendor else distribution.write_wheel(_new_file(project / "wheels" / "x").parent)
    deepspeed = any(mapping_in(config).get("distributed_type") == "DEEPSPEED" for config in configs)
    flags = {config.stem: "" if is_alone else " ".join(flags_for(script.stem, config.stem) or ()) for config in configs}
    values = {
        "config": configs[0].stem,
        "dependencies": json.dumps(_dependencies(script, is_alone, vendor, deepspeed), indent=4),
        "flags": flags[configs[0].stem],
        "flags_of_configs": json.dumps({config: own for config, own in flags.items() if own}),
        "name": re.sub(r"[^a-z0-9]+", "-", project.name.lower()).strip("-") or "project",
        "origin": f"{script.relative_to(bundle.ROOT).as_posix()} of accelerate-recipes {bundle.VERSION}",
        "own_loop": own_loop,
        "vendor": vendor,
        "wheel": wheel.name if wheel else None,
    }
    kind = "_single_file" * is_alone
    products = {"pyproject.toml": "pyproject.toml", "Makefile": "Makefile", f"README{kind}.md": "README.md"}
    for template, product in (products | {f"test_train{kind}.py": "tests/test_train.py"}).items():
        _new_file(project / product).write_text(render(f"{template}.template", **values), encoding="utf-8")


def _own_files(script: Path, configs: list[Path], own_loop: bool) -> dict[str, str]:
    """{name: text} of the recipe, the configs and the loop, with the names that files have in a project."""
    text = script.read_text(encoding="utf-8").replace(script.relative_to(bundle.ROOT).as_posix(), "train.py")
    text = text.replace("accelerate_configs/ddp.yaml", f"accelerate_configs/{configs[0].name}")
    found = {f"accelerate_configs/{config.name}": config.read_text(encoding="utf-8") for config in configs}
    found = {name: re.sub(r"recipes/\w+\.py", "train.py", config) for name, config in found.items()}
    if own_loop:
        loop = (bundle.COMMON / "loop.py").read_text(encoding="utf-8")
        found["loop.py"] = re.sub("^from [.]", "from accelerate_recipes.common.", loop, flags=re.MULTILINE)
        imports, ours = r"^(from accelerate_recipes import .*)fit, (.*)$", r"\1\2\nfrom loop import fit"
        text = re.sub(imports, ours, text, flags=re.MULTILINE)
    return found | {"train.py": text}


def _new_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _dependencies(script: Path, is_alone: bool, vendor: bool, deepspeed: bool) -> list[str]:
    """The requirements of a project: this package, or its requirements, or the imports of a single file."""
    if not is_alone and not vendor:
        return [f"accelerate-recipes{'[deepspeed]' * deepspeed} ~= {'.'.join(bundle.VERSION.split('.')[:2])}"]
    required = distribution.requirements()
    if is_alone:
        imported = re.findall(r"^ *(?:import|from) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)
        names = {DISTRIBUTIONS.get(name, name) for name in imported}
        required = [line for line in required if re.split(r"[^\w-]", line)[0] in names]
    return required + distribution.requirements("deepspeed") * deepspeed
