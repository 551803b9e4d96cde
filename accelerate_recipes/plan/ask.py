"""Asks for dry runs of a recipe, and completes their answers with times."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes.at_fit import QUESTION, at_fit
from accelerate_recipes.catalog import find_config
from accelerate_recipes.errors import UsageError
from accelerate_recipes.plan.clock import grown, num_sent, step_seconds
from accelerate_recipes.plan.hardware import Gpu
from accelerate_recipes.plan.zero import divided

MOST = 8192  # GPUs of a scaling curve
PER_MACHINE = 8  # GPUs, where a plan for one machine grows
SECTIONS = ("fsdp", "parallelism", "deepspeed", "fp8", "dynamo")  # a key that starts so stands in <section>_config


@dataclass(frozen=True)
class Case:
    """What to plan for.

    Attributes:
        config: a config file.
        num_processes, num_machines: instead of the file's; None keeps them.
        settings: {key of the file: value} instead of the file's.
        stages: of a pipeline.
        flags: {flag of the recipe: value} instead of those on the command line.
    """

    config: Path
    num_processes: int | None = None
    num_machines: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stages: int = 1
    flags: dict[str, Any] = field(default_factory=dict)

    def written(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """(a config file for this case, what it has other than the file given, beside the number of processes)."""
        content = _mapping(self.config)
        number = self.num_processes or content.get("num_processes") or 1
        machines = self.num_machines or content.get("num_machines") or 1
        if number % machines:
            raise UsageError(f"{number} processes do not divide into {machines} machines: type another --num_processes")
        sizes = _sizes(content.get("parallelism_config") or {}, self.settings, number, machines)
        content |= {"num_processes": number, "num_machines": machines, "machine_rank": 0}
        if machines > 1:
            content |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
        for key, value in (self.settings | sizes).items():
            section = key.partition("_")[0]
            nested = section in SECTIONS and key not in content
            (content.setdefault(f"{section}_config", {}) if nested else content)[key] = value
        path = Path(tempfile.mkdtemp(dir=folder)) / self.config.name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path, sizes


def _mapping(config: Path) -> dict[str, Any]:
    """The content of a config file. Raises UsageError for another file."""
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        raise UsageError(f"{config} is no config file of Accelerate: type the path of one, or a name such as ddp")
    return content


def _sizes(asked: dict[str, Any], settings: dict[str, Any], number: int, machines: int) -> dict[str, int]:
    """The sizes of a parallelism_config that the number of processes changes. Replicas are machines; then the shards
    grow, else the processes that share a layer; those that share a sample's tokens get replicas."""
    prefix = "parallelism_config_"
    sizes = {
        key.removeprefix(prefix).removesuffix("_size"): int(value)
        for key, value in asked.items()
        if key.endswith("_size")
    }
    if any(key.startswith(prefix) for key in settings) or not {"dp_replicate", "dp_shard", "tp", "sp"} & set(sizes):
        return {}
    before = dict(sizes)
    if "dp_replicate" in sizes and machines > 1:
        sizes["dp_replicate"] = machines
    grows = next((name for name in ("dp_shard", "dp_replicate", "tp") if name in sizes), "dp_replicate")
    rest = math.prod(size for name, size in sizes.items() if name != grows)
    if number % rest == 0:
        sizes[grows] = number // rest
    return {f"{prefix}{name}_size": size for name, size in sizes.items() if size != before.get(name, 1)}


def plans(script: Path, flags: Sequence[str], cases: Sequence[Case], gpu: Gpu) -> list[dict[str, Any]]:
    """A plan for each case: {"refused": the run's lines}, {"failed": a line}, or the facts of dry.py, with times.

    Raises:
        UsageError: the recipe ended before it called `fit`.
    """
    found: dict[int, dict[str, Any]] = {}
    for stages in sorted({case.stages for case in cases}):  # a recipe may build another model for a pipeline
        of_stages = [*flags, "--pipeline_stages", str(stages)] if stages > 1 else flags
        numbers = [number for number, case in enumerate(cases) if case.stages == stages]
        try:
            answers = _plans(script, of_stages, [cases[number] for number in numbers], gpu)
        except UsageError as error:
            if len(numbers) == len(cases):
                raise
            answers = [{"failed": str(error), "config": cases[number].config.stem} for number in numbers]
        found |= zip(numbers, answers)
    return [found[number] for number in range(len(cases))]


