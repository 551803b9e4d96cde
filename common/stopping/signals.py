"""Stop requests from outside: signals, or the launcher's exit."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import BEGUN_AS
from ..environment import Environment

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TWICE_S = 1.0  # one Ctrl-C sends SIGINT twice at once: from the terminal and from the launcher
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_received: list[str] = []
_at_once: Callable[[str], object] | None = None
_before: dict[int, Any] = {}  # {signal number: handler before `catch`}


def received_signal() -> str | None:
    """The name of the first signal received; None if there was none. A launcher may add SIGTERM to the signal that it
    passes on, and the system may deliver the two in either order."""
    return next((name for name in _received if name != "SIGTERM"), _received[0] if _received else None)


def catch(at_once: Callable[[str], object] | None = None) -> None:
    """Records SIGTERM, SIGINT and SIGUSR1, instead of letting them end this process.

    A second SIGINT still ends the process at once, even if torchrun turned it into SIGTERM. On Linux, the end of the
    launcher counts as SIGTERM. A thread calls `at_once` with the name of each signal, until the next call of `catch`.
    """
    global _at_once
    _at_once = at_once
    if threading.current_thread() is not threading.main_thread() or _before:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # A thread records them: Python's own handlers do not run while a collective blocks the main thread.
    threading.Thread(target=_listen, args=(reader, writer, os.getppid()), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in STOPPING:
        _before[number] = signal.signal(number, lambda *_: None)
    if Environment.read().was_launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # Also if the launcher has ended already. A fork has a different parent from the start.
        if (os.getpid() == BEGUN_AS[0] and os.getppid() != BEGUN_AS[1]) or _is_orphan():
            os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan() -> bool:
    """Whether the launcher ended before this module was imported, so that process 1 took its place. In a container,
    process 1 may be the launcher itself, or its shell."""
    if os.getppid() != 1:
        return False
    try:
        words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return not any(word in words for word in ("accelerate", "torch", "python", "launch", "sh\0"))


def release() -> None:
    """Restores the handlers from before `catch`: in a notebook the process continues after the run."""
    if _before:
        signal.set_wakeup_fd(-1)
    while _before:
        signal.signal(*_before.popitem())


def _listen(reader: socket.socket, writer: socket.socket, parent: int) -> None:
    # `writer` is an argument to keep the socket open as long as the thread runs.
    interrupted_at = None
    while number := reader.recv(1):
        # torchrun turns a second SIGINT into SIGTERM. A SIGTERM after the end of the parent does not count as one.
        again = number[0] == signal.SIGINT or (number[0] == signal.SIGTERM and os.getppid() == parent)
        if again and interrupted_at is not None and time.monotonic() - interrupted_at > TWICE_S:
            os._exit(130)
        if number[0] == signal.SIGINT:
            interrupted_at = interrupted_at or time.monotonic()
        if number[0] in STOPPING:
            _received.append(signal.Signals(number[0]).name)
            if _at_once is not None:
                _at_once(_received[-1])
