"""What eight minutes on one GPU tell, in the order of what is worth most: make gpu-lease

    PYTHONPATH=.:tests python3 tests/gpu/lease.py --output gpu_lease.jsonl

The parts: facts of the machine; GPT-2 beside a loop by hand, alone on the GPU; twelve strategies whose processes share
the GPU (tests/support/one_device.py), beside one process; the most telling tests, in parallel; memory beside what
`plan` says. Each result is a line of JSON in the file as soon as it is known, so that a script that is killed leaves
what it found. What fails is a result, too. Without a GPU all of it runs on the CPU, with the smallest sizes: a
rehearsal. Each part but memory has run on a GPU, not yet in one call (docs/gpu.md).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from accelerate_recipes.common.check.tolerances import FLOAT32
from accelerate_recipes.common.records.run_card import hardware
from accelerate_recipes.verify.certificate import Row
from accelerate_recipes.verify.differences import compare
from support.launching import ACCELERATE_LAUNCH, CONFIGS, execute, fork
from support.recipes import FLAGS, RECIPES
from support.runs import ROOT, Run

REHEARSES = not torch.cuda.is_available()
ON_GPU = {"CUDA_VISIBLE_DEVICES": "" if REHEARSES else os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
TINY = "--layers 1 --heads 2 --width 64 --context 32 --vocabulary 256 --batch_size 4 --steps 3 --inductor none"
STRATEGIES = (
    "ddp", "fsdp2", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "fsdp2_expert_parallel", "hsdp",
    "fsdp2_tensor_parallel", "fsdp2_sequence_parallel", "fsdp2_pipeline", "hsdp_tensor_parallel",
    "fsdp2_tensor_pipeline",
)  # fmt: skip
FEW_STEPS = " --max_steps 6 --eval_every 6"
TELLING = "result_of_the_cpu or overflow or flash or mesh_of_one or waits_for_the_gpu or lost_peer or fsdp2 or memory"
PACKAGES = ("torch", "accelerate", "transformers", "safetensors", "scikit-learn", "pytest", "pytest-xdist", "triton")
PACKAGES += ("datasets", "deepspeed")
PLANNED = "--num_layers 12 --hidden_size 768 --num_heads 12 --context 512 --batch_size 16 --max_steps 8"


class Lease:
    """The time that is left, and the file of results.

    Args:
        path: of the file, to which lines are added.
        seconds: from now.
    """

    def __init__(self, path: Path, seconds: float):
        self.path, self.started, self.seconds = path, time.monotonic(), seconds
        self._lock = threading.Lock()

    def left(self, at_most: float) -> float:
        """Seconds for what takes at most so many."""
        return min(at_most, self.seconds - (time.monotonic() - self.started))

    def tell(self, part: str, name: str, **facts: Any) -> None:
        """Writes a result at once."""
        line = {"part": part, "name": name, "at": round(time.monotonic() - self.started, 1), **facts}
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:300], flush=True)

    def try_to(self, part: str, name: str, find: Callable[[], dict[str, Any]]) -> None:
        """Writes what `find` returns, or why it failed."""
        started = time.monotonic()
        try:
            if self.left(1e9) < 5:
                raise TimeoutError("no time left")
            facts = find()
        except Exception as error:  # AssertionErrors of launches carry their output
            facts = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[-3000:]}
        self.tell(part, name, seconds=round(time.monotonic() - started, 1), **facts)


def facts() -> dict[str, Any]:
    """Of the machine."""
    found = {name: _version(name) for name in PACKAGES}
    smi = [line.strip() for line in _output("nvidia-smi", "-q", "-d", "MEMORY,CLOCK,POWER").splitlines()]
    tools = {name: shutil.which(name) for name in ("cc", "c++", "nvcc", "ninja")}
    gpu = {}
    if not REHEARSES:
        properties = torch.cuda.get_device_properties(0)
        gpu = {"memory": properties.total_memory, "capability": torch.cuda.get_device_capability()}
        gpu |= {"cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version(), "cudnn": torch.backends.cudnn.version()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "outcome": "rehearsal" if REHEARSES else "gpu", "date": date, "python": platform.python_version(),
        "hardware": hardware(), "versions": found, "tools": tools, "gpu": gpu, "nvidia-smi": smi[:80],
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """Of a command; nothing if there is none."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


