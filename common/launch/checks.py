"""Refuses launches that cannot work: checks of the config file and the launcher, before the processes join."""

import math

import torch

from ..config import RunConfig
from ..environment import Environment, check_compiler, launcher_was_given
from ..errors import Edit, UsageError, first_line
from ..layout import Layout
from ..parallel.strategies import strategies_of
from ..parallel.strategy import LaunchCheck

SUPPORTED = ("cpu", "cuda", "xpu", "npu")


def check_launcher(layout: Layout, config: RunConfig) -> None:
    """Refuses processes that would train alone, or wait forever, because of variables that another launch left."""
    environment = layout.environment
    launched = environment.local_rank is not None
    has_place = environment.main_address and environment.main_port
    kinds = [f"ACCELERATE_USE_{kind}" for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")]
    of_all = f"{environment.rank} of {environment.world_size} processes"
    left = [
        ("WORLD_SIZE", environment.world_size == 0, "0"),
        ("RANK", environment.rank >= environment.world_size, of_all),
        ("LOCAL_RANK", launched and not has_place, f"{environment.local_rank} without MASTER_ADDR or MASTER_PORT"),
        *((kind, not launched and environment.is_true(kind), "true without a launcher") for kind in kinds),
    ]
    for name, is_wrong, what in left:
        if is_wrong:
            what = f"{name} is {what}, left over from another launch"
            raise UsageError(what, f"unset {name}", beside="or start with accelerate launch")
    if not launched and layout.num_processes > 1:
        raise UsageError(
            f"WORLD_SIZE is {layout.num_processes} but LOCAL_RANK is not set, so each process would train alone",
            "start with accelerate launch or torchrun, or unset WORLD_SIZE",
        )
    if not launched and environment.was_launched and environment.main_port and not launcher_was_given("MASTER_PORT"):
        # Accelerate's launcher sets MASTER_PORT only if the user asked for more than one process.
        raise UsageError(
            "accelerate launch was asked for several processes but starts one under this config (its distributed_type "
            "is NO or MULTI_CPU)",
            "use --config_file accelerate_configs/ddp.yaml, or --num_processes 1",
        )


def check_device(layout: Layout, config: RunConfig) -> None:
    """Refuses an accelerator that these recipes do not support, or fewer GPUs than processes."""
    if asked := layout.environment.torch_device:
        try:
            torch.empty(0, device=asked)
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch without this kind of device
            raise UsageError(f"ACCELERATE_TORCH_DEVICE is {asked}: {first_line(error)}", "unset it") from None
    if layout.device not in SUPPORTED:
        raise UsageError(
            f"this machine's accelerator is {layout.device}, but these recipes support {', '.join(SUPPORTED)}",
            "put ACCELERATE_USE_CPU=true before the command to rehearse on the CPU",
        )
    if layout.device != "cpu":
        check_num_gpus(layout.environment, torch.accelerator.device_count())


def check_num_gpus(environment: Environment, num_gpus: int) -> None:
    """Raises UsageError for more processes on a machine than it has GPUs."""
    if num_gpus < environment.local_world_size:
        gpus, all_gpus = f"{num_gpus} GPU" + "s" * (num_gpus > 1), num_gpus * environment.num_machines
        raise UsageError(
            f"{environment.local_world_size} processes but {gpus} on this machine",
            f"use --num_processes {all_gpus}, or put CUDA_VISIBLE_DEVICES= before the command to rehearse on the CPU",
        )


def check_flags_of_the_loop(layout: Layout, config: RunConfig) -> None:
    """Refuses settings in the config file that belong on the recipe's command line."""
    dynamo, accumulation = layout.environment.dynamo_backend, layout.environment.gradient_accumulation
    if dynamo.lower() != "no":
        edits = [Edit("dynamo_backend", section="dynamo_config"), Edit("dynamo_backend")]  # the latter in old files
        raise UsageError(f"--dynamo_backend {dynamo}", "remove it", edits, "and use --compile after the recipe")
    if accumulation not in ("auto", "1"):
        raise UsageError(
            f"gradient_accumulation_steps: {accumulation} in the config file",
            "remove it",
            [Edit("gradient_accumulation_steps", section="deepspeed_config")],
            "accumulation follows from --batch_size and --micro_batch_size",
        )


def check_precision(layout: Layout, config: RunConfig) -> None:
    """Refuses precisions that are not tested, alone or under a strategy."""
    if layout.precision not in ("float32", "bf16", "fp16"):
        what = f"mixed_precision: {layout.precision} is not supported"
        raise UsageError(what, "use mixed_precision: bf16 there", [Edit("mixed_precision", "bf16")])
    bf16, edits = "--mixed_precision bf16 after accelerate launch", [Edit("mixed_precision", "bf16")]
    if layout.environment.mixed_precision == "no":  # DeepSpeed's own file decides, not the flag
        bf16, edits = "bf16 in place of fp16 in DeepSpeed's own file", []
    for strategy in strategies_of(layout):
        if layout.precision == "fp16" and not strategy.takes_fp16:
            what = f"{strategy.name} does not work with fp16"
            raise UsageError(what, f"use {bf16}", edits, "or --config_file accelerate_configs/ddp_fp16.yaml")


def check_mesh(layout: Layout, config: RunConfig) -> None:
    """Refuses sizes of parallelism_config that are not supported, or whose product is not the number of processes."""
    if not (environment := layout.environment).uses("parallelism_config"):
        return
    sizes = {f"{name}_size": environment.mesh_size(name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    if sizes["cp_size"] > 1:
        raise UsageError(
            f"parallelism_config: cp_size: {sizes['cp_size']}: these recipes divide sequences differently",
            "use sp_size instead",
            _other_size("sp_size", "cp_size", sizes),
            "as in accelerate_configs/sequence_parallel.yaml",
        )
    by_fsdp = environment.uses("fsdp")
    if layout.tp * layout.pp == 1 and sizes["dp_shard_size"] > 1 and not by_fsdp:
        raise UsageError(
            "parallelism_config has a dp_shard_size",
            "use distributed_type: FSDP in the config file",
            [Edit("distributed_type", "FSDP")],
            "as in accelerate_configs/hsdp.yaml",
        )
    # FSDP2 shards over sp_size, too, and joins tensor parallelism there.
    is_divided = sizes["dp_shard_size"] > 1 or (layout.sp > 1 and (by_fsdp or layout.tp > 1))
    if sizes["dp_replicate_size"] > 1 and not is_divided and (by_fsdp or layout.tp > 1):
        raise UsageError(
            f"parallelism_config has a dp_replicate_size of {sizes['dp_replicate_size']} and no dp_shard_size, which "
            "Accelerate refuses",
            "use dp_shard_size instead",
            _other_size("dp_shard_size", "dp_replicate_size", sizes),
            "or --config_file accelerate_configs/ddp.yaml",
        )
    used = {name: size for name, size in (*sizes.items(), ("--pipeline_stages", layout.pp)) if size > 1}
    product = math.prod(used.values())
    stages, rest = divmod(layout.num_processes, product)
    if product != layout.num_processes:
        factors = " × ".join(f"{name} {size}" for name, size in used.items()) or "no size above 1"
        raise UsageError(
            f"parallelism_config has {factors} = {product} processes, but there are {layout.num_processes}",
            f"use --num_processes {product}, or change the sizes in the config file",
            beside=f"or add --pipeline_stages {stages} after the recipe"
            * (layout.pp == 1 and rest == 0 and stages > 1),
        )


def _other_size(right: str, wrong: str, sizes: dict[str, int]) -> list[Edit]:
    """One size of parallelism_config in place of another."""
    section = "parallelism_config"
    return [Edit(f"{section}_{right}", sizes[wrong], section), Edit(f"{section}_{wrong}", section=section)]


def check_compiler_of_torch(layout: Layout, config: RunConfig) -> None:
    """Looks for the compiler that `--compile` needs: inductor compiles C++ for the CPU, Triton C for a GPU."""
    if config.compile:
        variable, default = ("CXX", "g++") if layout.device == "cpu" else ("CC", "cc")
        check_compiler("--compile", variable, default)


def launch_checks(layout: Layout) -> list[LaunchCheck]:
    """The refusals of a launch. A run raises the first; `accelerate-recipes doctor` lists all."""
    # Strategies that join another one come first: their refusals name it.
    strategies = sorted(strategies_of(layout), key=lambda strategy: strategy.wraps)
    return [
        check_launcher,
        check_device,
        check_flags_of_the_loop,
        check_precision,
        *(check for strategy in strategies for check in strategy.launch_checks),
        check_mesh,
        check_compiler_of_torch,
    ]
