"""Runs `accelerate-recipes` in this process, and forks the processes that it starts."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_recipes.cli import main
from accelerate_recipes.verify.runs import Finished, Launch, finished
from support.launching import fork_command

STARTERS = [f"accelerate_recipes.{name}" for name in ("at_fit", "verify.plain")]


def tool(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Returns the exit code of the command."""
    fork_processes(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["accelerate-recipes", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def fork_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks what the tool runs to its end, in this test. What it starts and kills are real processes, as are those of
    test_new_command.py and of the commands in docs/."""
    forking = SimpleNamespace(**vars(subprocess) | {"run": _run})
    for name in STARTERS:
        monkeypatch.setattr(importlib.import_module(name), "subprocess", forking)
    monkeypatch.setattr(Launch, "run", _run_launch)


def _run(command: list[str], env: dict[str, str], stderr: int | None = None, **_: Any) -> SimpleNamespace:
    run = fork_command(command, Path.cwd(), env)
    if stderr == subprocess.STDOUT:
        return SimpleNamespace(returncode=run.exit_code, stdout=run.stdout + run.stderr)
    return SimpleNamespace(returncode=run.exit_code, stdout=run.stdout, stderr=run.stderr)


def _run_launch(launch: Launch, folder: Path, *flags: str) -> Finished:
    run = fork_command(launch.command(folder, flags), Path.cwd(), dict(os.environ))
    return finished(folder, run.exit_code, run.stdout + run.stderr)
