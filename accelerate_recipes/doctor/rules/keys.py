"""Rules about the keys of a config file: unknown ones, and those that have no effect.

`accelerate launch` refuses unknown keys at the top of a file, but ignores those of a section. For some keys it takes
the value of its own flag, even if nobody typed that flag. tests/unit/test_doctor.py compares the lists with Accelerate.
"""

import difflib
from collections.abc import Iterable, Iterator

from accelerate_recipes.doctor.config import ONE_PROCESS, Config, as_yaml, is_true
from accelerate_recipes.doctor.finding import Finding

OF_TPUS = {
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env"),
    *("downcast_bf16", "main_training_function"),
}
TOP = OF_TPUS | {
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config"),
    *("megatron_lm_config", "mpirun_config", "dynamo_config"),
    *("fp16", "dynamo_backend"),  # of old files; Accelerate converts them
}


def _prefixed(prefix: str, names: str) -> set[str]:
    return {f"{prefix}{name}" for name in names.split()}


SECTIONS = {
    "deepspeed_config": {
        *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
        *("offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps"),
        *("gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile"),
        *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
        "deepspeed_moe_layer_cls_names",
    },
    "fsdp_config": _prefixed(
        "fsdp_",
        "version offload_params min_num_params sharding_strategy reshard_after_forward auto_wrap_policy "
        "transformer_layer_cls_to_wrap backward_prefetch state_dict_type forward_prefetch use_orig_params "
        "cpu_ram_efficient_loading sync_module_states activation_checkpointing activation_checkpointing_offload "
        "ignored_modules",
    ),
    "parallelism_config": _prefixed(
        "parallelism_config_",
        "dp_replicate_size dp_shard_size tp_size cp_size cp_backend cp_comm_strategy sp_size sp_backend "
        "sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    ),
    "megatron_lm_config": _prefixed(
        "megatron_lm_",
        "tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim "
        "optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree "
        "num_micro_batches sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping "
        "recompute_granularity recompute_method recompute_num_layers attention_backend expert_model_parallel_size "
        "context_parallel_size attention_dropout hidden_dropout attention_softmax_in_fp32 "
        "expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings",
    ),
    "dynamo_config": _prefixed("dynamo_", "backend mode use_fullgraph use_dynamic use_regional_compilation"),
    "fp8_config": _prefixed(
        "fp8_",
        "backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo "
        "override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim",
    ),
    "mpirun_config": {"mpirun_hostfile"},
}
# {section: the distributed_type that reads it}
READERS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
# {key: value of the flag of accelerate launch if nobody types it}
OF_THE_COMMAND_LINE = {"rdzv_backend": "static", "enable_cpu_affinity": False}


def unknown_keys(config: Config) -> Iterator[Finding]:
    """A key at the top of the file that Accelerate does not know."""
    for key in config.values:
        if key not in TOP and config.is_local:
            yield Finding(
                f"{key} is not a key of a config file of Accelerate",
                "accelerate launch refuses the file: it had unknown keys",
                _right_key(str(key), TOP),
            )


def unknown_section_keys(config: Config) -> Iterator[Finding]:
    """A key of a section that Accelerate does not know."""
    for section, known in SECTIONS.items():
        given = config.values.get(section)
        if given is not None and not isinstance(given, dict):
            yield Finding(
                f"{section} is {as_yaml(given)}, not a section with keys",
                "accelerate launch ignores it",
                f"the keys below {section}:, each on a line of its own after two spaces",
            )
        for key in config.section(section):
            if key not in known:
                yield Finding(
                    f"{section} has {key}, which Accelerate does not know",
                    "accelerate launch ignores it without a message: the run has the default",
                    _right_key(key, known, section),
                )


def ignored_sections(config: Config) -> Iterator[Finding]:
    """A section that this distributed_type does not read."""
    for section, reader in READERS.items():
        if config.section(section) and config.kind != reader:
            yield Finding(
                f"{section} has no effect, because distributed_type is {config.kind or 'missing'}",
                f"Accelerate reads this section under distributed_type: {reader} alone",
                f"distributed_type: {reader}, or remove {section}",
            )
    if config.section("parallelism_config") and config.kind in ONE_PROCESS:
        yield Finding(
            f"parallelism_config has no effect, because distributed_type is {config.kind}",
            "Accelerate starts one process and does not hand the sizes on",
            "distributed_type: MULTI_GPU for a tp_size, distributed_type: FSDP for a dp_shard_size",
        )
    if config.section("mpirun_config") and config.kind not in ONE_PROCESS:
        yield Finding(
            f"mpirun_config has no effect, because distributed_type is {config.kind or 'missing'}",
            "Accelerate starts the processes through torchrun; it uses mpirun under MULTI_CPU",
            "remove mpirun_config",
        )
    if config.section("fp8_config") and config.precision != "fp8":
        yield Finding(
            f"fp8_config has no effect, because mixed_precision is {config.precision}",
            "Accelerate reads this section under mixed_precision: fp8 alone",
            "remove fp8_config",
        )


def keys_of_tpus(config: Config) -> Iterator[Finding]:
    """Keys that only TPUs have, with a value, under another distributed_type."""
    defaults: tuple = (None, False, "no", "main", "", [], [""])
    set_keys = [key for key in sorted(OF_TPUS) if config.values.get(key) not in defaults]
    if set_keys and config.kind != "XLA":
        yield Finding(
            f"{', '.join(set_keys)} {'have' if len(set_keys) > 1 else 'has'} no effect, because distributed_type is "
            f"{config.kind or 'missing'}",
            "Accelerate reads these keys on TPUs alone",
            f"remove {', '.join(set_keys)}",
        )


def flags_of_the_command_line(config: Config) -> Iterator[Finding]:
    """A key whose value Accelerate 1.15 takes from its command line, even if the flag is not typed there."""
    for key, default in OF_THE_COMMAND_LINE.items():
        value = config.values.get(key, default)
        if value is not None and value != default:
            flag = f"--{key}" if value is True else f"--{key} {value}"
            yield Finding(
                f"{key}: {as_yaml(value)} in the file has no effect",
                f"accelerate launch takes this value from its command line alone; without the flag it is "
                f"{as_yaml(default)}",
                f"{flag} after accelerate launch, and {key}: {as_yaml(default)} in the file",
            )


def cpu_alone(config: Config) -> Iterator[Finding]:
    """use_cpu under a distributed_type for which Accelerate does not hand it on."""
    if is_true(config.values.get("use_cpu")) and config.starts_several:
        yield Finding(
            f"use_cpu: true has no effect, because distributed_type is {config.kind}",
            "accelerate launch hands it on under NO and MULTI_CPU alone: this run uses the machine's GPUs",
            "use_cpu: false; to stay on the CPU, put ACCELERATE_USE_CPU=true before the command",
        )


def one_machine(config: Config) -> Iterator[Finding]:
    """Keys of a run on several machines, with num_machines: 1."""
    keys = [key for key in ("main_process_ip", "machine_rank") if config.values.get(key)]
    if keys and config.num_machines == 1 and config.starts_several:
        yield Finding(
            f"{' and '.join(keys)} {'have' if len(keys) > 1 else 'has'} no effect, because num_machines is 1",
            "each machine would train alone",
            f"num_machines: 2 or more, or remove {' and '.join(keys)}",
        )


def _right_key(key: str, known: Iterable[str], own_section: str | None = None) -> str:
    """What to type instead of an unknown key: where it belongs, the nearest one, or nothing."""
    for section in sorted(SECTIONS, key=lambda name: name != own_section):
        for name in (key, f"{section.removesuffix('config')}{key}", f"{section}_{key}"):
            if name in SECTIONS[section]:
                return f"{name} below {section}"
    if key in TOP:
        return f"{key} at the top of the file"
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8)  # ipex_config is no slip for fp8_config
    return near[0] if near else f"remove {key}"


RULES = (
    unknown_keys,
    unknown_section_keys,
    ignored_sections,
    keys_of_tpus,
    flags_of_the_command_line,
    cpu_alone,
    one_machine,
)
