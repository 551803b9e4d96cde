"""What a recipe imports, and the command-line tool: find, copy, prove, check and look at recipes.

The names below are loaded when they are first asked for: the tool starts without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .common.checkpoint.export import load_exported
    from .common.config import RunConfig, flag
    from .common.environment import print_once
    from .common.errors import UsageError
    from .common.launch.start import start
    from .common.loop import fit
    from .common.parameter_groups import parameter_groups
    from .common.run import run
    from .common.schedule import Schedule

__all__ = [
    "RunConfig",
    "Schedule",
    "UsageError",
    "fit",
    "flag",
    "load_exported",
    "parameter_groups",
    "print_once",
    "run",
    "start",
]
_HOMES = {
    "RunConfig": "config",
    "Schedule": "schedule",
    "UsageError": "errors",
    "fit": "loop",
    "flag": "config",
    "load_exported": "checkpoint.export",
    "parameter_groups": "parameter_groups",
    "print_once": "environment",
    "run": "run",
    "start": "launch.start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".common.{_HOMES[name]}", __name__), name)
    except KeyboardInterrupt:  # the imports take seconds
        raise SystemExit(130) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
