"""Starts a script with `accelerate launch`, kills and resumes it, and reads the files that a run leaves."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.catalog import find_config, mapping_in
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.records.run_card import read_card
from accelerate_recipes.doctor.config_file import is_count
from accelerate_recipes.matrix import CONFIGS
from accelerate_recipes.verify.differences import Trace

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]


def recording(steps: int) -> list[str]:
    """The flags of a run for a comparison: a record of each of its `steps`, and two evaluations."""
    return ["--max_steps", str(steps), "--log_every", "1", "--eval_every", str(max(1, steps // 2))]


def chosen_configs(names: list[str] | None) -> list[Path]:
    """The configs of these names or paths; None: all. Raises UsageError for an unknown one."""
    paths = [find_config(name) for name in names or CONFIGS]
    for path in paths:
        if not is_count(mapping_in(path).get("num_processes")):
            raise UsageError(f"{path} has no num_processes above 0, which verify needs: add it to the file")
    return paths


@dataclass(frozen=True)
class Finished:
    folder: Path  # its output folder
    refusal: str | None = None  # the line with which the recipe refused to run; None if it did not refuse
    failure: str | None = None  # the last lines of its output if it failed in another way; None if it is done
    output: str = ""  # what it printed

    @property
    def is_done(self) -> bool:
        """Whether the run trained to its end."""
        return self.refusal is None and self.failure is None

    @property
    def cause(self) -> str | None:
        """The likely cause that the recipe named with its refusal."""
        return self.output.partition("likely cause: ")[2].partition("\n")[0] or None

    @property
    def last_step(self) -> int:
        """The step of the last training record; 0 if there is none."""
        with suppress(OSError, ValueError, KeyError):
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return max((json.loads(line)["step"] for line in lines), default=0)
        return 0

    @cached_property
    def card(self) -> dict[str, Any]:
        """The run card; empty if the run did not write one."""
        return read_card(self.folder)

    @cached_property
    def trace(self) -> Trace:
        """Its records and weights; only for a run that is done."""
        return Trace.of_run(self.folder)


@dataclass(frozen=True)
class Launch:
    """How to start one run: the config, the script and the flags."""

    script: Path
    config: Path
    flags: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)  # of accelerate launch

    def command(self, folder: Path, flags: tuple[str, ...]) -> list[str]:
        words = [*self.options, str(self.script), *self.flags, *flags, "--output_dir", str(folder)]
        return [*LAUNCH, "--config_file", str(self.config), *words]

    def run(self, folder: Path, *flags: str) -> Finished:
        """Runs to the end."""
        with self._start(folder, flags) as process:
            output = process.communicate()[0]
        return finished(folder, process.returncode, output)

    def run_until(self, is_enough: Callable[[Path], bool], folder: Path, *flags: str) -> Finished:
        """Runs until `is_enough` accepts the output folder, or to the end. A run that it kills counts as done."""
        with self._start(folder, flags) as process, ThreadPoolExecutor(1) as reader:
            output = reader.submit(process.communicate)  # read meanwhile, because the pipe may fill
            while not (stops := is_enough(folder)) and not output.done():
                time.sleep(0.05)
            _kill(_tree(process.pid))
        text = output.result()[0]
        return Finished(folder, output=text) if stops else finished(folder, process.returncode, text)

    def run_killed(self, folder: Path, num_steps: int) -> tuple[int, Finished]:
        """Kills the run with SIGKILL after a random step, and resumes it. Returns (the last step of the killed run, the
        resumed run). Raises UsageError if the run ended before the kill, three times."""
        saves = ["--save_every", "1"]
        for _ in range(3):
            after = random.randint(2, max(2, num_steps // 2))
            shutil.rmtree(folder, ignore_errors=True)
            with self._start(folder, tuple(saves)) as process:
                while process.poll() is None and not read_card(folder):
                    time.sleep(0.01)
                processes = _tree(process.pid)  # now, because the search takes longer than steps of a small model
                while process.poll() is None and Finished(folder).last_step < after:
                    time.sleep(0.001)
                _kill(processes)
                process.communicate()
            if (killed := Finished(folder).last_step) and read_card(folder).get("status") == "running":
                return killed, self.run(folder, *saves, "--resume_from_checkpoint", "latest")
        raise UsageError("the run ended before it could be killed: use a larger --steps")

    def _start(self, folder: Path, flags: tuple[str, ...]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(folder, flags),
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # a run that is killed has printed all
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )


def finished(folder: Path, exit_code: int, output: str) -> Finished:
    if exit_code == 0 and read_card(folder).get("status", "done") == "done" and (folder / "metrics.jsonl").exists():
        return Finished(folder, output=output)
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    if lines and read_card(folder).get("exit_code", 2) == 2:
        return Finished(folder, refusal=lines[0].removeprefix("error: "), output=output)
    if exit_code == 0:
        return Finished(folder, failure="it wrote no metrics.jsonl: verify needs a recipe that calls fit")
    traceback = [line for line in output.splitlines() if line.strip() and "Error" in line]
    return Finished(folder, failure=(lines or traceback or output.splitlines() or ["it printed nothing"])[0])


def _tree(pid: int) -> list[psutil.Process]:
    """A launcher and all its processes; torchrun starts each in its own session."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)
