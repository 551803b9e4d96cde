"""Runs the scripts of recipes/plain and reads what they print."""

import contextlib
import io
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from support.launching import CONFIGS, accelerate_forked, execute
from support.runs import ROOT, Run

PLAIN = ROOT / "recipes" / "plain"
ONE_PROCESS = runpy.run_path(str(PLAIN / "one_process.py"), run_name="one_process")
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


def rarely(*cases: tuple) -> list[Any]:
    """Parameters of a test that `make test-full` runs."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def plain(folder: Path, script: str, arguments: str = "", num_processes: int | None = None, config: str = "ddp") -> Run:
    """Runs `recipes/plain/<script>`: with python, or if a number of processes is given as torchrun does.

    Several processes are forks under a config, to save their imports. test_plain.py runs each script's own command.
    """
    words = [str(PLAIN / script), *arguments.split()]
    if num_processes is None:
        run = execute([sys.executable, *words], folder, folder, {"OMP_NUM_THREADS": "1"})
    elif num_processes == 1:
        run = execute([*TORCHRUN, "1", *words], folder, folder, {"OMP_NUM_THREADS": "1"})
    else:
        run = launched(folder, config, num_processes, *words)
    assert run.exit_code == 0, run.stdout + run.stderr
    return run


@cache
def one_process(num_steps: int, data: str = "digits") -> Run:
    """Runs `recipes/plain/one_process.py` in this process, to save its imports."""
    output, num_threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["one_process.py", "--steps", str(num_steps), "--data", data]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(output):
        runpy.run_path(str(PLAIN / "one_process.py"), run_name="__main__")
    torch.set_num_threads(num_threads)
    return Run(0, output.getvalue(), "", PLAIN)


def local_steps(
    num_steps: int, num_replicas: int = 1, sync_every: int = 1, momentum: float = 0.0, outer_momentum: float = 0.0
) -> list[float]:
    """The mean losses of replicas that are trained one after the other in this process."""
    images, labels, *_ = ONE_PROCESS["load_data"]("digits")
    nets = [ONE_PROCESS["make_net"](images.shape[1], 0) for _ in range(num_replicas)]
    optimizers = [torch.optim.SGD(net.parameters(), ONE_PROCESS["LEARNING_RATE"], momentum) for net in nets]
    shared = parameters_to_vector(nets[0].parameters()).detach().clone()
    velocity = torch.zeros_like(shared)
    means = []
    for step in range(num_steps):
        parts: tuple[Tensor, ...] = ONE_PROCESS["sample_ids"](step, len(images), 0).chunk(num_replicas)
        mean = 0.0
        for net, optimizer, ids in zip(nets, optimizers, parts):
            loss = F.cross_entropy(net(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean += loss.item() / num_replicas
        means.append(mean)
        if (step + 1) % sync_every == 0:
            distance = shared - torch.stack([parameters_to_vector(net.parameters()).detach() for net in nets]).mean(0)
            velocity = outer_momentum * velocity + distance
            shared = shared - (distance + outer_momentum * velocity)  # Nesterov's momentum; it is 0 for the mean
            for net in nets:
                vector_to_parameters(shared.clone(), net.parameters())
    return means


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
