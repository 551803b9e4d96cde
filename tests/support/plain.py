"""Runs the scripts of recipes/plain and reads what they print."""

import re
import sys
from pathlib import Path

from support.launching import execute
from support.runs import ROOT, Run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def plain(folder: Path, script: str, arguments: str = "", num_processes: int | None = None) -> Run:
    """Runs `recipes/plain/<script>`: with python, or under torchrun if a number of processes is given."""
    command = [sys.executable] if num_processes is None else [*TORCHRUN, str(num_processes)]
    command += [str(ROOT / "recipes" / "plain" / script), *arguments.split()]
    run = execute(command, folder, folder, {"OMP_NUM_THREADS": "1"})
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


def losses(run: Run) -> list[float]:
    """The losses that a run prints, one per step."""
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]


def accuracy(run: Run) -> float:
    """The accuracy that a run prints at its end."""
    found = re.search(r"^accuracy (\S+)", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    return float(found[1])
