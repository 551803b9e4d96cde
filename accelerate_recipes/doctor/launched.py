"""The variables or the error that `accelerate launch` makes of a config file, without starting a process."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from accelerate_recipes.doctor.finding import Finding
from accelerate_recipes.doctor.rules.launching import by_hand

_INHERITED = re.compile("ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|TORCHELASTIC_|MASTER_|WORLD_SIZE|RANK|LOCAL_|GROUP_")


def launched(config: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """The variables of the first process, under a config file and flags of `accelerate launch`. Raises what it raises
    for what it refuses."""
    from accelerate.commands import launch  # here, because the import takes seconds
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    arguments = launch.launch_command_parser().parse_args(["--config_file", str(config), *flags, "recipe.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    arguments.main_process_port = 0  # any free one: the launcher refuses a port that is in use
    arguments.main_process_ip = arguments.main_process_ip or "127.0.0.1"  # the command line may give it
    if arguments.use_deepspeed:
        _, variables = prepare_deepspeed_cmd_env(arguments)
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        variables = prepare_multi_gpu_env(arguments)
    else:
        _, variables = prepare_simple_launcher_cmd_env(arguments)
        return variables
    sizes = {"WORLD_SIZE": arguments.num_processes, "GROUP_WORLD_SIZE": arguments.num_machines}
    sizes["LOCAL_WORLD_SIZE"] = arguments.num_processes // arguments.num_machines
    first = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return variables | {name: str(size) for name, size in sizes.items()} | first


def remove_variables() -> None:
    """Removes the variables of a launcher around this process, which a run must not inherit."""
    for name in filter(_INHERITED.match, list(os.environ)):
        del os.environ[name]


def refusal_of(line: str) -> Finding:
    """What the launcher refuses, and no rule."""
    cure = "what the file lacks"
    if variable := re.search(r"\$\{?\w+\}?", line):
        cure = by_hand("machine_rank", variable[0])  # the only number that no rule reads
    elif "`--gpu_ids`" in line:
        cure = "gpu_ids: all; or distributed_type: 'NO' for one GPU"
    elif flag := re.search(r"`--(\w+)`", line):
        cure = f"{flag[1]}: with its value, in the file; or --{flag[1]} after accelerate launch"
    return Finding("accelerate launch refuses the file", line, cure)
