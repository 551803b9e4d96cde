"""What the launcher tells its processes through the environment, and what this machine has."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

CODE_FILE = "ACCELERATE_RECIPES_EXIT_CODE"  # names a file of a script that hands the true exit code on


def was_launched() -> bool:
    """By accelerate launch or torchrun."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def world_size() -> int:
    """The number of processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_world_size() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def num_machines() -> int:
    """Of this run, as torchrun counts them."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def num_restarts() -> int:
    """How often this machine's launcher has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def is_true(variable: str) -> bool:
    """Whether an environment variable is set and means yes."""
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def uses_deepspeed() -> bool:
    """Whether the config file asks for it."""
    return is_true("ACCELERATE_USE_DEEPSPEED")


def offloads() -> bool:
    """Whether DeepSpeed keeps weights or optimizer state in the memory of the CPU."""
    return "cpu" in (
        os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
    )


def has_gpu() -> bool:
    """Whether there is one to train on; Apple's is none: it has no float64 and no way to work with others."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps" and not is_true("ACCELERATE_USE_CPU")


def user_chose_threads() -> bool:
    """Whether `OMP_NUM_THREADS` is a wish of the user and not what launchers set by themselves."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        return False
    if not was_launched() or threads != "1":
        return True
    return launcher_was_given("OMP_NUM_THREADS")


def launcher_was_given(variable: str) -> bool:
    """Whether the process that started this one has the variable from its own start."""
    try:
        parent = psutil.Process().parent()
        return parent is not None and variable in parent.environ()
    except (psutil.Error, AttributeError):  # some systems do not tell
        return False


def versions(*packages: str) -> dict[str, str]:
    """{name: version} of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
