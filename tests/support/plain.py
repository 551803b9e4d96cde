"""Runs the scripts of recipes/plain and reads what they print."""

import contextlib
import io
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from support.launching import CONFIGS, accelerate_forked, execute
from support.runs import ROOT, Run

PLAIN = ROOT / "recipes" / "plain"
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
    """Runs `recipes/plain/<script>`: with python, or if a number of processes is given as torchrun does.

    Several processes are forks, to save their imports. test_plain.py runs each script's own command.
    """
    words = [str(PLAIN / script), *arguments.split()]
    if num_processes is None:
        run = execute([sys.executable, *words], folder, folder, {"OMP_NUM_THREADS": "1"})
    elif num_processes == 1:
        run = execute([*TORCHRUN, "1", *words], folder, folder, {"OMP_NUM_THREADS": "1"})
    else:
        run = launched(folder, "ddp", num_processes, *words)
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


@cache
def one_process(num_steps: int) -> Run:
    """Runs `recipes/plain/one_process.py` in this process, to save its imports."""
    output, num_threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["one_process.py", "--steps", str(num_steps)]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(output):
        runpy.run_path(str(PLAIN / "one_process.py"), run_name="__main__")
    torch.set_num_threads(num_threads)
    return Run(0, output.getvalue(), "", PLAIN)


def launched(folder: Path, config: str, num_processes: int, *words: str) -> Run:
    """Runs a script under a config of accelerate_configs/ with forked processes."""
    options = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(num_processes)]
    return accelerate_forked(["launch", *options, "--main_process_port", "0", *words], folder, folder)


def threads_left(folder: Path, script: str, arguments: str) -> list[str]:
    """The names of the threads at the end of a script of one process."""
    command = [sys.executable, "-c", THEN_PRINT_THREADS, str(PLAIN / script), *arguments.split()]
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
