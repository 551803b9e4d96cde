"""Makes a project from a recipe: the recipe, the loop, the tasks it imports and configs as files that belong to the
user."""

import ast
import json
import os
import re
import shlex
import shutil
from importlib.metadata import requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes import bundle
from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.catalog import FLAGS, SIZES, find_config, find_recipe
from accelerate_recipes.console import print_json
from accelerate_recipes.doctor.launched import set_variables
from accelerate_recipes.errors import UsageError
from accelerate_recipes.paths import check_new_folder

TABLE = bundle.COMMON / "parallel" / "kinds.py"
_TEMPLATES = Path(__file__).parent / "templates"
# What the loop itself needs. A recipe and its tasks add what they import.
_LOOP = {"accelerate", "filelock", "numpy", "psutil", "pyyaml", "safetensors", "torch", "tqdm", "xxhash"}
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "tokenizers": "transformers"}  # where names differ
PLAIN = bundle.RECIPES / "plain" / "plain_accelerate.py"
PLAIN_CONFIGS = ("single", "ddp", "fsdp2", "deepspeed_zero2")  # its docstring says: verified under these
TYPES = "TYPE_CHECKING"


def make(recipe: str, folder: Path | None, configs: list[str] | None, plain: bool, as_json: bool) -> None:
    """Makes the project, and prints its files and the two commands.

    Args:
        recipe: name of a recipe; with `plain`, the folder.
        folder: the folder to make.
        configs: names of configs; the first one is that of `make train`. The project has the kinds of parallelism that
            they need. None: ddp, and all kinds.
        plain: make a project of one script on Accelerate alone.
        as_json: print JSON.

    Raises:
        UsageError: an unknown recipe or config, a config that the recipe does not support, a folder with content.
    """
    if plain:
        if folder is not None:
            raise UsageError(f"--plain has one script: type accelerate-recipes new --plain {folder}")
        script, target = PLAIN, Path(recipe)
    elif folder is None:
        raise UsageError(f"no folder: type accelerate-recipes new {recipe} FOLDER")
    else:
        script, target = find_recipe(recipe), folder
    chosen = [find_config(name) for name in dict.fromkeys(configs or ["ddp"])]
    for config in chosen:
        _check_pair(script, config)
    if not str(target).isprintable():
        raise UsageError(f"{str(target)!r} cannot be typed after cd: type another name")
    check_new_folder(target)
    kinds = None if plain or configs is None else _kinds_of(script, chosen)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".new_") as scratch:
            _write(Path(scratch) / target.name, script, chosen, kinds)
            (Path(scratch) / target.name).rename(target)  # as a whole, or not at all
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror}): type another folder") from None
    commands = [f"cd {shlex.quote(str(target))}", "make train", "make test"]
    if as_json:
        files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
        print_json({"folder": str(target), "files": files, "commands": commands})
    else:
        print("\n".join([*_tree(target), "", "Type:", *(f"  {command}" for command in commands)]))


def _check_pair(script: Path, config: Path) -> None:
    if script == PLAIN and config.stem not in PLAIN_CONFIGS:
        raise UsageError(
            f"--config {config.stem}: plain_accelerate.py was not verified under it; type one of "
            f"{', '.join(PLAIN_CONFIGS)}"
        )
    if FLAGS.get((script.stem, config.stem), "") is None:
        fitting = [path.stem for path in bundle.configs() if FLAGS.get((script.stem, path.stem), "") is not None]
        raise UsageError(f"--config {config.stem}: {script.name} has no plan for it; type one of {', '.join(fitting)}")


def _kinds_of(script: Path, configs: list[Path]) -> set[str]:
    """The modules of the kinds of parallelism that a recipe has under these configs."""
    asked = [(str(config), SIZES.get(config.stem, [])) for config in configs]
    return {*at_fit(None, [], f"{__name__}:asked_kinds", {QUESTION: json.dumps(asked)})}


def asked_kinds() -> list[str]:
    """The modules of the kinds that configs ask for; the question is [(config, [flag, size] or nothing)]."""
    from common import RunConfig
    from common.parallel.kinds import kinds_of, layout_of

    found = {"ddp"}  # it takes what no other kind does
    for config, size in json.loads(os.environ[QUESTION]):
        set_variables(Path(config))
        sizes: dict[str, Any] = {size[0].removeprefix("--"): int(size[1])} if size else {}
        layout = layout_of(RunConfig(**sizes))
        found |= {type(kind).__module__.rpartition(".")[2] for kind in kinds_of(layout)}
    return sorted(found)


