"""Seconds that the processes of one machine spend on agreeing with each other, for several numbers of them.

    python benchmarks/control_plane.py
    python benchmarks/control_plane.py --processes 2 8 --config ddp

Forked processes run a config on the CPU with gloo, with a small model of many tensors: what they compute and
write costs little, so that the rows show the messages. `set-up` joins the processes, wraps the model and takes
one step, without imports. `flags` is the all-reduce of a step that lets all stop together. `plan` decides which
process writes which part of a checkpoint, and `save` is the whole save. `resume` verifies the checkpoint, and
reads it. `end` leaves the process group. Each number is that of the slowest process: the median of the rounds,
and set-up and end once.

The second table simulates 4,096 processes that save a model of 70 billion weights: the milliseconds that a drawn
process needs for its plan, and the largest number of bytes that a drawn process writes relative to the mean.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import accelerate
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser, prepare_multi_gpu_env
from torch import Tensor, nn

from accelerate_recipes import RunConfig, start
from accelerate_recipes.common.checkpoint.reader import Reader
from accelerate_recipes.common.checkpoint.save import Saver
from accelerate_recipes.common.checkpoint.writer import assign, collect_shards
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.parallel.strategies import prepare
from accelerate_recipes.common.plan import Plan
from accelerate_recipes.common.records.running_sums import RunningSums
from accelerate_recipes.common.state import TrainState
from accelerate_recipes.common.step.setup import Setup
from accelerate_recipes.common.stopping.watch import Watch
from accelerate_recipes.common.weights.shards import Shard, holders, shard_range

ROOT = Path(__file__).parents[1]
COLUMNS = ("set-up", "flags", "plan", "save", "resume", "end")
WIDTH, ROUNDS = 48, 5  # the width is a multiple of each default number of processes


def build(layers: int) -> nn.Module:
    """Weights and biases of this many layers: with AdamW, eight tensors in a checkpoint for each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def forward_step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Any loss."""
    return {"loss": model(batch["x"]).square().mean(-1)}


def work(folder: Path, layers: int) -> dict[str, list[float]]:
    """{column: seconds of each round} of this process."""
    seconds: dict[str, list[float]] = {name: [] for name in COLUMNS}

    def timed(name: str, do: Callable[[], object]) -> None:
        group.all_gather(None)  # all start together
        started = time.perf_counter()
        do()
        seconds[name].append(time.perf_counter() - started)

    started = time.perf_counter()
    size = int(os.environ["WORLD_SIZE"])
    config = RunConfig(batch_size=size, save_every=1, keep_checkpoints=1, output_dir=str(folder))
    accelerator = start(config)
    model = build(layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    plan = Plan.of(config, accelerator.layout, size)
    engine = prepare(Setup(accelerator, model, optimizer, forward_step, plan))
    result = engine.step(0, [{"x": torch.ones(1, WIDTH)}], wants_norm=False)
    group = CpuGroup()
    watch, state = Watch(accelerator, plan, group), TrainState()
    seconds["set-up"].append(time.perf_counter() - started)
    # A save asks whether the older checkpoint is of this run: by settings and samples.
    with Saver(engine, {"samples": {}}, group, watch, lambda step, finish: None) as saver:
        for number in range(1, ROUNDS + 1):
            state.step = number

            def flags(step: int = number) -> None:
                watch.after_step(step, result)
                watch.settle()

            def resume(step: int = number) -> None:
                engine.load_parts(Reader.open_verified(folder / "checkpoints" / f"step_{step:08d}", group))

            timed("flags", flags)
            timed("plan", lambda: collect_shards(engine.shards(), group.rank))
            timed("save", lambda: saver.save(state, RunningSums()))
            timed("resume", resume)
    timed("end", torch.distributed.destroy_process_group)
    return seconds


def environment(config: str, size: int) -> dict[str, str]:
    """The variables that `accelerate launch` gives to all processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = f"--config_file {config}.yaml --num_processes {size} --main_process_port {port} script".split()
    with contextlib.chdir(ROOT / "accelerate_configs"):
        arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(options))
    own = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return prepare_multi_gpu_env(arguments) | {name: str(value) for name, value in own.items()}


