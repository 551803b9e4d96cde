"""What cannot be launched: checks of the config file and the launcher, before the processes join. A run raises the
first refusal; `accelerate-recipes doctor` asks for all of them."""

import math
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from ..config import RunConfig
from ..environment import is_true, launcher_was_given, local_world_size, num_machines, world_size
from ..errors import UsageError
from ..layout import Kind, Layout, deepspeed_section, mesh_size

SUPPORTED = ("cpu", "cuda", "xpu", "npu")


def check_launch(config: RunConfig) -> None:
    """Raises UsageError for mistakes that show before the processes join."""
    for check in CHECKS:
        check(Layout.asked(config), config)


def check_launcher(layout: Layout, config: RunConfig) -> None:
    """Processes that would train alone."""
    launched = "LOCAL_RANK" in os.environ
    if not launched and layout.num_processes > 1:
        raise UsageError(
            f"WORLD_SIZE is {layout.num_processes} but LOCAL_RANK is not set, so each process would train alone: "
            "start with accelerate launch or torchrun, or unset WORLD_SIZE"
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    if not launched and by_accelerate and "MASTER_PORT" in os.environ and not launcher_was_given("MASTER_PORT"):
        # Accelerate's launcher sets MASTER_PORT only if the user asked for more than one process.
        raise UsageError(
            "accelerate launch was asked for several processes but starts one under this config (its "
            "distributed_type is NO or MULTI_CPU): type --config_file accelerate_configs/ddp.yaml, or "
            "--num_processes 1"
        )


def check_device(layout: Layout, config: RunConfig) -> None:
    """An accelerator that these recipes do not know, or fewer GPUs than processes."""
    if layout.device not in SUPPORTED:
        raise UsageError(
            f"this machine's accelerator is {layout.device}, but these recipes support {', '.join(SUPPORTED)}: put "
            "ACCELERATE_USE_CPU=true before the command to rehearse on the CPU"
        )
    if layout.device != "cpu":
        check_num_gpus(local_world_size(), torch.accelerator.device_count())


def check_num_gpus(num_processes: int, num_gpus: int) -> None:
    """Raises UsageError for more processes on a machine than it has GPUs."""
    if num_gpus < num_processes:
        gpus = f"{num_gpus} GPU" + "s" * (num_gpus > 1)
        raise UsageError(
            f"{num_processes} processes but {gpus} on this machine: type --num_processes {num_gpus * num_machines()}, "
            "or put CUDA_VISIBLE_DEVICES= before the command to rehearse on the CPU"
        )


def check_flags_of_the_loop(layout: Layout, config: RunConfig) -> None:
    """What the command line of the recipe decides, in the config file."""
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo.lower() != "no":
        raise UsageError(f"--dynamo_backend {dynamo}: remove it, and type --compile after the recipe")
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation not in ("auto", "1"):
        raise UsageError(
            f"gradient_accumulation_steps: {accumulation} in the config file: remove it; accumulation follows "
            "from --batch_size and --micro_batch_size"
        )


def check_precision(layout: Layout, config: RunConfig) -> None:
    """A precision of which nothing is tested."""
    if layout.precision not in ("float32", "bf16", "fp16"):
        raise UsageError(f"mixed_precision: {layout.precision} is not supported: type mixed_precision: bf16 there")


def check_fsdp(layout: Layout, config: RunConfig) -> None:
    """FSDP1, or weights to move from a GPU that is not there."""
    if not is_true("ACCELERATE_USE_FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UsageError(
            "the config file asks for FSDP1, which is Accelerate's default: type fsdp_version: 2 there, or accelerate "
            "to-fsdp2 --config_file FILE --output_file fsdp2.yaml"
        )
    if is_true("FSDP_OFFLOAD_PARAMS") and layout.device == "cpu":
        raise UsageError("fsdp_offload_params: true in the config file needs a GPU: type false there to rehearse")


def check_mesh(layout: Layout, config: RunConfig) -> None:
    """Sizes of parallelism_config that these recipes do not run, or that do not multiply to the processes."""
    if not is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return
    sizes = {f"{name}_size": mesh_size(name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    if sizes["cp_size"] > 1:
        raise UsageError(
            f"parallelism_config: cp_size: {sizes['cp_size']}: these recipes divide sequences in another way: type "
            "sp_size instead, as in accelerate_configs/sequence_parallel.yaml"
        )
    if layout.sequence > 1 and layout.kind not in (Kind.DDP, Kind.FSDP2):
        raise UsageError(
            f"sp_size does not combine with {layout.kind}: type --config_file "
            "accelerate_configs/sequence_parallel.yaml, or fsdp2_sequence_parallel.yaml"
        )
    by_fsdp = is_true("ACCELERATE_USE_FSDP")
    if layout.tensor > 1 and (by_fsdp or layout.kind == Kind.DEEPSPEED):
        raise UsageError(
            "parallelism_config has a tp_size: type distributed_type: MULTI_GPU in the config file, as in "
            "accelerate_configs/fsdp2_tensor_parallel.yaml"
        )
    if layout.tensor > 1 and layout.precision == "fp16":
        raise UsageError(
            "fp16 does not work with tensor parallelism: type --mixed_precision bf16 after accelerate launch"
        )
    if layout.tensor == 1 and sizes["dp_shard_size"] > 1 and not by_fsdp:
        raise UsageError(
            "parallelism_config has a dp_shard_size: type distributed_type: FSDP in the config file, as in "
            "accelerate_configs/hsdp.yaml"
        )
    is_divided = sizes["dp_shard_size"] > 1 or (by_fsdp and layout.sequence > 1)  # FSDP2 shards over sp_size, too
    if sizes["dp_replicate_size"] > 1 and not is_divided and (by_fsdp or layout.tensor > 1):
        raise UsageError(
            f"parallelism_config has a dp_replicate_size of {sizes['dp_replicate_size']} and no dp_shard_size, which "
            "Accelerate refuses: type dp_shard_size instead, or --config_file accelerate_configs/ddp.yaml"
        )
    used = {name: size for name, size in sizes.items() if size > 1}
    product = math.prod(used.values())
    if product != world_size():
        factors = " × ".join(f"{name} {size}" for name, size in used.items()) or "no size above 1"
        raise UsageError(
            f"parallelism_config has {factors} = {product} processes, but there are {world_size()}: type "
            f"--num_processes {product}, or change the sizes in the config file"
        )


def check_stages(layout: Layout, config: RunConfig) -> None:
    """A pipeline under a config that divides the model, too, or whose stages do not divide the processes."""
    if layout.kind != Kind.PIPELINE:
        return
    if layout.num_processes % layout.stages:
        raise UsageError(
            f"--pipeline_stages {layout.stages} does not divide {layout.num_processes} processes: type "
            f"--num_processes {layout.stages} after accelerate launch"
        )
    others = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
    if any(map(is_true, others)) or layout.precision == "fp16":
        raise UsageError(
            "--pipeline_stages needs a config without sharding, in float32 or bf16: type --config_file "
            "accelerate_configs/pipeline_parallel.yaml"
        )


def check_deepspeed(layout: Layout, config: RunConfig) -> None:
    """A stage or precision that these recipes do not run under DeepSpeed."""
    if layout.kind != Kind.DEEPSPEED:
        return
    if layout.precision == "fp16":
        bf16 = "--mixed_precision bf16 after accelerate launch"
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":  # DeepSpeed's own file decides, not the flag
            bf16 = "bf16 in place of fp16 in DeepSpeed's own file"
        raise UsageError(
            f"fp16 under DeepSpeed is not supported yet: type {bf16}, or --config_file accelerate_configs/ddp_fp16.yaml"
        )
    if layout.zero_stage not in (1, 2, 3):
        raise UsageError(
            f"zero_stage: {layout.zero_stage} in the config file, or in DeepSpeed's own: type 1, 2 or 3; for stage 0, "
            "use accelerate_configs/ddp.yaml"
        )
    for what, section in (deepspeed_section().get("zero_optimization") or {}).items():
        if isinstance(section, dict) and section.get("device") == "nvme":
            raise UsageError(
                f"{what}_device: nvme, in the config file or in DeepSpeed's own: type cpu; these recipes do not move "
                "weights to a disk"
            )
    for name, owner in (("optimizer", "the recipe's optimizer"), ("scheduler", "--lr_schedule")):
        if name in deepspeed_section():  # DeepSpeed's own scheduler would override our learning rates
            raise UsageError(f"the DeepSpeed config has a section {name}, which {owner} replaces: remove it there")


def check_packages(layout: Layout, config: RunConfig) -> None:
    """Packages and compilers that the config or `--compile` needs."""
    if config.compile:  # inductor compiles C++ for the CPU; Triton compiles C for a GPU
        variable, default = ("CXX", "g++") if layout.device == "cpu" else ("CC", "cc")
        _check_compiler("--compile", os.environ.get(variable, default))
    if layout.kind != Kind.DEEPSPEED:
        return
    for package in ("deepspeed", "transformers"):  # Accelerate's DeepSpeed code reads transformers' version
        if find_spec(package) is None:
            raise UsageError(f"this config needs {package}: type pip install -e '.[deepspeed]'")
    if layout.device != "cpu" and not layout.offloads:
        return
    if shutil.which("ninja") is None:
        raise UsageError("DeepSpeed compiles a part of itself on first use and needs ninja: type pip install ninja")
    _check_compiler("DeepSpeed", os.environ.get("CXX", "c++"))


def _check_compiler(who: str, compiler: str) -> None:
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{who} compiles on first use and needs a C++ compiler (Debian: apt-get install g++): no {compiler} found"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UsageError(
            f"{who} compiles on first use and needs Python's headers (Debian: apt-get install python3-dev): no {header}"
        )


CHECKS = (
    check_launcher,
    check_device,
    check_flags_of_the_loop,
    check_precision,
    check_fsdp,
    check_mesh,
    check_stages,
    check_deepspeed,
    check_packages,
)
