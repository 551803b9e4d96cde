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

COMMAND, CONFIGS = "command.txt", "accelerate_configs"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same source gives the same archive


@cache
def source() -> str:
    """A zip archive, packed with bzip2, as base64: the recipe, what it imports from its folder, the config file, the
    command that started the run, the version of this package and, unless this identifies its code, the package."""
    archive, config = io.BytesIO(), launch_option(shlex.split(launch_command()), "--config_file")
    files = files_of_run() | ({} if config is None else {f"{CONFIGS}/{Path(config).name}": Path(config)})
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(zipfile.ZipInfo(COMMAND, LONG_AGO), launch_command() + "\n")
        opened.writestr(zipfile.ZipInfo("version.txt", LONG_AGO), f"accelerate-recipes {version()}\n")
        for name in sorted(files, key=lambda name: (name.count("/"), name), reverse=True):  # packs best
            with suppress(OSError):  # a recipe that was typed in, or a file that is gone
                opened.writestr(zipfile.ZipInfo(name, LONG_AGO), files[name].read_bytes())
    return base64.b64encode(bz2.compress(archive.getvalue())).decode()


def open_source(text: str) -> zipfile.ZipFile:
    """The archive that `source` returned; earlier versions compressed each file by itself, or with xz."""
    content = base64.b64decode(text)
    if not content.startswith(b"PK"):
        content = bz2.decompress(content) if content.startswith(b"BZ") else lzma.decompress(content)
    return zipfile.ZipFile(io.BytesIO(content))


def launch_option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of the launcher in the words of a command; None without it."""
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, value = word.partition("=")
        if option.replace("-", "_") == name.replace("-", "_"):
            return value if equals else following
    return None