def measure(config: str, size: int, layers: int) -> list[float]:
    """The seconds of each column, of the slowest process."""
    variables, pids = environment(config, size), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(size):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                    seconds = work(folder, layers)
                (folder / f"{rank}.json").write_text(json.dumps(seconds))
                os._exit(0)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {size} processes failed")
        each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [statistics.median(map(max, zip(*(seconds[column] for seconds in each)))) for column in COLUMNS]


def llama_70b() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """{name: (shape, the dimension that tensor parallelism divides)} of its weights."""
    width, wide, keys, vocabulary = 8192, 28672, 1024, 128256
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "q": ((width, width), 0),
        "k": ((keys, width), 0),
        "v": ((keys, width), 0),
        "o": ((width, width), 1),
        "gate": ((wide, width), 0),
        "up": ((wide, width), 0),
        "down": ((width, wide), 1),
        "norm 1": ((width,), None),
        "norm 2": ((width,), None),
    }
    weights = {f"{number}.{name}": weight for number in range(80) for name, weight in layer.items()}
    ends = dict.fromkeys(("embedding", "head"), ((vocabulary, width), 0))
    return weights | ends | {"norm": ((width,), None)}


def simulate(replicas: int, shards: int, tensor: int, draws: int = 32) -> tuple[float, float]:
    """(median milliseconds of a process's plan, largest bytes / mean bytes) under HSDP × TP."""
    ranks, generator = torch.arange(replicas * shards * tensor).view(replicas, shards, tensor), random.Random(0)
    milliseconds, written, weights = [], [], llama_70b()
    total = sum(4 * 3 * math.prod(shape) for shape, _ in weights.values())
    for rank in generator.sample(range(ranks.numel()), draws):
        started, parts = time.perf_counter(), []
        coordinate = (rank == ranks).nonzero()[0].tolist()
        for name, (shape, along) in weights.items():
            cuts: list[int | None] = [None, 0, along] if along is not None else [None, 0]
            mesh = ranks if along is not None else ranks[..., coordinate[-1]]
            offsets, sizes = shard_range(shape, mesh.shape, cuts, coordinate[: len(cuts)])
            writers = holders(mesh, cuts, coordinate[: len(cuts)], ranks.numel())
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                parts.append(Shard(f"{kind}.{name}", shape, offsets, sizes, torch.Tensor, writers))
            parts.append(Shard(f"step.{name}", (), (), (), torch.Tensor, range(ranks.numel())))
        mine = assign(parts, rank)
        milliseconds.append(1000 * (time.perf_counter() - started))
        written.append(4 * sum(math.prod(part.sizes) for part in parts if part.name in mine))
    return statistics.median(milliseconds), max(written) / (total / ranks.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--config", default="fsdp2", help="name of a file in accelerate_configs/")
    parser.add_argument("--layers", type=int, default=75, help="of the model; a checkpoint has eight tensors for each")
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, {options.config}, {versions}\n", flush=True)
    print(f"| processes | {' | '.join(COLUMNS)} |\n| ---: |{' ---: |' * len(COLUMNS)}", flush=True)
    for size in options.processes:
        row = [f"{seconds:.3f}" for seconds in measure(options.config, size, options.layers)]
        print(f"| {size} | {' | '.join(row)} |", flush=True)
    print("\n| 4,096 simulated processes, 70 B weights | plan, ms | largest / mean bytes |\n| --- | ---: | ---: |")
    for sizes in ((1, 4096, 1), (8, 512, 1), (64, 64, 1), (1, 512, 8), (8, 64, 8)):
        spent, largest = simulate(*sizes)
        print(f"| {sizes[0]} replicas × {sizes[1]} FSDP2 × {sizes[2]} TP | {spent:.0f} | {largest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