def _write(project: Path, script: Path, configs: list[Path], kinds: set[str] | None) -> None:
    """Writes all files of a project into a new folder, with these kinds of parallelism; None: all."""
    place = f"recipes/plain/{script.name}" if script == PLAIN else f"recipes/{script.name}"
    (project / "accelerate_configs").mkdir(parents=True)
    (project / "tests").mkdir()
    text = script.read_text(encoding="utf-8").replace(place, "train.py")
    text = text.replace("accelerate_configs/ddp.yaml", f"accelerate_configs/{configs[0].name}")
    (project / "train.py").write_text(text, encoding="utf-8")
    for config in configs:
        text = re.sub(r"recipes/\w+\.py", "train.py", config.read_text(encoding="utf-8"))
        (project / "accelerate_configs" / config.name).write_text(text, encoding="utf-8")
    packages = _LOOP | _imported(script)
    if script != PLAIN:
        changed = {TABLE: _table_of_kinds(kinds)}
        files = _used(script, changed)
        packages = packages.union(*map(_imported, [file for file in files if file.parent.name == "tasks"]))
        _copy_common(project / "common", files, changed)
    name = re.sub(r"[^a-z0-9]+", "-", project.name.lower()).strip("-") or "project"
    required = _requirements() + _requirements("data")
    flags = {config.stem: FLAGS.get((script.stem, config.stem)) or "" for config in configs}
    values = {
        "config": configs[0].stem,
        "dependencies": json.dumps([line for line in required if _name(line) in packages], indent=4),
        "deepspeed": json.dumps(_requirements("deepspeed")),
        "lora": f"lora = {json.dumps(_requirements('lora'))}\n" * ("peft" in packages),
        "extras": ",".join(["deepspeed"] * any("deepspeed" in name for name in flags) + ["test"]),
        "flags": flags[configs[0].stem],
        "flags_of_configs": json.dumps(flags),
        "name": name,
        "origin": f"{place} of accelerate-recipes {bundle.VERSION}",
    }
    test = f"test_train{'_plain' * (script == PLAIN)}.py"
    readme = "README_plain.md" if script == PLAIN else "README.md"
    products = {readme: "README.md", "Makefile": "Makefile", "pyproject.toml": "pyproject.toml"}
    products |= {"gitignore": ".gitignore", test: "tests/test_train.py"}
    for template, product in products.items():
        text = (_TEMPLATES / f"{template}.template").read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"<<{key}>>", value)
        (project / product).write_text(text, encoding="utf-8")


def _table_of_kinds(kinds: set[str] | None) -> str:
    """The text of `common/parallel/kinds.py`, with these kinds alone; None: as it is."""
    text = TABLE.read_text(encoding="utf-8")
    for module, name in re.findall(r"^from \.(\w+) import ([A-Z]\w+)$", text, re.MULTILINE):
        if kinds is not None and name.isupper() and module not in kinds:
            text = text.replace(f"from .{module} import {name}\n", "").replace(f"    {name},\n", "")
    return text


def _copy_common(target: Path, files: list[Path], changed: dict[Path, str]) -> None:
    """Copies these files of `common/`; some have another text."""
    for file in files:
        copy = target / file.relative_to(bundle.COMMON)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        if file in changed:
            copy.write_text(changed[file], encoding="utf-8")
    init = target / "__init__.py"
    line = f"# From accelerate-recipes {bundle.VERSION}. This copy is yours: change what you like.\n"
    init.write_text(line + init.read_text(encoding="utf-8"), encoding="utf-8")


def _used(script: Path, changed: dict[Path, str]) -> list[Path]:
    """The files of `common/` that a recipe imports, and those that these import. `changed`: the text of some."""
    found: set[Path] = set()
    waiting = {bundle.COMMON / "__init__.py", *_files_of(_modules(script.read_text(encoding="utf-8")), script)}
    while waiting:
        path = waiting.pop()
        found.add(path)
        text = changed.get(path) or path.read_text(encoding="utf-8")
        waiting |= _files_of(_modules(text), path) - found
    return sorted(found)


def _files_of(modules: list[str], importer: Path) -> set[Path]:
    """The files of `common/` that these imports of a file mean, with the packages that they are in."""
    files: set[Path] = set()
    for name in modules:
        dots = len(name) - len(name.lstrip("."))
        words = name.lstrip(".").split(".") if name.lstrip(".") else []
        if dots:
            folder = importer.parents[dots - 1]
        elif words[0] == "common":
            folder, words = bundle.COMMON, words[1:]
        else:
            continue
        if not folder.is_relative_to(bundle.COMMON):
            continue
        for number in range(len(words) + 1):
            place = folder.joinpath(*words[:number])
            files |= {file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()}
    return files


def _imported(path: Path) -> set[str]:
    """The distributions that a file imports anywhere, or looks for by `find_spec`."""
    text = path.read_text(encoding="utf-8")
    names = {name.partition(".")[0] for name in [*_modules(text), *re.findall(r"find_spec\(\"(\w+)\"\)", text)]}
    return {_DISTRIBUTIONS.get(name, name) for name in names}


def _modules(text: str) -> list[str]:
    """The modules that a file imports anywhere, except for its annotations: `a.b`, and `.b` for one of the same
    folder."""
    names: list[str] = []
    tree = ast.parse(text)
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == TYPES]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            separator = "" if module.endswith(".") else "."
            names += [module, *(f"{module}{separator}{alias.name}" for alias in node.names)]
    return names


def _requirements(extra: str = "") -> list[str]:
    """What accelerate-recipes requires for this extra, or without one."""
    split = [requirement.partition(";") for requirement in requires("accelerate-recipes") or []]
    return [name.strip() for name, _, marker in split if marker.partition("extra == ")[2].strip("'\" ") == extra]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def _tree(folder: Path, indent: str = "") -> list[str]:
    """The files of a project, as lines of a tree; of `common/` only the folder."""
    lines = [f"{indent}{folder.name if indent else folder}/"]
    if indent and folder.name == "common":
        return lines
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        lines += _tree(path, indent + "  ") if path.is_dir() else [f"{indent}  {path.name}"]
    return lines
