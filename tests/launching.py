"""Starts recipes as a user does, and reads what they leave behind."""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from common.output_dir import checkpoints

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
DISTURBED = "tests/scripts/disturbed.py"
ACCELERATE_LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
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
        return [step for step, _ in checkpoints(self.output_dir)]

    @cached_property
    def card(self) -> dict:
        return json.loads((self.output_dir / "run.json").read_text())

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.output_dir / "model" / "model.safetensors")


def environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not INHERITED.match(name)}
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    # Rehearsals on the CPU, on a machine with GPUs, too.
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | changes


def execute(command: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """Runs a command in a session of its own, which is ended with it, whatever happens."""
    env = environment(**(env or {}))
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    _check_nothing_left(process.pid)
    return Run(process.returncode, stdout, stderr, output_dir)


def _check_nothing_left(session: int) -> None:
    def left() -> list[dict]:
        processes = psutil.process_iter(["pid", "cmdline", "status"])
        living = [other.info for other in processes if other.info["status"] != psutil.STATUS_ZOMBIE]
        return [info for info in living if _session(info["pid"]) == session]

    # One that was killed has closed its pipes a moment before it is gone.
    until(lambda: not left(), 5, left)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def launch_quickly(arguments: list[str], cwd: Path, output_dir: Path) -> Run:
    """`accelerate <arguments>` in a process that has imported accelerate already: that takes 4 of the 14 seconds of CPU
    time of a short run on two processes. The processes that it starts are started as ever."""
    context = _prepared()
    pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    process = context.Process(target=_run_accelerate, args=(arguments, str(cwd), [writer for _, writer in pipes]))
    process.start()
    for _, writer in pipes:
        writer.close()
    with ThreadPoolExecutor() as readers:
        texts = [readers.submit(_read_to_end, reader.fileno()) for reader, _ in pipes]
        try:  # until all that write there have ended
            stdout, stderr = (text.result(TIMEOUT_S) for text in texts)
            process.join(TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    _check_nothing_left(process.pid)
    return Run(process.exitcode, stdout, stderr, output_dir)


def _read_to_end(descriptor: int) -> str:
    with open(descriptor, closefd=False) as file:
        return file.read()


@cache
def _prepared() -> multiprocessing.context.ForkServerContext:
    before = dict(os.environ)
    # Tests run several at a time: threads that wait for each other would take the cores from all.
    inside = environment(OMP_NUM_THREADS="1")
    os.environ.clear()
    os.environ.update(inside)
    try:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["accelerate.commands.accelerate_cli"])
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run_accelerate(arguments: list[str], cwd: str, writers: list[Connection]) -> None:
    os.setsid()
    for number, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
    os.chdir(cwd)
    sys.argv = ["accelerate", *arguments]
    from accelerate.commands.accelerate_cli import main

    try:
        main()
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))  # without this frame
        sys.exit(1)


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
    command = ["launch", "--config_file", str(config), "--main_process_port", "0", *shlex.split(options)]
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    command += [str(ROOT / script), "--output_dir", str(output_dir), *shlex.split(arguments)]
    cwd = next(parent for parent in output_dir.parents if parent.is_dir())
    run = (
        launch_quickly(command, cwd, output_dir)
        if env is None
        else execute(["accelerate", *command], cwd, output_dir, env)
    )
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


def until(condition: Callable[[], bool], seconds: float = 120, explain: Callable[[], object] = lambda: None) -> None:
    """Waits until it holds; `explain` gives what to say if it does not come to that."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), explain()
