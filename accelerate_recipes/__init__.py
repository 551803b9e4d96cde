"""The names that a recipe imports, and the command-line tool: find, copy, verify and check recipes.

Each name below loads on first use, so that the tool starts without importing torch.
"""

import signal
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .common.checkpoint.exported import load_exported as load_exported
    from .common.config import RunConfig as RunConfig
    from .common.config import flag as flag
    from .common.environment import print_once as print_once
    from .common.errors import UsageError as UsageError
    from .common.launch.start import start as start
    from .common.loop import fit as fit
    from .common.parameter_groups import parameter_groups as parameter_groups
    from .common.run import run as run
    from .common.schedule import Schedule as Schedule

_HOMES = {
    "RunConfig": "config",
    "Schedule": "schedule",
    "UsageError": "errors",
    "fit": "loop",
    "flag": "config",
    "load_exported": "checkpoint.exported",
    "parameter_groups": "parameter_groups",
    "print_once": "environment",
    "run": "run",
    "start": "launch.start",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_main = threading.current_thread() is threading.main_thread()
    # The imports take seconds, and packages swallow KeyboardInterrupt: while they run, Ctrl-C ends the process at once.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    found = getattr(import_module(f".common.{_HOMES[name]}", __name__), name)
    if before is not None:
        signal.signal(signal.SIGINT, before)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
