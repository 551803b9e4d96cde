"""Standard output and standard error, even if they are closed or cannot encode a character."""

import os
from contextlib import suppress
from typing import Any, TextIO


class Output:
    """A stream that ignores write errors: after the loss of its ssh connection a run continues and saves, and a
    reader such as `| head` may stop. Replaces characters that the terminal cannot show. Closed streams are None."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        with suppress(AttributeError, OSError):  # a notebook's stream has no such method; a stream may be a pipe by now
            self._stream.reconfigure(errors="replace")  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
