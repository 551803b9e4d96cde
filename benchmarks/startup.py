"""Seconds from the launch command to the first optimizer step, beside a PyTorch script written by hand.

    python benchmarks/startup.py

Both train the same small net on two processes with DDP on scikit-learn's digits; theirs under
torchrun, ours under `accelerate launch`. They take turns; the ratio is taken within a pair.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Reads the digits as common.images does, without importing scikit-learn: data imports are left out.
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
    """Runs a command; seconds until it prints a line that begins with "step"."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    started, seconds = time.perf_counter(), 0.0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("step") and not seconds:  # an evaluation follows
                seconds = time.perf_counter() - started
        if process.wait() != 0:
            raise RuntimeError(f"{command} failed")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        raw_script = Path(folder) / "raw.py"
        raw_script.write_text(RAW)
        recipe = str(ROOT / "recipes" / "mnist.py")
        arguments = ["--model", "mlp", "--max_steps", "1", "--output_dir", folder]
        config = str(ROOT / "accelerate_configs" / "ddp.yaml")
        commands = {
            "torchrun, by hand": ["torchrun", "--standalone", "--nproc_per_node", "2", str(raw_script)],
            "accelerate launch, ours": ["accelerate", "launch", "--config_file", config, recipe, *arguments],
            "torchrun, ours": ["torchrun", "--standalone", "--nproc_per_node", "2", recipe, *arguments],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for index in range(rounds):
            names = list(commands)
            for name in names[index % 3 :] + names[: index % 3]:
                seconds[name].append(seconds_to_first_step(commands[name]))
    print("| start | seconds to the first step, median (min to max) | ratio, median (min to max) |")
    print("| --- | ---: | ---: |")
    for name, times in seconds.items():
        ratios = [mine / raw for mine, raw in zip(times, seconds["torchrun, by hand"])]
        print(
            f"| {name} | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
