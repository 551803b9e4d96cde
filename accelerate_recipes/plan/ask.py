"""Asks for dry runs of a recipe, and adds times to their answers."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes.at_fit import at_fit
from accelerate_recipes.catalog import MOST_PROCESSES, find_config, mapping_in
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.plan.clock import grow, num_sent, step_seconds
from accelerate_recipes.plan.estimates import Estimate, Facts, NoPlan, RunFacts, Sent, Speed, StepFacts
from accelerate_recipes.plan.hardware import Gpu
from accelerate_recipes.plan.zero import divide

MOST = 8192  # GPUs of a scaling curve
Fitting = list[tuple[str, Estimate]]  # what to type, and its plan
PER_MACHINE = 8  # GPUs, where a plan for one machine grows
SECTIONS = ("fsdp", "parallelism", "deepspeed", "fp8", "dynamo")  # a key with this prefix belongs in <section>_config


@dataclass(frozen=True)
class Case:
    config: Path  # a config file
    num_processes: int | None = None  # instead of the file's; None keeps it
    num_machines: int | None = None  # instead of the file's; None keeps it
    settings: Mapping[str, int | str] = field(default_factory=dict)  # {key of the file: value} instead of the file's
    stages: int = 1  # of a pipeline
    flags: dict[str, int] = field(default_factory=dict)  # {flag of the recipe: value} instead of the command line's
    kind: int | None = None  # skip this case if one of the same kind fits; None: never skip it

    def write(self, folder: Path) -> tuple[Path, dict[str, int]]:
        """(a config file for this case, what it changes besides the number of processes). Raises UsageError."""
        content = mapping_in(self.config)
        given = {**content, **self.settings}
        number = self.num_processes or count(given, "num_processes")
        if number % (machines := self.num_machines or count(given, "num_machines")):
            raise UsageError(f"{number} processes do not divide into {machines} machines: use another --num_processes")
        sizes = _sizes(content.get("parallelism_config") or {}, self.settings, number // self.stages, machines)
        content |= {"num_processes": number, "num_machines": machines, "machine_rank": 0}
        if machines > 1:
            content |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
        for key, value in {**self.settings, **sizes}.items():
            section = key.partition("_")[0]
            nested = section in SECTIONS and key not in content
            (content.setdefault(f"{section}_config", {}) if nested else content)[key] = value
        path = Path(tempfile.mkdtemp(dir=folder)) / self.config.name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path, sizes


def count(given: Mapping[str, Any], key: str) -> int:
    """A number of a config, by default 1. Raises UsageError for another value."""
    value = 1 if given.get(key) is None else given[key]
    if not str(value).isdecimal() or not 0 < int(value) <= MOST_PROCESSES:
        raise UsageError(f"{key} is {value}: use a whole number from 1 to {MOST_PROCESSES:,}")
    return int(value)


def _sizes(asked: dict[str, Any], settings: Mapping[str, int | str], number: int, machines: int) -> dict[str, int]:
    """Sizes of a parallelism_config that change with a stage's number of processes. On several machines `dp_replicate`
    becomes their number; then `dp_shard` grows, otherwise `dp_replicate`, otherwise `tp`; `sp` alone gets replicas."""
    prefix = "parallelism_config_"
    sizes = {key.removeprefix(prefix).removesuffix("_size"): count(asked, key) for key in asked if "_size" in key}
    if any(key.startswith(prefix) for key in settings) or not {"dp_replicate", "dp_shard", "tp", "sp"} & set(sizes):
        return {}
    before = dict(sizes)
    if "dp_replicate" in sizes and machines > 1:
        sizes["dp_replicate"] = machines
    grows = next((name for name in ("dp_shard", "dp_replicate", "tp") if name in sizes), "dp_replicate")
    if number % (rest := math.prod(size for name, size in sizes.items() if name != grows)) == 0:
        sizes[grows] = number // rest
    return {f"{prefix}{name}_size": size for name, size in sizes.items() if size != before.get(name, 1)}


def plans(script: Path, flags: Sequence[str], cases: Sequence[Case], gpu: Gpu) -> list[Estimate | NoPlan]:
    """A plan for each case. Raises UsageError if the recipe ended before it called `fit`."""
    found, problem = dict[int, Estimate | NoPlan](), None
    for stages in sorted({case.stages for case in cases}):  # a recipe may build another model for a pipeline
        of_stages = [*flags, "--pipeline_stages", str(stages)] if stages > 1 else flags
        numbers = [number for number, case in enumerate(cases) if case.stages == stages]
        try:
            answers = _plans(script, of_stages, [cases[number] for number in numbers], gpu)
        except UsageError as error:
            problem = error
            answers = [NoPlan(failed=str(error), config=cases[number].config.stem) for number in numbers]
        found |= zip(numbers, answers)
    if problem is not None and all(isinstance(each, NoPlan) for each in found.values()):
        raise problem
    return [found[number] for number in range(len(cases))]


def _plans(script: Path, flags: Sequence[str], cases: Sequence[Case], gpu: Gpu) -> list[Estimate | NoPlan]:
    """The plans of cases with the same number of stages."""
    with tempfile.TemporaryDirectory() as folder:
        written = [case.write(Path(folder)) for case in cases]
        question = gpu, [replace(case, config=path) for case, (path, _) in zip(cases, written)]
        # dry.py forks, and in a process with threads, its children would wait for these threads.
        one_thread = {"OMP_NUM_THREADS": "1"}
        answers = at_fit(script, flags, "accelerate_recipes.plan.dry:measure", question, one_thread, on_meta=True)
    return [_plan(ends, gpu, case.config.stem, sizes) for ends, case, (_, sizes) in zip(answers, cases, written)]


def _plan(ends: list[Facts | NoPlan], gpu: Gpu, config: str, settings: dict[str, int]) -> Estimate | NoPlan:
    """One plan from the answers of the first stage and the last."""
    if wrong := next((end for end in ends if isinstance(end, NoPlan)), None):
        return replace(wrong, config=config, settings=settings)
    facts = [end for end in ends if not isinstance(end, NoPlan)]
    run, steps = facts[0][0], [divide(step, run) for run, step in facts]
    largest = max(steps, key=lambda step: step.peak)
    slowest = max(steps, key=lambda step: _seconds_of_step(run, step, gpu, run.num_processes)[0])
    sent, more = num_sent(largest.first, run.per_machine), num_sent(largest.more, run.per_machine)
    step = replace(largest, first=slowest.first, more=slowest.more)
    return Estimate(
        run,
        step,
        _speed(run, step, gpu, run.num_processes),
        Sent(step.whole(sent.link, more.link), step.whole(sent.network, more.network)),
        fits=step.peak <= gpu.usable,
        # One process computes the samples of all processes, at the rate that programs reach.
        check_seconds=run.check_steps * step.flops * run.num_processes / (_peak(run, gpu) * gpu.flops),
        config=config,
        settings=settings,
    )


def _peak(run: RunFacts, gpu: Gpu) -> float:
    """Peak operations per second in the run's precision."""
    return gpu.peak(run.precision != "float32", run.tf32)


