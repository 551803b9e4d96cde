"""The end of a process: its exit code, the printed line of the first failure, and torchrun's report."""

import contextlib
import json
import os
import sys
import time
from typing import NoReturn

import psutil
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from ..environment import Environment
from ..errors import needs_no_traceback, trace_of
from ..failure import first_failure


class ReportedErrors(ErrorHandler):
    """Writes the one line of the first failure into torchrun's report, instead of a traceback."""

    def record_exception(self, e: BaseException) -> None:
        if error_file := Environment.read().error_file:
            line = first_failure(e).line
            extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
            error_file.write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")


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
    code_file = Environment.read().code_file
    if code_file and failure.is_mine:
        with contextlib.suppress(OSError):
            code_file.write_text(str(failure.exit_code), encoding="utf-8")
    # Not sys.exit: destroying the process group would wait for processes that may wait for this one.
    os._exit(failure.exit_code)
