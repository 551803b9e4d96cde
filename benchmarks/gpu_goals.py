"""What the recipes reach on one GPU, beside the goals for an H200.

    python benchmarks/gpu_goals.py --mnist path/to/mnist --text path/to/tinyshakespeare.txt

- recipes/mnist.py: seconds of training until an evaluation finds 99.2 % accuracy. Needs MNIST's IDX files.
- recipes/transformer.py with nanoGPT's setting for one GPU (config/train_shakespeare_char.py), in bf16, compiled:
  seconds until the loss on tinyshakespeare is 1.45. Two things differ from nanoGPT: tokens are bytes, and the
  learning rate falls along a cosine to 0, not to 1e-4.
- The CNN of recipes/mnist.py with the channels-last memory format, as it is, and without. CUDA's GroupNorm may
  undo the format.

Seconds are those of the training records: without evaluation, with compiling and the first use of kernels. The
table says how many of them the steps up to the first record took. Goals without data are skipped.

Needs a GPU. `--max_steps 20` shows without one that the script runs. NOT YET RUN ON A GPU.
"""

import argparse
import contextlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.models.tokenization import byte_tokenizer

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Goal:
    """A value of an evaluation metric that a recipe reaches in `seconds` of training.

    `flags` are those of the recipe. An evaluation comes with a training record: then its seconds are known.
    """

    title: str
    recipe: str
    flags: str
    batch_size: int
    metric: str
    value: float
    seconds: float
    higher_is_better: bool
    options: str = ""  # of accelerate launch

    def is_met_by(self, value: float) -> bool:
        return value >= self.value if self.higher_is_better else value <= self.value


@dataclass
class Evaluation:
    """An evaluation, and the seconds of training before it."""

    step: int
    value: float
    seconds: float
    first_seconds: float  # of these, up to the first training record


MNIST = Goal(
    "`mnist.py`: accuracy ≥ 0.992 in < 0.5 s",
    "mnist",
    "--max_steps 468 --learning_rate 2e-2 --warmup_steps 60 --log_every 52 --eval_every 156",
    batch_size=384,
    metric="eval/accuracy",
    value=0.992,
    seconds=0.5,
    higher_is_better=True,
)
TEXT = Goal(
    "`transformer.py`, nanoGPT's setting: loss ≤ 1.45 in < 60 s",
    "transformer",
    "--max_steps 5000 --context 256 --learning_rate 1e-3 --warmup_steps 100 --weight_decay 0.1 "
    "--log_every 50 --eval_every 250 --sample_tokens 0 --compile",
    batch_size=64,
    metric="eval/loss",
    value=1.45,
    seconds=60,
    higher_is_better=False,
    options="--mixed_precision bf16",
)


def write_gpt(folder: Path, is_small: bool) -> None:
    """Writes nanoGPT's model, or a small one, untrained, with bytes as tokens. `--model_name_or_path` takes it."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    width, layers = (32, 1) if is_small else (384, 6)
    sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": width, "n_layer": layers, "n_head": layers}
    shape = GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def train(goal: Goal, flags: str, folder: Path) -> list[dict[str, Any]]:
    """Runs the recipe as a user does, in one process. Returns its records; none if it fails."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *goal.options.split()]
    command += ["--config_file", str(ROOT / "accelerate_configs" / "single.yaml")]
    command += [str(ROOT / "recipes" / f"{goal.recipe}.py"), "--output_dir", str(folder)]
    command += ["--batch_size", str(goal.batch_size), *goal.flags.split()]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run([*command, *flags.split()], env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stdout + run.stderr, file=sys.stderr, flush=True)
        return []
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(records: list[dict[str, Any]], goal: Goal) -> list[Evaluation]:
    """The evaluations in order, from a run's records."""
    found, times, last_step = [], [], 0
    for record in records:
        if "samples_per_second" in record:
            times.append((record["step"] - last_step) * goal.batch_size / record["samples_per_second"])
            last_step = record["step"]
        if goal.metric in record:
            found.append(Evaluation(record["step"], record[goal.metric], sum(times), times[0]))
    return found


