"""Bytes of weights, gradients and optimizer state in a process, beside the formula; the peak, beside the plan.

    python benchmarks/memory.py
    python benchmarks/memory.py --size 134m --config fsdp2 --config deepspeed_zero2

Launches a Llama (float32, AdamW, 10 million weights or more) under each config on 2 or 4
processes, and takes three steps. The script counts the storage of every live tensor:

- weights: after `prepare`;
- optimizer state: what the first step adds, except gradients;
- gradients: the rest when the optimizer starts its second step (DDP never frees them);
- peak: the most that the third step holds, from the profiler's record of allocations (on a GPU from the
  allocator).

The plan is that of `accelerate-recipes plan`, which runs no processes.

A second table has the activations of long samples: the most that a forward pass of one sample holds, beside what was
there before.

The formula for Ψ weights, if a process holds the share s: 4 Ψ s bytes of weights, 4 Ψ s of gradients and
8 Ψ s of optimizer state. Each ZeRO stage divides other parts (Rajbhandari et al. 2020). DeepSpeed's
optimizer works on a float32 copy of its share, 4 Ψ s more from the start. Under ZeRO-1, too, DeepSpeed
frees the gradients of other processes' shares before the step. Tensor parallelism divides the layers in
its plan; the norms stay whole.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from accelerate_recipes.plan.ask import Case, plans
from accelerate_recipes.plan.estimates import Estimate, NoPlan
from accelerate_recipes.plan.hardware import read

ROOT = Path(__file__).parents[1]
Run = tuple[str, int, list[str]]  # config, processes, options of the launcher
RUNS: list[Run] = [
    *((config, size, []) for config in ("ddp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")
      for size in (2, 4)),
    ("hsdp", 4, []),
    ("tensor_parallel", 2, []),
    ("tensor_parallel", 4, ["--parallelism_config_tp_size", "4"]),
    ("fsdp2_tensor_parallel", 4, []),
    ("sequence_parallel", 2, []),
    ("fsdp2_sequence_parallel", 4, []),
]  # fmt: skip
LONG_RUNS: list[Run] = [
    ("single", 1, []),
    ("tensor_parallel", 2, []),
    ("tensor_parallel", 4, ["--parallelism_config_tp_size", "4"]),
    ("sequence_parallel", 2, []),
    ("sequence_parallel", 4, ["--parallelism_config_sp_size", "4"]),
]
STEPS = 3
SHORT, LONG = (16, 8), (1024, 1)  # tokens of a sample, samples of a step: with few tokens activations stay small


def formula(config: str, num_processes: int, whole: int, named: int) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) in a process. The model has `whole` weights; tensor parallelism
    divides `named` of them."""
    one = 1 / num_processes
    shares = {
        "ddp": (1, 1, 1),
        "deepspeed_zero1": (1 + one, one, one),
        "deepspeed_zero2": (1 + one, one, one),
        "deepspeed_zero3": (one + one, one, one),
        "fsdp2": (one, one, one),
        "hsdp": (1 / 2, 1 / 2, 1 / 2),
        "sequence_parallel": (1, 1, 1),
        "fsdp2_sequence_parallel": (one, one, one),
    }
    if config in shares:
        weights, gradients, optimizer = shares[config]
        return 4 * whole * weights, 4 * whole * gradients, 8 * whole * optimizer
    tensor_parallel = 2 if config == "fsdp2_tensor_parallel" else num_processes
    held = (named / tensor_parallel + whole - named) / (num_processes / tensor_parallel)
    return 4 * held, 4 * held, 8 * held


