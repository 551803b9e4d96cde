"""Sums up the runs: last and best metrics, throughput, differences, and the command to repeat each."""

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from accelerate_recipes.common.state import lower_is_better
from accelerate_recipes.report.run_history import Curve, Run

# Flags that belong to one run and do not change what it computes.
NOT_COMPARED = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "evaluate_only")
_FACTS = {
    "parallelism": "parallelism",
    "precision": "precision",
    "num_processes": "processes",
    "threads_per_process": "threads per process",
    "micro_batch_size": "samples per forward pass and process",
    "gradient_accumulation_steps": "forward passes per optimizer step",
    "num_steps": "planned optimizer steps",
    "git_commit": "git commit",
}


def last(curve: Curve) -> tuple[int, float] | None:
    """(step, value) of the last finite value of a curve."""
    return next(((step, value) for step, value in reversed(curve) if value is not None), None)


def best(metric: str, curve: Curve) -> tuple[int, float] | None:
    """(step, value) of the best value of a loss or an evaluation metric, the first of equal ones: the lowest if the
    name contains loss, perplexity or error, the highest for other names."""
    finite = [(step, value) for step, value in curve if value is not None]
    if not finite or not metric.startswith(("train/", "eval/")):
        return None
    return (min if lower_is_better(metric) else max)(finite, key=lambda point: point[1])


def throughput(run: Run) -> float | None:
    """Samples per second of training, over all records."""
    if not run.clock or run.clock[-1][1] == 0 or run.batch_size is None:
        return None
    return (run.clock[-1][0] - run.clock[0][0]) * run.batch_size / run.clock[-1][1]


def settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(name, the value in each run) of every flag and fact in the run cards."""
    described = [_describe(run) for run in runs]
    names = dict.fromkeys(name for one in described for name in one)
    return [(name, [one.get(name, "–") for one in described]) for name in names]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    return [(name, values) for name, values in settings(runs) if len(set(values)) > 1]


def _describe(run: Run) -> dict[str, str]:
    found = {f"--{name}": _text(value) for name, value in run.config.items() if name not in NOT_COMPARED}
    found |= {label: _text(run.card[key]) for key, label in _FACTS.items() if key in run.card}
    for key, prefix in (("versions", "version of "), ("hardware", "hardware: ")):
        inner = run.card.get(key)
        found |= {prefix + name: _text(value) for name, value in inner.items()} if isinstance(inner, dict) else {}
    return found


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}", r"\1", text)  # the start of a git commit names it


def repeat(run: Run) -> str | None:
    """The command that repeats a run, in another folder; None if the run card does not say how it was started."""
    command = run.card.get("launch_command")
    if not isinstance(command, str) or "ipykernel_launcher" in command:  # a notebook
        return None
    return f"{command} --output_dir {shlex.quote(f'{run.folder}_again')}"


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The summary of the runs, for JSON."""
    by_run = {setting: dict(zip([run.name for run in runs], values)) for setting, values in differences(runs)}
    return {"runs": [_summary(run) for run in runs], "differences": by_run}


def _summary(run: Run) -> dict[str, Any]:
    metrics = {}
    for metric in run.metrics:
        curve = run.curve(metric)
        points = {"last": last(curve), "best": best(metric, curve)}
        metrics[metric] = {name: {"step": point[0], "value": point[1]} for name, point in points.items() if point}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status,
        "last_step": run.last_step,
        "planned_steps": run.planned_steps,
        "attempt": run.attempt,
        "events": [vars(event) for event in run.events],
        "samples_per_second": throughput(run),
        "metrics": metrics,
        "damaged_lines": run.num_damaged,
        "repeat": repeat(run),
    }
