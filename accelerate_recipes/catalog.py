"""Lists the recipes and configs, as their headers describe them, and how each config runs on this machine."""

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes import bundle
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, print_entry, print_json
from accelerate_recipes.paths import is_path, text_of

MOST_PROCESSES = 10**6  # that a config may ask for
# Drivers of NVIDIA's (also under WSL), AMD's, Intel's and Ascend's accelerators.
DRIVERS = [Path("/dev") / name for name in ("nvidiactl", "dxg", "kfd", "dri", "davinci_manager")]

GROUPS = {  # task: its recipes, as in the README
    "Get started": ("mnist", "linear_regression"),
    "Train a language model": ("transformer", "masked_lm", "finetune", "distillation", "preferences"),
    "Classify, tag or search texts": (
        *("text_classification", "token_classification", "question_answering", "embeddings"),
    ),
    "Translate or summarize": ("translation",),
    "Work with images": ("image_classification", "detection", "segmentation", "vision_language", "diffusion"),
    "Work with audio": ("speech",),
}


def show(as_json: AsJson = False) -> None:
    """List the recipes and the configs, and how each config runs on this machine.

    Example: accelerate-recipes list
    """
    recipes, num_gpus = {path.stem: read_recipe(path) for path in bundle.recipes()}, count_gpus()
    configs = [_read_config(path, num_gpus) for path in bundle.configs()]
    if as_json:
        print_json({"recipes": [*recipes.values()], "configs": configs})
        return
    for title, names in GROUPS.items():
        print(f"{title}\n")
        for name in names:
            print_entry(recipes[name])
    print("Where it runs\n")
    for config in configs:
        print_entry(config)
    print("Make your own project from a recipe: accelerate-recipes new mnist my_project --config ddp")


def read_recipe(path: Path) -> dict[str, str]:
    """A recipe's docstring: name, "what" it does, its lines "Data:", "Expect:" and "Time:", and its first command."""
    what, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")
    command = re.search(r"^ +(accelerate launch .*)$", rest, re.MULTILINE)
    lines = {label.lower(): _paragraph(rest, f"{label}:") for label in ("Data", "Expect", "Time")}
    return {"name": path.stem, "what": _one_line(what), **lines, "command": command[1] if command else ""}


def _read_config(path: Path, num_gpus: int) -> dict[str, str]:
    """A config file, from its header, with how it runs on a machine with this number of GPUs."""
    text = bundle.header(path)
    return {
        "name": path.stem,
        "what": _one_line(re.split(r"\n\n|^(?:Needs:|Pick it) ", text, maxsplit=1, flags=re.MULTILINE)[0]),
        "here": runs_here(mapping_in(path), num_gpus),
        "needs": _paragraph(text, "Needs:"),
        "pick_it": _paragraph(text, "Pick it"),
        "command": text.splitlines()[-1].strip(),
    }


def runs_here(config: dict[str, Any], num_gpus: int) -> str:
    """Whether a config runs for real or as a rehearsal on a machine with this number of GPUs, or what it needs."""
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
    """Whether this machine has an accelerator's driver. Without one, the tool skips the slow import of torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(driver.exists() for driver in DRIVERS)


def count_gpus() -> int:
    """The number of accelerators that torch can use on this machine."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def mapping_in(path: Path) -> dict[str, Any]:
    """The content of a config file. Raises UsageError for any other file."""
    try:
        content = yaml.safe_load(text_of(path, "", "use the path of a config file"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise UsageError(f"{path}{line} is not YAML: compare it with the files in accelerate_configs/") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} has no keys: compare it with the files in accelerate_configs/")
    return content


def find_recipe(name: str) -> Path:
    """The path of a recipe by name or path. Raises UsageError for an unknown one."""
    return find_of(bundle.recipes(), name, "recipe")


def find_config(name: str) -> Path:
    """The path of a config by name or path. Raises UsageError for an unknown one."""
    if is_path(name):
        mapping_in(Path(name))
        return Path(name)
    return find_of(bundle.configs(), name, "config", ", or the path of a file")


def find_of(paths: list[Path], name: str, kind: str, more: str = "") -> Path:
    """The path with the stem of a name. Raises UsageError if there is none; `more`: another thing to type."""
    known = {path.stem: path for path in paths}
    if (found := known.get(Path(name).stem)) is None:
        raise UsageError(f"{name}: no such {kind}; use one of {', '.join(known)}{more}")
    return found


def _paragraph(text: str, label: str) -> str:
    """The text after a label at the start of a line, up to the next label, the next empty line or the end."""
    found = re.search(rf"^{label}\s+(.*?)(?=\n\n|\n(?:\w+:|Pick it|Type|The command line)|\Z)", text, re.M | re.S)
    return _one_line(found[1]) if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
