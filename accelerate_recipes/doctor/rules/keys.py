"""Rules about the keys of a config file: unknown ones, and those that have no effect.

`accelerate launch` refuses unknown keys at the top of a file, but ignores those of a section. For some keys it takes
the value of its own flag, even if nobody typed that flag. tests/unit/test_doctor.py compares the lists with Accelerate.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from accelerate_recipes.common.errors import Edit
from accelerate_recipes.doctor.config import DISTRIBUTED_TYPES, ONE_PROCESS, PREFIXES, Config, is_true
from accelerate_recipes.doctor.finding import Finding, as_yaml, words

OF_TPUS = {
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env"),
    *("downcast_bf16", "main_training_function"),
}
# Accelerate takes a key of a section without a prefix for the flag of that name, so these work there, too.
FLAGS = {
    *("mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank", "num_machines", "gpu_ids"),
    *("main_process_ip", "main_process_port", "rdzv_backend", "same_network", "enable_cpu_affinity"),
}
_NAMES = {
    ("deepspeed_config", ""): "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
    "offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag "
    "zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter "
    "deepspeed_multinode_launcher deepspeed_moe_layer_cls_names",
    ("fsdp_config", "fsdp_"): "version offload_params min_num_params sharding_strategy reshard_after_forward "
    "auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params "
    "cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload "
    "ignored_modules",
    ("parallelism_config", "parallelism_config_"): "dp_replicate_size dp_shard_size tp_size cp_size cp_backend "
    "cp_comm_strategy sp_size sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    ("megatron_lm_config", "megatron_lm_"): "tp_degree use_custom_fsdp no_load_optim eod_mask_loss pp_degree "
    "overlap_cpu_optimizer_d2h_h2d no_save_optim optimizer_cpu_offload use_precision_aware_optimizer "
    "decoder_last_pipeline_num_layers num_micro_batches sequence_parallelism recompute_activations "
    "use_distributed_optimizer gradient_clipping recompute_granularity recompute_method recompute_num_layers "
    "attention_backend expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout "
    "attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings",
    ("dynamo_config", "dynamo_"): "backend mode use_fullgraph use_dynamic use_regional_compilation",
    ("fp8_config", "fp8_"): "backend use_autocast_during_eval margin interval format amax_history_len "
    "amax_compute_algo override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim",
    ("mpirun_config", ""): "mpirun_hostfile",
}
SECTIONS = {section: {f"{prefix}{name}" for name in _NAMES[section, prefix].split()} for section, prefix in _NAMES}
# Accelerate converts the last two, of old files.
TOP = OF_TPUS | FLAGS | SECTIONS.keys() | {"compute_environment", "distributed_type", "fp16", "dynamo_backend"}
# {section: the key, and the values of it with which Accelerate reads the section}
READERS = {
    "deepspeed_config": ("distributed_type", ("DEEPSPEED",)),
    "fsdp_config": ("distributed_type", ("FSDP",)),
    "megatron_lm_config": ("distributed_type", ("MEGATRON_LM",)),
    "mpirun_config": ("distributed_type", ONE_PROCESS),
    "fp8_config": ("mixed_precision", ("fp8",)),
}
# {key: value of the flag of accelerate launch if nobody types it}
OF_THE_COMMAND_LINE = {"rdzv_backend": "static", "enable_cpu_affinity": False}
OFFLOADS = ("offload_optimizer", "offload_param")  # sections of zero_optimization in DeepSpeed's file
# {key of DeepSpeed's file, or a flag, if it is true: what a config file has for it}
MEANT = {
    "bf16": Edit("mixed_precision", "bf16"),
    "fp16": Edit("mixed_precision", "fp16"),
    "use_fsdp": Edit("distributed_type", "FSDP"),
    "use_deepspeed": Edit("distributed_type", "DEEPSPEED"),
}


def name_in(section: str, word: str) -> str | None:
    """The key of a section that a word names, with or without its prefix."""
    names = (word, f"{section.removesuffix('config')}{word}", f"{section}_{word}")
    return next((name for name in names if name in SECTIONS[section]), None)


def unknown_keys(config: Config) -> Iterator[Finding]:
    """A key at the top of the file that Accelerate does not know."""
    for key in config.values:
        if key not in TOP and config.is_local:
            yield Finding(
                f"{key} is not a key of a config file of Accelerate",
                "accelerate launch refuses the file: it had unknown keys",
                *_instead(config, str(key)),
            )


def unknown_section_keys(config: Config) -> Iterator[Finding]:
    """A key of a section that Accelerate does not know."""
    for section, known in SECTIONS.items():
        given = config.values.get(section)
        if given is not None and not isinstance(given, dict):
            yield Finding(
                f"{section} is {as_yaml(given)}, not a section with keys",
                "accelerate launch ignores it",
                Edit(section),
                f"or type the keys below {section}:, each on a line of its own after two spaces",
            )
        for key in config.section(section):
            if key not in known and (key not in FLAGS or section in PREFIXES):
                yield Finding(
                    f"{section} has {key}, which Accelerate does not know",
                    "accelerate launch ignores it without a message: the run has the default",
                    *_instead(config, key, section),
                )


def ignored_sections(config: Config) -> Iterator[Finding]:
    """A section that this distributed_type or mixed_precision does not read."""
    given = {"distributed_type": config.kind, "mixed_precision": config.precision}
    has_tp = config.section("parallelism_config").get("parallelism_config_tp_size", 1) != 1
    kinds = () if has_tp else ("DEEPSPEED", "FSDP")  # of these recipes, which have tensor parallelism under MULTI_GPU
    for section, (key, readers) in READERS.items():
        if config.section(section) and given[key] not in readers and config.kind in DISTRIBUTED_TYPES:
            yield Finding(
                f"{section} has no effect, because {key} is {given[key]}",
                f"Accelerate reads this section under {key}: {' or '.join(readers)} alone",
                Edit(section),
                f"or {key}: {readers[0]}, if the run should be of this kind" * (readers[0] in kinds),
            )
    if config.section("parallelism_config") and config.kind in ONE_PROCESS:
        yield Finding(
            f"parallelism_config has no effect, because distributed_type is {config.kind}",
            "Accelerate starts one process and does not hand the sizes on",
            "distributed_type: MULTI_GPU for a tp_size, distributed_type: FSDP for a dp_shard_size",
        )


def flags_of_the_command_line(config: Config) -> Iterator[Finding]:
    """A key whose value Accelerate 1.15 takes from its command line, even if the flag is not typed there."""
    for key, default in OF_THE_COMMAND_LINE.items():
        value = config.values.get(key, default)
        if value is not None and value != default:
            yield Finding(
                f"{key}: {as_yaml(value)} in the file has no effect",
                "accelerate launch takes it from its command line alone; without the flag it is " + as_yaml(default),
                Edit(key, default),
                f"--{key}{'' if value is True else f' {value}'} after accelerate launch",
            )


def cpu_alone(config: Config) -> Iterator[Finding]:
    """use_cpu under a distributed_type for which Accelerate does not hand it on."""
    if is_true(config.values.get("use_cpu")) and config.starts_several:
        yield Finding(
            f"use_cpu: true has no effect, because distributed_type is {config.kind}",
            "accelerate launch hands it on under NO and MULTI_CPU alone: this run uses the machine's GPUs",
            Edit("use_cpu", False),
            "to stay on the CPU, put ACCELERATE_USE_CPU=true before the command",
        )


def one_machine(config: Config) -> Iterator[Finding]:
    """Keys of a run on several machines, with num_machines: 1."""
    keys = [key for key in ("main_process_ip", "machine_rank") if config.values.get(key)]
    if keys and config.values.get("num_machines", 1) == 1 and config.starts_several:
        yield Finding(
            f"{_have(keys)} no effect, because num_machines is 1",
            "each machine would train alone",
            *map(Edit, keys),
            "or num_machines: 2 or more",
        )


def _have(keys: list[str]) -> str:
    return f"{', '.join(keys)} {'have' if len(keys) > 1 else 'has'}"


def _instead(config: Config, key: str, section: str = "") -> Iterator[Edit | str]:
    """What to type instead of an unknown key: where it belongs, the nearest one, or nothing."""
    value = config.section(section).get(key)
    for edit in _meant(key, value, section):
        there = config.section(edit.section).get(edit.key)
        if there is None:
            yield edit
        elif there != edit.value:
            yield f"or {next(words([edit]))}, in place of {as_yaml(there)}"
    yield Edit(key, None, section)


def _meant(key: str, value: Any, section: str) -> list[Edit]:
    """The keys of Accelerate for an unknown one, which is in a section or at the top."""
    inside = value if isinstance(value, dict) else {}
    if key == "zero_optimization":
        offloads = {name: part.get("device") for name, part in inside.items() if isinstance(part, dict)}
        meant = {"zero_stage": inside.get("stage")} | {f"{name}_device": offloads.get(name) for name in OFFLOADS}
        return [Edit(name, found, "deepspeed_config") for name, found in meant.items() if found is not None]
    if key in MEANT:
        return [MEANT[key]] if is_true(inside.get("enabled", value)) else []
    for place in sorted(SECTIONS, key=lambda name: name != section):
        if name := name_in(place, key):
            return [Edit(name, value, place)]
    known = TOP if key in TOP or not section else SECTIONS[section]
    same_kind = [name for name in sorted(known) if name.endswith("_config") == isinstance(value, dict)]
    near = difflib.get_close_matches(key, same_kind, n=1, cutoff=0.8)  # ipex_config is no slip for fp8_config
    return [Edit(name, value, "" if known is TOP else section) for name in near]


RULES = (*(unknown_keys, unknown_section_keys, ignored_sections, flags_of_the_command_line, cpu_alone, one_machine),)
