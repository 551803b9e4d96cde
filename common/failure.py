"""Finds which process of a machine failed first: it usually causes the other failures, and only it prints. Ends each
process with that exit code and line, and with torchrun's report."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from textwrap import shorten
from typing import NoReturn

import psutil
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from .environment import Environment
from .errors import LOST_PEER, RunError, StoppedError, WorkerError, first_line, needs_no_traceback, place_of, trace_of

LONGEST = 400  # characters of an error's own line


@dataclass(frozen=True)
class Failure:
    """The first failure on this machine: the process, its exit code and its printed line."""

    pid: int
    exit_code: int
    line: str

    @property
    def is_mine(self) -> bool:
        """Whether this process was the first."""
        return self.pid == os.getpid()


def line_of(error: BaseException) -> str:
    """An error of the recipe's own code in one line: what, where, and its notes, such as the samples."""
    if isinstance(error, WorkerError):
        return str(error)
    environment = Environment.read()
    process = f"process {environment.rank}" if environment.world_size > 1 else None
    details = [detail for detail in (place_of(error), process, *getattr(error, "__notes__", ())) if detail]
    what = shorten(first_line(error), LONGEST, placeholder=" ...")  # torch lists all backends that it has
    return f"{type(error).__name__}: {what}" + (f" ({', '.join(details)})" if details else "")


@cache
def first_failure(error: BaseException) -> Failure:
    """Records this failure if it is the first on this machine. The first usually causes the later ones. Returns the
    first failure, of this process or of another."""
    if isinstance(error, RunError):
        exit_code, line = error.exit_code, f"{error.label}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        exit_code, line = 130, "interrupted"
    elif lost := LOST_PEER.search(str(error)):
        exit_code, line = 1, f"stopped: another process has ended ({lost[0]}); see the launcher's report"
    else:
        exit_code, line = 1, f"error: {line_of(error)}"
    mine = Failure(os.getpid(), exit_code, line)
    if (error_file := Environment.read().error_file) is None:
        return mine
    claim = error_file.parents[1] / "first_failure.json"
    own = claim.with_name(f"failure_{os.getpid()}.json")
    try:
        own.write_text(json.dumps(asdict(mine)), encoding="utf-8")
        os.link(own, claim)  # unlike a rename, fails if another process was first
        return mine
    except FileExistsError:
        with suppress(OSError, ValueError):
            return Failure(**json.loads(claim.read_text(encoding="utf-8")))
    except OSError:
        pass
    # If another process fails, the launcher removes this folder, and then stops this process.
    return Failure(0, exit_code, line) if isinstance(error, StoppedError) else mine


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
        # One write: between two, another process could write into the line.
        sys.stderr.write(f"{failure.line}\n{'' if needs_no_traceback(error) else trace_of(error)}")
        sys.stderr.flush()
    else:
        # When one process ends, torchrun ends the others: the first failure must be printed before that.
        with suppress(psutil.Error):
            psutil.Process(failure.pid).wait(timeout=10)
    if (code_file := Environment.read().code_file) and failure.is_mine:
        with suppress(OSError):
            code_file.write_text(str(failure.exit_code), encoding="utf-8")
    # Not sys.exit: destroying the process group would wait for processes that may wait for this one.
    os._exit(failure.exit_code)
