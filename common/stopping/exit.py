"""run(main, Config): the only place where errors become exit codes, and what a process says when it ends."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from common.config import ConfigT, parse
from common.environment import (
    CODE_FILE,
    num_machines,
    num_restarts,
)
from common.errors import StoppedError, first_failure, needs_no_traceback
from common.records.output_dir import checkpoints
from common.records.run_card import read_card
from common.stopping import signals


def run(main: Callable[[ConfigT], None], config_class: type[ConfigT]) -> NoReturn:
    """Parses the command line, calls `main(config)` and ends the process.

    Exit codes: 0 done, 2 the user's mistake, 3 a loss or gradient that is not finite, 75 stopped by a
    signal, 130 interrupted, 1 anything else. Of several processes on a machine that fail, the first
    prints: the others mostly fail because it did.
    """
    sys.stdout, sys.stderr = _Output(sys.stdout), _Output(sys.stderr)
    if code_file := os.environ.get(CODE_FILE):
        Path(code_file).touch()  # it has begun
    signals.catch(_stop_at_once)
    try:
        record(lambda: main(_after_restart(parse(config_class))), error_handler=_ReportedErrors())()
    except (Exception, KeyboardInterrupt) as error:
        end(error)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(0)


class _Output:
    """A stream that may vanish, as with the ssh that a run was started over: the run goes on, and saves."""

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
    """Before the first step, when there is nothing to save."""
    end(StoppedError(f"by {signal_name} before the first step: the same command starts again"))


def report(error: BaseException) -> None:
    """Puts an error into torchrun's report, where `run` does not, as in a thread."""
    _ReportedErrors().record_exception(error)


class _ReportedErrors(ErrorHandler):
    """Puts into torchrun's report our line, or that of the process that failed first, instead of a
    traceback of ours; a bug keeps its traceback."""

    def record_exception(self, e: BaseException) -> None:
        failure = first_failure(e)
        if failure.is_mine and not needs_no_traceback(e):
            super().record_exception(e)
        elif error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": failure.line, "timestamp": str(int(time.time()))}
            Path(error_file).write_text(json.dumps({"message": {"message": failure.line, "extraInfo": extra}}))


def end(error: BaseException) -> NoReturn:
    """Ends this process with the exit code of an error, and says what it was if none failed before."""
    failure = first_failure(error)
    sys.stdout.flush()
    if failure.is_mine:
        text = failure.line + "\n" if needs_no_traceback(error) else "".join(traceback.format_exception(error))
        sys.stderr.write(text)  # at once, where print would let another process write before the end of the line
        sys.stderr.flush()
    else:
        # As soon as one process ends, torchrun ends the others: let the first say what happened.
        with contextlib.suppress(psutil.Error):
            psutil.Process(failure.pid).wait(timeout=10)
    code_file = os.environ.get(CODE_FILE)
    if code_file and failure.is_mine:
        with contextlib.suppress(OSError):
            Path(code_file).write_text(str(failure.exit_code))
    # Not sys.exit: to take down the process group here would wait for processes that may wait for us.
    os._exit(failure.exit_code)


def _after_restart(config: ConfigT) -> ConfigT:
    """The config of a run that the launcher has started again (`--max_restarts`), with the same command line: it
    resumes from the newest checkpoint."""
    if num_restarts() == 0:
        return config
    # As long as this launcher's run has not begun to write, what is there is of another run.
    if num_machines() == 1 and read_card(config.output_dir).get("launcher") != os.getppid():
        return config
    resumes = checkpoints(config.output_dir) or config.resume_from_checkpoint is None
    resumed = "latest" if resumes else config.resume_from_checkpoint
    return replace(config, overwrite_output_dir=False, resume_from_checkpoint=resumed)