def gpt2(flags: str, seconds: float) -> dict[str, Any]:
    """Tokens per second, MFU and memory of both loops."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "gpt2.py"), "--rounds", "1", "--json", str(file)]
        run = execute([*command, *flags.split()], ROOT, file, {**ON_GPU, "PYTHONPATH": str(ROOT)}, seconds)
        assert run.exit_code == 0, run.stderr
        return {"outcome": "measured", **json.loads(file.read_text())}


def launched(folder: Path, config: str, script: str, flags: str, seconds: float, env: dict[str, str]) -> Run:
    """A run under `accelerate launch`; a rehearsal forks it."""
    if REHEARSES:
        return fork(folder, config, script, flags, env=env, succeeds=False)
    command = [*ACCELERATE_LAUNCH, "--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / script), "--output_dir", str(folder), *flags.split()]
    return execute(command, folder.parent, folder, {**env, **ON_GPU, "PYTHONPATH": str(ROOT)}, seconds)


def strategies(lease: Lease, names: list[str], folder: Path) -> None:
    """Each strategy with its processes on the one device, beside one process."""
    recipes = {name: "experts" if "expert" in name else "transformer" for name in names}
    alone = dict[str, Run]()
    for recipe in dict.fromkeys(recipes.values()):

        def reference(recipe: str = recipe) -> dict[str, Any]:
            script, flags = RECIPES[recipe]
            run = launched(folder / f"alone_{recipe}", "single", script, flags + FEW_STEPS, lease.left(90), {})
            assert run.exit_code == 0, run.stdout + run.stderr
            alone[recipe] = run
            return {"outcome": "done", "last loss": run.column("train/loss")[-1]}

        lease.try_to("one process", recipe, reference)

    def beside(name: str) -> None:
        def find() -> dict[str, Any]:
            expected, (script, flags) = alone[recipes[name]], RECIPES[recipes[name]]
            flags, env = flags + FEW_STEPS + FLAGS.get(name, ""), {"RECIPE": str(ROOT / script), "OMP_NUM_THREADS": "1"}
            run = launched(folder / name, name, "tests/support/one_device.py", flags, lease.left(120), env)
            assert run.exit_code == 0, (run.stdout + run.stderr)[-2900:]
            difference = compare(run.trace, expected.trace, tolerances=FLOAT32)
            through = [line for line in run.stdout.splitlines() if line.startswith("through the CPU")]
            outcome = Row(name, None, difference).verdict
            return {
                "outcome": outcome,
                "collectives": through,
                "checked": run.card.get("checked_steps"),
                **asdict(difference),
            }

        lease.try_to("strategy", name, find)

    with ThreadPoolExecutor(1 if REHEARSES else 4) as pool:
        for done in as_completed([pool.submit(beside, name) for name in names]):
            done.result()


def tests(words: str, report: Path, seconds: float) -> dict[str, Any]:
    """The tests append their outcomes to the same file."""
    workers = [] if REHEARSES else ["-n", "8", "--dist", "worksteal"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-k",
        words,
        "tests/gpu",
        "--report",
        str(report),
        *workers,
    ]
    env = {**ON_GPU, "ACCELERATE_RECIPES_REHEARSE_GPU_TESTS": "1" if REHEARSES else "0"}
    run = execute(command, ROOT, report, {**env, "PYTHONPATH": str(ROOT)}, seconds)
    return {"outcome": "passed" if run.exit_code == 0 else "failed", "summary": run.stdout.splitlines()[-1:]}


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The MiB that nvidia-smi reports, every fifth of a second; before the block first."""
    found, ended = list[int](), threading.Event()

    def look() -> None:
        while not ended.is_set():
            text = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
            found.extend(int(line) for line in text.splitlines()[:1] if line.strip().isdecimal())
            ended.wait(0.2)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def memory(flags: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Of a run: what torch allocates, what nvidia-smi sees, and what `plan` says."""
    script, base = RECIPES["transformer"]
    with watched_memory() as used:
        run = launched(folder / "memory", "single", script, f"{base} {flags}", seconds, {})
    assert run.exit_code == 0, run.stdout + run.stderr
    command = [
        sys.executable,
        "-m",
        "accelerate_recipes",
        "plan",
        str(ROOT / script),
        "--config",
        "single",
        "--gpu",
        "h100",
    ]
    plan = execute(
        [*command, "--json", "--", *base.split(), *flags.split()], ROOT, folder, {"PYTHONPATH": str(ROOT)}, 90
    )
    assert plan.exit_code == 0, plan.stdout + plan.stderr
    (told,) = json.loads(plan.stdout)["plans"]
    seen = {"nvidia-smi MiB": max(used) - used[0]} if used else {}
    return {"outcome": "measured", "torch GiB": run.card.get("peak_memory_gib"), "plan": told, **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_lease.jsonl"))
    parser.add_argument("--seconds", type=float, default=480)
    parts = ("facts", "gpt2", "strategies", "tests", "memory")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    arguments = parser.parse_args()
    lease = Lease(arguments.output.absolute(), arguments.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "facts" in arguments.parts:
            lease.try_to("facts", "machine", facts)
        if "gpt2" in arguments.parts:
            lease.try_to("gpt2", "defaults", lambda: gpt2(TINY if REHEARSES else "--steps 30", lease.left(150)))
        if "strategies" in arguments.parts:
            strategies(lease, list(arguments.strategies), folder)
        if "tests" in arguments.parts:
            words = "mesh_of_one or (result_of_the_cpu and linear)" if REHEARSES else TELLING
            lease.try_to("tests", words, lambda: tests(words, lease.path, lease.left(200)))
        if "memory" in arguments.parts:
            flags = "--max_steps 2" if REHEARSES else PLANNED
            lease.try_to("memory", flags, lambda: memory(flags, folder, lease.left(90)))
    lease.tell("end", "lease", seconds=round(time.monotonic() - lease.started, 1))


if __name__ == "__main__":
    main()
