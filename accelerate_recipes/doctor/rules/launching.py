"""Rules about the launch: the distributed_type, processes, machines, addresses, precision."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from accelerate_recipes.common.errors import Edit
from accelerate_recipes.doctor.config_file import Config, is_count
from accelerate_recipes.doctor.finding import Finding, as_yaml
from accelerate_recipes.doctor.rules.keys import READERS, known

PRECISIONS = ("no", "fp16", "bf16")
OTHER_DEVICES = ("XLA", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
PLACEHOLDER = re.compile(
    r".*[<>{}$\[\]*?\s].*|.*\bx+\b.*"  # <ip>, $MASTER_ADDR, xxx, 192.168.x.x
    r"|(your|my|the|main|master|head|first)?[_-]?(machine|process|node|server)?[_-]?"
    r"(ip|addr|address|ip[_-]?addr|ip[_-]?address|host|host[_-]?name)"
    r"|todo|change[_-]?me|replace[_-]?me|none|null",
    re.IGNORECASE,
)
NUMBERS = re.compile(r"[\d.]+")
IPV4 = re.compile(r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$)|$)){4}")
LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0", re.IGNORECASE)


def unknown_kind(config: Config) -> Iterator[Finding]:
    """No distributed_type, or one that Accelerate does not know."""
    all_kinds = known().kinds
    if config.kind in all_kinds or not config.is_local:
        return
    near = difflib.get_close_matches(config.kind.upper(), all_kinds, n=1)
    near += [kinds[-1] for name, (key, kinds) in READERS.items() if key == "distributed_type" and config.section(name)]
    yield Finding(
        f"distributed_type is {config.kind}" if config.kind else "the file has no distributed_type",
        f"accelerate launch ends with an error; it knows {', '.join(all_kinds)}",
        Edit("distributed_type", near[0] if near else "NO" if config.num_processes == 1 else "MULTI_GPU"),
    )


def unsupported_kind(config: Config) -> Iterator[Finding]:
    """A service (Amazon SageMaker), or a distributed_type for hardware or libraries that these recipes do not use."""
    if not config.is_local:
        yield Finding(
            f"compute_environment is {config.values['compute_environment']}",
            "these recipes run on machines that you start yourself",
            "compute_environment: LOCAL_MACHINE, with the keys of a file in accelerate_configs/",
        )
    if config.kind in OTHER_DEVICES:
        yield Finding(
            f"distributed_type is {config.kind}",
            "these recipes run on CPUs and on GPUs of NVIDIA, AMD (both MULTI_GPU), Intel (MULTI_XPU) and Ascend "
            "(MULTI_NPU)",
            Edit("distributed_type", "MULTI_GPU"),
        )
    if config.kind == "MEGATRON_LM":
        yield Finding(
            "distributed_type is MEGATRON_LM",
            "Megatron-LM trains its own models in its own loop; these recipes divide any model without it",
            "--config_file accelerate_configs/tensor_parallel.yaml, or accelerate_configs/pipeline_parallel.yaml",
        )


def unknown_precision(config: Config) -> Iterator[Finding]:
    """A precision that Accelerate or a recipe does not know, such as no without quotes, which YAML reads as false."""
    value = config.values.get("mixed_precision")
    if value is None or (isinstance(value, str) and value.lower() in PRECISIONS):
        return
    given = f"{value}" if isinstance(value, str) else f"the YAML value {as_yaml(value)}, not a word"
    meant = {"false": "no", "float32": "no", "fp32": "no", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
    known = meant.get(str(value).lower())
    yield Finding(
        f"mixed_precision is {given}",
        f"the run ends with an error; a recipe trains in {', '.join(PRECISIONS)}; YAML reads a bare no as false",
        Edit("mixed_precision", known) if known else "mixed_precision: bf16, fp16 or 'no'",
    )


def counts(config: Config) -> Iterator[Finding]:
    """Numbers of processes and machines that are not numbers, or do not divide."""
    for key in ("num_processes", "num_machines"):
        value = config.values.get(key)
        if value is not None and not is_count(value) and not (key == "num_processes" and value == -1):
            yield Finding(
                f"{key} is {value!r}",
                "accelerate launch needs a whole number above 0, and no more than machines have",
                Edit(key, int(value)) if re.fullmatch("[1-9][0-9]{0,5}", str(value)) else by_hand(key, value),
            )
    num_processes, num_machines = config.num_processes, config.num_machines
    if num_processes is not None and num_machines > 1 and num_processes % num_machines:
        yield Finding(
            f"num_processes is {num_processes}, the total over {num_machines} machines, and does not divide evenly",
            f"accelerate launch starts {num_processes // num_machines} on each machine, without a message",
            Edit("num_processes", max(1, num_processes // num_machines) * num_machines),
        )


def by_hand(key: str, value: Any) -> str:
    """What to type for a value that is not a number."""
    if "$" in str(value):
        return f"--{key} {value} after accelerate launch: the shell fills in variables, Accelerate does not"
    return f"{key}: a number"


def machine_rank(config: Config) -> Iterator[Finding]:
    """A rank that no machine has."""
    rank = config.values.get("machine_rank")
    if isinstance(rank, int) and config.num_machines > 1 and not 0 <= rank < config.num_machines:
        yield Finding(
            f"machine_rank is {rank}, with num_machines: {config.num_machines}",
            "machine ranks start at 0: one machine would be missing, and the others would wait",
            f"machine_rank: 0 on the first machine, up to {config.num_machines - 1} on the last",
        )


def address(config: Config) -> Iterator[Finding]:
    """A placeholder as main_process_ip, or an address that only the first machine itself can use.

    A file without this key is fine: as in accelerate_configs/multi_node_ddp.yaml, the command line has the address.
    """
    if config.num_machines == 1 or "main_process_ip" not in config.values:
        return
    given = config.values["main_process_ip"]
    text = "" if given is None else str(given).strip()
    advice = "main_process_ip: the address of the first machine, such as 10.0.0.1, or its name"
    if not text or PLACEHOLDER.fullmatch(text) or (NUMBERS.fullmatch(text) and not IPV4.fullmatch(text)):
        yield Finding(
            f"main_process_ip is {text or 'empty'}, which is not an address",
            "accelerate launch refuses it, or the machines wait for each other and fail",
            f"{advice}; or remove the key, and use --main_process_ip after accelerate launch",
        )
    elif LOOPBACK.fullmatch(text):
        yield Finding(
            f"main_process_ip is {text}, with num_machines: {config.num_machines}",
            "this is every machine's own address: the others would wait for themselves",
            advice,
        )


def port(config: Config) -> Iterator[Finding]:
    """A port that is not a number, or port 0 on several machines: each would choose a different one."""
    value = config.values.get("main_process_port")
    if value is not None and not (str(value).isdecimal() and int(value) < 2**16):
        cure = by_hand("main_process_port", value)
        yield Finding(f"main_process_port is {value}", "the launcher needs a whole number below 65536", cure)
    if config.num_machines > 1 and value == 0:
        yield Finding(
            f"main_process_port is 0, with num_machines: {config.num_machines}",
            "each machine chooses its own free port, so they do not meet",
            Edit("main_process_port", 29500),
            "or another port that is free on the first machine",
        )


def gpu_ids(config: Config) -> Iterator[Finding]:
    """gpu_ids with too few GPUs, with GPUs that this machine lacks, or that Accelerate cannot read."""
    if (given := config.values.get("gpu_ids")) in (None, "all"):
        return
    text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    if given != text:
        yield Finding(
            f"gpu_ids is {given!r}, not a string",
            "accelerate launch ends with: object has no attribute 'split'",
            Edit("gpu_ids", text),
        )
    num_ids, wanted, num_gpus = len(text.split(",")), config.num_local_processes, len(config.machine.gpus)
    if lacking := [one for one in text.split(",") if one.strip().isdecimal() and int(one) >= num_gpus > 0]:
        yield Finding(
            f"gpu_ids is {text}, but torch finds {num_gpus} GPUs on this machine, numbered from 0",
            f"CUDA ignores GPU {lacking[0].strip()} and those after it",
            "gpu_ids: all; unset CUDA_VISIBLE_DEVICES, if it hides GPUs",
        )
    if wanted is not None and num_ids < wanted and config.starts_several:
        total = num_ids * config.num_machines
        yield Finding(
            f"gpu_ids is {text}, but this machine has {wanted} processes",
            "each process needs its own GPU",
            f"gpu_ids: all, or num_processes: {total}" + " with distributed_type: 'NO'" * (total == 1),
        )


RULES = (unknown_kind, unsupported_kind, unknown_precision, counts, machine_rank, address, port, gpu_ids)
