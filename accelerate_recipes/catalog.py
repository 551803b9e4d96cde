"""What there is: the recipes and configs, as their headers describe them, and how a config runs on this machine."""

import ast
import os
import re
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes import bundle
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import print_entry, print_json
from accelerate_recipes.paths import is_path, text_of

# Drivers of NVIDIA's (also under WSL), AMD's, Intel's and Ascend's accelerators.
DRIVERS = [Path("/dev") / name for name in ("nvidiactl", "dxg", "kfd", "dri", "davinci_manager")]

GROUPS = {  # what people want to do: recipes
    "Classify, tag or score": ("mnist", "image_classification", "text_classification", "token_classification"),
    "Train or adapt a language model": ("transformer", "masked_lm", "finetune", "preferences", "vision_language"),
    "Search by meaning, find answers": ("embeddings", "question_answering"),
    "Translate or summarize": ("translation",),
    "Generate images": ("diffusion",),
    "Fit numbers": ("linear_regression",),
}


@dataclass(frozen=True)
class RecipeHeader:
    """A recipe, from its docstring.

    Attributes:
        what: its first sentence.
        data, expect, time: its lines "Data:", "Expect:" and "Time:".
        command: its first command.
    """

    name: str
    what: str
    data: str
    expect: str
    time: str
    command: str


@dataclass(frozen=True)
class ConfigHeader:
    """A config file, from its header.

    Attributes:
        what: all up to "Needs:".
        here: how it runs on this machine.
        needs, pick_it: the paragraphs "Needs:" and "Pick it".
        command: the last line.
    """

    name: str
    what: str
    here: str
    needs: str
    pick_it: str
    command: str


def show(as_json: bool) -> None:
    """Prints the recipes and configs."""
    recipes = [read_recipe(path) for path in bundle.recipes()]
    num_gpus = count_gpus()
    configs = [read_config(path, num_gpus) for path in bundle.configs()]
    if as_json:
        print_json(
            {"recipes": [asdict(recipe) for recipe in recipes], "configs": [asdict(config) for config in configs]}
        )
        return
    for title, names in GROUPS.items():
        print(f"{title}\n")
        for recipe in recipes:
            if recipe.name in names:
                print_entry(asdict(recipe))
    print("Where it runs\n")
    for config in configs:
        print_entry(asdict(config))
    print("Make a project of your own from a recipe: accelerate-recipes new mnist my_project --config ddp")


def read_recipe(path: Path) -> RecipeHeader:
    """Reads a recipe's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    what, _, rest = text.partition("\n\n")
    command = re.search(r"^ +(accelerate launch .*)$", rest, re.MULTILINE)
    data, expect, time = (_paragraph(rest, label) for label in ("Data:", "Expect:", "Time:"))
    return RecipeHeader(path.stem, _one_line(what), data, expect, time, command[1] if command else "")


def read_config(path: Path, num_gpus: int) -> ConfigHeader:
    """Reads a config's header, and how the config runs on a machine with so many GPUs."""
    text = bundle.header(path)
    what = _one_line(re.split(r"\n\n|^(?:Needs:|Pick it) ", text, maxsplit=1, flags=re.MULTILINE)[0])
    here = runs_here(yaml.safe_load(path.read_text(encoding="utf-8")), num_gpus)
    return ConfigHeader(
        path.stem, what, here, _paragraph(text, "Needs:"), _paragraph(text, "Pick it"), text.splitlines()[-1].strip()
    )


def runs_here(config: dict[str, Any], num_gpus: int) -> str:
    """Whether a config runs for real or as a rehearsal on a machine with so many GPUs, or what it needs."""
    num_processes, num_machines = config["num_processes"], config.get("num_machines", 1)
    if config.get("distributed_type") == "DEEPSPEED" and find_spec("deepspeed") is None:
        return "needs pip install deepspeed"
    if num_machines > 1:
        return f"needs {num_machines} machines"
    if num_gpus >= num_processes:
        return "for real"
    if num_gpus:
        return f"needs {num_processes} GPUs, or CUDA_VISIBLE_DEVICES= to rehearse on the CPU"
    if num_processes == 1:
        return "for real, on the CPU"
    return "rehearsal on the CPU" + (", in float32" if config.get("mixed_precision") == "fp16" else "")


def may_have_gpus() -> bool:
    """Whether there is an accelerator's driver. Without one there is nothing to ask torch for, whose import takes
    seconds."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(driver.exists() for driver in DRIVERS)


def count_gpus() -> int:
    """The number of accelerators that torch can use on this machine."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def mapping_in(path: Path) -> dict[str, Any]:
    """The content of a config file. Raises UsageError for a file that is none."""
    text = text_of(path, "", "use the path of a config file")
    try:
        content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise UsageError(f"{path}{line} is not YAML: compare it with the files in accelerate_configs/") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} has no keys: compare it with the files in accelerate_configs/")
    return content


def find_recipe(name: str) -> Path:
    """The path of a recipe by name or path. Raises UsageError for an unknown one."""
    known = {path.stem: path for path in bundle.recipes()}
    if (found := known.get(Path(name).stem)) is None:
        raise UsageError(f"{name}: no such recipe; use one of {', '.join(known)}")
    return found


def find_config(name: str) -> Path:
    """The path of a config by name or path. Raises UsageError for an unknown one."""
    if is_path(name):
        mapping_in(Path(name))
        return Path(name)
    known = {path.stem: path for path in bundle.configs()}
    if (found := known.get(Path(name).stem)) is None:
        raise UsageError(f"{name}: no such config; use one of {', '.join(known)}, or the path of a file")
    return found


def _paragraph(text: str, label: str) -> str:
    """The text after a label at the start of a line, to the next label, empty line or the end."""
    found = re.search(rf"^{label}\s+(.*?)(?=\n\n|\n(?:\w+:|Pick it|Type|The command line)|\Z)", text, re.M | re.S)
    return _one_line(found[1]) if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
