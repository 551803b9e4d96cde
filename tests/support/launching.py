"""Starts recipes: as a user does, or forked from a process that has imported everything."""

import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from support import forking
from support.runs import ROOT, Run

CONFIGS = ROOT / "accelerate_configs"
ACCELERATE_LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]  # accelerate launch without its other commands
TIMEOUT_S = 900  # DeepSpeed compiles on first use, minutes on a busy machine
# What a launcher around the tests would set, or a user who tunes threads.
INHERITED = re.compile("ACCELERATE_|FSDP_|TORCHELASTIC_|OMP_NUM|MASTER_|WORLD_SIZE|RANK|LOCAL_|CUDA_VISIBLE")


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
    command = _arguments_of_launch(output_dir, config, script, arguments, num_processes, options)
    return _checked(accelerate(["launch", *command], _nearest_folder(output_dir), output_dir, env), succeeds)


def accelerate(arguments: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """The command `accelerate <arguments>`, itself in a fork, which saves its imports; what it starts, it executes.

    Where it matters what the launcher's own process was started with, take `execute`.
    """
    return _forked(_run_accelerate, arguments, cwd, env or {}, output_dir)


def accelerate_forked(arguments: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """The same, but that what `accelerate launch` starts is forked, too."""
    assert arguments[0] == "launch"
    return _forked(forking.supervise, arguments[1:], cwd, env or {}, output_dir)


def fork(
    output_dir: Path,
    config: str | Path,
    script: str | Path,
    arguments: str = "",
    num_processes: int | None = None,
    options: str = "",
    env: dict[str, str] | None = None,
    succeeds: bool = True,
) -> Run:
    """The same processes as `launch` starts, forked. test_forking.py shows that they do the same."""
    command = _arguments_of_launch(output_dir, config, script, arguments, num_processes, options)
    run = _forked(forking.supervise, command, _nearest_folder(output_dir), env or {}, output_dir)
    return _checked(run, succeeds)


def _arguments_of_launch(
    output_dir: Path, config: str | Path, script: str | Path, arguments: str, num_processes: int | None, options: str
) -> list[str]:
    config = CONFIGS / f"{config}.yaml" if isinstance(config, str) else config
    command = ["--config_file", str(config), "--main_process_port", "0", *shlex.split(options)]
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    return [*command, str(ROOT / script), "--output_dir", str(output_dir), *shlex.split(arguments)]


def _nearest_folder(output_dir: Path) -> Path:
    return next(parent for parent in output_dir.parents if parent.is_dir())


def _checked(run: Run, succeeds: bool) -> Run:
    if succeeds:
        assert run.exit_code == 0, run.stdout + run.stderr
    return run


def _forked(target: Callable, arguments: list[str], cwd: Path, variables: dict[str, str], output_dir: Path) -> Run:
    # Tests run several at a time: threads that wait for each other would take the cores from all.
    context = forking.server(tuple(environment(OMP_NUM_THREADS="1").items()))
    pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    process = context.Process(target=target, args=(arguments, str(cwd), variables, [writer for _, writer in pipes]))
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


def _run_accelerate(arguments: list[str], cwd: str, variables: dict[str, str], writers: list[Connection]) -> None:
    forking.own_session(cwd, variables, writers)
    sys.argv = ["accelerate", *arguments]
    from accelerate.commands.accelerate_cli import main

    try:
        main()
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))  # without this frame
        sys.exit(1)


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


def until(condition: Callable[[], bool], seconds: float = 120, explain: Callable[[], object] = lambda: None) -> None:
    """Waits until it holds; `explain` gives what to say if it does not come to that."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), explain()
