"""The interface for recipes: `start`, `fit`, `run` and their config."""

from .stopping import signals as _signals  # noqa: F401  # first: from here on, the end of the launcher ends this process

# isort: split
from .checkpoint.export import load_exported
from .config import RunConfig, flag
from .environment import print_once
from .errors import UsageError
from .launch.start import start
from .loop import fit
from .parameter_groups import parameter_groups
from .run import run
from .schedule import Schedule

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
