"""The interface for recipes: `start`, `fit`, `evaluate`, `run` and their config."""

import common.stopping.signals  # noqa: F401  # first: from here on, the end of the launcher ends this process
from common.checkpoint.export import load_exported
from common.config import RunConfig, flag
from common.environment import print_once
from common.errors import UsageError
from common.evaluation import evaluate
from common.launch.start import start
from common.loop import fit
from common.models.parameter_groups import parameter_groups
from common.schedule import Schedule
from common.stopping.exit import run

__all__ = [
    "RunConfig",
    "Schedule",
    "UsageError",
    "evaluate",
    "fit",
    "flag",
    "load_exported",
    "parameter_groups",
    "print_once",
    "run",
    "start",
]
