"""Starts recipes: as a user does, or as forks of a process that has imported everything."""

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
ACCELERATE_LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]  # imports only this command of accelerate
TIMEOUT_S = 900  # DeepSpeed compiles on first use, minutes on a busy machine
# Variables of a launcher around the tests, or of a user who tunes threads: recipes must not inherit them.
INHERITED = re.compile("ACCELERATE_|FSDP_|TORCHELASTIC_|OMP_NUM|MASTER_|WORLD_SIZE|RANK|LOCAL_|CUDA_VISIBLE")


def environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not INHERITED.match(name)}
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited['PATH']}"
    # Tests run on the CPU, also on a machine with GPUs.
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | changes


def execute(
    command: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> Run:
    """Runs a command in a new session. Kills the session on an error; fails if a process is left in it."""
    env = environment(**(env or {}))
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
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
    """Runs `accelerate launch --config_file <config> <script> <arguments>` with the real launcher."""
    command = _arguments_of_launch(output_dir, config, script, arguments, num_processes, options)
    return _checked(accelerate(["launch", *command], _nearest_folder(output_dir), output_dir, env), succeeds)


def accelerate(arguments: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """Runs the command `accelerate <arguments>` in a fork, to save its imports. The fork starts real processes.

    For a test that depends on how the launcher itself is started, use `execute`.
    """
    return _forked(_run_accelerate, arguments, cwd, env or {}, output_dir)


def accelerate_forked(arguments: list[str], cwd: Path, output_dir: Path, env: dict[str, str] | None = None) -> Run:
    """Like `accelerate`, but also forks the processes that `accelerate launch` starts."""
    assert arguments[0] == "launch"
    return _forked(forking.supervise, arguments[1:], cwd, env or {}, output_dir)


def fork_script(script: str | Path, arguments: list[str], cwd: Path, env: dict[str, str] | None = None) -> Run:
    """Runs `python <script> <arguments>` in a fork."""
    return _forked(forking.run_script, [str(ROOT / script), *arguments], cwd, env or {}, cwd)


def fork_command(command: list[str], cwd: Path, env: dict[str, str]) -> Run:
    """Forks what a command of the tool starts: `accelerate launch`, or a recipe up to its call of `fit`."""
    if command[1:3] == ACCELERATE_LAUNCH[1:]:
        target, words = forking.supervise, command[3:]
    else:
        assert command[1:3] == ["-P", "-c"], command
        target, words = forking.run_script, [str(ROOT / "tests" / "scripts" / "asked.py"), *command[4:]]
    return _forked(target, words, cwd, {**env, "OMP_NUM_THREADS": "1"}, cwd)


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
    """Like `launch`, but forks the processes. test_forking.py checks that the results are the same."""
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
    # One thread: several tests run at a time, and threads that wait for each other would keep the cores busy.
    context = forking.server(tuple(environment(OMP_NUM_THREADS="1").items()))
    pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    process = context.Process(target=target, args=(arguments, str(cwd), variables, [writer for _, writer in pipes]))
    process.start()
    for _, writer in pipes:
        writer.close()
    with ThreadPoolExecutor() as readers:
        texts = [readers.submit(_read_to_end, reader.fileno()) for reader, _ in pipes]
        try:  # a pipe ends when all processes that write to it have ended
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

    # A killed process closes its pipes a moment before it is gone.
    until(lambda: not left(), 5, left)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def until(condition: Callable[[], bool], seconds: float = 120, explain: Callable[[], object] = lambda: None) -> None:
    """Waits until `condition` is true. Fails after `seconds`, with the result of `explain` as the message."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition(), explain()