def _plans(script: Path, flags: Sequence[str], cases: Sequence[Case], gpu: Gpu) -> list[dict[str, Any]]:
    """The plans of cases with the same number of stages."""
    with tempfile.TemporaryDirectory() as folder:
        written = [case.written(Path(folder)) for case in cases]
        questions = []
        for case, (path, _) in zip(cases, written):
            question = {"config": str(path), "stages": case.stages, "flags": case.flags, "gpu": asdict(gpu)}
            questions += [question, *([question | {"last": True}] if case.stages > 1 else [])]
        # dry.py forks, and the children of a process with threads would wait for these.
        answers = _at_fit(script, flags, {QUESTION: json.dumps(questions), "OMP_NUM_THREADS": "1"})
    ends = [[answers.pop(0) for _ in range(1 + (case.stages > 1))] for case in cases]
    return [
        _plan(of_case, gpu) | {"config": case.config.stem, "settings": sizes}
        for of_case, case, (_, sizes) in zip(ends, cases, written)
    ]


def _at_fit(script: Path, flags: Sequence[str], variables: dict[str, str]) -> list[dict[str, Any]]:
    """The answers, for a model without memory, or if the recipe looks at the values of its weights, for a real one."""
    function = "accelerate_recipes.plan.dry:measure"
    try:
        return at_fit(script, flags, function, variables, on_meta=True)
    except UsageError:
        return at_fit(script, flags, function, variables)


def _plan(ends: list[dict[str, Any]], gpu: Gpu) -> dict[str, Any]:
    """One plan from the answers of the first stage and the last."""
    if wrong := next((end for end in ends if "peak" not in end), None):
        return wrong
    each = [_timed(divided(end) if "zero_stage" in end else end, gpu) for end in ends]
    largest = max(each, key=lambda plan: plan["peak"])
    slowest = max(each, key=lambda plan: plan["seconds"])
    return largest | {name: slowest[name] for name in ("seconds", "waits", "first", "more")}


def _timed(answer: dict[str, Any], gpu: Gpu) -> dict[str, Any]:
    per_machine = answer["num_processes"] // answer["num_machines"]
    seconds, waits = seconds_of_step(answer, gpu)
    sent, more = num_sent(answer["first"], per_machine), num_sent(answer["more"], per_machine)
    return (
        answer
        | {
            "seconds": seconds,
            "waits": waits,
            "sent": {where: sent[where] + answer["passes"] * (more[where] - sent[where]) for where in sent},
            "fits": answer["peak"] <= gpu.usable,
            "check_seconds": _check_seconds(answer, gpu),
        }
        | rates(answer, seconds, answer["num_processes"], gpu)
    )


def _check_seconds(answer: dict[str, Any], gpu: Gpu) -> float:
    """Time that one process takes for the first steps with the samples of all, at the rate that programs reach."""
    operations = answer["check_steps"] * answer["flops"] * answer["num_processes"]
    return operations / (gpu.peak(answer["precision"] != "float32", answer["tf32"]) * gpu.flops)


def seconds_of_step(answer: dict[str, Any], gpu: Gpu, num_processes: int | None = None) -> tuple[float, float]:
    """(time, part of it in which the process waits) of a step; with other processes, each with as many samples."""
    before, per_machine = answer["num_processes"], answer["num_processes"] // answer["num_machines"]
    wanted = num_processes or before
    if wanted > before and answer["num_machines"] == 1:
        per_machine = max(per_machine, PER_MACHINE)
    times = [step_seconds(grown(answer[name], before, wanted), gpu, per_machine) for name in ("first", "more")]
    seconds, waits = (first + answer["passes"] * (more - first) for first, more in zip(*times))
    # Stages wait for the first and the last micro-batch: the bubble.
    bubble = 1 + (answer["stages"] - 1) / answer["accumulation"] if answer["stages"] > 1 else 1
    return seconds * bubble, waits + seconds * (bubble - 1)


