"""The source code of a run, which its checkpoints contain: you can still explain a result when the code has changed."""

import base64
import bz2
import io
import lzma
import shlex
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..package import files_of_run, version
from ..records.run_card import launch_command

COMMAND, VERSION, CONFIGS = "command.txt", "version.txt", "accelerate_configs"


@cache
def source() -> str:
    """Files, packed with bzip2, as base64: the recipe, what it imports from its folder, the config file, the command
    that started the run, the version of this package and, unless this identifies its code, the package. Before the
    content of each file stands a line with its size and name: a zip archive would take 2 % more."""
    config = launch_option(shlex.split(launch_command()), "--config_file")
    files = files_of_run() | ({} if config is None else {f"{CONFIGS}/{Path(config).name}": Path(config)})
    contents = {COMMAND: f"{launch_command()}\n".encode(), VERSION: f"accelerate-recipes {version()}\n".encode()}
    for name in sorted(files, key=lambda name: (name.count("/"), name), reverse=True):  # packs best
        with suppress(OSError):  # a recipe that was typed in, or a file that is gone
            contents[name] = files[name].read_bytes()
    packed = b"".join(b"%d %s\n%s" % (len(content), name.encode(), content) for name, content in contents.items())
    return base64.b64encode(bz2.compress(packed)).decode()


def open_source(text: str) -> zipfile.ZipFile:
    """The files that `source` returned, as a zip archive; in earlier versions they were one, which xz may compress."""
    content, archive = base64.b64decode(text), io.BytesIO()
    if not content.startswith(b"PK"):
        content = bz2.decompress(content) if content.startswith(b"BZ") else lzma.decompress(content)
    if content.startswith(b"PK"):
        return zipfile.ZipFile(io.BytesIO(content))
    with zipfile.ZipFile(archive, "w") as opened:
        while content:
            line, _, content = content.partition(b"\n")
            size, _, name = line.decode().partition(" ")
            opened.writestr(name, content[: int(size)])
            content = content[int(size) :]
    return zipfile.ZipFile(archive)


def launch_option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of the launcher in the words of a command; None without it."""
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, value = word.partition("=")
        if option.replace("-", "_") == name.replace("-", "_"):
            return value if equals else following
    return None
