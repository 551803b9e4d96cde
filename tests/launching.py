"""Starts recipes as a user does, and reads what they leave behind."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
DISTURBED = "tests/scripts/disturbed.py"
TIMEOUT_S = 900  # DeepSpeed compiles on first use, minutes on a busy machine
# What a launcher around the tests would set, or a user who tunes threads.
INHERITED = re.compile("ACCELERATE_|FSDP_|TORCHELASTIC_|OMP_NUM|MASTER_|WORLD_SIZE|RANK|LOCAL_|CUDA_VISIBLE")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    output_dir: Path

    @cached_property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    @property
    def lasting_records(self) -> list[dict]:
        """Records without what depends on the clock."""
        timed = ("samples_per_second", "tokens_per_second")
        return [{name: record[name] for name in record if name not in timed} for record in self.records]

    @property
    def checkpoints(self) -> list[int]:
        """Steps of those that are there."""
        return sorted(int(path.name.removeprefix("step_")) for path in self.output_dir.glob("checkpoints/step_*"))

    @cached_property
    def card(self) -> dict:
        return json.loads((self.output_dir / "run.json").read_text())

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.output_dir / "model" / "model.safetensors")


def environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not INHERITED.match(name)}
    # Rehearsals on the CPU, on a machine with GPUs, too.
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | changes


def execute(command: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """Runs a command in a session of its own, which is ended with it, whatever happens."""
    scripts = str(Path(sys.executable).parent)
    env = environment(**(env or {}))
    env["PATH"] = scripts + os.pathsep + env["PATH"]
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    left_over = [other.info for other in psutil.process_iter(["pid", "cmdline"]) if _session(other.pid) == process.pid]
    assert not left_over, left_over
    return Run(process.returncode, stdout, stderr, output_dir)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def launch(
    output_dir: Path,
    config: str | Path,
    script: str | Path,
    arguments: str = "",
    num_processes: int | None = None,
    options: str = "",
    env: dict[str, str] | None = None,
    succeeds: bool = True,
) -> Run:
    """`accelerate launch --config_file <config> <script> <arguments>`, for real."""
    config = CONFIGS / f"{config}.yaml" if isinstance(config, str) else config
    command = ["accelerate", "launch", "--config_file", str(config), "--main_process_port", "0", *shlex.split(options)]
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    command += [str(ROOT / script), "--output_dir", str(output_dir), *shlex.split(arguments)]
    cwd = next(parent for parent in output_dir.parents if parent.is_dir())
    # Tests run two at a time: threads that wait for each other would take the cores from both.
    run = execute(command, cwd, output_dir, {"OMP_NUM_THREADS": "1"} if env is None else env)
    if succeeds:
        assert run.exit_code == 0, run.stdout + run.stderr
    return run


def assert_equal_to_the_last_bit(run: Run, reference: Run) -> None:
    """Records and exported weights."""
    assert run.lasting_records == reference.lasting_records
    assert weight_distance(run, reference) == 0


def weight_distance(run: Run, reference: Run) -> float:
    """Largest ‖w − w₀‖ / ‖w₀‖ of all weight tensors."""
    assert run.weights.keys() == reference.weights.keys()
    distances = []
    for name, expected in reference.weights.items():
        assert run.weights[name].shape == expected.shape and run.weights[name].dtype == expected.dtype == torch.float32
        distances.append(float((run.weights[name] - expected).norm() / expected.norm()))
    return max(distances)


def largest_difference(values: list[float], expected: list[float]) -> float:
    """Largest relative difference; the lists are of one length."""
    assert len(values) == len(expected) > 0
    return max(abs(value - other) / abs(other) for value, other in zip(values, expected))
