"""Settings of the launcher and its config file, from environment variables, and this machine's hardware and packages.

Variables for other libraries are set where they are needed: in launch/start.py (DeepSpeed's, cuBLAS's and some of
Accelerate's), launch/machines.py (gloo's), parallel/strategy.py and deepspeed.py (Accelerate's, in a rehearsal),
parallel/extensions.py (torch's folder of extensions). accidents.py reads where libraries have their caches.
"""

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from .errors import UsageError
from .package import installed_versions, version

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CODE_FILE = "ACCELERATE_RECIPES_EXIT_CODE"  # launchers/node.py sets it
SETTINGS = re.compile("(ACCELERATE|FSDP|PARALLELISM_CONFIG)_")  # of the config file and accelerate's flags
RANKS = re.compile("(LOCAL_|GROUP_|ROLE_|)(RANK|WORLD_SIZE)")
NUMBERS = re.compile(f"{RANKS.pattern}|MASTER_PORT|TORCHELASTIC_RESTART_COUNT")
OF_LAUNCHERS = re.compile(f"({NUMBERS.pattern}|MASTER_ADDR)$|{SETTINGS.pattern}")
INHERITED = re.compile(f"{OF_LAUNCHERS.pattern}|TORCHELASTIC_")  # not for a process outside the run


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The settings of the launcher and its config file for this process. The layout holds them."""

    rank: int = 0  # of this process, even before it has joined the others
    world_size: int = 1  # processes on all machines
    local_rank: int | None = None  # None without a launcher of several processes
    local_world_size: int = 1  # processes on this machine
    machine_rank: int = 0  # of this launcher, if a host has several
    num_machines: int = 1  # torchrun counts one launcher as one machine
    num_restarts: int = 0  # of the processes of this machine, by their launcher
    # The number of restarts: it marks this start's entries in the launchers' own store, which keeps old data. Without
    # that store (elastic runs, docs/multi-node.md: `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`) each start has a new store: 0,
    # because a launcher that joined late has counted fewer restarts than the others.
    store_number: int = 0
    main_address: str | None = None  # where the processes meet
    main_port: str | None = None
    error_file: Path | None = None  # <one folder per attempt>/<local rank>/error.json, for torchrun's report
    code_file: Path | None = None  # for the recipe's exit code
    mixed_precision: str = "no"  # or "bf16", "fp16", "fp8"
    dynamo_backend: str = "no"
    torch_device: str | None = None  # set by a user's own launcher
    gradient_accumulation: str = "auto"
    settings: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)  # all, {variable: value}

    @classmethod
    def read(cls) -> "Environment":
        """The settings in this process's variables now."""
        get, num_restarts = os.environ.get, _number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            rank=_number("RANK", 0),
            world_size=_number("WORLD_SIZE", 1),
            local_rank=_number("LOCAL_RANK", None),
            local_world_size=_number("LOCAL_WORLD_SIZE", 1),
            machine_rank=_number("GROUP_RANK", 0),
            num_machines=_number("GROUP_WORLD_SIZE", 1),
            num_restarts=num_restarts,
            store_number=num_restarts if get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            main_address=get("MASTER_ADDR"),
            main_port=get("MASTER_PORT"),
            error_file=Path(os.environ["TORCHELASTIC_ERROR_FILE"]) if get("TORCHELASTIC_ERROR_FILE") else None,
            code_file=Path(os.environ[CODE_FILE]) if get(CODE_FILE) else None,
            mixed_precision=get("ACCELERATE_MIXED_PRECISION", "no"),
            dynamo_backend=get("ACCELERATE_DYNAMO_BACKEND", "no"),
            torch_device=get("ACCELERATE_TORCH_DEVICE"),
            gradient_accumulation=get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
            settings={name: value for name, value in os.environ.items() if SETTINGS.match(name)},
        )

    @property
    def was_launched(self) -> bool:
        """Whether accelerate launch or torchrun started this process."""
        return self.local_rank is not None or "ACCELERATE_MIXED_PRECISION" in self.settings

    @property
    def gathers_again(self) -> bool:
        """Whether a layer's weights are freed between the forward and the backward pass."""
        return self.settings.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"

    def uses(self, what: str) -> bool:
        """Whether the config file asks for "cpu", "deepspeed", "fsdp" or "parallelism_config"."""
        return self.is_true(f"accelerate_use_{what}")

    def is_true(self, key: str) -> bool:
        """Whether a setting is true, 1 or yes. Keys of fsdp_config have their prefix: "fsdp_offload_params"."""
        return self.settings.get(key.upper(), "false").lower() in ("true", "1", "yes")

    def mesh_size(self, name: str) -> int:
        """A size of parallelism_config, such as "tp". Raises UsageError unless it is a whole number above 0."""
        if not self.uses("parallelism_config"):
            return 1
        key = f"parallelism_config_{name}_size"
        text = self.settings.get(key.upper(), "1")
        if not text.isdecimal() or int(text) == 0:
            raise UsageError(f"{key} is {text}: use a whole number above 0 in the config file")
        return int(text)


