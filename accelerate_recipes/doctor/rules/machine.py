"""Rules about the machine alone."""

from collections.abc import Iterator

from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.doctor.machine import Machine

SMALL_SHARED_MEMORY = 64 * 2**20  # what Docker gives a container by default


def unusable_gpu(machine: Machine) -> Iterator[Finding]:
    """The machine has an NVIDIA GPU that torch cannot use: runs are rehearsals on the CPU."""
    if machine.why_no_gpu is None:
        return
    version = machine.versions.get("torch", "")
    advice = "update the driver, or install the build of torch for it: https://pytorch.org/get-started/locally/"
    if version.endswith("+cpu"):
        advice = "pip uninstall --yes torch, then the command for CUDA of https://pytorch.org/get-started/locally/"
    yield Finding(
        f"torch {version} cannot use this machine's GPU: {machine.why_no_gpu}",
        "every run would be a rehearsal on the CPU",
        advice,
    )


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Little shared memory for several GPUs, as in a container that Docker started without --shm-size.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    """
    size = machine.shared_memory
    if size is not None and size <= SMALL_SHARED_MEMORY and len(machine.gpus) > 1:
        yield Finding(
            f"/dev/shm has {size // 2**20} MiB for {len(machine.gpus)} GPUs",
            "NCCL passes data between the processes of a machine through it, and fails or crashes if it is full",
            "docker run --shm-size=1g ...; in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm",
        )


def unasked_config(machine: Machine) -> Iterator[Finding]:
    """A default config file, which Accelerate reads if a command names no other."""
    if machine.default_config is None:
        return
    keys = ("distributed_type", "num_processes", "mixed_precision")
    values = ", ".join(f"{key}: {machine.default_values[key]}" for key in keys if key in machine.default_values)
    yield Finding(
        f"{machine.default_config} exists ({values or 'unreadable'})",
        "accelerate launch without --config_file runs with its values, and says nothing",
        f"--config_file accelerate_configs/ddp.yaml after accelerate launch, or mv {machine.default_config} elsewhere",
    )


RULES = (unusable_gpu, shared_memory)
# With a named config, Accelerate does not read its default file.
RULES_WITHOUT_CONFIG = (unasked_config,)