def _seconds_of_step(run: RunFacts, step: StepFacts, gpu: Gpu, num_processes: int) -> tuple[float, float]:
    """(time, part in which the process waits) with this many processes, each with as many samples as in the run."""
    before, per_machine = run.num_processes, run.per_machine
    if num_processes > before and run.num_machines == 1:
        per_machine = max(per_machine, PER_MACHINE)
    times = [step_seconds(grow(events, before, num_processes), gpu, per_machine) for events in (step.first, step.more)]
    seconds, waits = (step.whole(first, more) for first, more in zip(*times))
    bubble = 1 / (1 - run.idle)  # stages wait for the first and the last micro-batch
    return seconds * bubble, waits + seconds * (bubble - 1)


def _speed(run: RunFacts, step: StepFacts, gpu: Gpu, num_processes: int) -> Speed:
    """The speed with this many processes, each with as many samples as in the run."""
    seconds, waits = _seconds_of_step(run, step, gpu, num_processes)
    samples = run.batch_size * num_processes / run.num_processes / seconds
    per_gpu = samples / num_processes
    operations = run.flops_per_sample or step.flops * run.num_processes / run.batch_size
    hours = run.num_steps * run.batch_size / samples / 3600
    return Speed(
        num_processes=num_processes,
        seconds=seconds,
        waits=waits,
        samples_per_second=samples,
        tokens_per_second_per_gpu=per_gpu * run.tokens_per_sample if run.tokens_per_sample else None,
        mfu=operations * per_gpu / _peak(run, gpu),
        hours=hours,
        gpu_hours=hours * num_processes,
    )


