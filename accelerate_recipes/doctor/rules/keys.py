"""Rules about keys that are unknown or have no effect. `accelerate launch` refuses unknown keys at the top of a file,
but ignores them in a section. For some keys it takes its own flag's value, even if the flag was not typed."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from accelerate_recipes.common.errors import Edit
from accelerate_recipes.doctor.config_file import ONE_PROCESS, PREFIXES, Config, is_true
from accelerate_recipes.doctor.finding import Finding, as_yaml, words

# {section: (a key, its values for which Accelerate reads the section)}
READERS = {
    "deepspeed_config": ("distributed_type", ("DEEPSPEED",)),
    "fsdp_config": ("distributed_type", ("FSDP",)),
    "megatron_lm_config": ("distributed_type", ("MEGATRON_LM",)),
    "mpirun_config": ("distributed_type", ONE_PROCESS),
    "fp8_config": ("mixed_precision", ("fp8",)),
}
OFFLOADS = ("offload_optimizer", "offload_param")  # sections of zero_optimization in DeepSpeed's file
# {key of DeepSpeed's file, or a flag, if it is true: the setting of a config file for it}
MEANT = {
    "bf16": Edit("mixed_precision", "bf16"),
    "fp16": Edit("mixed_precision", "fp16"),
    "use_fsdp": Edit("distributed_type", "FSDP"),
    "use_deepspeed": Edit("distributed_type", "DEEPSPEED"),
}


@dataclass(frozen=True)
class Known:
    """The names that the installed Accelerate knows."""

    kinds: tuple[str, ...]  # each distributed_type
    top: set[str]  # keys at the top of a file
    sections: dict[str, set[str]]  # {section: its keys}
    # {key at the top: default of the flag of that name}. Accelerate reads a key of a section without a prefix as such
    # a flag, so these keys work there, too.
    flags: dict[str, Any]


@cache
def known() -> Known:
    """Asks Accelerate's own parser, whose import takes seconds."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType

    parser = launch_command_parser()
    groups = [{action.dest: action.default for action in group._group_actions} for group in parser._action_groups]
    flags = {name: default for group in groups for name, default in group.items()}
    top = [*ClusterConfig.__dataclass_fields__]
    prefixes = {name: name.removesuffix("config") for name in top if name.endswith("_config")}
    sections = {name: {flag for flag in flags if flag.startswith(prefix)} for name, prefix in prefixes.items()}
    sections["deepspeed_config"] |= next(group.keys() for group in groups if "zero_stage" in group)
    sections["fsdp_config"].add("fsdp_ignored_modules")  # it has no flag
    of_tpus = next(group for group in groups if "tpu_use_cluster" in group)
    return Known(
        kinds=tuple(DistributedType.__members__),
        top={*top, "fp16", "dynamo_backend"},  # Accelerate converts these two, of old files
        sections=sections,
        # The launcher calls one of them --cpu.
        flags={name: flags.get(name) for name in top if name in flags.keys() - of_tpus.keys() | {"use_cpu"}},
    )


def unknown_keys(config: Config) -> Iterator[Finding]:
    """A key at the top of the file that Accelerate does not know."""
    for key in config.values:
        if key not in known().top and config.is_local:
            yield Finding(
                f"{key} is not a key of a config file of Accelerate",
                "accelerate launch refuses the file: it had unknown keys",
                *_instead(config, str(key)),
            )


def unknown_section_keys(config: Config) -> Iterator[Finding]:
    """A key of a section that Accelerate does not know."""
    for section, keys in known().sections.items():
        if (given := config.values.get(section)) is not None and not isinstance(given, dict):
            yield Finding(
                f"{section} is {as_yaml(given)}, not a section with keys",
                "accelerate launch ignores it",
                Edit(section),
                f"or use the keys below {section}:, each on its own line after two spaces",
            )
        for key in config.section(section):
            if key not in keys and (key not in known().flags or section in PREFIXES):
                yield Finding(
                    f"{section} has {key}, which Accelerate does not know",
                    "accelerate launch ignores it silently: the run uses the default",
                    *_instead(config, key, section),
                )


