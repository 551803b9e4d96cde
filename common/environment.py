"""The environment variables of the launcher, and the hardware and packages of this machine."""

import os
import platform
import shutil
import sysconfig
from pathlib import Path

import psutil
import torch

from .errors import UsageError
from .package import installed_versions, version

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CODE_FILE = "ACCELERATE_RECIPES_EXIT_CODE"  # path of a file for the recipe's exit code; launchers/node.py reads it


def was_launched() -> bool:
    """Whether accelerate launch or torchrun started this process."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def world_size() -> int:
    """The number of processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process among all, which need not have joined."""
    return int(os.environ.get("RANK", 0))


def print_once(line: str) -> None:
    """Prints a line in the first of the processes, which need not have joined."""
    if rank() == 0:
        print(line, flush=True)


def local_world_size() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def num_cores() -> int:
    """The number of cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_machines() -> int:
    """The number of machines of this run. torchrun counts one launcher as one machine."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def num_restarts() -> int:
    """How often this machine's launcher has restarted the processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_true(variable: str) -> bool:
    """Whether an environment variable is set to true, 1 or yes."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def mesh_size(name: str) -> int:
    """A size of the config file's parallelism_config: "dp_replicate", "dp_shard", "tp", "cp" or "sp". Raises UsageError
    unless it is a whole number above 0."""
    if not is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    text = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f"parallelism_config_{name}_size is {text}", "type a whole number above 0 in the config file")
    return int(text)


def device_type() -> str:
    """The kind of device to train on: "cuda" (also AMD's GPUs), "xpu" (Intel), "npu" (Ascend), ... or "cpu"."""
    device = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU has no float64 and no collectives.
    return "cpu" if device is None or device.type == "mps" or is_true("ACCELERATE_USE_CPU") else device.type


def has_gpu() -> bool:
    """Whether there is a GPU to train on."""
    return device_type() != "cpu"


def why_no_gpu() -> str | None:
    """Why torch cannot use an NVIDIA GPU of this machine; None if it can, or if the machine has none."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not NVIDIA_DRIVER.exists():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build for the CPU
        return str(error).splitlines()[0]
    return "torch finds no device"


def share_cores() -> None:
    """Divides the cores among this machine's processes, unless the user did: launchers set one thread per process."""
    if not user_chose_threads():
        torch.set_num_threads(max(1, num_cores() // local_world_size()))


def user_chose_threads() -> bool:
    """Whether the user set `OMP_NUM_THREADS`. A launcher may set it to 1 if the user did not."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        return False
    if not was_launched() or threads != "1":
        return True
    return launcher_was_given("OMP_NUM_THREADS")


def launcher_was_given(variable: str) -> bool:
    """Whether the parent process was started with the variable, and so did not set it itself."""
    try:
        parent = psutil.Process().parent()
        return parent is not None and variable in parent.environ()
    except (psutil.Error, AttributeError):  # some systems hide the environment of other processes
        return False


def versions(*packages: str) -> dict[str, str]:
    """{name: version} of Python, of this package, and of those of `packages` that are installed."""
    return {"python": platform.python_version(), "accelerate-recipes": version()} | installed_versions(*packages)


def check_compiler(who: str, compiler: str) -> None:
    """Raises UsageError if there is no such compiler, or no header of Python for it."""
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{who} compiles on first use and needs a C++ compiler (Debian: apt-get install g++)",
            f"no {compiler} found",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UsageError(
            f"{who} compiles on first use and needs Python's headers (Debian: apt-get install python3-dev)",
            f"no {header}",
        )