def scale_up(plan: Estimate, gpu: Gpu) -> list[Speed]:
    """The plan with 1, 4, 16, ... times as many processes, each with as many samples as in the plan. One row if all
    processes share the same samples: without data parallelism, the plan does not show how gradient traffic grows."""
    rows = [plan.speed]
    while plan.run.data_parallel > 1 and (number := rows[-1].num_processes * 4) <= MOST:
        row = _speed(plan.run, plan.step, gpu, number)
        rows.append(replace(row, efficiency=plan.speed.seconds / row.seconds))
    return rows


def alternatives(case: Case, plan: Estimate, script: Path, flags: Sequence[str], gpu: Gpu) -> Fitting:
    """[(what to type, its plan)]: settings near a case that fit the GPU's memory, the first of each kind."""
    own = plan.run.micro_batch_size
    smaller = _of_sizes(case, [own // 2**power for power in range(1, own.bit_length())], own)
    found = _first_that_fit([smaller, _fsdp2_cases(case, plan.run)], script, flags, gpu)
    flag = "--activation_checkpointing"
    if flag not in flags:
        again = [(flag, case), *((f"{flag} {text}", other) for text, other in smaller)]
        with suppress(UsageError):  # a recipe without that flag
            found += _first_that_fit([again], script, [*flags, flag], gpu)
    return found


def larger(case: Case, plan: Estimate, script: Path, flags: Sequence[str], gpu: Gpu) -> Fitting:
    """The largest micro-batch that fits, like `alternatives`; empty if the case's own is the largest."""
    run = plan.run
    sizes = [run.micro_batch_size * 2**power for power in range(run.accumulation.bit_length() - 1, 0, -1)]
    return _first_that_fit([_of_sizes(case, sizes, run.micro_batch_size * run.accumulation)], script, flags, gpu)


def _of_sizes(case: Case, sizes: Sequence[int], number: int) -> list[tuple[str, Case]]:
    """The case with each micro-batch size that divides a number of samples."""
    divisors = [size for size in sizes if number % size == 0]
    return [(f"--micro_batch_size {size}", replace(case, flags={"micro_batch_size": size})) for size in divisors]


def _fsdp2_cases(case: Case, run: RunFacts) -> list[tuple[str, Case]]:
    """FSDP2 on as many processes as in a run, and on more."""
    name = "fsdp2_bf16" if run.precision == "bf16" else "fsdp2"
    cases = []
    for factor in (1, 2, 4, 8):
        number, machines = run.num_processes * factor, run.num_machines
        machines = machines * factor if machines > 1 else -(-number // PER_MACHINE)
        if run.batch_size % number == 0 and (factor > 1 or case.config.stem != name) and number % machines == 0:
            cases.append((f"--config {name} --num_processes {number}", Case(find_config(name), number, machines)))
    return cases


def _first_that_fit(
    kinds: Sequence[Sequence[tuple[str, Case]]], script: Path, flags: Sequence[str], gpu: Gpu
) -> Fitting:
    tries = [(text, replace(case, kind=number)) for number, kind in enumerate(kinds) for text, case in kind]
    found = dict(zip((text for text, _ in tries), plans(script, flags, [case for _, case in tries], gpu)))
    fitting = {text: plan for text, plan in found.items() if isinstance(plan, Estimate) and plan.fits}
    firsts = [next((text for text, _ in kind if text in fitting), "") for kind in kinds]
    return [(text, fitting[text]) for text in firsts if text]
