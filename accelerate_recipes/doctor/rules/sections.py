"""Rules about the sections of a config file for sharding: FSDP's, and DeepSpeed's with its own file."""

from collections.abc import Iterator
from typing import Any

from accelerate_recipes.common.errors import Edit
from accelerate_recipes.common.parallel.sharding import BY_CLASSES, without_effect
from accelerate_recipes.doctor.config_file import Config
from accelerate_recipes.doctor.finding import Finding, as_yaml

TRUTH = ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f", "on", "off")  # words that Accelerate reads
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# FSDP2 does what these keys asked for, or has no such option. Source: accelerate to-fsdp2.
LEFTOVERS = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
# FSDP1's sharding strategies; old files count them from 1. FSDP2 has fsdp_reshard_after_forward in their place.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
KEEP_WHOLE = ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2")  # after the forward pass
# Keys that Accelerate refuses together with deepspeed_config_file.
OF_THE_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)


def leftovers(config: Config) -> Iterator[Finding]:
    """Keys of FSDP1 in a file for FSDP2."""
    if keys := [key for key in LEFTOVERS if _section_of_fsdp2(config).get(key) is not None]:
        yield Finding(
            f"{', '.join(keys)} in a file for FSDP2",
            "FSDP2 has no such settings: Accelerate ignores them, sometimes without a warning",
            *(Edit(key, None, "fsdp_config") for key in keys),
        )


def values_of_fsdp1(config: Config) -> Iterator[Finding]:
    """FSDP1's values for what to shard and save, in a file for FSDP2."""
    section = _section_of_fsdp2(config)
    strategy, reshard = (section.get(f"fsdp_{key}") for key in ("sharding_strategy", "reshard_after_forward"))
    if strategy is not None:
        yield Finding(
            f"fsdp_sharding_strategy is {strategy} in a file for FSDP2",
            "FSDP2 ignores it, and shards as fsdp_reshard_after_forward says",
            *([_reshard(strategy)] if reshard is None else []),
            Edit("fsdp_sharding_strategy", None, "fsdp_config"),
            _beside(strategy),
        )
    if reshard is not None and str(reshard).lower() not in TRUTH:
        yield Finding(
            f"fsdp_reshard_after_forward is {reshard}, a value of FSDP1",
            f"Accelerate refuses it: invalid truth value {str(reshard).lower()}",
            _reshard(reshard),
            _beside(reshard),
        )
    if str(section.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        yield Finding(
            "fsdp_state_dict_type is LOCAL_STATE_DICT, a value of FSDP1",
            "Accelerate refuses it under FSDP2",
            Edit("fsdp_state_dict_type", "SHARDED_STATE_DICT", "fsdp_config"),
        )


def _reshard(strategy: Any) -> Edit:
    return Edit("fsdp_reshard_after_forward", _name(strategy) not in KEEP_WHOLE, "fsdp_config")


def _beside(strategy: Any) -> str:
    """Advice for an FSDP1 strategy under FSDP2, besides fsdp_reshard_after_forward."""
    if "HYBRID" in _name(strategy):
        return "add a parallelism_config as in accelerate_configs/hsdp.yaml: otherwise all processes share one copy"
    return "NO_SHARD is DDP: accelerate_configs/ddp.yaml; this file shards" if _name(strategy) == "NO_SHARD" else ""


def _name(strategy: Any) -> str:
    """A sharding strategy by its name."""
    text = str(strategy).upper()
    return STRATEGIES[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text


def wrapping(config: Config) -> Iterator[Finding]:
    """The wrapping of layers: an unknown policy, or a key that nothing reads."""
    section = config.section("fsdp_config", "FSDP")
    if (policy := str(section.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()) not in POLICIES:
        yield Finding(
            f"fsdp_auto_wrap_policy is {policy}",
            f"Accelerate refuses it; it knows {', '.join(POLICIES)}",
            Edit("fsdp_auto_wrap_policy", POLICIES[0], "fsdp_config"),
        )
    for key in without_effect(section.get("fsdp_auto_wrap_policy"), section.get("fsdp_min_num_params")):
        yield Finding(f"{key} has no effect", BY_CLASSES, Edit(key, None, "fsdp_config"))


def activation_offload(config: Config) -> Iterator[Finding]:
    """Activations that FSDP should offload to the CPU, without activation checkpointing."""
    section = config.section("fsdp_config", "FSDP")
    checkpoints = str(section.get("fsdp_activation_checkpointing", False)).lower()
    if str(section.get("fsdp_activation_checkpointing_offload", False)).lower() == "true" and checkpoints != "true":
        yield Finding(
            "fsdp_activation_checkpointing_offload is true, but fsdp_activation_checkpointing is not",
            "Accelerate refuses it",
            Edit("fsdp_activation_checkpointing", True, "fsdp_config"),
        )


def _section_of_fsdp2(config: Config) -> dict[str, Any]:
    section = config.section("fsdp_config", "FSDP")
    return section if str(section.get("fsdp_version")) == "2" else {}


def offload(config: Config) -> Iterator[Finding]:
    """Offloading of weights under a ZeRO stage in which each process holds all weights."""
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
        "DeepSpeed's launcher reads the machines only from its hostfile: without one, it prints a warning and trains "
        "on this machine alone. It also writes the variables of your shell to .deepspeed_env",
        Edit("deepspeed_multinode_launcher", "standard", "deepspeed_config"),
        "accelerate launch on each machine, as in accelerate_configs/multi_node_deepspeed_zero3.yaml",
    )


def beside_the_file(config: Config) -> Iterator[Finding]:
    """Keys that belong in the DeepSpeed file that the section names."""
    section = config.section("deepspeed_config", "DEEPSPEED")
    file = section.get("deepspeed_config_file")
    given = {key: section[key] for key in OF_THE_FILE if key in section}
    given |= {key: config.values[key] for key in ("mixed_precision", "fp16") if config.values.get(key)}
    if file not in (None, "", "none") and given:
        yield Finding(
            f"{', '.join(given)} and deepspeed_config_file are set",
            "Accelerate refuses them together: the file has these values",
            *(Edit(key, None, "deepspeed_config" if key in section else "") for key in given),
            f"check that {file} has {as_yaml(given)[1:-1]}: otherwise the run has different values",
        )


RULES = (leftovers, values_of_fsdp1, wrapping, activation_offload, offload, launcher, beside_the_file)
