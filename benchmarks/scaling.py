"""What more processes buy: speed, waiting and traffic with 1, 2 and 4 processes.

    python benchmarks/scaling.py --plot docs/scaling.svg
    python benchmarks/scaling.py --quick

Launches each config with `accelerate launch`. Each process has one thread, so that two processes use twice the cores of
one. Takes the optimizer steps of `fit`, each on the same batch; reading data is not timed. Strong scaling keeps the
global batch, so each process gets a smaller part of it; weak scaling keeps the batch of each process. Tensor
parallelism gives all processes the whole batch and a part of each layer. A round launches each config once. The table
shows medians of the rounds:

- samples per second, of all processes together;
- efficiency: these, divided by those of one process in the same round and by the cores in use: as many as processes,
  but no more than the machine has. In brackets: the lowest and the highest of all rounds;
- collectives: the share of a step in which at least one collective runs, from torch's profiler (the `gloo:` events,
  from the call until this process has the result). The processes may compute at the same time;
- waiting: the share of a step in which the main thread sleeps, from the kernel's statistics of the thread. It computes
  nothing and does not wait for a core, so it waits for the other processes: communication that computation does not
  hide, and slower processes. On a GPU instead: the share in which NCCL's kernels run and no other kernel does;
- MB: what a process writes to its connections in a step (/proc/self/io, mean of the processes), beside the formula of
  docs/parallelism.md, if the processes pass messages around a ring: N processes then send 2 (N - 1) / N values for each
  value of an all-reduce, and (N - 1) / N in a reduce-scatter or all-gather.

On a machine with GPUs it takes 1, 2, 4, ... of them, and measures no MB. That has not been verified yet.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from scaling_plot import plot
from torch import Tensor, nn

from accelerate_recipes.common.environment import num_cores

ROOT = Path(__file__).parents[1]
CONFIGS = ("ddp", "fsdp2", "deepspeed_zero2", "tensor_parallel")
MODES = ("strong", "weak")
NUM_CORES = num_cores()
NUM_GPUS = torch.accelerator.device_count()
PROFILED = 4  # steps
THREAD, PROCESS = Path("/proc/thread-self/schedstat"), Path("/proc/self/io")


@dataclass(frozen=True)
class Task:
    """A model, and the batch of one process.

    Attributes:
        build: makes the model.
        recipe: the recipe whose `forward_step` takes the loss.
        batch: number of samples -> batch.
        batch_size: samples of one process; in strong scaling of all processes.
        num_steps: steps to time in a round.
        reduced: values per sample that tensor parallelism sums over the processes in a forward pass, by the formula:
            one sum per pair of layers. 0 if the model has no plan for it.
    """

    title: str
    recipe: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    batch_size: int
    num_steps: int
    reduced: int


def recipe(name: str) -> dict:
    import runpy

    return runpy.run_path(str(ROOT / "recipes" / f"{name}.py"))


def llama(hidden_size: int, num_layers: int) -> nn.Module:
    """The model of recipes/transformer.py."""
    from accelerate_recipes.common.tasks.models.causal_lm import with_losses

    module = recipe("transformer")
    return with_losses(module["build"](module["Config"](hidden_size=hidden_size, num_layers=num_layers))[0])


def images(num_samples: int) -> dict[str, Tensor]:
    """Random images in the shape of MNIST."""
    return {"image": torch.rand(num_samples, 1, 28, 28), "label": torch.randint(0, 10, (num_samples,))}


def tokens(num_samples: int) -> dict[str, Tensor]:
    """Random samples of 64 tokens."""
    ids = torch.randint(0, 256, (num_samples, 64))
    return {"tokens": ids, "labels": ids}


def mlp() -> nn.Module:
    return recipe("mnist")["MLP"]((1, 28, 28), 10, width=16)


TASKS = {
    "mlp": Task("MLP, 13 thousand weights, batch 128", "mnist", mlp, images, 128, 150, 16),
    "llama1": Task(
        "Llama-style, 0.8 million weights, batch 8 of 64 tokens",
        "transformer",
        lambda: llama(128, 4),
        tokens,
        8,
        12,
        2 * 4 * 64 * 128,
    ),
    "llama10": Task(
        "Llama-style, 10.7 million weights, batch 4 of 64 tokens",
        "transformer",
        lambda: llama(384, 6),
        tokens,
        4,
        4,
        2 * 6 * 64 * 384,
    ),
}


def formula(config: str, num_processes: int, task: Task, num_weights: int, batch_size: int) -> float:
    """Bytes that a process sends in a step, by docs/parallelism.md; values of 4 bytes in a ring of processes."""
    ring = (num_processes - 1) / num_processes
    if config == "tensor_parallel":  # an all-reduce per pair of layers, forward and backward
        return 4 * 2 * ring * 2 * task.reduced * batch_size
    return 4 * {"ddp": 2, "deepspeed_zero2": 2, "fsdp2": 3}[config] * num_weights * ring


def counters() -> Tensor:
    """[seconds, of these asleep in the main thread, bytes written]; nan where this system does not count."""
    if NUM_GPUS:
        torch.accelerator.synchronize()
    now, asleep, written = time.perf_counter(), float("nan"), float("nan")
    if THREAD.exists() and PROCESS.exists() and not NUM_GPUS:
        on_core, waits_for_core, _ = (int(word) / 1e9 for word in THREAD.read_text().split())
        asleep = now - on_core - waits_for_core
        written = float(PROCESS.read_text().split("wchar: ")[1].split()[0])
    return torch.tensor([now, asleep, written], dtype=torch.float64)


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profiled(take: Callable[[int], None]) -> tuple[float, float]:
    """The shares of time (in which a collective runs, in which only collectives run on the GPU; nan on a CPU)."""
    take(1)
    with torch.profiler.profile() as profiler:
        started = counters()[0]
        take(PROFILED)
        micro = 1e6 * float(counters()[0] - started)
    spans = [(event.name, event.device_type, (event.time_range.start, event.time_range.end))
             for event in profiler.events()]  # fmt: skip
    if not NUM_GPUS:
        return covered([span for name, _, span in spans if name.startswith("gloo:")]) / micro, float("nan")
    kernels = [(name, span) for name, device, span in spans if device != torch.autograd.DeviceType.CPU]
    every, compute = ([span for name, span in kernels if keep or "nccl" not in name] for keep in (True, False))
    sending = covered([span for name, span in kernels if "nccl" in name])
    return sending / micro, (covered(every) - covered(compute)) / micro


def measure(task: Task, batch_size: int, folder: str) -> dict[str, float]:
    """Trains in this process, one of several. Returns means over the processes, per step."""
    from accelerate.state import AcceleratorState

    from accelerate_recipes.common.config import RunConfig
    from accelerate_recipes.common.launch.start import start
    from accelerate_recipes.common.parallel.strategies import prepare, with_plans
    from accelerate_recipes.common.plan import Plan
    from accelerate_recipes.common.step.setup import Setup

    config = RunConfig(batch_size=batch_size, max_steps=1, output_dir=folder)
    AcceleratorState._reset_state()  # a new Accelerator for each model, because DeepSpeed's takes only one
    accelerator = start(config)
    model = task.build()
    num_weights = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plan = Plan.of(config, accelerator.layout, batch_size)
    batch = task.batch(plan.micro_batch_size)
    samples = [dict(zip(batch, sample)) for sample in zip(*batch.values())]
    setup = Setup(accelerator, model, optimizer, recipe(task.recipe)["forward_step"], plan, train_set=samples)
    engine = prepare(with_plans(setup))
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}

    def take(num_steps: int) -> None:
        for number in range(num_steps):
            engine.step(number, [batch], wants_norm=False)

    take(3)  # DDP divides its buckets anew after the first step
    accelerator.wait_for_everyone()
    before = counters()
    take(task.num_steps)
    seconds, asleep, written = (counters() - before) / task.num_steps
    sending, waiting = profiled(take)
    numbers = torch.tensor([seconds, asleep / seconds if not NUM_GPUS else waiting, written, sending])
    numbers = accelerator.reduce(numbers.to(accelerator.device), "mean").tolist()
    return dict(zip(("seconds", "waiting", "written", "sending"), numbers)) | {"weights": num_weights}


def worker(path: str, names: list[str]) -> None:
    """One process of a launch: all tasks that the config can run. The first process writes its numbers to `path`."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    is_tensor_parallel = "PARALLELISM_CONFIG_TP_SIZE" in os.environ
    found = {}
    for name in names:
        task = TASKS[name]
        if is_tensor_parallel and not task.reduced:
            continue
        for mode in MODES if size > 1 else MODES[:1]:
            found[f"{name} {mode}"] = measure(task, task.batch_size * (size if mode == "weak" else 1), f"{path}.run")
    if os.environ.get("RANK", "0") == "0":
        Path(path).write_text(json.dumps(found))
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def launch(config: str, size: int, names: list[str]) -> dict[str, dict[str, float]]:
    """{"task mode": numbers} of a launch."""
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    options = ["--parallelism_config_tp_size", str(size)] if config == "tensor_parallel" else []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "numbers.json"
        command = ["accelerate", "launch", "--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
        command += ["--num_processes", str(size), "--main_process_port", "0", *options]
        command += [__file__, "--worker", str(result), "--tasks", *names]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        if run.returncode or not result.exists():
            sys.exit(run.stdout + run.stderr)
        return json.loads(result.read_text())


@dataclass(frozen=True)
class Results:
    """What all launches measured. `rounds[r][config, size]` is the result of a launch."""

    rounds: list[dict[tuple[str, int], dict[str, dict[str, float]]]]

    def rates(self, name: str, mode: str, config: str, size: int) -> list[float]:
        """Samples per second in each round; empty if the config cannot run the task."""
        key = (config, size) if size > 1 else ("single", 1)
        batch_size = TASKS[name].batch_size * (size if mode == "weak" else 1)
        found = [launches[key].get(f"{name} {mode if size > 1 else 'strong'}") for launches in self.rounds]
        return [batch_size / numbers["seconds"] for numbers in found if numbers]

    def speedups(self, name: str, mode: str, config: str, size: int) -> list[float]:
        """Samples per second, divided by those of one process in the same round."""
        return [
            rate / one for rate, one in zip(self.rates(name, mode, config, size), self.rates(name, mode, config, 1))
        ]

    def lines(self, name: str, mode: str, configs: list[str], sizes: list[int]) -> dict[str, dict[int, list[float]]]:
        """{config: {number of processes: speedups}} of the configs that can run the task."""
        found = {config: {size: self.speedups(name, mode, config, size) for size in sizes} for config in configs}
        return {config: speedups for config, speedups in found.items() if all(speedups.values())}

    def median(self, name: str, mode: str, config: str, size: int, what: str) -> float:
        """The median of one of the numbers of `measure`."""
        return statistics.median(launches[config, size][f"{name} {mode}"][what] for launches in self.rounds)


def cores_in_use(size: int) -> int:
    """A process uses a GPU, or a core as long as there are some."""
    return size if NUM_GPUS else min(size, NUM_CORES)


def print_tables(results: Results, names: list[str], configs: list[str], sizes: list[int]) -> None:
    columns = "samples/s | efficiency | collectives | waiting"
    for name in names:
        one = statistics.median(results.rates(name, "strong", "single", 1))
        print(f"\n{TASKS[name].title}; one process: {one:.0f} samples per second\n")
        print(f"| config | processes | strong: {columns} | weak: {columns} | MB: measured / formula |")
        print("| --- " + "| ---: " * 10 + "|")
        for config in configs:
            for size in sizes[1:]:
                if results.rates(name, "strong", config, size):
                    print(row(results, name, config, size), flush=True)


def row(results: Results, name: str, config: str, size: int) -> str:
    cells = [config, str(size)]
    for mode in MODES:
        shares = [speedup / cores_in_use(size) for speedup in results.speedups(name, mode, config, size)]
        cells += [
            f"{statistics.median(results.rates(name, mode, config, size)):.0f}",
            f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})",
            *(f"{100 * results.median(name, mode, config, size, what):.0f} %" for what in ("sending", "waiting")),
        ]
    num_weights = int(results.median(name, "strong", config, size, "weights"))
    written = results.median(name, "strong", config, size, "written") / 1e6
    expected = formula(config, size, TASKS[name], num_weights, TASKS[name].batch_size) / 1e6
    measured = "-" if math.isnan(written) else f"{written:.2f}"
    return f"| {' | '.join([*cells, f'{measured} / {expected:.2f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--quick", action="store_true", help="one round of the MLP under DDP with 1 and 2 processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.tasks)
        return
    names, configs, sizes = arguments.tasks, list(CONFIGS), [1, 2, 4]
    if NUM_GPUS:
        sizes = [2**power for power in range(NUM_GPUS.bit_length())]
    if arguments.quick:
        names, configs, sizes = ["mlp"], ["ddp"], sizes[:2]
    launches = [("single", 1), *((config, size) for size in sizes[1:] for config in configs)]
    rounds: list[dict] = []
    for index in range(1 if arguments.quick else arguments.rounds):
        start = index % len(launches)
        rounds.append({})
        for key in launches[start:] + launches[:start]:
            print(f"round {index + 1}: {key[0]} on {key[1]}", file=sys.stderr, flush=True)
            rounds[-1][key] = launch(*key, names)
    results = Results(rounds)
    packages = ", ".join(f"{package} {version(package)}" for package in ("torch", "accelerate", "deepspeed"))
    devices = f"{NUM_GPUS} GPUs" if NUM_GPUS else f"{NUM_CORES} cores"
    print(f"{date.today()}, {platform.machine()}, {devices}, {len(rounds)} round(s), {packages}")
    print_tables(results, names, configs, sizes)
    if arguments.plot is not None:
        panels = {
            (TASKS[name].title, mode): results.lines(name, mode, configs, sizes) for name in names for mode in MODES
        }
        arguments.plot.write_text(plot(panels, {size: cores_in_use(size) for size in sizes}))


if __name__ == "__main__":
    main()
