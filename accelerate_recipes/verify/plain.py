"""Verifies a script on plain Accelerate: one process against DDP, watched from outside."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate_recipes.catalog import count_gpus, find_config
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.weights.on_disk import WeightFiles
from accelerate_recipes.verify.causes import cause_of_other_repetition, likely_cause_of_script
from accelerate_recipes.verify.certificate import Certificate, Row
from accelerate_recipes.verify.differences import Trace, compare, noise_floor
from accelerate_recipes.verify.runs import LAUNCH

WATCHED = Path(__file__).with_name("watched.py")
# The last line of a traceback, perhaps behind torchrun's prefix: not a line of code that names an error.
_ERROR = re.compile(
    r"(?m)^(?!.*(?:ChildFailed|CalledProcess))(?:\[\w+\]:\s)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*|\S+: error: .*)"
)


class FailedError(UsageError):
    """A script that fails after the compared steps."""


def verify_watched(script: Path, flags: list[str], steps: int, folder: Path, as_json: bool, splits: bool) -> int:
    """Compares one process with DDP, writes the certificate, and returns the exit code. If they differ, one process
    runs twice more, once with weights that start one rounding error away: a difference up to ten times as large is
    noise. `script`: a path or a module. Raises UsageError if it is missing, takes no steps or fails."""
    certificate = Certificate(folder, _file_of(script), flags, steps, as_json)
    certificate.begin(["single, 2 accumulated", "ddp (MULTI_CPU)"])
    with TemporaryDirectory(prefix="verify_") as scratch:

        def watched(name: str, config: str, *how: str) -> Trace:
            return watch(script, flags, steps, config, Path(scratch) / name, " ".join((*how, "split" * splits)))

        single = watched("single", "single")
        certificate.add(Row(f"single ({single.facts['distributed_type']})", 1, note="the reference"))
        if single.facts["by_trainer"]:  # it keeps the global batch, however it is divided
            accumulated = compare(watched("in_2", "single", "accumulated"), single)
            certificate.add(Row("single, 2 accumulated", 1, difference=accumulated))
        cause = None
        try:
            ddp = watched("ddp", "ddp")
        except FailedError as error:
            certificate.add(Row("ddp", None, failure=str(error)))
        else:
            difference = compare(ddp, single)
            if not difference.is_same:
                again = watched("again", "single")
                repeated = compare(again, single)
                certificate.add(Row("single, again", 1, difference=repeated))
                difference = compare(ddp, single, noise_floor(watched("moved", "single", "moved"), single))
                if not repeated.is_same:
                    cause = cause_of_other_repetition(again, single)
                elif not difference.is_same:
                    cause = likely_cause_of_script(ddp, single, difference)
            name = f"ddp ({ddp.facts['distributed_type']})"
            certificate.add(Row(name, ddp.facts["processes"], difference=difference))
    certificate.steps = max(step for step, _ in single.values)
    return certificate.write(cause)


def _file_of(script: Path) -> Path:
    """The file of a script, or of a module by name. Raises UsageError if there is neither."""
    if script.is_file():
        return script
    sys.path.insert(0, str(Path.cwd()))
    with suppress(ImportError, ValueError):
        if (found := importlib.util.find_spec(str(script))) is not None and found.origin:
            return Path(found.origin)
    raise UsageError(f"{script}: no such file or module; use the path of a script, or package.module")


def watch(script: Path, flags: list[str], steps: int, config: str, folder: Path, how: str = "as it is") -> Trace:
    """Runs a script under a config; returns what its processes did. Raises UsageError if it fails or takes no step."""
    folder.mkdir()
    command = [*LAUNCH, "--config_file", str(find_config(config)), str(WATCHED), str(folder), str(steps), how]
    # Without a GPU, Accelerate would run each process of the config alone.
    environment = os.environ | ({} if count_gpus() else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""})
    command += [str(script), *flags]
    run = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    processes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("process_*.json"))]
    took_steps = bool(processes) and all(process["steps"] for process in processes)
    if run.returncode or not took_steps:
        found = _ERROR.search(run.stderr) or _ERROR.search(run.stdout)
        reason = "it takes no step with an optimizer that Accelerate prepared"
        reason = found[1] if found else f"it ends with exit code {run.returncode}" if took_steps else reason
        if took_steps:
            raise FailedError(f"{script} fails under {config}.yaml, after the compared steps: {reason}")
        raise UsageError(f"{script} cannot be watched under {config}.yaml: {reason}")
    return _trace(processes, folder)


def _trace(processes: list[dict[str, Any]], folder: Path) -> Trace:
    """The trace of a run from the records of its processes: the loss is the mean over micro-batches and processes."""
    values: dict[tuple[int, str], Any] = {}
    parts_at, has_unequal_parts, has_widths = 0, False, False
    for number, step in enumerate(zip(*(process["steps"] for process in processes)), 1):
        parts = [part for record in step for part in record["micro_batches"]]
        losses, ids = [part["loss"] for part in parts], [part.get("ids") or [] for part in parts]
        values[number, "train/loss"] = sum(losses) / len(losses) if losses else math.nan
        values[number, "learning_rate"] = step[0]["learning_rate"]
        if step[0]["grad_norm"] is not None:  # the script clips
            values[number, "grad_norm"] = step[0]["grad_norm"]
        if all(ids):
            values[number, "samples"] = sorted(sum(ids, []))
        if len({record["weights"] for record in step}) > 1:
            parts_at = parts_at or number
        has_unequal_parts |= len({part.get("tokens") for part in parts}) > 1
        has_widths |= len({part.get("width") for part in parts}) > 1
    first = processes[0]
    if first["gathered"]:  # in all evaluations
        values[0, "gathered"] = first["gathered"]
    facts = {"processes": len(processes), "repeats_an_epoch": _repeats_an_epoch(first["steps"])}
    facts |= {"parts_at": parts_at, "has_unequal_parts": has_unequal_parts, "has_widths": has_widths}
    epochs = [[part.get("epoch") for part in step["micro_batches"]][:1] for step in first["steps"]]
    ends = [number for number, (before, after) in enumerate(pairwise(epochs), 1) if before != after]
    return Trace(values, WeightFiles(sorted(folder.glob("*.safetensors"))), first | facts | {"epochs": ends})


def _repeats_an_epoch(steps: list[dict[str, Any]]) -> bool:
    """Whether a process takes the same samples in the same order in each of its first two epochs."""
    orders: dict[int, list[int]] = {}
    for part in (part for step in steps for part in step["micro_batches"]):
        orders.setdefault(part.get("epoch", 0), []).extend(part.get("ids") or [])
    first, second = [*orders.values(), [], []][:2]
    return len(second) > 1 and first[: len(second)] == second
