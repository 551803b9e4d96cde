"""Forks the processes of a run from a server that has imported everything: one second of CPU time instead of ten.

`accelerate launch` runs its own code until it starts processes. Then a supervisor, itself a fork, replaces torchrun: it
serves the store for the rendezvous, sets the variables that torchrun sets, and ends the other processes when one fails.
"""

import atexit
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

_FORK_EXEC = subprocess._fork_exec
SHUTDOWN_S = 30  # from SIGTERM to SIGKILL, as in torchrun


@cache
def server(environment: tuple[tuple[str, str], ...]) -> multiprocessing.context.ForkServerContext:
    """Starts a server process with that environment and all imports done. Returns the context that forks it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    # The server needs this entry to find support.preloaded, which removes it again.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    try:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.preloaded"])
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def supervise(arguments: list[str], cwd: str, variables: dict[str, str], writers: list[Connection]) -> None:
    """Runs `accelerate launch <arguments>` with forked processes. The target of a process from `server`.

    Args:
        arguments: of accelerate launch.
        cwd: folder in which the processes start.
        variables: added to the environment of the server.
        writers: pipes for standard output and standard error.
    """
    own_session(cwd, variables, writers)
    _launch(arguments)


def _launch(arguments: list[str]) -> None:
    """Runs `accelerate launch <arguments>` in this process."""
    import torch.distributed.run
    from accelerate.commands import launch

    def start_one(args: Namespace) -> None:
        _, environment = launch.prepare_simple_launcher_cmd_env(args)
        sys.exit(_start([environment], [args.training_script, *args.training_script_args]))

    launch.simple_launcher = start_one
    torch.distributed.run.run = _start_several
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))


def run_script(arguments: list[str], cwd: str, variables: dict[str, str], writers: list[Connection]) -> None:
    """Runs `python <script> <arguments>`. The target of a process from `server`.

    Commands of Python and of `accelerate launch` that the script starts are forks as well.
    """
    own_session(cwd, variables, writers)
    subprocess._fork_exec = _fork_command
    sys.exit(_start([dict(os.environ)], arguments))


def _fork_command(
    words: Sequence[str | bytes],
    executables: object,
    close_fds: object,
    pass_fds: object,
    cwd: str | None,
    variables: list[bytes] | None,
    *others: Any,
) -> int:
    """Replaces what `subprocess` uses to fork and execute `words`, with its arguments. Returns the id of the process.

    It executes what is not Python's, and with options of Python, or when torch or a tokenizer has started threads,
    which a fork lacks.
    """
    command = [os.fsdecode(word) for word in words]
    launches = command[:2] == ["accelerate", "launch"]
    runs_python = command[0] == sys.executable and (command[1] == "-m" or command[1].endswith(".py"))
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if not (launches or runs_python) or num_threads > threading.active_count():
        return _FORK_EXEC(words, executables, close_fds, pass_fds, cwd, variables, *others)
    if pid := os.fork():
        return pid
    for finalizer in list(weakref.finalize._registry):  # else this fork removes the script's temporary folders
        finalizer.detach()
    for number, descriptor in enumerate((others[0], others[3], others[5])):
        if descriptor != -1:
            os.dup2(descriptor, number)
    os.chdir(cwd or ".")
    given = [variable.split(b"=", 1) for variable in variables or []]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given} or dict(os.environ)
    if launches or command[1:3] == ["-m", "accelerate.commands.launch"]:
        _become(environment, lambda: _launch(command[2 if launches else 3 :]))
    _work(environment, command[1:])


def own_session(cwd: str, variables: dict[str, str], writers: list[Connection]) -> None:
    """Starts a new session, which shows processes that are left behind, and sets output, folder and environment."""
    assert "support.preloaded" in sys.modules  # multiprocessing silently ignores a failed preload
    os.setsid()
    for number, writer in enumerate(writers, start=1):
        os.dup2(writer.fileno(), number)
        writer.close()
    os.chdir(cwd)
    os.environ.update(variables)


def _start_several(args: Namespace) -> NoReturn:
    """Replaces torchrun. Takes torchrun's arguments; Accelerate has already set the environment."""
    from torch.distributed import TCPStore

    size = int(args.nproc_per_node)
    listener = socket.create_server(("127.0.0.1", 0))  # reserves the port
    errors = Path(tempfile.mkdtemp())
    environments = []
    for rank in range(size):
        (errors / str(rank)).mkdir()
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": listener.getsockname()[1],
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCHELASTIC_ERROR_FILE": errors / str(rank) / "error.json",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        }
        environments.append({**os.environ, **{name: str(value) for name, value in own.items()}})

    def keep_store() -> object:
        # Runs after the forks, because it starts threads. Earlier connections wait in the listener's queue.
        port, descriptor = listener.getsockname()[1], listener.detach()
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    exit_code = _start(environments, [args.training_script, *args.training_script_args], keep_store)
    shutil.rmtree(errors)
    os._exit(exit_code)  # without the exit handlers that the fork inherited


def _start(
    environments: list[dict[str, str]],
    words: list[str],
    meanwhile: Callable[[], object] = lambda: None,
) -> int:
    """Forks a process for each environment. When one fails, ends the others and returns its exit code."""
    pids = set()
    for environment in environments:
        pid = os.fork()
        if pid == 0:
            _work(environment, words)
        pids.add(pid)
    kept = meanwhile()
    exit_code, deadline = 0, float("inf")
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            pids.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            if code != 0 and exit_code == 0:
                exit_code, deadline = code, time.monotonic() + SHUTDOWN_S
                _signal(pids, signal.SIGTERM)
        elif time.monotonic() > deadline:
            _signal(pids, signal.SIGKILL)
        else:
            time.sleep(0.01)
    del kept
    return exit_code if exit_code >= 0 else 128 - exit_code


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:  # not reaped yet, so the system has not reused the ids
        os.kill(pid, number)


def _work(environment: dict[str, str], words: list[str]) -> NoReturn:
    """Does in this fork what `python <words>` does: a script, or -m and a module, and its arguments."""

    def run() -> None:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")

    _become(environment, run)


def _become(environment: dict[str, str], run: Callable[[], object]) -> NoReturn:
    """Makes this fork a process with that environment, which calls `run` and ends."""
    import datasets
    import numpy
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if "HF_HOME" in environment:  # of which `datasets` took the folder of its cache when the server imported it
        importlib.reload(datasets.config)
    os.closerange(3, 4096)
    _forget_multiprocessing()
    for seed in (random.seed, numpy.random.seed, torch.seed):  # else all forks draw the same numbers
        seed()
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code)


def _forget_multiprocessing() -> None:
    """Makes multiprocessing treat this process as a main process, not as a child of the fork server."""
    process = multiprocessing.process
    process._current_process = sys.modules["support.preloaded"].MAIN_PROCESS
    process._current_process.name = "MainProcess"
    process._parent_process, process._children = None, set()
    multiprocessing.set_start_method(None, force=True)
    tracker = resource_tracker._resource_tracker  # the server's; `_work` has closed the pipe to it
    tracker._fd = tracker._pid = None
