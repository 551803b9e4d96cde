"""The shared loop of the recipes: `start`, `fit`, `evaluate`, `run` and the config they take."""

from common.config import RunConfig, flag
from common.errors import UsageError
from common.loop import evaluate, fit
from common.start import run, start

__all__ = ["RunConfig", "UsageError", "evaluate", "fit", "flag", "run", "start"]
