"""Trackers of experiments, such as TensorBoard: Accelerate starts those that `--report_to` names."""

import dataclasses
import sys
from pathlib import Path

from accelerate import Accelerator

from ..errors import UsageError, first_line
from ..plan import Plan


def start_trackers(accelerator: Accelerator, plan: Plan, versions: dict[str, str]) -> None:
    """Starts the trackers, with the config of the run. Raises UsageError if one does not start."""
    config = dataclasses.asdict(plan.config) | versions
    config |= {"parallelism": str(plan.layout), "precision": plan.layout.precision}
    for name, value in config.items():  # trackers accept neither None nor Path
        config[name] = "" if value is None else str(value) if isinstance(value, Path) else value
    try:
        accelerator.init_trackers(Path(sys.argv[0]).stem, config, {"wandb": {"dir": str(plan.config.output_dir)}})
    except Exception as error:  # each tracker has its own error classes
        reason = first_line(error)
        advice = " (without a network: WANDB_MODE=offline)" if "wandb" in plan.config.report_to else ""
        raise UsageError(f"--report_to {plan.config.report_to} did not start: {reason}{advice}") from None


def finish_trackers(accelerator: Accelerator, summary: dict[str, float], step: float | None) -> None:
    """Logs the summary of the run at its last recorded step, and closes the trackers."""
    accelerator.log({f"summary/{name}": value for name, value in summary.items()}, step=step)
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:  # it must not hide how the run ended
            print(f"{tracker.name} did not finish: {error}", file=sys.stderr, flush=True)
