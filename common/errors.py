"""The errors that end a run, each with its exit code, and the process that failed first."""

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path


class RunError(Exception):
    """The run cannot continue. The message is one line for the user."""

    exit_code = 1
    label = "stopped"  # first word of the printed line


class UsageError(RunError):
    """A mistake of the user. The message says what was given, what was expected and what to type instead."""

    exit_code = 2
    label = "error"


class NonFiniteError(RunError):
    """A loss or gradient is not finite."""

    exit_code = 3


class StoppedError(RunError):
    """A signal stopped the run. All completed steps are saved."""

    exit_code = 75


class HangError(RunError):
    """No step for `--hang_timeout` seconds."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Messages of gloo and NCCL after the process at the other end of a connection has ended.
_LOST_PEER = re.compile("Connection (reset|closed) by peer|Broken pipe|remote process exited", re.IGNORECASE)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the message is enough. A bug in a recipe needs its traceback."""
    return isinstance(error, RunError | KeyboardInterrupt) or _LOST_PEER.search(str(error)) is not None


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


@cache
def first_failure(error: BaseException) -> Failure:
    """Records this failure if it is the first on this machine. The first mostly causes the later ones.

    Returns:
        The first failure, of this process or of another.
    """
    if isinstance(error, RunError):
        exit_code, line = error.exit_code, f"{error.label}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        exit_code, line = 130, "interrupted"
    elif lost := _LOST_PEER.search(str(error)):
        exit_code, line = 1, f"stopped: another process has ended ({lost[0]}); the launcher's report says how"
    else:
        exit_code, line = 1, f"{type(error).__name__}: {error}"
    mine = Failure(os.getpid(), exit_code, line)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # <one folder per attempt>/<local rank>/error.json
    if error_file is None:
        return mine
    claim = Path(error_file).parents[1] / "first_failure.json"
    own = claim.with_name(f"failure_{os.getpid()}.json")
    try:
        own.write_text(json.dumps(asdict(mine)))
        os.link(own, claim)  # unlike a rename, fails if another process was first
        return mine
    except FileExistsError:
        with suppress(OSError, ValueError):
            return Failure(**json.loads(claim.read_text()))
    except OSError:
        pass
    # If another process fails, the launcher removes this folder, and then stops this process.
    return Failure(0, exit_code, line) if isinstance(error, StoppedError) else mine