def rates(answer: dict[str, Any], seconds: float, num_processes: int, gpu: Gpu) -> dict[str, Any]:
    """Samples, tokens and hours of a run with so many processes, each with the plan's samples per step."""
    batch_size = answer["batch_size"] * num_processes / answer["num_processes"]
    samples = batch_size / seconds
    per_gpu = samples / num_processes
    operations = answer["flops_per_sample"] or answer["flops"] * answer["num_processes"] / answer["batch_size"]
    is_16 = answer["precision"] != "float32"
    hours = answer["num_steps"] * answer["batch_size"] / samples / 3600
    return {
        "samples_per_second": samples,
        "tokens_per_second_per_gpu": per_gpu * answer["tokens_per_sample"] if answer["tokens_per_sample"] else None,
        "mfu": operations * per_gpu / gpu.peak(is_16, answer["tf32"]),
        "hours": hours,
        "gpu_hours": hours * num_processes,
    }


def scaled(answer: dict[str, Any], gpu: Gpu) -> list[dict[str, Any]]:
    """The plan with 1, 4, 16, ... times as many processes, each with as many samples as in the plan. Processes that all
    share the same samples have only one row: there are no gradients to send that would show the way."""
    rows: list[dict[str, Any]] = []
    number = answer["num_processes"]
    while number <= MOST:
        seconds, waits = seconds_of_step(answer, gpu, number)
        row = {"num_processes": number, "seconds": seconds, "waits": waits} | rates(answer, seconds, number, gpu)
        rows.append(row | {"efficiency": (rows[0] if rows else row)["seconds"] / seconds})
        number = number * 4 if answer["data_parallel"] > 1 else MOST + 1
    return rows


def alternatives(
    case: Case, plan: dict[str, Any], script: Path, flags: Sequence[str], gpu: Gpu
) -> list[tuple[str, Any]]:
    """[(what to type, its plan)]: settings near a case that fit the GPU's memory, the first of each kind."""
    sizes = [plan["micro_batch_size"] // 2**power for power in range(1, plan["micro_batch_size"].bit_length())]
    smaller = [
        (f"--micro_batch_size {size}", replace(case, flags={"micro_batch_size": size}))
        for size in sizes
        if plan["micro_batch_size"] % size == 0
    ]
    found = _first_that_fit([smaller, _sharded(case, plan)], script, flags, gpu)
    flag = "--activation_checkpointing"
    if flag in flags:
        return found
    again = [(flag, case), *((f"{flag} {text}", other) for text, other in smaller)]
    try:
        return found + _first_that_fit([again], script, [*flags, flag], gpu)
    except UsageError:  # a recipe without that flag
        return found


def larger(case: Case, plan: dict[str, Any], script: Path, flags: Sequence[str], gpu: Gpu) -> dict[str, Any] | None:
    """The plan with the largest micro-batch that fits; None if the case's own is the largest."""
    own = plan["micro_batch_size"] * plan["accumulation"]
    sizes = [plan["micro_batch_size"] * 2**power for power in range(1, plan["accumulation"].bit_length())]
    cases = [replace(case, flags={"micro_batch_size": size}) for size in sizes if own % size == 0]
    found = plans(script, flags, cases, gpu) if cases else []
    return next((each for each in reversed(found) if each.get("fits")), None)


def _sharded(case: Case, plan: dict[str, Any]) -> list[tuple[str, Case]]:
    """FSDP2 on as many processes as in a plan, and on more."""
    name = "fsdp2_bf16" if plan["precision"] == "bf16" else "fsdp2"
    cases = []
    for factor in (1, 2, 4, 8):
        number, machines = plan["num_processes"] * factor, plan["num_machines"]
        machines = machines * factor if machines > 1 else -(-number // PER_MACHINE)
        if plan["batch_size"] % number == 0 and (factor > 1 or case.config.stem != name) and number % machines == 0:
            cases.append((f"--config {name} --num_processes {number}", Case(find_config(name), number, machines)))
    return cases


def _first_that_fit(
    kinds: Sequence[Sequence[tuple[str, Case]]], script: Path, flags: Sequence[str], gpu: Gpu
) -> list[tuple[str, Any]]:
    """The first of each kind that fits."""
    tries = [each for kind in kinds for each in kind]
    found = dict(zip((text for text, _ in tries), plans(script, flags, [case for _, case in tries], gpu)))
    fitting = [[(text, found[text]) for text, _ in kind if found[text].get("fits")] for kind in kinds]
    return [kind[0] for kind in fitting if kind]
