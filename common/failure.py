"""The process of a machine that failed first: it mostly causes the failures of the others, and it alone prints."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from textwrap import shorten

from .environment import Environment
from .errors import LOST_PEER, RunError, StoppedError, WorkerError, first_line, place_of

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
    """Records this failure if it is the first on this machine. The first mostly causes the later ones.

    Returns:
        The first failure, of this process or of another.
    """
    if isinstance(error, RunError):
        exit_code, line = error.exit_code, f"{error.label}: {error}"
    elif isinstance(error, KeyboardInterrupt):
        exit_code, line = 130, "interrupted"
    elif lost := LOST_PEER.search(str(error)):
        exit_code, line = 1, f"stopped: another process has ended ({lost[0]}); the launcher's report says how"
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