def live_storages() -> dict[int, int]:
    """{address: bytes} of the storage of all live tensors in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return storages


def live_bytes() -> int:
    """Bytes of all live tensors in this process."""
    return sum(live_storages().values())


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that are held while `step` runs."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    held = live_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    allocations = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    more = most = 0
    for _, size in sorted(allocations):
        more += size
        most = max(most, more)
    return held + most


def sent_by(step: Callable[[], object]) -> int:
    """Bytes that this process writes while `step` runs: to the sockets of other processes. 0 where the system does not
    count them."""
    if not (counters := Path("/proc/self/io")).exists():
        return 0
    before = int(counters.read_text().split()[3])
    step()
    return int(counters.read_text().split()[3]) - before


def planned(runs: Sequence[Run], size: str, sizes: tuple[int, int]) -> list[Estimate | NoPlan]:
    """The plans of the runs, for a model in `SIZES` of llama.py."""
    cases = []
    for config, num_processes, options in runs:
        settings = {name.removeprefix("--"): int(value) for name, value in zip(options[::2], options[1::2])}
        cases.append(Case(ROOT / "accelerate_configs" / f"{config}.yaml", num_processes, settings=settings))
    context, batch_size = map(str, sizes)
    flags = ["--size", size, "--context", context, "--batch_size", batch_size, "--max_steps", str(STEPS)]
    return plans(ROOT / "benchmarks" / "llama.py", flags, cases, read("h100"))


def worker(path: str, size: str, context: int, batch_size: int) -> None:
    """One process of a run. The first process writes its numbers to `path`."""
    from llama import SIZES, build, forward_step

    from accelerate_recipes.common.config import RunConfig
    from accelerate_recipes.common.launch.start import start
    from accelerate_recipes.common.parallel.strategies import prepare, with_plans
    from accelerate_recipes.common.parallel.tensor_plan import shipped_plan
    from accelerate_recipes.common.plan import Plan
    from accelerate_recipes.common.step.setup import Setup
    from accelerate_recipes.common.tasks.models.causal_lm import with_losses

    config = RunConfig(batch_size=batch_size, max_steps=STEPS, output_dir=path)
    accelerator = start(config)
    model = with_losses(build(size, context))
    whole = sum(weight.numel() for weight in model.parameters())
    layout = accelerator.layout
    plan, _ = shipped_plan(model, max(2, layout.tp))
    named = sum(model.get_submodule(name).weight.numel() for name in plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    at_step: list[int] = []
    gradients: set[int] = set()

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        at_step.append(live_bytes())
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        local = [weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad for weight in weights]
        gradients.update(gradient.untyped_storage().data_ptr() for gradient in local)

    optimizer.register_step_pre_hook(look)

    share = Plan.of(config, layout, batch_size)
    before = live_bytes()
    engine = prepare(with_plans(Setup(accelerator, model, optimizer, forward_step, share)))
    del model
    weights = live_bytes()
    tokens = torch.randint(SIZES[size][-1], (share.micro_batch_size, context), device=accelerator.device)
    batch = {"tokens": tokens, "labels": tokens}
    engine.step(0, [batch], wants_norm=False)
    after_first = sum(size for address, size in live_storages().items() if address not in gradients)
    engine.step(1, [batch], wants_norm=False)
    numbers = {
        "whole": whole,
        "named": named,
        "before": before,
        "weights": weights,
        "optimizer": after_first - weights,
        "gradients": at_step[-1] - after_first,
        "peak": peak_of(lambda: engine.step(2, [batch], wants_norm=False)),
        "sent": sent_by(lambda: engine.step(3, [batch], wants_norm=False)),
        "activations": peak_of(lambda: engine.forward_step(engine.model, batch, 0)) - live_bytes(),
    }
    if accelerator.is_main_process:
        Path(path).write_text(json.dumps(numbers))
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="10m", help="of the model: a size of llama.py")
    parser.add_argument("--config", action="append", help="only these")
    options = parser.parse_args()
    if given := options.worker:
        worker(given[0], given[1], int(given[2]), int(given[3]))
        return
    runs, long_runs = ([run for run in each if run[0] in (options.config or run[0])] for each in (RUNS, LONG_RUNS))
    print(
        "| config | processes | weights, MB: measured / formula | gradients | optimizer state | peak: measured / plan |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for run, plan in zip(runs, planned(runs, options.size, SHORT)):
        numbers, (config, num_processes, _) = launched(run, options.size, SHORT), run
        expected = formula(config, num_processes, numbers["whole"], numbers["named"])
        names = ("weights", "gradients", "optimizer")
        columns = [beside(numbers[name], bytes_) for name, bytes_ in zip(names, expected)]
        print(
            f"| {config} | {num_processes} | {' | '.join(columns)} | {beside(numbers['peak'], plan.step.peak)} |",
            flush=True,
        )
    print(f"\n| config | processes | activations of {LONG[0]} tokens, MB: measured / plan | peak of a step |")
    print("| --- | ---: | ---: | ---: |")
    for run, plan in zip(long_runs, planned(long_runs, options.size, LONG)):
        numbers, (config, num_processes, _) = launched(run, options.size, LONG), run
        columns = [beside(numbers["activations"], plan.step.forward), beside(numbers["peak"], plan.step.peak)]
        print(f"| {config} | {num_processes} | {' | '.join(columns)} |", flush=True)


def beside(measured: float, expected: float) -> str:
    """A cell of the table, in MB."""
    return f"{measured / 1e6:.1f} / {expected / 1e6:.1f}"


def launched(run: Run, size: str, sizes: tuple[int, int]) -> dict[str, int]:
    """The numbers of the first process of a run. `sizes`: (tokens of a sample, samples of a step)."""
    config, num_processes, options = run
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "numbers.json"
        file = str(ROOT / "accelerate_configs" / f"{config}.yaml")
        command = ["accelerate", "launch", "--config_file", file, "--num_processes", str(num_processes), *options]
        command += [__file__, "--worker", str(result), size, *map(str, sizes)]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if not result.exists():
            sys.exit(ended.stdout + ended.stderr)
        return json.loads(result.read_text())


if __name__ == "__main__":
    main()
