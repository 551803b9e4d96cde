"""The shared loop of the recipes: `start`, `fit`, `evaluate`, `run` and the config they take."""

from common.checkpoint import load_exported
from common.config import RunConfig, flag
from common.errors import UsageError
from common.loop import evaluate, fit
from common.optimizer import parameter_groups
from common.run import run
from common.schedule import Schedule
from common.start import start

__all__ = [
    "RunConfig",
    "Schedule",
    "UsageError",
    "evaluate",
    "fit",
    "flag",
    "load_exported",
    "parameter_groups",
    "run",
    "start",
]
