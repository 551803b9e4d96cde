"""Rules about this machine, alone and with a config: GPUs, packages, memory, limits."""

from collections.abc import Iterator

from accelerate_recipes.doctor.config_file import ONE_PROCESS, Config
from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.doctor.machine import GIB, Machine

# Measured with recipes/mnist.py on the CPU build of torch, which needs least: memory before the first batch, and open
# files. gloo connects every process with every other.
LAUNCHER_BYTES = 150 * 2**20
PROCESS_BYTES = 225 * 2**20
PREFETCHED = 2  # batches that each worker of torch's DataLoader holds ready
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
    if (size := machine.shared_memory) is not None and size <= SMALL_SHARED_MEMORY and len(machine.gpus) > 1:
        yield Finding(
            f"/dev/shm has {size // 2**20} MiB for {len(machine.gpus)} GPUs",
            "NCCL passes data between the processes of a machine through it, and fails or crashes if it is full",
            "docker run --shm-size=1g ...; in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm",
        )


def unasked_config(machine: Machine) -> Iterator[Finding]:
    """A default config file, which Accelerate reads if a command does not name one."""
    if machine.default_config is None:
        return
    keys = ("distributed_type", "num_processes", "mixed_precision")
    values = ", ".join(f"{key}: {machine.default_values[key]}" for key in keys if key in machine.default_values)
    yield Finding(
        f"{machine.default_config} exists ({values or 'unreadable'})",
        "accelerate launch without --config_file runs with its values, without a message",
        f"--config_file accelerate_configs/ddp.yaml after accelerate launch, or mv {machine.default_config} elsewhere",
    )


def processes(config: Config) -> Iterator[Finding]:
    """More processes than GPUs."""
    wanted, num_gpus = config.num_local_processes, len(config.machine.gpus)
    if wanted is not None and 0 < num_gpus < wanted and config.starts_several:
        gpus = f"{num_gpus} GPU" + "s" * (num_gpus > 1)
        yield Finding(
            f"num_processes asks for {wanted} processes on this machine, which has {gpus}",
            "each process needs its own GPU",
            f"--num_processes {num_gpus * config.num_machines} after accelerate launch, or CUDA_VISIBLE_DEVICES= "
            "before the command to rehearse on the CPU",
        )


def bf16(config: Config) -> Iterator[Finding]:
    """bf16 on a GPU that only emulates it."""
    old = next((gpu.name for gpu in config.machine.gpus if not gpu.has_bf16), None)
    if config.precision == "bf16" and old is not None:
        yield Finding(
            f"mixed_precision is bf16, but {old} has no bf16",
            "torch emulates it there, which is slow",
            "mixed_precision: 'no'; or fp16, which does not work here with DeepSpeed or tensor parallelism",
        )


def packages(config: Config) -> Iterator[Finding]:
    """Packages that the config needs and this environment lacks."""
    if config.section("mpirun_config") and config.kind in ONE_PROCESS and config.machine.mpirun is None:
        yield Finding(
            "mpirun is not installed",
            "accelerate launch starts the processes with it",
            "apt-get install openmpi-bin (Debian); or distributed_type: MULTI_GPU without mpirun_config",
        )


def memory(config: Config) -> Iterator[Finding]:
    """Less free memory than the processes take before they have a model."""
    wanted, free = config.num_local_processes, config.machine.free_memory
    if free < (needed := LAUNCHER_BYTES + (wanted or 1) * PROCESS_BYTES):
        yield Finding(
            f"only {free / GIB:.1f} GiB of memory is free for {wanted or 1} processes",
            f"they take {needed / GIB:.1f} GiB before the model and the data: the system would kill a process",
            "--num_processes with a smaller number, or end other programs",
        )


def open_files(config: Config) -> Iterator[Finding]:
    """A limit of open files that is too low for the connections between the processes."""
    limit, needed = config.machine.open_files, 16 + 3 * (config.num_processes or 1)
    if limit is not None and limit < needed:
        yield Finding(
            f"a process may open only {limit} files, but there are {config.num_processes or 1} processes",
            f"the connections between them take about {needed}: the run fails at its start, or waits forever",
            f"ulimit -n {max(1024, 2 * needed)}",
        )


def shared_memory_of_workers(config: Config, recipe: dict[str, int]) -> Iterator[Finding]:
    """Too little shared memory for workers' batches. `recipe`: its num_workers, micro_batch_size, sample_bytes."""
    size = config.machine.shared_memory
    if "micro_batch_size" not in recipe or size is None or config.num_local_processes is None:
        return
    num_batches = config.num_local_processes * recipe["num_workers"] * PREFETCHED
    if (needed := num_batches * recipe["micro_batch_size"] * recipe["sample_bytes"]) > size:
        yield Finding(
            f"/dev/shm has {size // 2**20} MiB, but --num_workers {recipe['num_workers']} prepares {needed // 2**20} "
            "MiB of batches",
            "a full /dev/shm kills the workers: Bus error",
            "docker run --shm-size=8g ..., or a smaller --num_workers or --micro_batch_size",
        )


RULES = (processes, bf16, packages, memory, open_files)
