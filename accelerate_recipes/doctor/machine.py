"""The facts of this machine."""

import os
import platform
import resource
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import yaml

GIB = 2**30
NVIDIA = Path("/dev/nvidiactl")
# Devices of NVIDIA's accelerators (also under WSL), AMD's, Intel's and Ascend's. Without them there is nothing to ask
# torch for, and its import takes seconds.
ACCELERATORS = (NVIDIA, Path("/dev/dxg"), Path("/dev/kfd"), Path("/dev/dri"), Path("/dev/davinci_manager"))
# The packages that a run uses, and those that must fit torch to the digit.
PACKAGES = (
    *("accelerate-recipes", "torch", "accelerate", "transformers", "safetensors", "datasets", "numpy", "deepspeed"),
    *("torchvision", "torchaudio", "torchao", "transformer-engine", "msamp", "megatron-core"),
)


@dataclass(frozen=True)
class GPU:
    """An accelerator that torch can use.

    Attributes:
        memory: in bytes.
        has_bf16: whether it computes in bf16 itself, without emulation.
    """

    name: str
    memory: int
    has_bf16: bool = True


@dataclass(frozen=True)
class Lock:
    """A lock file in torch's folder of compiled extensions.

    Attributes:
        age: in seconds.
        is_held: whether a process of this machine has the file open.
    """

    path: Path
    age: float
    is_held: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of a machine. Sizes are in bytes.

    Attributes:
        num_cores: cores that a process may use.
        memory, free_memory: of the machine, or less where a container limits it.
        shared_memory: of /dev/shm; None where there is none.
        gpus: all that torch can use.
        why_no_gpu: why torch cannot use an NVIDIA GPU that is there.
        has_infiniband: whether there is a network adapter for RDMA.
        open_files, locked_memory: limits of a process; None: unlimited.
        compiler, ninja, mpirun: paths; None where not found.
        versions: {package: version} of those of `PACKAGES` that are installed.
        requirements: {package: its own requirements, such as "torch>=2.0"}.
        locks: in torch's folder of compiled extensions.
        default_config: Accelerate's default config file.
        default_values: its content.
    """

    system: str
    num_cores: int
    memory: int
    free_memory: int
    shared_memory: int | None
    gpus: tuple[GPU, ...] = ()
    why_no_gpu: str | None = None
    has_infiniband: bool = False
    open_files: int | None = None
    locked_memory: int | None = None
    compiler: str | None
    ninja: str | None
    mpirun: str | None = None
    versions: dict[str, str]
    requirements: dict[str, list[str]] = field(default_factory=dict)
    locks: tuple[Lock, ...] = ()
    default_config: Path | None = None
    default_values: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """The facts as a table of names and values."""
        packages = [f"{name} {version}" for name, version in self.versions.items() if name != "accelerate-recipes"]
        return [
            ("system", self.system),
            ("cores", str(self.num_cores)),
            ("memory", f"{_gib(self.memory)}, {_gib(self.free_memory)} free"),
            ("shared memory", "none" if self.shared_memory is None else _gib(self.shared_memory)),
            ("GPUs", ", ".join(f"{gpu.name} ({_gib(gpu.memory)})" for gpu in self.gpus) or "none"),
            ("open files", "unlimited" if self.open_files is None else f"at most {self.open_files} per process"),
            ("C++ compiler", self.compiler or "none (DeepSpeed and --compile need one)"),
            ("ninja", self.ninja or "none (DeepSpeed needs it)"),
            ("packages", ", ".join(packages)),
        ]


def look() -> Machine:
    """The facts of this machine. Takes about 0.1 s, or the time to import torch if there is a driver of a GPU."""
    memory, free_memory = _memory()
    gpus, why_no_gpu = _gpus()
    versions, requirements = _packages()
    default_config = _default_config()
    shared = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory,
        free_memory=free_memory,
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        gpus=gpus,
        why_no_gpu=why_no_gpu,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        compiler=shutil.which(os.environ.get("CXX", "c++")),
        ninja=shutil.which("ninja"),
        mpirun=shutil.which("mpirun") or shutil.which("mpiexec"),
        versions=versions,
        requirements=requirements,
        locks=_locks(),
        default_config=default_config,
        default_values=_values(default_config) if default_config else {},
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory() -> tuple[int, int]:
    """(total, free) bytes of memory: of the machine, or of this container if it has less."""
    machine = psutil.virtual_memory()
    group = Path("/sys/fs/cgroup")
    try:  # version 2 of Linux's control groups
        limit = int((group / "memory.max").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(facts["inactive_file"])  # the kernel can drop these
    except (OSError, ValueError, KeyError):  # ValueError: the limit is "max"
        return machine.total, machine.available
    return min(machine.total, limit), min(machine.available, limit - used)


def _gpus() -> tuple[tuple[GPU, ...], str | None]:
    """The accelerators that torch can use; if there are none, why torch cannot use an NVIDIA GPU that is there."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(path.exists() for path in ACCELERATORS):
        return (), None
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return (), _why_no_gpu() if NVIDIA.exists() else None
    found = [torch.get_device_module().get_device_properties(i) for i in range(torch.accelerator.device_count())]
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return tuple(GPU(one.name, one.total_memory, not is_nvidia or one.major >= 8) for one in found), None


def _why_no_gpu() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build for the CPU
        return str(error).splitlines()[0]
    return "torch finds no device"


def _packages() -> tuple[dict[str, str], dict[str, list[str]]]:
    """The versions and the requirements of the installed packages of `PACKAGES`."""
    versions: dict[str, str] = {}
    requirements: dict[str, list[str]] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            package = distribution(name)
            versions[name], requirements[name] = package.version, package.requires or []
    return versions, requirements


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _default_config() -> Path | None:
    """The config file that `accelerate launch` reads if none is named."""
    path = Path(os.environ.get("HF_HOME") or _cache() / "huggingface").expanduser() / "accelerate/default_config.yaml"
    return path if path.is_file() else None


def _values(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _locks() -> tuple[Lock, ...]:
    """The lock files of torch's builds of extensions. The recipes' own folder is left out: a run removes old ones."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(chosen) if chosen else _cache() / "torch_extensions"
    paths = [path for path in (*root.glob("*/lock"), *root.glob("*/*/lock")) if path.is_file()]
    paths = [path for path in paths if not path.relative_to(root).parts[0].startswith("accelerate_recipes_")]
    held = _open_files() if paths else set()
    return tuple(Lock(path, time.time() - path.stat().st_mtime, str(path.resolve()) in held) for path in paths)


def _open_files() -> set[str]:
    """The files that the processes of this machine have open, as far as this user may see."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            found |= {file.path for file in process.open_files()}
        except psutil.Error:
            continue
    return found
