"""Each recipe beside its peer: the same weights, the same batches. Losses step by step, and CPU seconds in pairs.

    pip install trl==1.16.0 sentence-transformers==6.2.0 timm==1.0.31 diffusers==0.42.1
    python benchmarks/peers/run.py

Both sides run as commands of their own, in turns. The CPU seconds of a step are those of a long run without those of a
short one, divided by the steps between: starting, loading and the first steps are not in them. The memory is the peak
of the long run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import diffusion
import embeddings
import finetune
import image_classification
import preferences
import text_classification
import vision_language

ROOT = Path(__file__).parents[2]
PEERS = {
    module.__name__: module
    for module in (
        finetune,
        preferences,
        text_classification,
        embeddings,
        image_classification,
        vision_language,
        diffusion,
    )
}
SHORT = 4  # steps


class Cost(NamedTuple):
    """CPU seconds and peak memory in MB of a command, and the losses of its steps."""

    seconds: float
    memory: float
    losses: list[float]


def run_ours(name: str, folder: Path, steps: int) -> Cost:
    """The recipe on one process."""
    output = folder / "ours"
    flags = f"--output_dir {output} --overwrite_output_dir --max_steps {steps} --log_every 1 --eval_every {steps}"
    shared = "--warmup_steps 0 --lr_schedule constant --weight_decay 0 --check_steps 0"
    command = [str(ROOT / "recipes" / f"{name}.py"), *f"{flags} {shared} {PEERS[name].flags(folder)}".split()]
    seconds, memory, _ = _measure(command)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return Cost(seconds, memory, [line["train/loss"] for line in lines if "train/loss" in line])


def run_peer(name: str, folder: Path, steps: int) -> Cost:
    """The peer; its last line has the losses."""
    seconds, memory, output = _measure([str(Path(__file__).with_name(f"{name}.py")), str(folder), str(steps)])
    return Cost(seconds, memory, json.loads(output.splitlines()[-1]))


def _measure(command: list[str]) -> tuple[float, float, str]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        errors.seek(0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed:\n{output.read()[-2000:]}\n{errors.read()[-2000:]}")
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, output.read()


def compare(name: str, steps: int, rounds: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        PEERS[name].prepare(folder, steps)
        sides = {"ours": run_ours, "peer": run_peer}
        per_step: dict[str, list[float]] = {side: [] for side in sides}
        last = dict[str, Cost]()
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                short, long = (sides[side](name, folder, count) for count in (SHORT, steps))
                per_step[side].append((long.seconds - short.seconds) / (steps - SHORT))
                last[side] = long
        ratio = statistics.median(own / other for own, other in zip(per_step["ours"], per_step["peer"]))
        pairs = zip(last["ours"].losses, last["peer"].losses, strict=True)
        gap = max(abs(own - other) / abs(other) for own, other in pairs)
        own, other = (statistics.median(per_step[side]) for side in sides)
        memory = " | ".join(f"{last[side].memory:,.0f}" for side in sides)
        return f"| {name} | {PEERS[name].PEER} | {gap:.0e} | {own:.3f} | {other:.3f} | {ratio:.2f} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=PEERS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(
        "| recipe | peer | largest difference of a loss | CPU s a step, ours | peer | ours / peer | MB, ours | peer |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in [arguments.only] if arguments.only else PEERS:
        print(compare(name, arguments.steps, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
