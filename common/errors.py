"""The ways a run may end other than by finishing, each with its exit code, and which process was first."""

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path


class RunError(Exception):
    """A run that cannot go on; its message is one line for the user."""

    exit_code = 1
    label = "stopped"  # the word that its line begins with


class UsageError(RunError):
    """The user's mistake: says what was given, what was expected and what to type instead."""

    exit_code = 2
    label = "error"


class NonFiniteError(RunError):
    """A loss or a gradient that is infinite or not a number."""

    exit_code = 3


class StoppedError(RunError):
    """A signal came, and what was done is saved."""

    exit_code = 75


class HangError(RunError):
    """No step for so long that none will come."""


# What gloo and NCCL say when a process at the other end has ended.
_LOST_PEER = re.compile("Connection (reset|closed) by peer|Broken pipe|remote process exited", re.IGNORECASE)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether its line says it all: a bug in a recipe is another matter."""
    return isinstance(error, RunError | KeyboardInterrupt) or _LOST_PEER.search(str(error)) is not None


@dataclass(frozen=True)
class Failure:
    """How a run failed: the process of this machine that was first, its exit code and its line."""

    pid: int
    exit_code: int
    line: str

    @property
    def is_mine(self) -> bool:
        """Whether this process was the first."""
        return self.pid == os.getpid()


@cache
def first_failure(error: BaseException) -> Failure:
    """Claims to be the first process of this machine that fails, as the others mostly fail because it did.

    Returns:
        What the first process claimed, this one or another.
    """
    if isinstance(error, RunError):
        exit_code, line = error.exit_code, f"{error.label}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        exit_code, line = 130, "interrupted"
    elif lost := _LOST_PEER.search(str(error)):
        exit_code, line = 1, f"stopped: another process is gone ({lost[0]}); the launcher's report says how it ended"
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
        os.link(own, claim)  # unlike a rename, fails where another process was before
        return mine
    except FileExistsError:
        with suppress(OSError, ValueError):
            return Failure(**json.loads(claim.read_text()))
    except OSError:
        pass
    # When a process fails, the launcher removes this folder and stops the others: it stopped this process.
    return Failure(0, exit_code, line) if isinstance(error, StoppedError) else mine
