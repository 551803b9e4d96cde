"""Checks of the config file and the launcher, before the processes join."""

import math
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from ..environment import (
    device_type,
    has_gpu,
    is_true,
    launcher_was_given,
    local_world_size,
    num_machines,
    offloads,
    uses_deepspeed,
    world_size,
)
from ..errors import UsageError

SUPPORTED = ("cpu", "cuda", "xpu", "npu")


def check_launch() -> None:
    """Raises UsageError for mistakes that show before the processes join."""
    launched = "LOCAL_RANK" in os.environ
    if not launched and world_size() > 1:
        raise UsageError(
            f"WORLD_SIZE is {world_size()} but LOCAL_RANK is not set, so each process would train alone: "
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
    if device_type() not in SUPPORTED:
        raise UsageError(
            f"this machine's accelerator is {device_type()}, but these recipes support {', '.join(SUPPORTED)}: put "
            "ACCELERATE_USE_CPU=true before the command to rehearse on the CPU"
        )
    if has_gpu():
        check_num_gpus(local_world_size(), torch.accelerator.device_count())
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo.lower() != "no":
        raise UsageError(f"--dynamo_backend {dynamo}: remove it, and type --compile after the recipe")
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation not in ("auto", "1"):
        raise UsageError(
            f"gradient_accumulation_steps: {accumulation} in the config file: remove it; accumulation follows "
            "from --batch_size and --micro_batch_size"
        )
    if is_true("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UsageError("fsdp_version: 1 in the config file: type fsdp_version: 2 there")
    if is_true("ACCELERATE_USE_FSDP") and is_true("FSDP_OFFLOAD_PARAMS") and not has_gpu():
        raise UsageError("fsdp_offload_params: true in the config file needs a GPU: type false there to rehearse")
    if uses_deepspeed():
        _check_deepspeed()
    if is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        _check_parallelism_config()


def _check_parallelism_config() -> None:
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1)) for name in names}
    for name in ("cp_size", "sp_size"):
        if sizes[name] > 1:
            raise UsageError(
                f"parallelism_config: {name}: {sizes[name]}: these recipes do not divide sequences: type 1"
            )
    by_fsdp = is_true("ACCELERATE_USE_FSDP")
    if sizes["tp_size"] > 1 and (by_fsdp or uses_deepspeed()):
        raise UsageError(
            "parallelism_config has a tp_size: type distributed_type: MULTI_GPU in the config file, as in "
            "accelerate_configs/fsdp2_tensor_parallel.yaml"
        )
    if sizes["tp_size"] > 1 and _asks_for_fp16():
        raise UsageError(
            "fp16 does not work with tensor parallelism: type --mixed_precision bf16 after accelerate launch"
        )
    if sizes["tp_size"] == 1 and sizes["dp_shard_size"] > 1 and not by_fsdp:
        raise UsageError(
            "parallelism_config has a dp_shard_size: type distributed_type: FSDP in the config file, as in "
            "accelerate_configs/hsdp.yaml"
        )
    used = {name: size for name, size in sizes.items() if size > 1}
    product = math.prod(used.values())
    if product != world_size():
        factors = " × ".join(f"{name} {size}" for name, size in used.items()) or "no size above 1"
        raise UsageError(
            f"parallelism_config has {factors} = {product} processes, but there are {world_size()}: type "
            f"--num_processes {product}, or change the sizes in the config file"
        )


def check_num_gpus(num_processes: int, num_gpus: int) -> None:
    """Raises UsageError for more processes on a machine than it has GPUs."""
    if num_gpus < num_processes:
        gpus = f"{num_gpus} GPU" + "s" * (num_gpus > 1)
        raise UsageError(
            f"{num_processes} processes but {gpus} on this machine: type --num_processes {num_gpus * num_machines()}, "
            "or put CUDA_VISIBLE_DEVICES= before the command to rehearse on the CPU"
        )


def _asks_for_fp16() -> bool:
    return os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16"


def _check_deepspeed() -> None:
    for package in ("deepspeed", "transformers"):  # Accelerate's DeepSpeed code reads transformers' version
        if find_spec(package) is None:
            raise UsageError(f"this config needs {package}: type pip install -e '.[deepspeed]'")
    if _asks_for_fp16():
        raise UsageError(
            "fp16 under DeepSpeed is not supported yet: type --mixed_precision bf16 after accelerate launch, or "
            "--config_file accelerate_configs/ddp_fp16.yaml"
        )
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise UsageError(
            f"zero_stage: {stage} in the config file: type 1, 2 or 3; for stage 0, use accelerate_configs/ddp.yaml"
        )
    if has_gpu() and not offloads():
        return
    if shutil.which("ninja") is None:
        raise UsageError("DeepSpeed compiles a part of itself on first use and needs ninja: type pip install ninja")
    check_compiler("DeepSpeed", os.environ.get("CXX", "c++"))


def check_compiler(who: str, compiler: str) -> None:
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{who} compiles on first use and needs a C++ compiler (Debian: apt-get install g++): no {compiler} found"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UsageError(
            f"{who} compiles on first use and needs Python's headers (Debian: apt-get install python3-dev): no {header}"
        )