def result(goal: Goal, found: list[Evaluation]) -> str:
    """A line of the table: the first evaluation that meets the goal, or else the best."""
    sign = -1 if goal.higher_is_better else 1
    best = min(found, key=lambda one: sign * one.value)
    chosen = next((one for one in found if goal.is_met_by(one.value)), best)
    met = "met" if goal.is_met_by(chosen.value) and chosen.seconds < goal.seconds else "missed"
    return (
        f"| {goal.title} | {chosen.value:.4f} at step {chosen.step} "
        f"| {chosen.seconds:.2f} | {chosen.first_seconds:.2f} "
        f"| {best.value:.4f} at step {best.step}, last {found[-1].value:.4f} | {met} |"
    )


def seconds_of_a_step(model: nn.Module, images: Tensor, labels: Tensor, num_steps: int) -> float:
    """The mean time of a forward and backward pass."""
    for index in range(num_steps + 1):
        if index == 1:  # the first step chooses kernels
            _wait()
            started = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        model.zero_grad()
    _wait()
    return (time.perf_counter() - started) / num_steps


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def channels_last(precision: str, num_steps: int = 200, num_rounds: int = 10, batch_size: int = 384) -> str:
    """A line of the table: the time of a step with the format, as a share of the time without, in pairs."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    network = runpy.run_path(str(ROOT / "recipes" / "mnist.py"))["ConvNet"]

    class Contiguous(network):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.blocks(self.stem(images)).flatten(1))

    models = {"with": network((1, 28, 28), 10).to(DEVICE), "without": Contiguous((1, 28, 28), 10).to(DEVICE)}
    images = torch.rand(batch_size, 1, 28, 28, device=DEVICE)
    labels = torch.randint(0, 10, (batch_size,), device=DEVICE)
    kept = []
    models["with"].blocks[0].register_forward_hook(
        lambda module, inputs, output: kept.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    bf16 = torch.autocast(DEVICE, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    ratios = []
    with bf16:
        for index in range(num_rounds):
            names = ("with", "without") if index % 2 == 0 else ("without", "with")
            times = {name: seconds_of_a_step(models[name], images, labels, num_steps) for name in names}
            ratios.append(times["with"] / times["without"])
    ratio = statistics.median(ratios)
    return (
        f"| {precision} | {ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) "
        f"| {'kept' if kept[-1] else 'undone'} | {'met' if ratio <= 1 else 'missed'} |"
    )


def parse() -> argparse.Namespace:
    """Reads the command line. Raises UsageError for what is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four IDX files")
    parser.add_argument("--text", type=Path, help="tinyshakespeare as one text file")
    parser.add_argument("--max_steps", type=int, help="short runs, to see that the script runs")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and arguments.max_steps is None:
        raise UsageError("the goals need a GPU: use --max_steps 20 to see that the script runs")
    for path in (arguments.mnist, arguments.text):
        if path is not None and not path.exists():
            raise UsageError(f"{path}: not found")
    return arguments


def main() -> None:
    arguments = parse()
    few = arguments.max_steps
    short = f"--max_steps {few} --log_every {few} --eval_every {few}" if few else ""
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    print(f"## Recipes, {date.today()}, {gpu}, torch {torch.__version__}\n")
    print("| goal | reached | seconds of training | of these up to the first record | best and last | |")
    print("| --- | --- | ---: | ---: | --- | --- |")
    for goal, data in ((MNIST, arguments.mnist), (TEXT, arguments.text)):
        if data is None:
            print(f"| {goal.title} | skipped: no --{'mnist' if goal is MNIST else 'text'} | | | | |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            flags = f"--data {data.resolve()} {short}"
            if goal is TEXT:
                write_gpt(Path(folder) / "gpt", is_small=bool(few))
                flags += f" --model_name_or_path {folder}/gpt"
            records = train(goal, flags, Path(folder) / "run")
        found = evaluations(records, goal)
        print(result(goal, found) if found else f"| {goal.title} | failed: see stderr | | | | |", flush=True)
    print("\nA step of the CNN with channels_last, as a share of the time without. The goal is at most 1.\n")
    print("| precision | ratio, median (min to max) | the format after the first GroupNorm | |")
    print("| --- | ---: | --- | --- |")
    for precision in ("float32", "bf16"):
        size = {"num_steps": few, "num_rounds": 2, "batch_size": 8} if few else {}
        print(channels_last(precision, **size), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
