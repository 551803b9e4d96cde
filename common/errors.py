"""The errors that end a run, each with its exit code, and how to put them in one line."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .package import is_own

MAX_IDS_NAMED = 8
# Messages of torch's allocators, of cuBLAS and cuDNN, and of CUDA or NCCL.
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|_STATUS_ALLOC_FAILED|out of memory", re.IGNORECASE)
_LOOP = Path(__file__).parent


class RunError(Exception):
    """The run cannot continue. The message is one line for the user."""

    exit_code = 1
    label = "stopped"  # first word of the printed line


@dataclass(frozen=True)
class Edit:
    """A change of a config file of Accelerate."""

    key: str  # as Accelerate calls it; in a section, the file may leave out the prefix
    value: Any = None  # the new value; None removes the key, if the file has it
    section: str = ""  # with the key; empty at the top of the file


@dataclass(eq=False, repr=False)
class UsageError(RunError):
    """A mistake by the user. Its message is `what: instead`, plus `beside`; or `what` alone."""

    what: str  # what is wrong: what was given, and what was expected
    instead: str = ""  # what to type or to do instead
    edits: Sequence[Edit] = ()  # of the config file, if the user need not decide: `doctor --fix` makes them
    beside: str = ""  # what else to do, or an alternative: "or ...", "and ...", "as in ..." or another sentence

    exit_code = 2
    label = "error"

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, join_advice(self.instead, self.beside))))


def join_advice(advice: str, beside: str) -> str:
    """Joins a piece of advice and its addition."""
    separator = ", " if beside.startswith(("or ", "and ", "then ", "as in ")) else "; "
    return separator.join(filter(None, (advice, beside)))


class NonFiniteError(RunError):
    """A loss or gradient is not finite."""

    exit_code = 3


class DriftError(RunError):
    """Processes that hold the same weights no longer agree."""

    exit_code = 3


class StoppedError(RunError):
    """A signal stopped the run. All completed steps are saved."""

    exit_code = 75


class HangError(RunError):
    """No step for `--hang_timeout` seconds."""


@dataclass(eq=False, repr=False)
class WorkerError(Exception):
    """An error of the recipe's own code in a DataLoader worker. The message is its line, without "error: "."""

    line: str
    trace: str  # the traceback, as text

    def __str__(self) -> str:
        return self.line


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors that caused it, even if `from None` hides them."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (each := waiting.pop()) is not None and each not in seen:
            seen.append(each)
            yield each
            waiting += [each.__context__, each.__cause__]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the next if it ends in a colon; the name of its class if empty."""
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join([first, *map(str.strip, more[: first.endswith(":")])])


def place_of(error: BaseException) -> str | None:
    """The file and line of the recipe's own code that raised the error, or called the code that did; or None."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else None


def trace_of(error: BaseException) -> str:
    """The traceback from the recipe's code on, with the last frame of packages; all of it if the loop raised it."""
    if isinstance(error, WorkerError):
        return error.trace
    whole = traceback.TracebackException.from_exception(error)
    whole.__notes__ = []  # the line has them
    calls = [number for number, frame in enumerate(whole.stack) if Path(frame.filename).is_relative_to(_LOOP)]
    called = whole.stack[max(calls, default=-1) + 1 :]
    if own := [frame for frame in called if is_own(frame.filename) or frame is called[-1]]:
        whole.stack = traceback.StackSummary.from_list(own)
    return "".join(whole.format())


@contextmanager
def annotate_errors(note: Callable[[], str]) -> Iterator[None]:
    """Adds a note, such as the samples, to an error in the `with` block; `line_of` shows it."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        error.add_note(note())
        raise


def list_samples(samples: list[int]) -> str:
    """Names samples, the first eight of many."""
    more = ", ..." if len(samples) > MAX_IDS_NAMED else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:MAX_IDS_NAMED]))}{more}"


# Messages of gloo and NCCL after the process at the other end of a connection has ended.
LOST_PEER = re.compile("Connection (reset|closed) by peer|Broken pipe|remote process exited", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has too little memory, for one of torch's allocators or for another library."""
    is_named = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    return is_named or isinstance(error, MemoryError)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the message is enough. A bug in a recipe needs its traceback."""
    return isinstance(error, RunError | KeyboardInterrupt) or LOST_PEER.search(str(error)) is not None
