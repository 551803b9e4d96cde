"""Where the recipes, configs, launchers and `common` are: inside the installed package, or in the checkout."""

import re
from pathlib import Path

from accelerate_recipes import __version__

_INSTALLED = Path(__file__).parent / "bundle"
ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
CONFIGS = ROOT / "accelerate_configs"
COMMON = Path(__file__).parent / "common"  # a link in a checkout
LAUNCHERS = ROOT / "launchers"
VERSION = __version__


def recipes() -> list[Path]:
    """The recipes, sorted by name."""
    return sorted(RECIPES.glob("*.py"))


def configs() -> list[Path]:
    """The config files, sorted by name."""
    return sorted(CONFIGS.glob("*.yaml"))


def header(config: Path) -> str:
    """The comment at the top of a config file, without the # signs."""
    lines = re.match(r"(#.*\n)*", config.read_text(encoding="utf-8"))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in (lines[0] if lines else "").splitlines())
