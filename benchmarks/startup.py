"""Seconds from the launch command to the first optimizer step, beside a PyTorch script written by hand.

    python benchmarks/startup.py

First table: the script by hand under torchrun, and recipes/mnist.py under `accelerate launch` and under
torchrun. All train the same small network on scikit-learn's digits, on two processes with DDP. They take
turns, and the ratio is taken within a round. Second table: each recipe with its own model and data, with
and without a launcher, and the number and seconds of its imports in one process (`python -X importtime`).
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Like common/tasks/vision/images.py, this script reads the digits without scikit-learn: the same work for both.
RAW = """
import gzip, os, sys
from importlib.util import find_spec
from pathlib import Path
import numpy, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
package = Path(find_spec("sklearn").submodule_search_locations[0])
with gzip.open(package / "datasets" / "data" / "digits.csv.gz", "rt") as file:
    rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
dataset = TensorDataset(rows[:, :-1] / 16, rows[:, -1].long())
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for pixels, labels in DataLoader(dataset, 32, sampler=DistributedSampler(dataset), drop_last=True):
    F.cross_entropy(model(pixels), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("step 1", flush=True)
    break
dist.destroy_process_group()
"""


def seconds_to_first_step(command: list[str]) -> float:
    """Runs a command to its end. Returns the seconds until its first line that begins with "step"."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    started, seconds = time.perf_counter(), 0.0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        for line in process.stdout:
            if line.startswith("step") and not seconds:  # later lines begin with "step", too
                seconds = time.perf_counter() - started
        if process.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()}")
    return seconds


def imports(command: list[str]) -> tuple[int, float]:
    """Returns (number of modules, seconds) of the imports of a recipe in one process."""
    command = [sys.executable, "-X", "importtime", *command]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    micro = [
        int(line.removeprefix("import time:").split("|")[0]) for line in lines if re.match(r"import time: +\d", line)
    ]
    return len(micro), sum(micro) / 1e6


def in_turns(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """{name: seconds of each round}; the order of the commands rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(rounds):
        names = list(commands)
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(seconds_to_first_step(commands[name]))
    return seconds


def spread(values: list[float]) -> str:
    """median (min to max)"""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
    parser.add_argument("--recipes", nargs="*", choices=recipes, default=recipes, help="of the second table")
    arguments = parser.parse_args()
    rounds, recipes = arguments.rounds, arguments.recipes
    config = str(ROOT / "accelerate_configs" / "ddp.yaml")
    launchers = {
        "accelerate launch": ["accelerate", "launch", "--config_file", config],
        "torchrun": ["torchrun", "--standalone", "--nproc_per_node", "2"],
        "python": [sys.executable],
    }
    with tempfile.TemporaryDirectory() as folder:
        raw_script = Path(folder) / "raw.py"
        raw_script.write_text(RAW)
        # --log_every 1 prints the first step at once. The evaluation comes after the second step, so it is not timed.
        flags = f"--max_steps 2 --log_every 1 --eval_every 2 --output_dir {folder} --overwrite_output_dir".split()
        mlp = [str(ROOT / "recipes" / "mnist.py"), "--model", "mlp", *flags]
        by_hand = "torchrun, by hand"
        commands = {by_hand: [*launchers["torchrun"], str(raw_script)]}
        commands |= {f"{name}, ours": launchers[name] + mlp for name in ("accelerate launch", "torchrun")}
        seconds = in_turns(commands, rounds)
        print("| start | seconds to the first step, median (min to max) | ratio, median (min to max) |")
        print("| --- | ---: | ---: |")
        for name, times in seconds.items():
            ratios = [mine / raw for mine, raw in zip(times, seconds[by_hand])]
            print(f"| {name} | {spread(times)} | {spread(ratios)} |")
        print("\n| recipe | " + " | ".join(launchers) + " | modules imported | seconds to import them |")
        print("| --- |" + " ---: |" * (len(launchers) + 2))
        for name in recipes:
            script = ROOT / "recipes" / f"{name}.py"
            recipe = [str(script), *flags, *(["--sample_tokens", "0"] if name == "transformer" else [])]
            times = in_turns({name: launcher + recipe for name, launcher in launchers.items()}, rounds)
            num_modules, import_seconds = imports(recipe)
            columns = [*(spread(values) for values in times.values()), str(num_modules), f"{import_seconds:.2f}"]
            print(f"| {script.name} | " + " | ".join(columns) + " |", flush=True)


if __name__ == "__main__":
    main()