def _number(name: str, default: Any) -> Any:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default  # `drop_leftovers` says what is wrong


def drop_leftovers() -> None:
    """Removes empty variables of launchers. Raises UsageError for one that should be a number and is not."""
    for name in [*filter(OF_LAUNCHERS.match, os.environ)]:
        if not (value := os.environ[name].strip()):
            del os.environ[name]
        elif NUMBERS.fullmatch(name) and not value.isdecimal():
            raise UsageError(
                f"{name} is {value}, which is not a number", f"unset {name}", beside="or use accelerate launch"
            )


def rank() -> int:
    """This process's rank, even before the processes have joined."""
    return Environment.read().rank


def print_once(line: str) -> None:
    """Prints a line in the first process, even before the processes have joined."""
    if rank() == 0:
        print(line, flush=True)


@contextmanager
def without_ranks() -> Iterator[None]:
    """Removes the variables that number and count processes for the `with` block, then restores the environment."""
    with patch.dict(os.environ):
        for name in filter(RANKS.fullmatch, list(os.environ)):
            del os.environ[name]
        yield


def variables_of_one_process() -> dict[str, str]:
    """The environment for a separate process on the CPU, in the precision of this run, without its launcher."""
    kept = {name: value for name, value in os.environ.items() if not INHERITED.match(name)}
    precision = {"ACCELERATE_MIXED_PRECISION": Environment.read().mixed_precision}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} | precision


def num_cores() -> int:
    """The number of cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_type() -> str:
    """The kind of device to train on: "cuda" (also AMD's GPUs), "xpu" (Intel), "npu" (Ascend), ... or "cpu"."""
    device = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU has no float64 and no collectives.
    return "cpu" if device is None or device.type == "mps" or Environment.read().uses("cpu") else device.type


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
    """Divides the cores among this machine's processes, unless the user did. A launcher may have set 1."""
    environment, threads = Environment.read(), os.environ.get("OMP_NUM_THREADS")
    by_launcher = threads == "1" and environment.was_launched and not launcher_was_given("OMP_NUM_THREADS")
    if threads is None or by_launcher:
        torch.set_num_threads(max(1, num_cores() // environment.local_world_size))


def launcher_was_given(variable: str) -> bool:
    """Whether the parent process was started with the variable, and so did not set it itself."""
    with suppress(psutil.Error, AttributeError):  # some systems hide the environment of other processes
        parent = psutil.Process().parent()
        return parent is not None and variable in parent.environ()
    return False


def versions(*packages: str) -> dict[str, str]:
    """{name: version} of Python, of this package, and of the installed `packages`."""
    return {"python": platform.python_version(), "accelerate-recipes": version()} | installed_versions(*packages)


def check_compiler(who: str, variable: str, default: str) -> None:
    """Raises UsageError without this compiler, or without Python's headers. The variable may name another compiler."""
    compiler, header = os.environ.get(variable, default), Path(sysconfig.get_path("include")) / "Python.h"
    for needed, is_there, what_lacks in (
        ("a C++ compiler (Debian: apt-get install g++)", shutil.which(compiler), f"no {compiler} found"),
        ("Python's headers (Debian: apt-get install python3-dev)", header.exists(), f"no {header}"),
    ):
        if not is_there:
            raise UsageError(f"{who} compiles on first use and needs {needed}", what_lacks)
