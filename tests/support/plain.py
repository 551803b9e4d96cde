"""Runs the scripts of recipes/plain and reads what they print."""

import re
import sys
from pathlib import Path

from support.launching import execute
from support.runs import ROOT, Run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
# Runs a script as the only process of its group, then prints the threads that are left.
THEN_PRINT_THREADS = """
import runpy, sys, torch
from pathlib import Path
torch.multiprocessing.spawn = lambda work, arguments, nprocs: work(0, *arguments)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("threads left:", *(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


def plain(folder: Path, script: str, arguments: str = "", num_processes: int | None = None) -> Run:
    """Runs `recipes/plain/<script>`: with python, or under torchrun if a number of processes is given."""
    command = [sys.executable] if num_processes is None else [*TORCHRUN, str(num_processes)]
    command += [str(ROOT / "recipes" / "plain" / script), *arguments.split()]
    run = execute(command, folder, folder, {"OMP_NUM_THREADS": "1"})
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


def threads_left(folder: Path, script: str, arguments: str) -> list[str]:
    """The names of the threads at the end of a script of one process."""
    command = [sys.executable, "-c", THEN_PRINT_THREADS, str(ROOT / "recipes" / "plain" / script), *arguments.split()]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    run = execute(command, folder, folder, variables)
    assert run.exit_code == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[-1].removeprefix("threads left: ").split()


def losses(run: Run) -> list[float]:
    """The losses that a run prints, one per step."""
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", run.stdout, re.MULTILINE)]


def accuracy(run: Run) -> float:
    """The accuracy that a run prints at its end."""
    found = re.search(r"^accuracy (\S+)", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout
    return float(found[1])
