"""Rules about FSDP's section of a config file, and about parallelism_config."""

import math
from collections.abc import Iterator
from typing import Any

from accelerate_recipes.doctor.config import SIZES, Config, is_count
from accelerate_recipes.doctor.finding import Finding

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# FSDP2 does what these keys asked for, or has nothing of the kind. Source: accelerate to-fsdp2.
LEFTOVERS = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
# {FSDP1's sharding strategy: fsdp_reshard_after_forward of FSDP2}
STRATEGIES = {"FULL_SHARD": "true", "SHARD_GRAD_OP": "false", "HYBRID_SHARD": "true", "HYBRID_SHARD_ZERO2": "false"}


def fsdp_version(config: Config) -> Iterator[Finding]:
    """FSDP1, which the recipes refuse; it is Accelerate's default."""
    given = _section(config).get("fsdp_version", 1)
    if config.kind == "FSDP" and str(given) != "2":
        missing = "fsdp_version" not in _section(config)
        yield Finding(
            "fsdp_version is missing" if missing else f"fsdp_version is {given}",
            "the recipes refuse FSDP1" + (", which is Accelerate's default" if missing else ""),
            f"accelerate to-fsdp2 --config_file {config.path} --output_file fsdp2.yaml" + _beside(_section(config)),
        )


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


def sizes(config: Config) -> Iterator[Finding]:
    """Sizes that are no numbers, or do not multiply to the number of processes."""
    section = config.section("parallelism_config")
    if not section or not config.starts_several:
        return
    wrong = [name for name in SIZES if not is_count(section.get(f"parallelism_config_{name}", 1))]
    for name in wrong:
        yield Finding(
            f"parallelism_config_{name} is {section[f'parallelism_config_{name}']!r}",
            "Accelerate needs a whole number above 0",
            f"parallelism_config_{name}: 1",
        )
    used = {name: size for name, size in config.sizes.items() if size > 1}
    product = math.prod(used.values())
    if not wrong and config.num_processes not in (None, product):
        factors = " × ".join(f"{name} {size}" for name, size in used.items()) or "no size above 1"
        yield Finding(
            f"parallelism_config has {factors} = {product} processes, but num_processes is {config.num_processes}",
            "the recipes refuse it: each process needs a place in the mesh",
            f"num_processes: {product}, or change the sizes",
        )


def divided_sequences(config: Config) -> Iterator[Finding]:
    """Context or sequence parallelism, which the recipes do not have."""
    for name in ("cp_size", "sp_size"):
        if config.sizes[name] > 1:
            yield Finding(
                f"parallelism_config_{name} is {config.sizes[name]}",
                "the recipes refuse it: they do not divide sequences",
                f"parallelism_config_{name}: 1",
            )


def tensor_parallelism(config: Config) -> Iterator[Finding]:
    """Tensor parallelism with a distributed_type, a precision or replicas that do not go with it."""
    if config.sizes["tp_size"] == 1:
        return
    what = f"parallelism_config_tp_size is {config.sizes['tp_size']}"
    if config.kind in ("FSDP", "DEEPSPEED"):
        yield Finding(
            f"{what}, with distributed_type: {config.kind}",
            "the recipes refuse it: they divide and shard the layers themselves, because Accelerate 1.15 needs a class "
            "for it that transformers 5 no longer has",
            "distributed_type: MULTI_GPU, as in accelerate_configs/fsdp2_tensor_parallel.yaml",
        )
    if config.precision == "fp16":
        yield Finding(
            f"{what}, with mixed_precision: fp16",
            "the recipes refuse it: fp16 does not work with tensor parallelism",
            "mixed_precision: bf16",
        )
    if config.sizes["dp_replicate_size"] > 1 and config.sizes["dp_shard_size"] == 1:
        yield Finding(
            f"{what}, with a dp_replicate_size and no dp_shard_size",
            "Accelerate refuses tensor parallelism inside plain data parallelism",
            f"parallelism_config_dp_shard_size: {config.sizes['dp_replicate_size']}, and "
            "parallelism_config_dp_replicate_size: 1",
        )


def data_parallelism(config: Config) -> Iterator[Finding]:
    """Sharding without FSDP, or FSDP without sharding."""
    found = config.sizes
    if found["dp_shard_size"] > 1 and found["tp_size"] == 1 and config.kind != "FSDP" and config.starts_several:
        yield Finding(
            f"parallelism_config_dp_shard_size is {found['dp_shard_size']}, with distributed_type: {config.kind}",
            "the recipes refuse it: FSDP shards, and this is another distributed_type",
            "distributed_type: FSDP, as in accelerate_configs/hsdp.yaml",
        )
    if config.kind == "FSDP" and found["dp_replicate_size"] > 1 and found["dp_shard_size"] == 1:
        yield Finding(
            f"parallelism_config_dp_replicate_size is {found['dp_replicate_size']}, and dp_shard_size is 1",
            "Accelerate refuses it: FSDP has nothing to shard across",
            "--config_file accelerate_configs/ddp.yaml, or a parallelism_config_dp_shard_size above 1",
        )


def _section(config: Config) -> dict[str, Any]:
    return config.section("fsdp_config") if config.kind == "FSDP" else {}


RULES = (
    fsdp_version,
    leftovers,
    values_of_fsdp1,
    wrapping,
    activation_offload,
    sizes,
    divided_sequences,
    tensor_parallelism,
    data_parallelism,
)
