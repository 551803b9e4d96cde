"""`run(main, Config)`: turns errors into exit codes and prints the first error of a machine."""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from ..command_line import ConfigT, parse
from ..environment import CODE_FILE, num_machines, num_restarts, rank
from ..errors import StoppedError, UsageError, first_failure, needs_no_traceback, trace_of
from ..records.output_dir import checkpoints
from ..records.run_card import read_card
from . import signals


def run(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> NoReturn:
    """Parses the command line, calls `main(config)` and ends the process.

    If `main` returns a function, the main process calls it when all processes have left the run, so that none waits for
    it. The memory of training is free then.

    Exit codes: 0 done, 2 the user's mistake, 3 a loss or gradient that is not finite, 75 stopped by a
    signal, 130 interrupted, 1 anything else. If several processes of a machine fail, only the first
    prints: it mostly causes the other failures.
    """
    sys.stdout, sys.stderr = _Output(sys.stdout), _Output(sys.stderr)
    if code_file := os.environ.get(CODE_FILE):
        Path(code_file).touch()  # the file exists: the recipe has started
    signals.catch(_stop_at_once)
    try:
        record(lambda: _train(main, config_class), error_handler=_ReportedErrors())()
    except (Exception, KeyboardInterrupt) as error:
        end(error)
    sys.exit(0)


def _train(main: Callable[[ConfigT], Any], config_class: type[ConfigT]) -> None:
    try:
        afterwards = main(_after_restart(parse(config_class)))
    except ModuleNotFoundError as error:
        if error.name not in ("datasets", "pandas"):  # of the extra `data`: only some data needs them
            raise
        raise UsageError(f"this data needs {error.name}: type pip install {error.name}") from None
    gc.collect()  # a DDP model that outlives its process group may abort the process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if callable(afterwards) and rank() == 0:
        try:
            afterwards()
        except torch.OutOfMemoryError:
            print("the exported model does not fit into the memory of one GPU: it generates nothing", flush=True)


class _Output:
    """A stream that ignores write errors: after the loss of its ssh connection a run goes on, and saves."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stop_at_once(signal_name: str) -> None:
    """Ends the process on a signal before the first step, when there is nothing to save."""
    end(StoppedError(f"by {signal_name} before the first step: the same command starts again"))


def report(error: BaseException) -> None:
    """Writes an error of a thread into torchrun's report; `run` does that for the main thread."""
    _ReportedErrors().record_exception(error)


class _ReportedErrors(ErrorHandler):
    """Writes the one line of the first failure into torchrun's report, instead of a traceback."""

    def record_exception(self, e: BaseException) -> None:
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            line = first_failure(e).line
            extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
            Path(error_file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def end(error: BaseException) -> NoReturn:
    """Ends this process with the exit code of the first failure; prints the error if it is the first."""
    failure = first_failure(error)
    sys.stdout.flush()
    if failure.is_mine:
        trace = "" if needs_no_traceback(error) else trace_of(error)
        # One write: between two, another process could write into the line.
        sys.stderr.write(f"{failure.line}\n{trace}")
        sys.stderr.flush()
    else:
        # When one process ends, torchrun ends the others: the first failure must be printed before.
        with contextlib.suppress(psutil.Error):
            psutil.Process(failure.pid).wait(timeout=10)
    code_file = os.environ.get(CODE_FILE)
    if code_file and failure.is_mine:
        with contextlib.suppress(OSError):
            Path(code_file).write_text(str(failure.exit_code))
    # Not sys.exit: destroying the process group would wait for processes that may wait for this one.
    os._exit(failure.exit_code)


def _after_restart(config: ConfigT) -> ConfigT:
    """The config; after a restart by the launcher (`--max_restarts`), with the flags to resume from the newest
    checkpoint instead of those on the command line."""
    if num_restarts() == 0:
        return config
    # If this launcher's run has not written its run card yet, the folder's content is from another run.
    if num_machines() == 1 and read_card(config.output_dir).get("launcher") != os.getppid():
        return config
    resumes = checkpoints(config.output_dir) or config.resume_from_checkpoint is None
    resumed = "latest" if resumes else config.resume_from_checkpoint
    return replace(config, overwrite_output_dir=False, resume_from_checkpoint=resumed)
