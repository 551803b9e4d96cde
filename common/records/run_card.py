"""The run card, run.json: how and on what the run started, and how it ended."""

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from ..environment import device_type, has_gpu
from ..errors import StoppedError
from ..failure import Failure
from ..files import read_file, replace_file

MOST_OF_DIFF = 200_000  # characters
# Dense bf16 and fp16 floating-point operations per second, from NVIDIA's data sheets. For H100,
# H200, L4 and L40S they list twice as much, with sparsity. The more specific name comes first.
PEAK_FLOPS = {
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}


def read_card(output_dir: Path) -> dict[str, Any]:
    """The run card; an empty dict if the file is missing or is not a run card."""
    with suppress(OSError, ValueError, RecursionError):
        card = json.loads(read_file(output_dir / "run.json"))
        return card if isinstance(card, dict) else {}
    return {}


def attempts(output_dir: Path, resumes: bool) -> tuple[int, list[dict[str, Any]]]:
    """(number of this attempt, where the earlier attempts began and how they ended), from the run card."""
    before = read_card(output_dir)
    number, earlier = before.get("attempt"), before.get("earlier_attempts")
    if not resumes or not isinstance(number, int):
        return 1, []
    ended = {name: before.get(name) for name in ("first_step", "status", "exit_code", "error")}
    return number + 1, [*(earlier if isinstance(earlier, list) else []), ended]


def launch_command() -> str:
    """The command that started this process, with its launcher, to type into a shell in the same folder."""
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent else []
        if len(words) > len(sys.argv) and words[-len(sys.argv) :] == sys.argv:  # otherwise the parent is a shell
            is_module = words[1].startswith("-")  # python -m torch.distributed.run; otherwise the path of a command
            return shlex.join(["python", *words[1:]] if is_module else [Path(words[1]).name, *words[2:]])
    return shlex.join(["python", *sys.argv])


def git_commit() -> str | None:
    """The commit of the recipe's checkout, with "-dirty" after it if files differ from it."""
    return _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def git_diff() -> str | None:
    """How the files of the recipe's checkout differ from its commit; None if they do not, or if git does not know."""
    diff = _git("diff", "HEAD") or None
    return diff if diff is None or len(diff) <= MOST_OF_DIFF else diff[:MOST_OF_DIFF] + "\n... and more"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), *arguments]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout.strip()
    return None


def hardware() -> dict[str, Any]:
    """Processor, cores and GPUs of this machine, for the run card."""
    module: Any = torch.get_device_module(device_type())
    gpus = [module.get_device_name(index) for index in range(torch.accelerator.device_count())] if has_gpu() else []
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpus": gpus}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak floating-point operations per second of a GPU in bf16 or fp16; None if unknown, as for a GPU's slice."""
    words = device_name.replace("-", " ").split()
    if precision not in ("bf16", "fp16") or "MIG" in words:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if set(name.split()) <= set(words)), None)


def ending(failure: Failure) -> dict[str, Any]:
    """The entries of the run card for a run that failed or was stopped."""
    status = "stopped" if failure.exit_code == StoppedError.exit_code else "failed"
    return {"status": status, "exit_code": failure.exit_code, "error": failure.line}


def replace_card(output_dir: Path, card: dict[str, Any]) -> None:
    """Writes the run card; prints a line if it cannot. Any process or thread may call it."""
    try:
        replace_file(output_dir / "run.json", (json.dumps(card, indent=2, default=str) + "\n").encode())
    except OSError as error:
        print(f"{output_dir}/run.json could not be written ({error.strerror})", file=sys.stderr, flush=True)