def ignored_sections(config: Config) -> Iterator[Finding]:
    """A section that this distributed_type or mixed_precision does not read."""
    given = {"distributed_type": config.kind, "mixed_precision": config.precision}
    has_tp = config.section("parallelism_config").get("parallelism_config_tp_size", 1) != 1
    kinds = () if has_tp else ("DEEPSPEED", "FSDP")  # kinds to suggest; here tensor parallelism runs under MULTI_GPU
    for section, (key, readers) in READERS.items():
        if config.section(section) and given[key] not in readers and config.kind in known().kinds:
            yield Finding(
                f"{section} has no effect, because {key} is {given[key]}",
                f"Accelerate reads this section only under {key}: {' or '.join(readers)}",
                Edit(section),
                f"or {key}: {readers[0]}, if you want this kind of run" * (readers[0] in kinds),
            )
    if config.section("parallelism_config") and config.kind in ONE_PROCESS:
        yield Finding(
            f"parallelism_config has no effect, because distributed_type is {config.kind}",
            "Accelerate starts one process and does not pass the sizes on",
            "distributed_type: MULTI_GPU for a tp_size, distributed_type: FSDP for a dp_shard_size",
        )


def flags_of_the_command_line(config: Config) -> Iterator[Finding]:
    """A key whose value Accelerate takes from its command line, or from that flag's default if it is not typed."""
    for key, default in known().flags.items():
        value = config.values.get(key)
        # The rendezvous is the same with and without same_network.
        if None not in (value, default) and value != default and key != "same_network":
            yield Finding(
                f"{key}: {as_yaml(value)} in the file has no effect",
                "accelerate launch takes it only from its command line; without the flag it is " + as_yaml(default),
                Edit(key, default),
                f"--{key}{'' if value is True else f' {value}'} after accelerate launch",
            )


def cpu_alone(config: Config) -> Iterator[Finding]:
    """use_cpu under a distributed_type where Accelerate does not pass it on."""
    if is_true(config.values.get("use_cpu")) and config.starts_several:
        yield Finding(
            f"use_cpu: true has no effect, because distributed_type is {config.kind}",
            "accelerate launch passes it on only under NO and MULTI_CPU: this run uses the machine's GPUs",
            Edit("use_cpu", False),
            "to stay on the CPU, put ACCELERATE_USE_CPU=true before the command",
        )


def one_machine(config: Config) -> Iterator[Finding]:
    """Keys of a run on several machines, with num_machines: 1."""
    keys = [key for key in ("main_process_ip", "machine_rank") if config.values.get(key)]
    if keys and config.values.get("num_machines", 1) == 1 and config.starts_several:
        yield Finding(
            f"{', '.join(keys)} {'have' if len(keys) > 1 else 'has'} no effect, because num_machines is 1",
            "each machine would train alone",
            *map(Edit, keys),
            "or num_machines: 2 or more",
        )


def _instead(config: Config, key: str, section: str = "") -> Iterator[Edit | str]:
    """What to type instead of an unknown key: where it belongs, the most similar key, or nothing."""
    for edit in _meant(key, config.section(section).get(key), section):
        if (there := config.section(edit.section).get(edit.key)) is None:
            yield edit
        elif there != edit.value:
            yield f"or {next(words([edit]))}, in place of {as_yaml(there)}"
    yield Edit(key, None, section)


def _meant(key: str, value: Any, section: str) -> list[Edit]:
    """The keys of Accelerate that an unknown key may mean. The unknown key is in a section or at the top."""
    inside = value if isinstance(value, dict) else {}
    if key == "zero_optimization":
        offloads = {name: part.get("device") for name, part in inside.items() if isinstance(part, dict)}
        meant = {"zero_stage": inside.get("stage")} | {f"{name}_device": offloads.get(name) for name in OFFLOADS}
        return [Edit(name, found, "deepspeed_config") for name, found in meant.items() if found is not None]
    if key in MEANT:
        return [MEANT[key]] if is_true(inside.get("enabled", value)) else []
    for place in sorted(known().sections, key=lambda name: name != section):
        for name in (key, f"{place.removesuffix('config')}{key}", f"{place}_{key}"):  # with or without its prefix
            if name in known().sections[place]:
                return [Edit(name, value, place)]
    is_of_top = key in known().top or not section
    keys = known().top if is_of_top else known().sections[section]
    same_kind = [name for name in sorted(keys) if name.endswith("_config") == isinstance(value, dict)]
    near = difflib.get_close_matches(key, same_kind, n=1, cutoff=0.8)  # ipex_config is not a typo of fp8_config
    return [Edit(name, value, "" if is_of_top else section) for name in near]


RULES = (*(unknown_keys, unknown_section_keys, ignored_sections, flags_of_the_command_line, cpu_alone, one_machine),)
