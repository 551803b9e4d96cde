#!/usr/bin/env python3
"""Runs on each machine of a job: waits for the other machines, runs accelerate launch, returns the recipe's exit code.

    python launchers/node.py --num_machines 2 --machine_rank 0 --main_process_ip n1 -- \\
        --config_file accelerate_configs/multi_node_ddp.yaml --num_processes 16 recipes/mnist.py

Type the same command on each machine, except for the rank. The arguments after `--` go to accelerate launch; leave out
its flags for machines. This script passes signals on and gives the processes time to save. Exit codes: 2 for a wrong
argument, 1 if a machine did not arrive, otherwise that of the recipe, for example 75 if it was stopped and has saved
(accelerate launch alone turns every failure into 1).
"""

import argparse
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from meeting import Meeting, MeetingError, UsageError, meet

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_S = 0.1
STOPPED = 75  # exit code of a recipe that was stopped and has saved: start it again to resume
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main() -> int:
    options = parse()
    for number in SIGNALS:
        signal.signal(number, stop_at_once)
    if options.ends_with_stdin:
        threading.Thread(target=stop_with_stdin, daemon=True).start()
    try:
        check(options)
        if options.num_machines > 1:
            meet(
                Meeting(
                    options.num_machines,
                    options.machine_rank,
                    options.main_process_ip,
                    options.main_process_port,
                    options.timeout,
                )
            )
    except MeetingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return launch(options)


def stop_with_stdin() -> None:
    os.read(0, 1)  # not sys.stdin.read: Python needs the lock of sys.stdin when it exits
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at_once(number: int, _: object) -> None:
    """Ends this script before the recipe starts. The first process of a container ignores signals without a handler."""
    name = signal.Signals(number).name
    with suppress(OSError):
        line = f"stopped: by {name} before the first step: the same command will start again"
        print(line, file=sys.stderr, flush=True)
    sys.exit(STOPPED)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--num_machines", type=int, required=True)
    parser.add_argument("--machine_rank", type=int, required=True, help="0 to num_machines - 1")
    parser.add_argument("--main_process_ip", default="127.0.0.1", help="name or address of the machine with rank 0")
    parser.add_argument("--main_process_port", type=int, default=29500, help="a free port on it (default: 29500)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for all machines (default: 300)")
    parser.add_argument(
        "--ends_with_stdin", action="store_true", help="stop when standard input is closed, as by a lost ssh connection"
    )
    parser.add_argument("launch", nargs="+", metavar="-- ARGUMENT", help="arguments of accelerate launch")
    return parser.parse_args()


def check(options: argparse.Namespace) -> None:
    """Checks the arguments on this machine alone. Raises UsageError."""
    for name, value in vars(options).items():
        if isinstance(value, str) and re.search("[<>]|CHANGE_?ME|YOUR_", value):
            raise UsageError(f"--{name} {value} is a placeholder: use the real value")
    if not 0 <= options.machine_rank < options.num_machines:
        raise UsageError(
            f"--machine_rank {options.machine_rank} with --num_machines {options.num_machines}: expected 0 to "
            f"{options.num_machines - 1}"
        )
    given: list[str] = options.launch
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("--") else [word])]
    script = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    flags = dict(pairwise(words[:script]))  # flags after the script belong to the recipe
    config = flags.get("--config_file")
    for file in (config, *words[script : script + 1]):
        if file is not None and not Path(file).is_file():
            raise UsageError(f"{file}: no such file on {socket.gethostname()} in {Path.cwd()}")
    in_config = re.search(
        r"^num_processes: *(\d+)", Path(config).read_text(encoding="utf-8") if config else "", re.MULTILINE
    )
    value = flags.get("--num_processes", in_config[1] if in_config else "")
    if not value.isdigit() or int(value) < 1 or int(value) % options.num_machines:
        raise UsageError(
            f"--num_processes {value or 'is missing: it'} is the total over all {options.num_machines} machines: use "
            f"a multiple of {options.num_machines}"
        )
    if "--max_restarts" in words[:script] and options.num_machines > 1:
        raise UsageError(
            "--max_restarts does not work on several machines: remove it, and after a failure start the same command "
            "again with --resume_from_checkpoint latest"
        )


def adopt_orphans() -> None:
    """Makes this process the parent of processes that torchrun leaves behind (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def wait_for_orphans() -> None:
    """Waits for processes that torchrun has left in their save. It leaves them when a signal reaches it twice, for
    example from SLURM and from this script."""
    deadline = time.monotonic() + int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    with suppress(ChildProcessError):  # no process is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(POLL_S)


def launch(options: argparse.Namespace) -> int:
    """Runs accelerate launch and returns the exit code of the recipe."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
    ]  # faster than accelerate launch, which imports all its commands
    names = ["num_machines", "machine_rank"]
    if options.num_machines > 1:
        names += ["main_process_ip", "main_process_port"]
        command += ["--rdzv_conf", f"timeout={options.timeout:.0f}"]
    command += [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "exit_code"
        os.environ["ACCELERATE_RECIPES_EXIT_CODE"] = str(code_file)
        # By default torchrun kills processes 30 s after a signal, and does not pass on SIGUSR1.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(number.name for number in SIGNALS))
        adopt_orphans()
        received: list[int] = []
        for caught in SIGNALS:
            signal.signal(caught, lambda number, _: received.append(number))
        # In a new session, so that Ctrl-C in the terminal reaches it only once, through this script.
        process = subprocess.Popen([*command, *options.launch], start_new_session=True)
        num_passed_on = 0
        while process.poll() is None:
            for number in received[num_passed_on:]:
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
                num_passed_on += 1
            time.sleep(POLL_S)
        code = process.returncode
        if received:
            wait_for_orphans()
        known = code_file.read_text(encoding="utf-8") if code_file.exists() else None
        if code and known:
            return int(known)
        if code and received and known is None:  # the recipe had not started
            stop_at_once(received[0], None)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
