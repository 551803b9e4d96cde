"""Rules about DeepSpeed's section of a config and about a DeepSpeed file that it names."""

from collections.abc import Iterator

from accelerate_recipes.common.errors import Edit
from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Finding, as_yaml

# Keys that Accelerate refuses beside deepspeed_config_file.
OF_THE_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)


def offload(config: Config) -> Iterator[Finding]:
    """Offloading of weights at a stage at which each process holds all weights."""
    section = config.section("deepspeed_config", "DEEPSPEED")
    device = section.get("offload_param_device", "none")
    if str(device) != "none" and str(section.get("zero_stage", 2)) in ("1", "2"):
        yield Finding(
            f"offload_param_device is {device}, with zero_stage: {section.get('zero_stage', 2)}",
            "DeepSpeed moves weights only at stage 3: they stay on the GPU, and may not fit",
            Edit("offload_param_device", "none", "deepspeed_config"),
            "or zero_stage: 3, which moves them",
        )


def launcher(config: Config) -> Iterator[Finding]:
    """Several machines, started by DeepSpeed's launcher and not by torchrun."""
    given = config.section("deepspeed_config").get("deepspeed_multinode_launcher", "pdsh")
    if config.kind != "DEEPSPEED" or config.num_machines == 1 or given == "standard":
        return
    yield Finding(
        f"deepspeed_multinode_launcher is {given}, with num_machines: {config.num_machines}",
        "DeepSpeed's launcher takes the machines only from its hostfile: without one, it trains on this machine, and "
        "says so in one warning. It also writes the variables of your shell to .deepspeed_env",
        Edit("deepspeed_multinode_launcher", "standard", "deepspeed_config"),
        "accelerate launch on each machine, as in accelerate_configs/multi_node_deepspeed_zero3.yaml",
    )


def beside_the_file(config: Config) -> Iterator[Finding]:
    """Keys that belong into the DeepSpeed file that the section names."""
    section = config.section("deepspeed_config", "DEEPSPEED")
    file = section.get("deepspeed_config_file")
    given = {key: section[key] for key in OF_THE_FILE if key in section}
    given |= {key: config.values[key] for key in ("mixed_precision", "fp16") if config.values.get(key)}
    if file not in (None, "", "none") and given:
        yield Finding(
            f"{', '.join(given)} and deepspeed_config_file are set",
            "Accelerate refuses them together: the file has these values",
            *(Edit(key, None, "deepspeed_config" if key in section else "") for key in given),
            f"look whether {file} says {as_yaml(given)[1:-1]}: else the run has other values",
        )


RULES = (offload, launcher, beside_the_file)
