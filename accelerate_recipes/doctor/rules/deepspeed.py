"""Rules about DeepSpeed's section of a config file, and about a DeepSpeed file that it names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Finding

# Keys that Accelerate refuses beside deepspeed_config_file.
OF_THE_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
BY_FLAG = "accumulation follows from --batch_size and --micro_batch_size"


def stage(config: Config) -> Iterator[Finding]:
    """A stage that the recipes do not run."""
    section = _section(config)
    given = section.get("zero_stage", 2)
    if section and str(given) not in ("1", "2", "3"):
        yield Finding(
            f"zero_stage is {given}",
            "the recipes refuse it: only the stages 1 to 3 shard anything",
            "zero_stage: 1, 2 or 3; for stage 0, --config_file accelerate_configs/ddp.yaml",
        )


def accumulation(config: Config) -> Iterator[Finding]:
    """An accumulation in the file, which belongs to the command line."""
    given = _section(config).get("gradient_accumulation_steps", "auto")
    if str(given) not in ("auto", "1"):
        yield Finding(
            f"gradient_accumulation_steps is {given}",
            f"the recipes refuse it: {BY_FLAG}",
            "remove it, and type --micro_batch_size after the recipe: --batch_size divided by num_processes and by "
            f"{given}",
        )


def offload(config: Config) -> Iterator[Finding]:
    """Offloading of weights at a stage at which each process holds all weights."""
    section = _section(config)
    device = section.get("offload_param_device", "none")
    if str(device) != "none" and str(section.get("zero_stage", 2)) in ("1", "2"):
        yield Finding(
            f"offload_param_device is {device}, with zero_stage: {section.get('zero_stage', 2)}",
            "DeepSpeed moves weights at stage 3 alone: they stay on the GPU, and may not fit",
            "zero_stage: 3, or offload_param_device: none",
        )


def fp16(config: Config) -> Iterator[Finding]:
    """fp16, which the recipes do not support under DeepSpeed."""
    if config.kind == "DEEPSPEED" and config.precision == "fp16":
        yield Finding(
            "mixed_precision is fp16 under DeepSpeed",
            "the recipes refuse it: it is not supported yet",
            "mixed_precision: bf16, or --config_file accelerate_configs/ddp_fp16.yaml",
        )


def launcher(config: Config) -> Iterator[Finding]:
    """Several machines, started by DeepSpeed's launcher and not by torchrun."""
    given = _section(config).get("deepspeed_multinode_launcher", "pdsh")
    if config.kind != "DEEPSPEED" or config.num_machines == 1 or given == "standard":
        return
    yield Finding(
        f"deepspeed_multinode_launcher is {given}, with num_machines: {config.num_machines}",
        "DeepSpeed's launcher takes the machines from its hostfile alone: without one, it trains on this machine, and "
        "says so in one warning. It also writes the variables of your shell to .deepspeed_env",
        "deepspeed_multinode_launcher: standard, and accelerate launch on each machine, as in "
        "accelerate_configs/multi_node_deepspeed_zero3.yaml",
    )


def beside_the_file(config: Config) -> Iterator[Finding]:
    """Keys that belong into the DeepSpeed file that the section names."""
    section = _section(config)
    keys = [key for key in OF_THE_FILE if key in section]
    keys += ["mixed_precision"] if config.values.get("mixed_precision") is not None else []
    if named_file(config) and keys:
        yield Finding(
            f"{', '.join(keys)} and deepspeed_config_file are set",
            "Accelerate refuses them together: the file has these values",
            f"remove {', '.join(keys)} here, and set them in {section['deepspeed_config_file']}",
        )


def file(config: Config) -> Iterator[Finding]:
    """A DeepSpeed file that is missing or unreadable, or that sets what the recipes set."""
    path = named_file(config)
    if path is None:
        return
    values = content(config)
    if values is None:
        yield Finding(
            f"deepspeed_config_file is {path}, which is {'no JSON object' if path.is_file() else 'missing'}",
            "the run ends when DeepSpeed reads it; a relative path starts at the folder of the command",
            "deepspeed_config_file: the path of a JSON file, or zero_stage: 2 without a file",
        )
        return
    for name, owner in (("optimizer", "the recipe's optimizer"), ("scheduler", "--lr_schedule")):
        if name in values:
            yield Finding(
                f"{path} has a section {name}",
                f"the recipes refuse it: {owner} replaces it",
                f"remove {name} from {path}",
            )
    optimization = values.get("zero_optimization")
    if not isinstance(optimization, dict) or optimization.get("stage") not in (1, 2, 3):
        yield Finding(
            f"{path} has no zero_optimization with a stage of 1, 2 or 3",
            "the recipes refuse it: only these stages shard anything",
            f'"zero_optimization": {{"stage": 2}} in {path}',
        )


def named_file(config: Config) -> Path | None:
    """The DeepSpeed file that the section names; None if it names none."""
    name = _section(config).get("deepspeed_config_file")
    return None if name in (None, "", "none") else Path(str(name))


def content(config: Config) -> dict[str, Any] | None:
    """What the named DeepSpeed file holds; None if there is no file or no JSON object in it."""
    path = named_file(config)
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _section(config: Config) -> dict[str, Any]:
    return config.section("deepspeed_config") if config.kind == "DEEPSPEED" else {}


RULES = (stage, accumulation, offload, fp16, launcher, beside_the_file, file)
