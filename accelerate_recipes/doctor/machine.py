"""The facts of this machine."""

import os
import platform
import resource
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from accelerate_recipes.catalog import mapping_in, may_have_gpus
from accelerate_recipes.common.accidents import folders
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.package import installed_versions

GIB = 2**30
PACKAGES = ("torch", "accelerate", "transformers", "safetensors", "datasets", "numpy", "deepspeed")


@dataclass(frozen=True)
class GPU:
    """An accelerator that torch can use."""

    name: str
    memory: int  # in bytes
    has_bf16: bool = True  # whether it computes in bf16 itself, without emulation


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of a machine. Sizes are in bytes."""

    memory: int  # of the machine, or less where a container limits it
    free_memory: int
    shared_memory: int | None  # of /dev/shm; None if there is none
    gpus: tuple[GPU, ...] = ()  # all that torch can use
    why_no_gpu: str | None = None  # why torch cannot use the machine's NVIDIA GPU
    open_files: int | None = None  # limit of a process; None: unlimited
    mpirun: str | None = None  # its path; None where not found
    versions: dict[str, str]  # {package: version} of the installed `PACKAGES`
    default_config: Path | None = None  # Accelerate's default config file
    default_values: dict[str, Any] = field(default_factory=dict)  # its content

    def rows(self) -> list[tuple[str, str]]:
        """The facts as a table of names and values, including facts that no rule needs."""
        from accelerate_recipes.common.environment import num_cores

        packages = [f"{name} {version}" for name, version in self.versions.items()]
        return [
            ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
            ("cores", str(num_cores())),
            ("memory", f"{_gib(self.memory)}, {_gib(self.free_memory)} free"),
            ("shared memory", "none" if self.shared_memory is None else _gib(self.shared_memory)),
            ("GPUs", ", ".join(f"{gpu.name} ({_gib(gpu.memory)})" for gpu in self.gpus) or "none"),
            ("open files", "unlimited" if self.open_files is None else f"at most {self.open_files} per process"),
            ("C++ compiler", shutil.which(os.environ.get("CXX", "c++")) or "none (DeepSpeed and --compile need one)"),
            ("ninja", shutil.which("ninja") or "none (DeepSpeed needs it)"),
            ("packages", ", ".join(packages)),
        ]


def look() -> Machine:
    """The facts of this machine. Takes about 0.1 s, or the time to import torch if there is a GPU driver."""
    memory, free_memory = _memory()
    gpus, why_no_gpu = _gpus()
    default_config = folders()["HF_HOME"] / "accelerate/default_config.yaml"  # `accelerate launch` reads it
    default_values: dict[str, Any] = {}
    with suppress(UsageError):  # no such file, or not a config
        default_values = mapping_in(default_config)
    shared, (open_files, _) = Path("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        memory=memory,
        free_memory=free_memory,
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        gpus=gpus,
        why_no_gpu=why_no_gpu,
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        mpirun=shutil.which("mpirun") or shutil.which("mpiexec"),
        versions=installed_versions(*PACKAGES),
        default_config=default_config if default_config.is_file() else None,
        default_values=default_values,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _memory() -> tuple[int, int]:
    """(total, free) bytes of memory: of the machine, or of this container if it has less."""
    machine = psutil.virtual_memory()
    group = Path("/sys/fs/cgroup")  # version 2 of Linux's control groups
    with suppress(OSError, ValueError, KeyError):  # ValueError: the limit is "max"
        limit = int((group / "memory.max").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(facts["inactive_file"])  # the kernel can drop these
        return min(machine.total, limit), min(machine.available, limit - used)
    return machine.total, machine.available


def _gpus() -> tuple[tuple[GPU, ...], str | None]:
    """The accelerators that torch can use; if there are none, why torch cannot use the machine's NVIDIA GPU."""
    if not may_have_gpus():
        return (), None
    import torch

    if (device := torch.accelerator.current_accelerator(check_available=True)) is None:
        from accelerate_recipes.common.environment import why_no_gpu

        return (), why_no_gpu()
    found = [torch.get_device_module().get_device_properties(i) for i in range(torch.accelerator.device_count())]
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return tuple(GPU(one.name, one.total_memory, not is_nvidia or one.major >= 8) for one in found), None
