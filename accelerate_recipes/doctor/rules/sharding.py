"""Rules about FSDP's section of a config file, and about parallelism_config."""

from collections.abc import Iterator
from typing import Any

from accelerate_recipes.doctor.config import Config
from accelerate_recipes.doctor.finding import Finding

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# FSDP2 does what these keys asked for, or has nothing of the kind. Source: accelerate to-fsdp2.
LEFTOVERS = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
# {FSDP1's sharding strategy: fsdp_reshard_after_forward of FSDP2}
STRATEGIES = {"FULL_SHARD": "true", "SHARD_GRAD_OP": "false", "HYBRID_SHARD": "true", "HYBRID_SHARD_ZERO2": "false"}


def leftovers(config: Config) -> Iterator[Finding]:
    """Keys of FSDP1 in a file for FSDP2."""
    section = _section(config)
    if str(section.get("fsdp_version")) != "2":
        return
    keys = [key for key in LEFTOVERS if section.get(key) is not None]
    if keys:
        yield Finding(
            f"{', '.join(keys)} in a file for FSDP2",
            "FSDP2 has no such choice: Accelerate ignores them, with or without a warning",
            f"remove {', '.join(keys)}",
        )


def values_of_fsdp1(config: Config) -> Iterator[Finding]:
    """What to shard and to save, in the words of FSDP1, in a file for FSDP2."""
    section = _section(config)
    if str(section.get("fsdp_version")) != "2":
        return
    strategy = section.get("fsdp_sharding_strategy")
    if strategy is not None:
        yield Finding(
            f"fsdp_sharding_strategy is {strategy} in a file for FSDP2",
            "FSDP2 ignores it, and shards as fsdp_reshard_after_forward says",
            f"fsdp_reshard_after_forward: {STRATEGIES.get(str(strategy).upper(), 'true')}; remove "
            f"fsdp_sharding_strategy{_beside(section)}",
        )
    reshard = section.get("fsdp_reshard_after_forward", True)
    if str(reshard).lower() not in ("true", "false", "1", "0", "yes", "no", "y", "n", "t", "f", "on", "off"):
        yield Finding(
            f"fsdp_reshard_after_forward is {reshard}, a value of FSDP1",
            f"Accelerate refuses it: invalid truth value {str(reshard).lower()}",
            f"fsdp_reshard_after_forward: {STRATEGIES.get(str(reshard).upper(), 'true')}{_beside(section)}",
        )
    if str(section.get("fsdp_state_dict_type")).upper() == "LOCAL_STATE_DICT":
        yield Finding(
            "fsdp_state_dict_type is LOCAL_STATE_DICT, a value of FSDP1",
            "Accelerate refuses it under FSDP2",
            "fsdp_state_dict_type: SHARDED_STATE_DICT",
        )


def _beside(section: dict[str, Any]) -> str:
    """What an FSDP1 strategy needs under FSDP2 beside fsdp_reshard_after_forward."""
    strategies = {str(section.get(key)).upper() for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")}
    if strategies & {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}:
        return "; add a parallelism_config as in accelerate_configs/hsdp.yaml"
    return "; NO_SHARD is DDP: accelerate_configs/ddp.yaml" if "NO_SHARD" in strategies else ""


def wrapping(config: Config) -> Iterator[Finding]:
    """What to gather at a time: an unknown policy, or a key that another policy reads."""
    section = _section(config)
    policy = str(section.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    if policy not in POLICIES:
        yield Finding(
            f"fsdp_auto_wrap_policy is {policy}",
            f"Accelerate refuses it; it knows {', '.join(POLICIES)}",
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        )
        return
    readers = {"fsdp_transformer_layer_cls_to_wrap": POLICIES[0], "fsdp_min_num_params": POLICIES[1]}
    for key, reader in readers.items():
        if section.get(key) not in (None, "") and policy != reader:
            given = "missing" if "fsdp_auto_wrap_policy" not in section else policy
            yield Finding(
                f"{key} has no effect, because fsdp_auto_wrap_policy is {given}",
                f"Accelerate reads it under {reader} alone",
                f"fsdp_auto_wrap_policy: {reader}, or remove {key}",
            )


def activation_offload(config: Config) -> Iterator[Finding]:
    """Activations to move to the CPU that were not checkpointed."""
    section = _section(config)
    checkpoints = str(section.get("fsdp_activation_checkpointing", False)).lower()
    if str(section.get("fsdp_activation_checkpointing_offload", False)).lower() == "true" and checkpoints != "true":
        yield Finding(
            "fsdp_activation_checkpointing_offload is true, but fsdp_activation_checkpointing is not",
            "Accelerate refuses it",
            "fsdp_activation_checkpointing: true",
        )


def _section(config: Config) -> dict[str, Any]:
    return config.section("fsdp_config") if config.kind == "FSDP" else {}


RULES = (
    leftovers,
    values_of_fsdp1,
    wrapping,
    activation_offload,
)
