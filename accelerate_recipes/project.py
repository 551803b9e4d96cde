"""Makes a project from a recipe: the recipe, the loop, the tasks it imports and configs as files that belong to the
user."""

import ast
import json
import re
import shutil
from importlib.metadata import requires
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate_recipes import bundle
from accelerate_recipes.catalog import FLAGS, find_config, find_recipe
from accelerate_recipes.console import print_json
from accelerate_recipes.errors import UsageError

_TEMPLATES = Path(__file__).parent / "templates"
# What the loop itself needs. A recipe and its tasks add what they import.
_LOOP = {"accelerate", "filelock", "numpy", "psutil", "pyyaml", "safetensors", "torch", "tqdm", "xxhash"}
_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "tokenizers": "transformers"}  # where names differ
PLAIN = bundle.RECIPES / "plain" / "plain_accelerate.py"
PLAIN_CONFIGS = ("single", "ddp", "fsdp2", "deepspeed_zero2")  # its docstring says: verified under these


def make(recipe: str, folder: Path | None, configs: list[str], plain: bool, as_json: bool) -> None:
    """Makes the project, and prints its files and the two commands.

    Args:
        recipe: name of a recipe; with `plain`, the folder.
        folder: the folder to make.
        configs: names of configs; the first one is that of `make train`.
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
    chosen = [find_config(name) for name in dict.fromkeys(configs)]
    for config in chosen:
        _check_pair(script, config)
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}_") as scratch:
        _write(Path(scratch) / target.name, script, chosen)
        (Path(scratch) / target.name).rename(target)  # as a whole, or not at all
    commands = [f"cd {target}", "make train", "make test"]
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


def _check_target(target: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UsageError(f"{target} is not empty: type the name of a new folder")


def _write(project: Path, script: Path, configs: list[Path]) -> None:
    """Writes all files of a project into a new folder."""
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
        tasks = _tasks_of(script)
        packages = packages.union(*map(_imported, tasks))
        _copy_common(project / "common", tasks)
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


def _copy_common(target: Path, tasks: list[Path]) -> None:
    """Copies the loop, and of the tasks only these."""
    shutil.copytree(bundle.COMMON, target, ignore=shutil.ignore_patterns("__pycache__", "tasks"))
    for task in tasks and [bundle.COMMON / "tasks" / "__init__.py", *tasks]:
        copy = target / task.relative_to(bundle.COMMON)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(task, copy)
    init = target / "__init__.py"
    line = f"# From accelerate-recipes {bundle.VERSION}. This copy is yours: change what you like.\n"
    init.write_text(line + init.read_text(encoding="utf-8"), encoding="utf-8")


def _tasks_of(script: Path) -> list[Path]:
    """The modules of `common/tasks/` that a recipe imports, and those that they import."""
    folder = bundle.COMMON / "tasks"
    tasks: list[Path] = []
    wanted = {name.removeprefix("common.tasks.") for name in _modules(script) if name.startswith("common.tasks.")}
    while wanted:
        path = folder / f"{wanted.pop()}.py"
        if path.exists() and path not in tasks:
            tasks.append(path)
            wanted |= {name.removeprefix(".") for name in _modules(path) if re.fullmatch(r"\.\w+", name)}
    return sorted(tasks)


def _imported(path: Path) -> set[str]:
    """The distributions that a file imports anywhere, or looks for by `find_spec`."""
    text = path.read_text(encoding="utf-8")
    names = {name.partition(".")[0] for name in [*_modules(path), *re.findall(r"find_spec\(\"(\w+)\"\)", text)]}
    return {_DISTRIBUTIONS.get(name, name) for name in names}


def _modules(path: Path) -> list[str]:
    """The modules that a file imports anywhere: `a.b`, and `.b` for one of the same folder."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
